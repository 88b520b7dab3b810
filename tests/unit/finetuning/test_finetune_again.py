"""`trp-scale finetune` repeated after something has changed: a figure is of what was asked for, or there is none."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.runs import flags, pretrain_here
from tests.unit.finetuning.glue.small_data import finetune_here, glue_flags, write_cola
from trp_scale.cli import main as cli
from trp_scale.reporting.results import RESULT_FILE, read_results

ONE = Path("cola") / "seed_0"


@pytest.fixture
def command(text_dataset: Path, tmp_path: Path) -> list[str]:
    """Three steps of CoLA from scratch, in tmp_path/run; the tokenizer is a copy, in tmp_path/tokenizer."""
    shutil.copytree(text_dataset / "tokenizer", tmp_path / "tokenizer")
    root = write_cola(tmp_path / "glue", 20, 10)
    changes = {"downstream.tokenizer": tmp_path / "tokenizer", "downstream.epochs": 0, "training.steps": 3}
    return ["finetune", *glue_flags(root, tmp_path / "run", "cola", "scratch", **changes)]


def steps_of(run: Path) -> int:
    return int(json.loads((run / ONE / RESULT_FILE).read_text())["settings"]["training"]["steps"])


def test_more_steps_go_on_and_fewer_are_refused(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    assert cli.main([*command, "--checkpoint.every", "1"]) == 0
    assert cli.main([*command, "--training.steps", "2"]) == 2, "the figure of three steps was taken for that of two"
    assert "--training.steps is 2" in capsys.readouterr().err
    assert steps_of(run) == 3
    assert cli.main([*command, "--training.steps", "5"]) == 0
    assert steps_of(run) == 5 and (run / ONE / "checkpoints" / "step_00000005").is_dir()


def test_runs_of_two_commands_do_not_share_a_directory(
    command: list[str], text_dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pretrained = flags(text_dataset, tmp_path / "pretrained", training__steps=1)
    assert pretrain_here(pretrained) == 0
    before = sorted(path.name for path in (tmp_path / "pretrained").iterdir())
    assert cli.main([*command, "--run_dir", str(tmp_path / "pretrained")]) == 2
    assert "/pretrained holds" in capsys.readouterr().err
    assert sorted(path.name for path in (tmp_path / "pretrained").iterdir()) == before
    assert cli.main(command) == 0
    assert cli.main(["pretrain", *flags(text_dataset, tmp_path / "run", training__steps=1)]) == 2
    assert "/run holds" in capsys.readouterr().err
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_what_is_started_anew_takes_no_earlier_figure(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*command, "--resume", "never"]) == 0
    assert cli.main([*command, "--resume", "never"]) == 2
    assert "--resume never" in capsys.readouterr().err


def test_seeds_on_other_data_are_not_joined(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(command) == 0
    dev = tmp_path / "glue" / "CoLA" / "dev.tsv"
    dev.write_text(dev.read_text(encoding="utf-8").replace("\t1\t", "\t0\t", 1), encoding="utf-8")
    assert cli.main([*command, "--seeds", "2"]) == 2
    assert "seed_1: " in capsys.readouterr().err
    assert not (tmp_path / "run" / "cola" / "seed_1" / RESULT_FILE).exists()
    assert read_results(tmp_path / "run").tasks[0].seeds == [0]
    assert cli.main([*command, "--training.seed", "1"]) == 0, "alone it may have other data"
    assert cli.main([*command, "--seeds", "2"]) == 2
    assert "seed_1: " in capsys.readouterr().err


def test_an_encoder_that_has_learned_on_is_another_one(
    command: list[str], text_dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "source"
    command[command.index("scratch")] = str(source)
    pretrain_here(flags(text_dataset, source, training__steps=1))
    assert cli.main(command) == 0
    pretrain_here(flags(text_dataset, source, training__steps=2))
    assert cli.main([*command, "--seeds", "2"]) == 2, "one mean over two encoders"
    refused = capsys.readouterr().err
    assert "step_00000001, now" in refused and "step_00000002" in refused
    first = source / "checkpoints" / "step_00000001"
    command[command.index(str(source))] = str(first)
    assert cli.main([*command, "--seeds", "2"]) == 0, "the checkpoint itself is the encoder that it was"


def test_a_run_is_measured_by_the_tokenizer_it_has_learned_with(command: list[str], tmp_path: Path) -> None:
    assert finetune_here(command[1:]) == 0
    shutil.rmtree(tmp_path / "tokenizer")
    assert cli.main(["evaluate", "--run", str(tmp_path / "run")]) == 0
    assert read_results(tmp_path / "run" / "evaluations" / "own").tasks == read_results(tmp_path / "run").tasks
