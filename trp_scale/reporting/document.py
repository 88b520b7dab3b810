"""Parts of a page, and their rendering as one HTML file.

jinja2 escapes all text, in page.html only. The file loads nothing from the network: style, script, plotly and pictures
are embedded, and a Content-Security-Policy forbids the rest. Plots are plain data for plotly, which is not imported.
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
"""Colours of Okabe and Ito, adjusted so that readers with deuteranopia or protanopia can distinguish all of them. The
page's script replaces light colours by dark ones."""

DASHES = ("solid", "dash", "dot")
"""Dash patterns: lines 9 to 16 are dashed, lines 17 to 24 dotted."""

MOST_LINES = len(LIGHT) * len(DASHES)
"""Number of distinguishable lines in a plot."""

FEW_POINTS = 40
"""Largest number of points of a curve with markers."""


def colours(names: Iterable[str]) -> dict[str, Colour]:
    """Assign a colour to each name; they repeat after MOST_LINES."""
    colours: dict[str, Colour] = {}
    for number, name in enumerate(dict.fromkeys(names)):
        turn, colour = divmod(number, len(LIGHT))
        colours[name] = Colour(light=LIGHT[colour], dark=DARK[colour], dash=DASHES[turn % len(DASHES)])
    return colours


@dataclass(frozen=True, kw_only=True)
class Line:
    """Curve in a plot. `emphasis` is the reason for a thick line, shown in the legend; empty for a thin one."""

    name: str
    points: Points
    colour: Colour
    emphasis: str = ""


@dataclass(frozen=True, kw_only=True)
class Plot:
    """Curves over steps.

    Attributes:
        lines: in the order of the legend; the last is on top.
        unit: of the axis; share: values in [0, 1], shown in per cent.
        log: logarithmic axis; values that are not positive are omitted.
        edge: a marked value and its label.
        from_zero: the axis starts at 0.
        wide: uses the full page width.
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
        """Largest number of logged steps per point."""
        return max((line.points.averaged for line in self.lines), default=1)

    @property
    def has_legend(self) -> bool:
        """Whether there are several lines."""
        return len(self.lines) > 1

    def limit_lines(self) -> Plot:
        """Limit the plot to MOST_LINES lines, the emphasised ones first."""
        if len(self.lines) <= MOST_LINES:
            return self
        first = sorted(self.lines, key=lambda line: not line.emphasis)[:MOST_LINES]
        left_out = f"{len(self.lines) - MOST_LINES} more are not drawn."
        return replace(self, lines=first, note=f"{self.note} {left_out}".strip())

    def figure(self) -> dict[str, Any]:
        """Return {"data": traces, "layout": layout}. A line and its band share a legend group."""
        traces: list[dict[str, Any]] = []
        for number, line in enumerate(self.lines):
            if line.points.averaged > 1:
                traces.append(_band(line, number))
        # The last line is drawn on top.
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
            value, label = self.edge
            rule = {"width": 1, "dash": "dot", "color": LIGHT[-1]}
            across = {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": value, "y1": value, "line": rule}
            named = {"text": as_text(label), "showarrow": False, "font": {"size": 11}}
            at = {"xref": "paper", "x": 0, "xanchor": "left", "y": log10(value) if self.log else value}
            layout |= {"shapes": [across], "annotations": [{**named, **at, "yanchor": "bottom"}]}
        return layout

    def _per_cent(self) -> str:
        """Return a format with enough digits to distinguish ticks."""
        values = [value for line in self.lines for value in line.points.values]
        spread = max([0.0, *values]) - min([0.0, *values])
        return ".0%" if spread > 0.05 else ".1%" if spread > 0.01 else ".2%" if spread > 0.0005 else ".1e"


def as_text(label: str) -> str:
    """Escape text for plotly, which interprets some tags and entities."""
    return html.escape(label, quote=False)


def _band(line: Line, number: int) -> dict[str, Any]:
    """Return the band between the least and the largest value behind each point."""
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


HERE = Path(__file__).parent

PLOTLY = "plotly.min.js"
"""Name under which a served page loads plotly; browsers cache it across page versions."""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """(name, value) pairs."""

    facts: Sequence[tuple[str, str]]


@dataclass(frozen=True, kw_only=True)
class Sentences:
    """List with one sentence per line."""

    sentences: Sequence[str]


@dataclass(frozen=True, kw_only=True)
class Pictures:
    """PNG pictures as (caption, content)."""

    pictures: Sequence[tuple[str, bytes]]


@dataclass(frozen=True, kw_only=True)
class Commands:
    """Commands as (purpose, command)."""

    commands: Sequence[tuple[str, str]]


Block = Table | Facts | Sentences | Pictures | Commands | Plot


@dataclass(frozen=True, kw_only=True)
class PageSection:
    """Section of a page.

    Attributes:
        name: of its anchor: lower-case letters and hyphens.
        look_for: hint in one or two sentences; empty: none.
        blocks: in order; adjacent plots share a row if they fit.
    """

    name: str
    title: str
    look_for: str = ""
    blocks: Sequence[Block]

    def rows(self) -> Iterator[tuple[str, list[Block]]]:
        """Yield (kind, blocks) of adjacent blocks of one kind."""
        for kind, blocks in itertools.groupby(self.blocks, lambda block: type(block).__name__):
            yield kind, list(blocks)


@dataclass(frozen=True, kw_only=True)
class Page:
    """One page.

    Attributes:
        kind: shown above the title, such as "Pre-training".
        state: how a run ended; empty: not applicable.
        mood: colour of the state.
        lead: sentences below the title.
        tiles: key figures as (name, value, detail).
        sections: those without blocks are omitted.
        made_of: last line.
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
"""Characters of a cell that are never wrapped."""

INSTALL = "pip install 'trp-scale[pictures]'"


def can_draw() -> bool:
    """Return whether plotly is installed."""
    return find_spec("plotly") is not None


def plotly_source() -> str:
    """Return plotly's script. Raises RefusedError if plotly is not installed."""
    if not can_draw():
        raise RefusedError(f"a page needs the package plotly, which is not installed: {INSTALL}")
    from plotly.offline import get_plotlyjs

    return str(get_plotlyjs())


def page_text(page: Page, *, served: str = "") -> str:
    """Render a page as HTML. Raises RefusedError if it has plots and plotly is not installed.

    Args:
        served: version of a served page, which polls for newer ones (watch.py); empty for a self-contained file.
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
    """Encode JSON for a script element: no text can close the element."""
    text = json.dumps(document, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
