"""A table, rendered to the console (rich), Markdown and LaTeX (booktabs); reporting/page.html renders it to HTML."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
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
    """Colour of a line in plots, and of its patch in tables. Attributes: light, dark: CSS colours on a light and on a
    dark page; dash: as plotly names it."""

    light: str
    dark: str
    dash: str = "solid"


@dataclass(frozen=True, kw_only=True)
class Cell:
    """Table cell; a plain string stands for one without attributes.

    Attributes:
        text: as it is read.
        order: sort key of the HTML column; None: the text.
        colour: of a patch before the text, in HTML.
        strong: printed bold.
        code: a path, a flag or a value as one types it.
    """

    text: str
    order: float | None = None
    colour: Colour | None = None
    strong: bool = False
    code: bool = False


@dataclass(frozen=True, kw_only=True)
class Table:
    """Rows under headings.

    Attributes:
        head: headings.
        rows: as long as the head.
        title: above it; empty: none.
        words: number of first columns that are words, the rest are figures.
        marked: numbers of the rows that are emphasised.
        notes: below it, a line each.
    """

    head: Sequence[str | Cell]
    rows: Sequence[Sequence[str | Cell]]
    title: str = ""
    words: int = 1
    marked: tuple[int, ...] = ()
    notes: Sequence[str] = ()

    def cells(self) -> Iterator[list[Cell]]:
        """Yield the head, then each row."""
        for row in (self.head, *self.rows):
            yield [Cell(text=cell) if isinstance(cell, str) else cell for cell in row]

    def to_rich(self) -> RichTable:
        """Return what a rich console prints; texts are no markup."""
        from rich import box
        from rich.table import Table as RichTable
        from rich.text import Text

        head, *body = self.cells()
        table = RichTable(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True, caption_justify="left")
        table.caption = "\n".join(self.notes) or None
        for column, cell in enumerate(head):
            table.add_column(Text(cell.text), justify="left" if column < self.words else "right", overflow="fold")
        for number, row in enumerate(body):
            style = "bold red" if number in self.marked else None
            table.add_row(*(Text(cell.text, style="bold" if cell.strong else "") for cell in row), style=style)
        return table

    def to_markdown(self, *, padded: bool = False) -> str:
        """Render with the title as a heading of level two.

        Args:
            padded: for a terminal: columns have one width, and texts are not escaped.
        """
        lines = [[cell.text if padded else _markdown_cell(cell) for cell in row] for row in self.cells()]
        widths = [max(len(line[column]) for line in lines) if padded else 0 for column in range(len(self.head))]
        rule = ["-" * max(3, width) if column < self.words else "---:" for column, width in enumerate(widths)]
        lines.insert(1, rule)
        padding = [[text.ljust(width) for text, width in zip(line, widths, strict=True)] for line in lines]
        heading = f"## {self.title}" if self.title else ""
        rows = "\n".join(f"| {' | '.join(line)} |" for line in padding)
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
    """Escape the characters that Markdown reads as markup."""
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
    """Return the cell of a number, "-" where there is none."""
    known = value if value is not None and math.isfinite(value) else None
    return Cell(text=figure_text(value, digits, sign=sign, unit=unit), order=known)
