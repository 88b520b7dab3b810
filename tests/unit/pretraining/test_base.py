"""`--training.epochs`: the steps follow from the rows of the training split, in runs, resumes and plans."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from tests.runs import flags, image_flags, pretrain_here
from trp_scale.checkpoint.document import read_document
from trp_scale.checkpoint.run_directory import checkpoints
from trp_scale.cli.main import main
from trp_scale.config import RefusedError
from trp_scale.config.loader import load_recipe
from trp_scale.config.run_flags import parse
from trp_scale.pretraining.base import open_sources, set_length


def without_steps(words: list[str]) -> list[str]:
    place = words.index("--training.steps")
    return words[:place] + words[place + 2 :]


@pytest.fixture
def words(text_dataset: Path, tmp_path: Path) -> list[str]:
    return without_steps(flags(text_dataset, tmp_path / "run"))


def test_fractions_of_the_split_are_steps_of_whole_batches(words: list[str]) -> None:
    config = parse([*words, "--training.epochs", "0.3"]).config
    rows = open_sources(config, rank=0, world=1).train.rows
    set_length(config)
    assert config.training.steps == math.ceil(0.3 * rows / config.batch.global_size) > 1
    set_length(config)  # a restart, or a saved recipe
    assert config.training.steps == math.ceil(0.3 * rows / config.batch.global_size)


@pytest.mark.parametrize("recipe", ["mae_tiny", "mm_mae_tiny"])
def test_epochs_of_images(recipe: str, image_dataset: Path, tmp_path: Path) -> None:
    words = without_steps(image_flags(recipe, image_dataset, tmp_path / "run"))
    config = parse([*words, "--training.epochs", "2", "--batch.micro_size", "auto"]).config
    set_length(config)
    assert config.batch.micro_size == "auto" and config.training.steps > 2


def test_rows_of_labelled_splits_do_not_count(image_dataset: Path, tmp_path: Path) -> None:
    words = without_steps(image_flags("mlo_mae_tiny", image_dataset, tmp_path / "run"))
    config = parse([*words, "--training.epochs", "1", "--multilevel.unlabelled", "train"]).config
    set_length(config)
    few = config.training.steps
    config.multilevel.unlabelled = "all"
    set_length(config)
    assert few < config.training.steps


def test_a_run_saves_its_steps_resumes_and_goes_on(words: list[str], tmp_path: Path) -> None:
    assert pretrain_here([*words, "--training.epochs", "0.1"]) == 0
    saved = load_recipe(tmp_path / "run" / "config.yaml").training
    assert saved.epochs == 0.1 and saved.steps > 0  # type: ignore[attr-defined]
    assert pretrain_here([*words, "--training.epochs", "0.1"]) == 0  # nothing is left to do
    assert pretrain_here([*words, "--training.epochs", "0.2"]) == 0
    step, path = checkpoints(tmp_path / "run")[-1]
    assert step == load_recipe(tmp_path / "run" / "config.yaml").training.steps > saved.steps
    assert read_document(path).config["training"]["epochs"] == 0.2
    assert pretrain_here([*words, "--training.steps", str(step + 1)]) == 0


def test_the_schedule_is_checked_against_the_resolved_steps(words: list[str]) -> None:
    schedule = ["--optimizer.schedule", "wsd", "--optimizer.decay_steps", "100000", "--training.epochs", "0.1"]
    config = parse([*words, *schedule]).config
    with pytest.raises(RefusedError, match=r"--optimizer\.decay_steps is 100000"):
        set_length(config)


def test_the_length_is_printed(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    command = ["pretrain", *words, "--training.epochs", "0.5"]
    config = parse(command[1:]).config
    set_length(config)
    assert main([*command, "--print_config"]) == 0
    assert f"steps: {config.training.steps}\n" in capsys.readouterr().out
    assert main([*command, "--dry_run"]) == 0
    assert f"{config.training.steps:,} steps take " in capsys.readouterr().out


@pytest.mark.parametrize("command", [["plan"], ["pretrain", "--print_config"], ["pretrain", "--dry_run"]])
def test_unknown_data_is_refused(command: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = ["--recipe", "pos_bert_tiny", "--data.path", str(tmp_path / "none"), "--training.epochs", "2"]
    assert main([*command, *words]) == 2
    assert str(tmp_path / "none") in capsys.readouterr().err
