"""A table as Markdown, as LaTeX (booktabs) and as HTML."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass, field

from trp_scale.reporting.result_tables import Cell, Rows, markdown_table

LATEX = {
    "\\": r"\textbackslash{}",
    **{sign: f"\\{sign}" for sign in "&%$#_{}"},
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "±": r"$\pm$",
}


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table with a title; the first row is its head, the first column is words.

    Attributes: notes: below it, a line each.
    """

    title: str
    rows: Rows
    notes: list[str] = field(default_factory=list)


def cell(text: str, bold: bool = False) -> Cell:
    """Short for a cell."""
    return Cell(text=text, bold=bold)


def as_markdown(table: Table) -> str:
    """Render with the title as a heading of level two."""
    notes = "\n".join(f"- {line}" for line in table.notes)
    return "\n\n".join([f"## {table.title}", markdown_table(table.rows, words=1), *([notes] if notes else [])])


def as_latex(table: Table) -> str:
    """A `table` of booktabs."""

    def line(row: Sequence[Cell]) -> str:
        texts = [rf"\textbf{{{_latex(one.text)}}}" if one.bold else _latex(one.text) for one in row]
        return " & ".join(texts) + r" \\"

    head, *body = table.rows
    lines = [
        r"\begin{table}",
        r"\centering",
        rf"\caption{{{_latex(table.title)}}}",
        rf"\begin{{tabular}}{{l{'r' * (len(head) - 1)}}}",
        r"\toprule",
        line(head),
        r"\midrule",
        *map(line, body),
        r"\bottomrule",
        r"\end{tabular}",
        *(rf"\par\small {_latex(note)}" for note in table.notes),
        r"\end{table}",
    ]
    return "\n".join(lines)


def _latex(text: str) -> str:
    return "".join(LATEX.get(sign, sign) for sign in text)


def as_html(table: Table) -> str:
    """A `section` with heading, table and notes."""

    def row(cells: Sequence[Cell], tag: str) -> str:
        texts = [f"<b>{html.escape(one.text)}</b>" if one.bold else html.escape(one.text) for one in cells]
        return "<tr>" + "".join(f"<{tag}>{text}</{tag}>" for text in texts) + "</tr>"

    head, *body = table.rows
    notes = "".join(f"<li>{html.escape(note)}</li>" for note in table.notes)
    return "\n".join(
        [
            f"<section><h2>{html.escape(table.title)}</h2>",
            f"<table><thead>{row(head, 'th')}</thead><tbody>",
            *(row(one, "td") for one in body),
            f"</tbody></table>{f'<ul>{notes}</ul>' if notes else ''}</section>",
        ]
    )
