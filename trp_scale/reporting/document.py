"""A page's parts, and how they are written as one HTML file: sections of tables, plots, pictures and commands.

All text is escaped here, and only here. The file asks nothing of the network: style, script, plotly and pictures are in
it, and a Content-Security-Policy forbids the rest.
"""

from __future__ import annotations

import base64
import html
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from string import Template
from typing import Literal

from trp_scale.errors import RefusedError
from trp_scale.reporting.figures import DARK, LIGHT, Colour, Plot

HERE = Path(__file__).parent

PLOTLY = "plotly.min.js"
"""Where a served page finds plotly, so that a browser keeps it from one version of the page to the next."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """Table cell of a page.

    Attributes:
        text: as it is read.
        order: what a click on the heading sorts by; None: the text.
        colour: of a patch before the text, as in the plots.
        strong: what a row is remembered for.
        code: a path, a flag or a value as one types it.
    """

    text: str
    order: float | None = None
    colour: Colour | None = None
    strong: bool = False
    code: bool = False


@dataclass(frozen=True, kw_only=True)
class Table:
    """Rows under headings; a click on a heading sorts them.

    Attributes:
        head: headings.
        rows: as long as the head.
        words: so many first columns are words, the rest figures.
        marked: numbers of the rows that are emphasised.
        note: below it.
    """

    head: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    words: int = 1
    marked: tuple[int, ...] = ()
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Values that need no table: (name, value)."""

    facts: Sequence[tuple[str, str]]


@dataclass(frozen=True, kw_only=True)
class Sentences:
    """One a line."""

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
class Section:
    """A part of a page.

    Attributes:
        name: of its anchor: lower-case letters and hyphens.
        title: its heading.
        look_for: what to look for, in a sentence or two.
        blocks: in order; plots that follow one another stand side by side where there is room.
    """

    name: str
    title: str
    look_for: str
    blocks: Sequence[Block]


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
    sections: Sequence[Section] = field(default_factory=list)
    made_of: str = ""


def figure_text(value: float | None, digits: int = 4, *, sign: bool = False, unit: str = "") -> str:
    """A number with `digits` digits that matter, a whole one with all; "-" where there is none; share: in per cent."""
    if value is None or not math.isfinite(value):
        return "-"
    if unit == "share":
        return f"{value:+.1%}" if sign else f"{value:.1%}"
    if isinstance(value, int):
        return f"{value:{'+' * sign},} {unit}".strip()
    whole = len(str(int(abs(value)))) if abs(value) >= 1 else 1
    if abs(value) >= 1e6 or 0 < abs(value) < 1e-3:
        text = f"{value:{'+' * sign}.{max(1, digits - 1)}g}"
    else:
        text = f"{value:{'+' * sign},.{max(0, digits - whole)}f}"
    return f"{text} {unit}".strip()


def number_cell(value: float | None, digits: int = 4, *, sign: bool = False, unit: str = "") -> Cell:
    """A number in a table."""
    known = value if value is not None and math.isfinite(value) else None
    return Cell(text=figure_text(value, digits, sign=sign, unit=unit), order=known)


def can_draw() -> bool:
    """Whether plotly is installed."""
    return find_spec("plotly") is not None


SHORT = 30
"""Characters of a cell that stay on one line."""

INSTALL = "pip install 'trp-scale[pictures]'"


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
            which holds plotly.

    Raises:
        RefusedError: plotly is not installed.
    """
    sections = [section for section in page.sections if section.blocks]
    plots = [block.figure() for section in sections for block in section.blocks if isinstance(block, Plot)]
    numbers = iter(range(len(plots)))
    script = f'<script src="{PLOTLY}"></script>' if served else f"<script>{plotly_source()}</script>"
    return Template(_part("page.html")).substitute(
        title=_escaped(f"{page.title} - {page.kind}"),
        sources="'self' 'unsafe-inline'" if served else "'unsafe-inline'",
        connections="'self'" if served else "'none'",
        version=_escaped(served),
        style=_part("page.css"),
        head=_head(page),
        contents="".join(f'<a href="#{section.name}">{_escaped(section.title)}</a>' for section in sections),
        sections="\n".join(_section(section, numbers) for section in sections),
        made_of=_escaped(page.made_of),
        plots=_json({"figures": plots, "dark": dict(zip(LIGHT, DARK, strict=True))}),
        plotly=script if plots else "",
        script=_part("page.js"),
    )


def _part(name: str) -> str:
    return (HERE / name).read_text(encoding="utf-8")


def _json(document: object) -> str:
    """JSON that may stand in a script element: no text in it can end that."""
    text = json.dumps(document, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _escaped(text: str) -> str:
    return html.escape(text, quote=True)


def _head(page: Page) -> str:
    state = f'<span class="state {page.mood}">{_escaped(page.state)}</span>' if page.state else ""
    lead = "".join(f"<p>{_escaped(line)}</p>" for line in page.lead)
    tiles = "".join(
        f"<div><dt>{_escaped(name)}</dt><dd>{_escaped(value)}</dd><dd>{_escaped(beside)}</dd></div>"
        for name, value, beside in page.tiles
    )
    return "\n".join(
        [
            f'<p class="kind">{_escaped(page.kind)} {state}</p>',
            f"<h1>{_escaped(page.title)}</h1>",
            f'<div class="lead">{lead}</div>',
            f'<dl class="tiles">{tiles}</dl>' if tiles else "",
        ]
    )


def _section(section: Section, numbers: Iterator[int]) -> str:
    parts, row = [], list[str]()
    for block in section.blocks:
        if isinstance(block, Plot):
            row.append(_plot(block, next(numbers)))
            continue
        if row:
            parts.append(f'<div class="plots">{"".join(row)}</div>')
            row = []
        parts.append(_block(block))
    if row:
        parts.append(f'<div class="plots">{"".join(row)}</div>')
    return "\n".join(
        [
            f'<section id="{section.name}"><h2>{_escaped(section.title)}</h2>',
            f'<p class="look">{_escaped(section.look_for)}</p>',
            *parts,
            "</section>",
        ]
    )


def _plot(plot: Plot, number: int) -> str:
    notes = [plot.note] if plot.note else []
    if plot.averaged > 1:
        notes.append(f"Means of up to {plot.averaged:,} logged steps; the band reaches from least to largest.")
    keys = "".join(
        f'<button type="button" aria-pressed="true" data-line="{place}"{" class=strong" * bool(line.emphasis)}>'
        f"{_swatch(line.colour)}{_escaped(line.name)}{f' · {_escaped(line.emphasis)}' * bool(line.emphasis)}</button>"
        for place, line in enumerate(plot.lines)
    )
    return "\n".join(
        [
            f"<figure{' class=wide' * plot.wide}><figcaption><h3>{_escaped(plot.title)}</h3>",
            *(f"<p>{_escaped(note)}</p>" for note in notes),
            "</figcaption>",
            f'<div class="legend" data-plot="{number}">{keys}</div>' if plot.has_legend else "",
            f'<div class="plot" data-plot="{number}" role="img" aria-label="{_escaped(plot.title)}"></div></figure>',
        ]
    )


def _swatch(colour: Colour) -> str:
    return f'<i class="{colour.dash}" style="--light:{colour.light};--dark:{colour.dark}"></i>'


def _block(block: Block) -> str:
    if isinstance(block, Table):
        return _table(block)
    if isinstance(block, Facts):
        facts = "".join(
            f"<div><dt>{_escaped(name)}</dt><dd>{_escaped(value)}</dd></div>" for name, value in block.facts
        )
        return f'<dl class="facts">{facts}</dl>'
    if isinstance(block, Sentences):
        return f"<ul>{''.join(f'<li>{_escaped(line)}</li>' for line in block.sentences)}</ul>"
    if isinstance(block, Pictures):
        return f'<div class="pictures" tabindex="0">{"".join(map(_picture, block.pictures))}</div>'
    assert isinstance(block, Commands), "plots stand in rows of their own"
    return "".join(
        f'<div class="command"><p>{_escaped(what)}</p><pre tabindex="0">{_escaped(command)}</pre></div>'
        for what, command in block.commands
    )


def _table(table: Table) -> str:
    # Buttons, so that a keyboard reaches them.
    head = "".join(
        f'<th scope="col"{" class=words" * (place < table.words)}><button type="button">{_escaped(name)}</button></th>'
        for place, name in enumerate(table.head)
    )
    rows = "".join(
        f"<tr{' class=marked' * (number in table.marked)}>"
        + "".join(_cell(cell, words=place < table.words) for place, cell in enumerate(row))
        + "</tr>"
        for number, row in enumerate(table.rows)
    )
    note = f'<p class="note">{_escaped(table.note)}</p>' if table.note else ""
    whole = f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"
    return f'<div class="table" tabindex="0">{whole}</div>{note}'


def _cell(cell: Cell, *, words: bool) -> str:
    text = _escaped(cell.text)
    text = f"<code>{text}</code>" if cell.code else text
    text = f"<strong>{text}</strong>" if cell.strong else text
    order = "" if cell.order is None else f' data-order="{cell.order!r}"'
    kind = (" class=words" if len(cell.text) > SHORT else ' class="words short"') if words else ""
    return f"<td{kind}{order}>{_swatch(cell.colour) if cell.colour else ''}{text}</td>"


def _picture(picture: tuple[str, bytes]) -> str:
    caption, content = picture
    source = f"data:image/png;base64,{base64.b64encode(content).decode()}"
    return (
        f'<figure><img src="{source}" alt="{_escaped(caption)}"><figcaption>{_escaped(caption)}</figcaption></figure>'
    )
