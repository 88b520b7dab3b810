"""The tables of docs/recipes.md are what benchmarks/document_tables.py prints now."""

from __future__ import annotations

import re

import pytest

from benchmarks.document_tables import (
    FINE_TUNING,
    HEAD,
    fine_tuning_row,
    planned_row,
    table,
    written_tables,
)
from tests.grids import always
from trp_scale.config import PretrainConfig
from trp_scale.config.loader import known_recipes, summary
from trp_scale.console import escape_markdown

PRE_TRAINING = known_recipes(PretrainConfig)


def rows() -> dict[str, str]:
    """The row of each recipe."""
    lines = re.findall(r"^\| `.*\|$", written_tables("recipes"), flags=re.MULTILINE)
    return {line.split("`")[1]: line for line in lines}


def test_every_recipe_is_there_with_what_it_says_of_itself() -> None:
    assert sorted(rows()) == sorted(known_recipes())
    assert all(f"| {escape_markdown(summary(name))} |" in row for name, row in rows().items())


@pytest.mark.parametrize("name", [name for name in known_recipes() if name not in PRE_TRAINING])
def test_a_row_of_fine_tuning_is_what_the_recipe_says(name: str) -> None:
    assert rows()[name] == table(FINE_TUNING, [fine_tuning_row(name)]).splitlines()[-1]


@pytest.mark.parametrize("name", always([name for name in PRE_TRAINING if not name.endswith("_tiny")], "pos_bert_base"))
def test_a_row_is_what_the_planner_says(name: str) -> None:
    assert rows()[name] == table(HEAD, [planned_row(name, "h100")]).splitlines()[-1]
