"""A page's parts, and how they are written as one HTML file: sections of tables, plots, pictures and commands.

All text is escaped by jinja2 in page.html, and only there. The file asks nothing of the network: style, script, plotly
and pictures are in it, and a Content-Security-Policy forbids the rest. Plots are plain data for plotly, so that making
a page imports nothing of it.
"""

from __future__ import annotations

import base64
import html
import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from math import log10
from pathlib import Path
from typing import Any, Literal

from trp_scale.console import Colour, Table
from trp_scale.errors import RefusedError
from trp_scale.reporting.record import Points

LIGHT = ("#0664b2", "#e67204", "#08a673", "#bf609d", "#a96600", "#4e88c1", "#665c14", "#4b5566")
DARK = ("#468ff4", "#e57c53", "#38d88a", "#ce88d1", "#edb141", "#aee7f3", "#f9f036", "#b59ea9")
"""Okabe and Ito's colours, moved until readers with deuteranopia and protanopia tell any two apart, on a light page and
on a dark one. The page's script replaces each of the first by the second."""

DASHES = ("solid", "dash", "dot")
"""Of more lines than colours: the second eight are dashed, the third dotted."""

MOST_LINES = len(LIGHT) * len(DASHES)
"""Lines of a plot that can be told apart."""

FEW_POINTS = 40
"""Up to so many points a curve has markers."""


def colours(names: Iterable[str]) -> dict[str, Colour]:
    """A colour for each name, in their order; from MOST_LINES on they come again."""
    colours: dict[str, Colour] = {}
    for number, name in enumerate(dict.fromkeys(names)):
        turn, colour = divmod(number, len(LIGHT))
        colours[name] = Colour(light=LIGHT[colour], dark=DARK[colour], dash=DASHES[turn % len(DASHES)])
    return colours


@dataclass(frozen=True, kw_only=True)
class Line:
    """A curve in a plot.

    Attributes:
        name: in the legend.
        emphasis: why it is drawn thick, in a word for the legend; empty: it is not.
    """

    name: str
    points: Points
    colour: Colour
    emphasis: str = ""


@dataclass(frozen=True, kw_only=True)
class Plot:
    """Curves over steps.

    Attributes:
        lines: in the legend's order; the last lies on top.
        unit: at the axis; share: values are shares of 1, shown in per cent.
        log: a logarithmic axis; values that are not positive are not drawn.
        edge: a value that is marked, and the words beside it.
        from_zero: the axis begins at 0, as that of shares does.
        wide: over the page's whole width.
    """

    title: str
    lines: Sequence[Line]
    unit: str = ""
    log: bool = False
    edge: tuple[float, str] | None = None
    note: str = ""
    from_zero: bool = False
    wide: bool = False

    @property
    def averaged(self) -> int:
        """Most logged steps of a point of any line."""
        return max((line.points.averaged for line in self.lines), default=1)

    @property
    def has_legend(self) -> bool:
        """One line needs none: the title says what it is."""
        return len(self.lines) > 1

    def limit_lines(self) -> Plot:
        """Return the plot with the emphasised lines and the first others, so that all can be told apart."""
        if len(self.lines) <= MOST_LINES:
            return self
        first = sorted(self.lines, key=lambda line: not line.emphasis)[:MOST_LINES]
        left_out = f"{len(self.lines) - MOST_LINES} more are not drawn."
        return replace(self, lines=first, note=f"{self.note} {left_out}".strip())

    def figure(self) -> dict[str, Any]:
        """{"data": traces, "layout": layout}. A line has one trace, and one more for its band, of one legend group."""
        traces: list[dict[str, Any]] = []
        for number, line in enumerate(self.lines):
            if line.points.averaged > 1:
                traces.append(_band(line, number))
        # Thick lines last: they lie on top.
        for number, line in sorted(enumerate(self.lines), key=lambda item: bool(item[1].emphasis)):
            traces.append(self._curve(line, number))
        return {"data": traces, "layout": self._layout()}

    def _curve(self, line: Line, number: int) -> dict[str, Any]:
        points = line.points
        few = len(points.steps) <= FEW_POINTS
        form = ".4~g" if self.unit != "share" else ".2e" if self._per_cent().endswith("e") else ".2%"
        return {
            "type": "scatter",
            "mode": "lines+markers" if few else "lines",
            "name": as_text(line.name),
            "x": points.steps,
            "y": points.values,
            "line": {
                "color": line.colour.light,
                "width": 3.5 if line.emphasis else 1.6,
                "dash": line.colour.dash,
            },
            "marker": {"size": 7 if line.emphasis else 5, "color": line.colour.light},
            "opacity": 0.8 if any(other.emphasis for other in self.lines) and not line.emphasis else 1.0,
            "legendgroup": str(number),
            "hovertemplate": f"%{{y:{form}}}",
        }

    def _layout(self) -> dict[str, Any]:
        axis: dict[str, Any] = {
            "type": "log" if self.log else "linear",
            "automargin": True,
            "nticks": 6,
            "exponentformat": "power",
        }
        if self.unit == "share":
            axis |= {"tickformat": self._per_cent(), "rangemode": "tozero"}
        elif self.from_zero:
            axis["rangemode"] = "tozero"
        if self.unit not in ("", "share"):
            axis["title"] = {"text": as_text(self.unit), "standoff": 6}
        layout: dict[str, Any] = {
            "xaxis": {"title": {"text": "step", "standoff": 4}, "automargin": True, "nticks": 6, "tickformat": "~s"},
            "yaxis": axis,
            "hovermode": "x unified",
            "showlegend": False,
            "margin": {"l": 8, "r": 12, "t": 8, "b": 8},
        }
        if self.edge is not None:
            value, words = self.edge
            layout["shapes"] = [_across(value)]
            layout["annotations"] = [_annotation(value, words, log=self.log)]
        return layout

    def _per_cent(self) -> str:
        """So many digits that ticks differ."""
        values = [value for line in self.lines for value in line.points.values]
        spread = max([0.0, *values]) - min([0.0, *values])
        return ".0%" if spread > 0.05 else ".1%" if spread > 0.01 else ".2%" if spread > 0.0005 else ".1e"


def as_text(words: str) -> str:
    """Words that plotly shows as they are: it reads some tags and entities in names."""
    return html.escape(words, quote=False)


def _band(line: Line, number: int) -> dict[str, Any]:
    """Return the band from the least to the largest of the steps behind each point."""
    points = line.points
    return {
        "type": "scatter",
        "mode": "lines",
        "name": as_text(line.name),
        "x": [*points.steps, *reversed(points.steps)],
        "y": [*points.largest, *reversed(points.least)],
        "fill": "toself",
        "fillcolor": line.colour.light,
        "opacity": 0.2 if line.emphasis else 0.1,
        "line": {"width": 0, "color": line.colour.light},
        "hoverinfo": "skip",
        "legendgroup": str(number),
    }


def _across(value: float) -> dict[str, Any]:
    return {
        "type": "line",
        "xref": "paper",
        "x0": 0,
        "x1": 1,
        "y0": value,
        "y1": value,
        "line": {"width": 1, "dash": "dot", "color": LIGHT[-1]},
    }


def _annotation(value: float, words: str, *, log: bool) -> dict[str, Any]:
    return {
        "text": as_text(words),
        "xref": "paper",
        "x": 0,
        "xanchor": "left",
        "y": log10(value) if log else value,
        "yanchor": "bottom",
        "showarrow": False,
        "font": {"size": 11},
    }


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
