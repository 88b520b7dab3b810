"""A page's parts, and how they are written as one HTML file: sections of tables, plots, pictures and commands.

All text is escaped by jinja2 in page.html, and only there. The file asks nothing of the network: style, script, plotly
and pictures are in it, and a Content-Security-Policy forbids the rest.
"""

from __future__ import annotations

import base64
import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from trp_scale.errors import RefusedError
from trp_scale.reporting.figures import DARK, LIGHT, Plot
from trp_scale.table import Table

HERE = Path(__file__).parent

PLOTLY = "plotly.min.js"
"""Where a served page finds plotly, so that a browser keeps it from one version of the page to the next."""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Values that need no table: (name, value)."""

    facts: Sequence[tuple[str, str]]


@dataclass(frozen=True, kw_only=True)
class Sentences:
    """A list, one sentence a line."""

    sentences: Sequence[str]


@dataclass(frozen=True, kw_only=True)
class Pictures:
    """PNG files with captions, in a strip: (caption, content)."""

    pictures: Sequence[tuple[str, bytes]]


@dataclass(frozen=True, kw_only=True)
class Commands:
    """Commands to type, as (purpose, command)."""

    commands: Sequence[tuple[str, str]]


Block = Table | Facts | Sentences | Pictures | Commands | Plot


@dataclass(frozen=True, kw_only=True)
class PageSection:
    """A part of a page.

    Attributes:
        name: of its anchor: lower-case letters and hyphens.
        title: its heading.
        look_for: what to look for, in a sentence or two; empty: nothing is said.
        blocks: in order; plots that follow one another stand side by side where there is room.
    """

    name: str
    title: str
    look_for: str = ""
    blocks: Sequence[Block]

    def rows(self) -> Iterator[tuple[str, list[Block]]]:
        """Yield (kind, blocks) of neighbours of one kind."""
        for kind, blocks in itertools.groupby(self.blocks, lambda block: type(block).__name__):
            yield kind, list(blocks)


@dataclass(frozen=True, kw_only=True)
class Page:
    """One page.

    Attributes:
        kind: above the title, such as "Pre-training".
        title: its name.
        state: how a run ended, in a word or two; empty: no such thing.
        mood: good, bad or open: the state's colour.
        lead: sentences below the title.
        tiles: the figures that matter most: (name, value, beside it).
        sections: with content; one without is left out.
        made_of: the last line.
    """

    kind: str
    title: str
    state: str = ""
    mood: Literal["good", "bad", "open"] = "open"
    lead: Sequence[str] = ()
    tiles: Sequence[tuple[str, str, str]] = ()
    sections: Sequence[PageSection] = field(default_factory=list)
    made_of: str = ""


SHORT = 30
"""Characters of a cell that stay on one line."""

INSTALL = "pip install 'trp-scale[pictures]'"


def can_draw() -> bool:
    """Whether plotly is installed."""
    return find_spec("plotly") is not None


def plotly_source() -> str:
    """plotly's script, as the package brings it along.

    Raises:
        RefusedError: it is not installed.
    """
    if not can_draw():
        raise RefusedError(f"a page needs the package plotly, which is not installed: {INSTALL}")
    from plotly.offline import get_plotlyjs

    return str(get_plotlyjs())


def page_text(page: Page, *, served: str = "") -> str:
    """The HTML of a page.

    Args:
        served: a version, where the page is served and looks for newer ones (watch.py); empty: a file of its own,
            which holds plotly if it has plots.

    Raises:
        RefusedError: there are plots, and plotly is not installed.
    """
    import jinja2
    from markupsafe import Markup

    sections = [section for section in page.sections if section.blocks]
    plots = [block.figure() for section in sections for block in section.blocks if isinstance(block, Plot)]
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    environment.filters["base64"] = lambda content: base64.b64encode(content).decode()
    return environment.from_string(_part("page.html")).render(
        page=page,
        sections=sections,
        short=SHORT,
        version=served,
        style=Markup(_part("page.css")),
        script=Markup(_part("page.js")),
        plots=Markup(_json({"figures": plots, "dark": dict(zip(LIGHT, DARK, strict=True))})),
        plotly_address=PLOTLY if served and plots else "",
        plotly=Markup(plotly_source()) if plots and not served else "",
    )


def _part(name: str) -> str:
    return (HERE / name).read_text(encoding="utf-8")


def _json(document: object) -> str:
    """JSON that may stand in a script element: no text in it can end that."""
    text = json.dumps(document, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
