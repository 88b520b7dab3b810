"""The files that docs/extending.md shows, as a user has them: outside the package."""

from __future__ import annotations

import re
from pathlib import Path

DOCUMENT = Path(__file__).parents[1] / "docs/extending.md"
FILE = re.compile(r"^```python (\S+\.py)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def files() -> dict[str, str]:
    """The files of the document, by name."""
    return dict(FILE.findall(DOCUMENT.read_text(encoding="utf-8")))


def write_files(directory: Path) -> Path:
    """Put them into a directory, which is returned."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in files().items():
        (directory / name).write_text(text, encoding="utf-8")
    return directory
