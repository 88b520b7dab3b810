"""One page with figures and pictures, that needs no other file."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from html import escape
from pathlib import Path

from trp_scale.downstream.pictures import Picture

STYLE = """body { font: 15px/1.5 system-ui, sans-serif; max-width: 70em; margin: 2em auto; padding: 0 1em; }
h1 { font-size: 1.4em; } h2 { font-size: 1.1em; margin-top: 2em; }
table { border-collapse: collapse; } td { padding: 0.2em 1.5em 0.2em 0; vertical-align: top; }
td + td { font-variant-numeric: tabular-nums; } tr + tr td { border-top: 1px solid #ddd; }
img { max-width: 100%; } p.caption { color: #555; margin-top: 0.3em; }"""


def write_page(
    path: Path,
    title: str,
    figures: Sequence[tuple[str, str]],
    pictures: Sequence[tuple[str, Picture]],
    notes: Sequence[str],
) -> None:
    """Write index.html.

    Args:
        figures: (what it is, its value) of each line of the table.
        pictures: (heading, picture); the file is put into the page.
        notes: sentences at the end.
    """
    rows = "\n".join(f"<tr><td>{escape(name)}</td><td>{escape(value)}</td></tr>" for name, value in figures)
    shown = "\n".join(_section(heading, picture) for heading, picture in pictures)
    listed = "\n".join(f"<p>{escape(note)}</p>" for note in notes)
    path.write_text(
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{escape(title)}</title>\n'
        f"<style>\n{STYLE}\n</style>\n</head>\n<body>\n<h1>{escape(title)}</h1>\n<table>\n{rows}\n</table>\n"
        f"{shown}\n{listed}\n</body>\n</html>\n",
        encoding="utf-8",
    )


def _section(heading: str, picture: Picture) -> str:
    data = base64.b64encode(picture.path.read_bytes()).decode("ascii")
    return (
        f'<h2>{escape(heading)}</h2>\n<img alt="{escape(heading)}" src="data:image/png;base64,{data}">\n'
        f'<p class="caption">{escape(picture.caption)}</p>'
    )
