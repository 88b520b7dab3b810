"""Output of commands: tables for the console (rich), Markdown and LaTeX (booktabs), and standard output.

reporting/page.html renders tables to HTML.
"""

from __future__ import annotations

import io
import logging
import math
import os
import re
import sys
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table as RichTable

GIB = 2.0**30

LATEX = {
    "\\": r"\textbackslash{}",
    **{sign: f"\\{sign}" for sign in "&%$#_{}"},
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "±": r"$\pm$",
}


@dataclass(frozen=True, kw_only=True)
class Colour:
    """Colour of a line in plots and of its patch in tables.

    Attributes:
        light, dark: CSS colours on a light and on a dark page.
        dash: plotly's name of the line style.
    """

    light: str
    dark: str
    dash: str = "solid"


@dataclass(frozen=True, kw_only=True)
class Cell:
    """Table cell; a plain string is a cell without attributes.

    Attributes:
        order: sort key of the HTML column; `None` = the text.
        colour: of a patch before the text, in HTML.
        strong: print bold.
        code: format as a path, flag or value.
    """

    text: str
    order: float | None = None
    colour: Colour | None = None
    strong: bool = False
    code: bool = False


WIDE = 160
"""Width of the output without a terminal, as in a log."""


class Shown:
    """Base of the results of commands: `show` prints one as its command does, and its text is the same."""

    @property
    def width(self) -> int:
        """Width of the output without a terminal."""
        return WIDE

    def parts(self) -> Iterator[RenderableType]:
        """Yield tables and lines."""
        raise NotImplementedError

    def show(self, console: Console | None = None) -> None:
        """Print the result; in colour on a terminal."""
        from rich.console import Console
        from rich.text import Text

        console = console or (Console() if sys.stdout.isatty() else Console(width=self.width))
        for part in self.parts():
            line = Text(part) if isinstance(part, str) else None  # printed unchanged
            console.print(line or part, soft_wrap=line is not None)

    def __str__(self) -> str:
        from rich.console import Console

        text = io.StringIO()
        self.show(Console(file=text, width=self.width, color_system=None, force_terminal=False, force_jupyter=False))
        return "\n".join(line.rstrip() for line in text.getvalue().rstrip().splitlines())

    __repr__ = __str__


@dataclass(frozen=True, kw_only=True)
class Table(Shown):
    """Rows with headings.

    Attributes:
        head: headings.
        rows: each as long as the head.
        title: title above the table; empty = none.
        words: number of first columns with text; the others have figures.
        marked: indices of emphasised rows.
        notes: lines below the table.
    """

    head: Sequence[str | Cell]
    rows: Sequence[Sequence[str | Cell]]
    title: str = ""
    words: int = 1
    marked: tuple[int, ...] = ()
    notes: Sequence[str] = ()

    @property
    def width(self) -> int:
        return 80

    def cells(self) -> Iterator[list[Cell]]:
        """Yield the head, then each row."""
        for row in (self.head, *self.rows):
            yield [Cell(text=cell) if isinstance(cell, str) else cell for cell in row]

    def to_rich(self) -> RichTable:
        """Return a table for a rich console; texts are not markup. In a table wider than `width` the headings are
        wrapped to the widths of their columns."""
        from rich import box
        from rich.table import Table as RichTable
        from rich.text import Text

        head, *body = self.cells()
        table = RichTable(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True, caption_justify="left")
        table.caption = "\n".join(self.notes) or None
        columns = [[len(cell.text) for cell in column] for column in zip(head, *body, strict=True)]
        wrapped = sum(max(column) + 2 for column in columns) > self.width
        for number, (cell, lengths) in enumerate(zip(head, columns, strict=True)):
            width = max(lengths[1:] if wrapped and body else lengths)
            text = textwrap.fill(cell.text, max(1, width), break_long_words=False, break_on_hyphens=False)
            words = [word for row in body for word in row[number].text.split()]
            table.add_column(
                Text(text),
                justify="left" if number < self.words else "right",
                overflow="fold",
                min_width=min(16, max(map(len, words), default=1)),
            )
        for number, row in enumerate(body):
            style = "bold red" if number in self.marked else None
            table.add_row(*(Text(cell.text, style="bold" if cell.strong else "") for cell in row), style=style)
        return table

    def parts(self) -> Iterator[RenderableType]:
        """Yield the table, and the notes as lines."""
        from rich.text import Text

        yield replace(self, notes=()).to_rich()
        yield from (Text(note) for note in self.notes)

    def to_markdown(self) -> str:
        """Render with the title as a heading of level two."""
        head, *body = (f"| {' | '.join(map(_markdown_cell, row))} |" for row in self.cells())
        rule = " | ".join("---" if column < self.words else "---:" for column in range(len(self.head)))
        heading = f"## {self.title}" if self.title else ""
        rows = "\n".join([head, f"| {rule} |", *body])
        notes = "\n".join(f"- {escape_markdown(note)}" for note in self.notes)
        return "\n\n".join(filter(None, [heading, rows, notes]))

    def to_latex(self) -> str:
        """Render as a `table` of booktabs."""
        head, *body = (" & ".join(map(_latex, row)) + r" \\" for row in self.cells())
        columns = "l" * self.words + "r" * (len(self.head) - self.words)
        lines = [
            r"\begin{table}",
            r"\centering",
            rf"\caption{{{_escape_latex(self.title)}}}",
            rf"\begin{{tabular}}{{{columns}}}",
            r"\toprule",
            head,
            r"\midrule",
            *body,
            r"\bottomrule",
            r"\end{tabular}",
            *(rf"\par\small {_escape_latex(note)}" for note in self.notes),
            r"\end{table}",
        ]
        return "\n".join(lines)


def escape_markdown(text: str) -> str:
    """Escape Markdown's markup characters."""
    for character in ("\\", "|", "*", "_", "<", "[", "]"):
        text = text.replace(character, f"\\{character}")
    return text


def _markdown_cell(cell: Cell) -> str:
    text = f"`{cell.text}`" if cell.code else escape_markdown(cell.text)
    return f"**{text}**" if cell.strong else text


def _latex(cell: Cell) -> str:
    text = _escape_latex(cell.text)
    return rf"\textbf{{{text}}}" if cell.strong else text


def _escape_latex(text: str) -> str:
    return "".join(LATEX.get(sign, sign) for sign in text)


def figure_text(value: float | None, digits: int = 4, *, sign: bool = False, unit: str = "") -> str:
    """Format a number with `digits` significant digits, an integer with all; "-" for `None` and non-finite values. Unit
    "share": in per cent."""
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
    """Return the cell of a number, "-" without one."""
    known = value if value is not None and math.isfinite(value) else None
    return Cell(text=figure_text(value, digits, sign=sign, unit=unit), order=known)


logger = logging.getLogger(__name__)

_STYLES = r"\x1b\[[0-9;]*m|\x1b\[(?:1A|2K|\?25[lh])"
"""Sequences by which rich colours text and redraws a display."""
_CONTROL = r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff]"


class EscapedStream:
    """Standard output or error of a command with escaped control characters: texts of files and names of paths may
    contain sequences that change the terminal's title, clipboard or lines. Bytes of names that are not UTF-8 are
    escaped too.

    Args:
        stream: output stream; rich's styles pass if it is a terminal.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        styles = _STYLES if stream.isatty() else "(?!)"
        self._pattern = re.compile(f"({styles})|{_CONTROL}")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write the text escaped; return the number of characters of the text."""
        self._stream.write(self._pattern.sub(lambda match: match[1] or ascii(match[0])[1:-1], text))
        return len(text)


class Outlet:
    """Standard output that becomes silent when it can no longer be written.

    Its reader (head, tee, a terminal) may exit, or its disk may fill up, during the work. The work continues, since
    nobody has stopped it and its directory has all results. (rich would end the process.)

    Args:
        stream: standard output; after an error its file descriptor leads to os.devnull, so that output of libraries
            does not end the work either.
        notice: what continues and where to see it; for the log.
    """

    def __init__(self, stream: TextIO, notice: str) -> None:
        self._stream, self._notice = stream, notice

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)  # rich reads isatty, encoding, fileno

    def write(self, text: str) -> int:
        try:
            self._stream.write(text)
        except OSError as error:
            self._fall_silent(error)
        return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            self._fall_silent(error)

    def _fall_silent(self, error: OSError) -> None:
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, self._stream.fileno())
        os.close(nothing)
        logger.warning("standard output cannot be written to (%s); %s", error.strerror, self._notice)
