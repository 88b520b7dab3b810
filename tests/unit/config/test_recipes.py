"""Recipes of a module of one's own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import trp_scale as trp
from tests.extending import forgetting
from trp_scale.cli import main as cli
from trp_scale.config import RefusedError
from trp_scale.config.loader import load_recipe
from trp_scale.config.run_flags import parse

MODULE = """
import trp_scale as trp

trp.recipe("short", {"extends": "pos_bert_tiny", "training": {"steps": 7}}, "Seven steps")
trp.recipe("shorter", "shorter.yaml")
"""
FILE = "# Three steps. No more.\nextends: short\ntraining:\n  steps: 3\n"


@pytest.fixture(autouse=True)
def module(tmp_path: Path) -> Iterator[str]:
    (tmp_path / "shorter.yaml").write_text(FILE)
    (tmp_path / "own_recipes.py").write_text(MODULE)
    with forgetting():
        yield str(tmp_path / "own_recipes.py")


def test_they_are_listed_shown_and_taken(module: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["recipes", "--module", module]) == 0
    listed = capsys.readouterr().out
    assert "Seven steps" in listed.split("trp-scale finetune")[0] and "Three steps\n" in listed
    assert cli.main(["recipes", "shorter", "--module", module]) == 0
    shown = capsys.readouterr().out
    assert "own_recipes:short extends pos_bert_tiny" in shown.splitlines()[0]
    steps = next(line for line in shown.splitlines() if line.strip().startswith("steps: 3"))
    assert steps.endswith("shorter.yaml")
    config = parse(["--recipe", "short", "--module", module]).config
    assert (config.training.steps, config.model.layers) == (7, load_recipe("pos_bert_tiny").model.layers)
    assert parse(["--recipe", "shorter", "--module", module]).config.training.steps == 3
    assert trp.known_recipes()["short"] == "Seven steps"


def test_one_that_is_wrong_is_named_where_it_stands(module: str, tmp_path: Path) -> None:
    (tmp_path / "shorter.yaml").write_text("extends: short\ntraining:\n  stepz: 3\n")
    with pytest.raises(RefusedError, match=r"shorter.yaml .*\n.*stepz"):
        parse(["--recipe", "shorter", "--module", module])


@pytest.mark.parametrize(
    ("name", "settings", "expected"),
    [
        ("pos_bert_tiny", {}, "'pos_bert_tiny'"),
        ("a/b", {}, "'a/b'"),
        ("mine", "nowhere.yaml", r"nowhere\.yaml"),
    ],
)
def test_what_cannot_be_registered_is_refused(name: str, settings: dict[str, int] | str, expected: str) -> None:
    with pytest.raises(RefusedError, match=expected):
        trp.recipe(name, settings)


def test_a_name_of_another_module_is_refused(module: str) -> None:
    parse(["--recipe", "short", "--module", module])
    with pytest.raises(RefusedError, match="own_recipes"):
        trp.recipe("short", {})
