"""docs/troubleshooting.md explains messages that the package says; docs/defaults.md has the settings' defaults; the
tables of docs/recipes.md are what benchmarks/document_tables.py prints now."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml

from benchmarks.document_tables import (
    FINE_TUNING,
    HEAD,
    fine_tuning_row,
    planned_row,
    table,
    written_tables,
)
from tests.commands import ROOT
from tests.documents.pages import read
from tests.grids import always
from trp_scale.config import PretrainConfig
from trp_scale.config.loader import known_recipes, summary
from trp_scale.config.registry import make_settings
from trp_scale.console import escape_markdown
from trp_scale.pretraining.pos_bert.settings import PosBertConfig

ROWS = re.findall(r"^\| `([a-z_0-9]+)\.([a-z_0-9]+)`(?: of `(\w+)`)?[^|]*\| `([^`]+)` \|", read("defaults.md"), re.M)


def said() -> str:
    """The texts of all sources, with strings that go on in the next line joined."""
    texts = [path.read_text(encoding="utf-8") for path in sorted((ROOT / "trp_scale").rglob("*.py"))]
    return re.sub(r"\{[^{}]*\}", "", re.sub(r'"\s*\n\s*f?"', "", "\n".join(texts)))


def messages() -> list[str]:
    """What stands in backquotes in the first column."""
    rows = re.findall(r"^\| ([^|]*`[^|]*) \|", read("troubleshooting.md"), flags=re.MULTILINE)
    return [piece for row in rows for piece in re.findall(r"`([^`]+)`", row)]


def test_each_message_is_one_that_the_package_says() -> None:
    texts = said()
    assert len(messages()) > 40 and [message for message in messages() if message not in texts] == []


def test_the_page_is_short_and_each_row_of_it_is_read() -> None:
    lines = read("defaults.md").splitlines()
    assert len(lines) <= 120
    assert len(ROWS) == sum(line.startswith("| `") for line in lines) > 40


def test_each_default_is_that_of_the_code() -> None:
    for section, name, kind, value in ROWS:
        settings: Any = make_settings(section, kind) if kind else getattr(PosBertConfig(), section)
        default = getattr(settings, name)
        stated = float(value) if isinstance(default, float) else yaml.safe_load(value)
        assert stated == default and isinstance(stated, type(default)), f"{section}.{name}"


PRE_TRAINING = known_recipes(PretrainConfig)


def recipe_rows() -> dict[str, str]:
    """The row of each recipe."""
    lines = re.findall(r"^\| `.*\|$", written_tables("recipes"), flags=re.MULTILINE)
    return {line.split("`")[1]: line for line in lines}


def test_every_recipe_is_there_with_what_it_says_of_itself() -> None:
    assert sorted(recipe_rows()) == sorted(known_recipes())
    assert all(f"| {escape_markdown(summary(name))} |" in row for name, row in recipe_rows().items())


@pytest.mark.parametrize("name", [name for name in known_recipes() if name not in PRE_TRAINING])
def test_a_row_of_fine_tuning_is_what_the_recipe_says(name: str) -> None:
    assert recipe_rows()[name] == table(FINE_TUNING, [fine_tuning_row(name)]).splitlines()[-1]


@pytest.mark.parametrize("name", always([name for name in PRE_TRAINING if not name.endswith("_tiny")], "pos_bert_base"))
def test_a_row_is_what_the_planner_says(name: str) -> None:
    assert recipe_rows()[name] == table(HEAD, [planned_row(name, "h100")]).splitlines()[-1]
