"""One table, in each of its forms."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from trp_scale.console import Cell, Table, figure_text, number_cell

TABLE = Table(
    head=["task", "loss"],
    rows=[["a|b_c", Cell(text="1.50", strong=True)], ["d & 5%", "2"]],
    title="Losses",
    marked=(1,),
    notes=["of 2 * 3 seeds"],
)


def test_markdown_escapes_what_it_would_read_as_markup() -> None:
    assert TABLE.to_markdown().split("\n\n") == [
        "## Losses",
        "| task | loss |\n| --- | ---: |\n| a\\|b\\_c | **1.50** |\n| d & 5% | 2 |",
        "- of 2 \\* 3 seeds",
    ]


def test_latex_escapes_its_signs_and_aligns_figures_to_the_right() -> None:
    text = TABLE.to_latex()
    assert r"\begin{tabular}{lr}" in text and r"\caption{Losses}" in text
    assert r"a|b\_c & \textbf{1.50} \\" in text and r"d \& 5\% & 2 \\" in text


def test_the_console_shows_every_cell_and_reads_no_markup() -> None:
    console = Console(file=io.StringIO(), width=40)
    console.print(Table(head=["x"], rows=[["[bold]y[/bold]"]]).to_rich())
    assert "[bold]y[/bold]" in console.file.getvalue()  # type: ignore[attr-defined]


def test_headings_of_wide_tables_wrap_and_words_are_not_broken() -> None:
    def text(name: str, cell: str, columns: int) -> str:
        head = ["name", *(f"figure number {number}" for number in range(columns))]
        return str(Table(head=head, rows=[[name, *[cell] * columns]]))

    assert "a long name of a row" in text("a long name of a row", "12345", 6)
    assert "checkpointing" in text("a b with checkpointing", "of 12345", 8)


@pytest.mark.parametrize(
    ("value", "arguments", "text"),
    [
        (None, {}, "-"),
        (float("nan"), {}, "-"),
        (0.12345, {}, "0.123"),
        (12.345, {}, "12.35"),
        (1234.5, {"digits": 3}, "1,234"),
        (2e7, {}, "2e+07"),
        (-0.5, {"sign": True, "unit": "share"}, "-50.0%"),
        (1200, {"unit": "s"}, "1,200 s"),
    ],
)
def test_numbers_have_the_digits_that_matter(value: float | None, arguments: dict[str, object], text: str) -> None:
    assert figure_text(value, **arguments) == text  # type: ignore[arg-type]
    cell = number_cell(value, **arguments)  # type: ignore[arg-type]
    assert cell.text == text and cell.order == (None if text == "-" else value)
