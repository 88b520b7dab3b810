"""The tables of docs/scaling.md are what the planner says now."""

from __future__ import annotations

import pytest

from benchmarks.document_tables import planned_recipes, scaling_section, written_tables
from tests.grids import always


def test_every_recipe_has_a_table() -> None:
    lines = written_tables("scaling").splitlines()
    assert [line.removeprefix("### ") for line in lines if line.startswith("### ")] == planned_recipes()


@pytest.mark.parametrize("name", always(planned_recipes()))
def test_a_table_is_what_the_planner_says(name: str) -> None:
    assert "\n".join(scaling_section(name, "h100")) in written_tables("scaling")
