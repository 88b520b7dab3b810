"""The run directory that two ranks leave behind: the fields that users and tools read."""

from __future__ import annotations

import json
import math
import os
import re
import socket
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from tests.ranks import Ranks
from tests.runs import flags, lines, pretrain_here
from trp_scale.checkpoint.run_directory import checkpoints, incompleteness
from trp_scale.config import RefusedError
from trp_scale.config.loader import load_recipe
from trp_scale.config.run_flags import parse
from trp_scale.data.text.dataset import GROUPS
from trp_scale.distributed.groups import Group
from trp_scale.pretraining.pos_bert.settings import PosBertConfig
from trp_scale.training.decisions import require_same_settings
from trp_scale.training.loop import Trainer
from trp_scale.training.report import report

STEPS = 6
TASKS = [*GROUPS, "next_sentence"]
OFFLINE = {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "TRP_SCALE_PROGRESS": "plain"}


def watched_run(arguments: list[str], run_dir: Path) -> tuple[int, list[int]]:
    """A run, and how many whole lines metrics.jsonl had for another reader after each step."""
    seen: list[int] = []
    train_step = Trainer.train_step

    def watched(trainer: Trainer) -> str | None:
        stop = train_step(trainer)
        seen.append((run_dir / "metrics.jsonl").read_bytes().count(b"\n"))
        return stop

    with mock.patch.object(Trainer, "train_step", watched), mock.patch.dict(os.environ, OFFLINE):
        return pretrain_here(arguments), seen


@pytest.fixture(scope="module")
def arguments(text_dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return flags(
        text_dataset,
        tmp_path_factory.mktemp("run") / "run",
        ds_config="ds_configs/zero2.json",
        training__steps=STEPS,
        validation__every=4,
        checkpoint__every=4,
        optimizer__lr=2e-4,
        balancer__estimate="lagged",
        logging__wandb="true",
        logging__tensorboard="true",
    )


@pytest.fixture(scope="module")
def run_dir(two_ranks: Ranks, arguments: list[str]) -> Path:
    """A finished run of two ranks under ZeRO-2, logged to TensorBoard and, offline, to W&B."""
    directory = parse(arguments).run_dir
    assert directory is not None
    answers = two_ranks(watched_run, arguments, directory)
    assert [status for status, _ in answers] == [0, 0]
    # A line is there when the next step is queued; that of a validated step comes with its validation, just after.
    assert answers[0][1] == [0, 1, 2, 3, 4, 5]
    return directory


def finite(value: Any, least: float = 0.0) -> bool:
    return isinstance(value, float) and math.isfinite(value) and value >= least


def test_every_step_has_a_line_with_every_field(run_dir: Path) -> None:
    found = lines(run_dir)
    assert [line["step"] for line in found] == list(range(1, STEPS + 1))
    for line in found:
        assert all(finite(line[name]) for name in ("loss", "grad_norm", "step_seconds", "data_wait_seconds"))
        assert finite(line["lr"]) and line["lr"] <= 2e-4
        assert finite(line["tokens_per_second"], 1.0) and finite(line["model_flops"], 1.0)
        assert "model_flops_utilisation" in line, "null where the device's peak is not known, but there"
        assert isinstance(line["peak_memory_bytes"], int) and line["peak_memory_bytes"] > 1e6
        assert line["applied"] is True
        assert line["balancer"]["kind"] == "minimax" and line["balancer"]["estimate"] == "lagged"
        assert line["balancer"]["effective_elements"] is None or line["balancer"]["effective_elements"] > 0
        assert set(line["outside_tasks"]) == {"other", "next_sentence"}


def test_every_line_lists_all_tasks_of_the_global_batch(run_dir: Path) -> None:
    for line in lines(run_dir):
        assert list(line["tasks"]) == TASKS
        for task, entry in line["tasks"].items():
            assert entry.keys() == {"loss", "weight", "count"}
            assert isinstance(entry["count"], int)
            absent = {"loss": None, "weight": 0.0, "count": 0}
            assert entry == absent if entry["count"] == 0 else finite(entry["loss"]) and finite(entry["weight"]), task
        assert line["tasks"]["next_sentence"]["count"] == 8, "rows of both ranks"
        balanced = [entry["weight"] for task, entry in line["tasks"].items() if task not in line["outside_tasks"]]
        assert sum(balanced) == pytest.approx(1.0)
        total = sum(entry["weight"] * (entry["loss"] or 0.0) for entry in line["tasks"].values())
        assert line["loss"] == pytest.approx(total, rel=1e-6)


def test_validated_steps_say_so(run_dir: Path) -> None:
    validated = {line["step"]: line["validation"] for line in lines(run_dir) if "validation" in line}
    assert list(validated) == [4, STEPS]
    for losses in validated.values():
        assert list(losses["tasks"]) == TASKS
        assert finite(losses["loss"]) and losses["worst_task"] in GROUPS


def test_the_summary_and_the_report_are_of_this_run(run_dir: Path) -> None:
    summary = json.loads((run_dir / "summary.json").read_text(encoding="utf-8"))
    last = lines(run_dir)[-1]
    assert (summary["exit_reason"], summary["steps"], summary["start_step"]) == ("finished", STEPS, 0)
    assert summary["skipped_steps"] == 0
    assert summary["validation"] == last["validation"]
    assert list(summary["tasks"]) == TASKS
    assert summary["worst_task"] in GROUPS[:-1]
    assert summary["tokens"] == STEPS * 8 * 64
    assert finite(summary["wall_seconds"]) and finite(summary["tokens_per_second"], 1.0)
    assert summary["description"] == "deepspeed, ZeRO 2, 2 ranks, fp32"
    text = (run_dir / "report.txt").read_text(encoding="utf-8")
    assert text == report(run_dir)
    seen = {name for record in lines(run_dir) for name, task in record["tasks"].items() if task["count"]}
    assert seen >= {"noun", "verb", "next_sentence"} and all(f"\n {name} " in text for name in seen)
    assert summary["worst_task"] in text and str(run_dir.name) in text


def test_the_environment_names_engine_stage_and_world(run_dir: Path) -> None:
    found = json.loads((run_dir / "environment.json").read_text(encoding="utf-8"))
    assert (found["engine"], found["zero_stage"], found["world_size"]) == ("deepspeed", 2, 2)
    assert found["hosts"] == [socket.gethostname()] and len(found["devices"]) == 2
    assert all(found["versions"][package] for package in ("torch", "deepspeed", "transformers", "numpy"))
    assert found["python"] and found["platform"] and found["earlier"] == []
    if found["git"] is not None:
        assert len(found["git"]["commit"]) == 40


def test_the_stored_settings_are_a_recipe_that_gives_the_same_run(run_dir: Path, arguments: list[str]) -> None:
    asked = parse(arguments).config
    asked.training.compile, asked.training.capture = "none", "off"  # what auto is on a CPU
    assert load_recipe(run_dir / "config.yaml") == asked


def test_the_last_step_has_a_whole_checkpoint(run_dir: Path) -> None:
    assert [step for step, _ in checkpoints(run_dir)] == [4, STEPS]
    assert [incompleteness(path) for _, path in checkpoints(run_dir)] == [None, None]
    assert not list(run_dir.rglob(".*.tmp"))


def test_tensorboard_and_wandb_have_the_steps(run_dir: Path) -> None:
    pytest.importorskip("tensorboard")
    pytest.importorskip("wandb")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run_dir / "tensorboard"))
    events.Reload()
    expected = {line["step"]: line["tasks"]["noun"]["loss"] for line in lines(run_dir)}
    assert {event.step: event.value for event in events.Scalars("tasks/noun/loss")} == pytest.approx(expected)
    identity = (run_dir / "wandb_id.txt").read_text(encoding="utf-8").strip()
    (stored,) = (run_dir / "wandb").glob(f"offline-run-*-{identity}/run-{identity}.wandb")
    assert b"tasks/noun/loss" in stored.read_bytes()


def compare_settings(differing: bool) -> str:
    """What a rank is told when it was started with another seed and another micro-batch than rank 0."""
    config = PosBertConfig()
    if differing and dist.get_rank() == 1:
        config.training.seed, config.batch.micro_size = 5, 16
    try:
        require_same_settings(Group("world", rank=dist.get_rank(), size=dist.get_world_size()), config)
    except RefusedError as error:
        return str(error)
    return ""


def test_ranks_started_with_other_settings_are_refused_on_all(two_ranks: Ranks) -> None:
    assert two_ranks(compare_settings, False) == ["", ""]
    first, second = two_ranks(compare_settings, True)
    assert first == second
    assert re.search(r"training\.seed: .*rank 0 .*0, rank 1 .*5", first) and "optimizer" not in first
    assert re.search(r"batch\.micro_size: .*rank 0 .*auto, rank 1 .*16", first)
