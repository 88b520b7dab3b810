"""The tables of docs/scaling.md are what the planner says now."""

from __future__ import annotations

import re

import pytest

from benchmarks.document_tables import SCALING, planned_recipes, scaling_section, written_tables
from tests.grids import always
from trp_scale.console import Cell


def rows() -> list[list[str]]:
    """The cells of the first table, without its head."""
    lines = [line for line in written_tables("scaling").splitlines() if line.startswith("| `")]
    return [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in lines]


def test_every_recipe_has_a_row_and_a_folded_table() -> None:
    assert [row[0] for row in rows()] == planned_recipes()
    assert re.findall(r"^<summary>(\w+)</summary>$", written_tables("scaling"), re.MULTILINE) == planned_recipes()
    assert {len(row) for row in rows()} == {len(SCALING)}


@pytest.mark.parametrize("name", always(planned_recipes()))
def test_a_row_and_a_table_are_what_the_planner_says(name: str) -> None:
    row, section = scaling_section(name, "h100")
    assert [cell.text if isinstance(cell, Cell) else cell for cell in row] in rows()
    assert section in written_tables("scaling")
