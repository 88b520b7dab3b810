"""The tables of docs/recipes.md are what benchmarks/document_tables.py prints now."""

from __future__ import annotations

import re

import pytest

from benchmarks.document_tables import fine_tuning_row, planned_recipes, planned_row, written_tables
from trp_scale.config import PretrainConfig
from trp_scale.config.loader import known_recipes, summary

PRE_TRAINING = known_recipes(PretrainConfig)
ALWAYS = ("pos_bert_base",)


def rows() -> dict[str, list[str]]:
    """The cells of each recipe's row."""
    lines = re.findall(r"^\| `.*\|$", written_tables("recipes"), flags=re.MULTILINE)
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {row[0].strip("`"): row for row in cells}


def test_every_recipe_is_there_with_what_it_says_of_itself() -> None:
    assert sorted(rows()) == sorted(known_recipes())
    assert {name: row[1] for name, row in rows().items()} == {name: summary(name) for name in known_recipes()}


@pytest.mark.parametrize("name", [name for name in known_recipes() if name not in PRE_TRAINING])
def test_a_row_of_fine_tuning_is_what_the_recipe_says(name: str) -> None:
    assert rows()[name] == fine_tuning_row(name)


@pytest.mark.parametrize(
    "name", [name if name in ALWAYS else pytest.param(name, marks=pytest.mark.exhaustive) for name in planned_recipes()]
)
def test_a_row_is_what_the_planner_says(name: str) -> None:
    assert rows()[name] == planned_row(name, "h100")
