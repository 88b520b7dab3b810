"""Hooks of mkdocs: the site gets the notebooks of examples/, which its pages link to as a checkout has them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

EXAMPLES = Path(__file__).parent / "examples"


def on_files(files: Any, config: Any) -> None:
    for path in sorted(EXAMPLES.glob("*.ipynb")):
        files.append(File.generated(config, f"examples/{path.name}", abs_src_path=str(path)))


def on_page_markdown(markdown: str, **named: Any) -> str:
    """Return the page with links inside the site."""
    return markdown.replace("](../examples/", "](examples/")
