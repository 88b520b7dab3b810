"""The tables of docs/scaling.md are what the planner says now."""

from __future__ import annotations

import pytest

from benchmarks.plan_tables import BEGIN, DOCUMENT, END, recipes, section

ALWAYS = ("pos_bert_base",)


def test_every_recipe_has_a_table() -> None:
    text = DOCUMENT.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0]
    assert [line.removeprefix("### ") for line in text.splitlines() if line.startswith("### ")] == recipes()


@pytest.mark.parametrize(
    "name", [name if name in ALWAYS else pytest.param(name, marks=pytest.mark.exhaustive) for name in recipes()]
)
def test_a_table_is_what_the_planner_says(name: str) -> None:
    assert "\n".join(section(name, "h100")) in DOCUMENT.read_text(encoding="utf-8")
