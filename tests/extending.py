"""The files that docs/extending.md and docs/api.md show, as a user has them: outside the package."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from trp_scale.config import registry as components
from trp_scale.config.recipes import registered_recipes

DOCUMENTS = [Path(__file__).parents[1] / name for name in ("docs/extending.md", "docs/api.md")]
FILE = re.compile(r'^```python title="(\S+\.py)"\n(.*?)^```$', re.MULTILINE | re.DOTALL)


def files() -> dict[str, str]:
    """The files of the documents, by name."""
    return dict(found for document in DOCUMENTS for found in FILE.findall(document.read_text(encoding="utf-8")))


def write_files(directory: Path) -> Path:
    """Put them into a directory, which is returned."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in files().items():
        (directory / name).write_text(text, encoding="utf-8")
    return directory


@contextmanager
def forgetting() -> Iterator[None]:
    """What is registered and imported within is forgotten afterwards, as by a process of its own."""
    components.names("balancer")  # the package's own are there
    known, path, modules = dict(components._components), list(sys.path), set(sys.modules)
    recipes = dict(registered_recipes)
    try:
        yield
    finally:
        components._components.clear()
        components._components.update(known)
        registered_recipes.clear()
        registered_recipes.update(recipes)
        own = {folder for folder in sys.path if folder not in path}
        sys.path[:] = path
        for name in set(sys.modules) - modules:
            if str(Path(getattr(sys.modules[name], "__file__", None) or "").parent) in own:
                del sys.modules[name]


if __name__ == "__main__":
    write_files(Path(sys.argv[1]))
