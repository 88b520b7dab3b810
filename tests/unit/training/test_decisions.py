"""What cannot be read is left out and named once: an image of D_val, or a block that a step was to have."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from math import nan
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from tests.runs import flags, image_flags, lines, pretrain_here
from tests.synthetic import Layout, small_config, trainer_for
from tests.unit.data.images.stored import sample, write_images
from trp_scale.checkpoint.run_directory import checkpoints
from trp_scale.config import CheckpointConfig, RefusedError, ReliabilityConfig
from trp_scale.core.batch import Batch, StepStats
from trp_scale.data.images.dataset import open_image_dataset
from trp_scale.data.plan import downstream_validation
from trp_scale.distributed.groups import Group
from trp_scale.errors import DataError
from trp_scale.training import pretrain as training
from trp_scale.training.decisions import (
    AT_LEAST,
    WINDOW,
    Agreed,
    Best,
    SpikeWatch,
    StepAgreement,
    build_best_tracker,
    validation_figures,
)
from trp_scale.training.rundir import Incidents, read_incidents


@pytest.fixture
def damaged(tmp_path: Path) -> tuple[Path, str]:
    """40 images of 3 classes, of which one of D_val is no picture; and its name."""
    samples = [sample(number, 40, 40) for number in range(40)]
    blocks = open_image_dataset(write_images(tmp_path / "whole", [samples], rows_per_block=2)).blocks
    every = np.ones(len(blocks.keys), dtype=np.bool_)
    chosen = downstream_validation(blocks.identities, 0.2, training=every, where="")
    number = int(blocks.first[np.flatnonzero(chosen)[0]])
    samples[number] = sample(number, 40, 40, jpg=b"no picture")
    return write_images(tmp_path / "data", [samples], rows_per_block=2), f"image-000000/n{number:05d}"


def head_flags(data: Path, run_dir: Path, allowed: int) -> list[str]:
    return image_flags(
        "mae_vit_b",
        data,
        run_dir,
        multilevel__kind="head",
        multilevel__network="patchwise",
        multilevel__unroll=1,
        training__steps=8,
        data__max_corrupt_blocks=allowed,
        data__validation_fraction=0.0,
    )


def test_it_is_left_out_and_named_once(
    damaged: tuple[Path, str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    data, name = damaged
    assert pretrain_here(head_flags(data, tmp_path / "run", allowed=1)) == 0
    assert capfd.readouterr().out.count(f"block {name} ") == 1
    logged = [line["multilevel"] for line in lines(tmp_path / "run")]
    assert all(np.isfinite(line["validation_loss"]) for line in logged)


def test_what_one_rank_could_not_read_is_told_though_another_has_no_rows_and_the_step_is_not_made(
    tmp_path: Path,
) -> None:
    trainer = trainer_for(Layout(), small_config(Layout(), training={"steps": 3}))
    trainer.control.incidents = Incidents(tmp_path)
    agreed = Agreed(counts=torch.zeros(0), stop=True, new_corrupt={"a.tar:0": "torn"}, without_rows=True)
    with mock.patch.object(trainer.agreement, "reach", return_value=agreed):
        trainer.train_step()
    assert trainer.state.step == 0
    (told,) = read_incidents(tmp_path)
    assert (told["kind"], told["key"], told["reason"]) == ("unreadable", "a.tar:0", "torn")
    trainer.engine.close()


def test_unreadable_blocks_in_step_after_step_are_the_storage() -> None:
    agreement = StepAgreement(Group("world"), max_corrupt_blocks=1000, max_corrupt_steps=3)

    def step(*keys: str) -> None:
        batch = Batch(fields={"row_weights": torch.ones(1)}, keys=torch.zeros(1, dtype=torch.int64), start=0)
        batch.corrupt = list(keys)
        agreement.reach(torch.zeros(1, dtype=torch.float64), [batch], stop=False)

    for number in range(3):
        step(f"block {number}")
    step()  # one that could be read
    for number in range(3, 6):
        step(f"block {number}")
    with pytest.raises(DataError, match=r"4 steps .*max_corrupt_steps .*3"):
        step("block 6")


def test_less_is_better_of_losses_and_more_of_accuracies() -> None:
    loss, accuracy = Best(figure="validation.noun", patience=2), Best(figure="probes.knn", patience=0)
    judged = [loss.judge(step, {"validation.noun": value}) for step, value in enumerate((3.0, 2.0, 2.5, 1.0), 1)]
    assert judged == [True, True, False, True]
    judged = [accuracy.judge(step, {"probes.knn": value}) for step, value in enumerate((0.3, 0.2, 0.4), 1)]
    assert judged == [True, False, True]
    assert (loss.value, loss.step, loss.since) == (1.0, 4, 0)
    assert not loss.judge(5, {"validation.noun": nan}) and not loss.judge(6, {"probes.knn": 9.0})
    assert loss.since == 1, "only what was measured counts"
    assert loss.given_up() is None and not loss.judge(7, {"validation.noun": None})
    assert loss.given_up() == "no better validation.noun in 2 measurements: validation.noun 1.0000 at step 4"
    again = Best(figure="validation.noun", patience=2)
    again.load(json.loads(json.dumps(loss.state())))
    assert again == loss
    accuracy.load(loss.state())
    assert accuracy.step == 3, "of another figure nothing is known"


def test_the_figures_of_a_validation() -> None:
    tasks = {"a": {"loss": 1.0, "count": 2}, "b": {"loss": 3.0, "count": 1}, "c": {"loss": None, "count": 0}}
    found = validation_figures({"loss": 2.0, "worst_task": "b", "tasks": tasks})
    assert found == {
        "validation.a": 1.0,
        "validation.b": 3.0,
        "validation.c": None,
        "validation.loss": 2.0,
        "validation.worst": 3.0,
    }
    assert validation_figures({"loss": None, "worst_task": None, "tasks": {}})["validation.worst"] is None


def test_unknown_figures_are_refused_with_those_there_are() -> None:
    assert build_best_tracker(CheckpointConfig(), ["noun"], []) is None
    with pytest.raises(RefusedError, match=r"validation.noun\?.*validation.worst, validation.noun"):
        build_best_tracker(CheckpointConfig(best="validation.nuon"), ["noun"], [])
    assert build_best_tracker(CheckpointConfig(best="probes.knn", patience=3), [], ["probes.knn"]) == Best(
        figure="probes.knn", patience=3
    )


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Validations whose losses are given by the step."""
    losses: Iterator[float] = iter([5.0, 4.0, 4.5, 4.2, 3.0, 2.0, 2.5, 2.6])

    def validate(*arguments: Any, **named: Any) -> dict[str, Any]:
        loss = next(losses)
        return {"loss": loss, "worst_task": "noun", "tasks": {"noun": {"loss": loss, "count": 1}}}

    monkeypatch.setattr(training, "validate", validate)


def test_a_run_keeps_its_best_ends_and_goes_on(text_dataset: Path, tmp_path: Path, scripted: None) -> None:
    run = tmp_path / "run"
    changes = {"validation__every": 1, "checkpoint__best": "validation.worst", "checkpoint__keep": 1}
    assert pretrain_here(flags(text_dataset, run, **changes, checkpoint__patience=2)) == 0
    assert [step for step, _ in checkpoints(run)] == [2, 4], "the best, and the newest"
    stop = json.loads((run / "stop.json").read_text())
    assert stop["why"].startswith("no better validation.worst in 2 measurements") and not stop["again"]
    assert lines(run)[-1]["step"] == 4
    assert "best validation.worst 4.0000 at step 2: " in " ".join((run / "report.txt").read_text().split())
    assert pretrain_here(flags(text_dataset, run, **changes, checkpoint__patience=2)) == 0
    assert lines(run)[-1]["step"] == 4, "it has ended"
    assert pretrain_here(flags(text_dataset, run, **changes, checkpoint__patience=3)) == 0
    assert [step for step, _ in checkpoints(run)] == [6, 8]
    assert json.loads((run / "stop.json").read_text())["why"] == "finished"


def test_patience_that_runs_out_in_the_last_step_ends_a_finished_run(
    text_dataset: Path, tmp_path: Path, scripted: None
) -> None:
    run = tmp_path / "run"
    changes = {"validation__every": 1, "checkpoint__best": "validation.worst", "training__steps": 4}
    for _ in range(2):
        assert pretrain_here(flags(text_dataset, run, **changes, checkpoint__patience=2)) == 0
        assert json.loads((run / "stop.json").read_text())["why"] == "finished"
        assert json.loads((run / "summary.json").read_text())["exit_reason"] == "finished"


def test_a_step_that_a_hook_has_measured_is_read_before_it_is_kept_or_the_last() -> None:
    trainer = trainer_for(Layout(), small_config(Layout(), training={"steps": 6}))
    trainer.best = Best(figure="probes.knn", patience=2)
    figures = [0.1, 0.3, 0.2, 0.1]  # after each step
    trainer.hooks.measured = lambda: {"probes.knn": figures[len(trainer.history) - 1]}  # type: ignore[method-assign]
    unread: list[bool] = []
    trainer.control.save = lambda: unread.append(trainer.pending is not None)
    assert trainer.run().startswith("no better probes.knn in 2 measurements")
    assert trainer.state.step == 4 and trainer.pending is None
    assert unread == [False] * 3, "after steps 1 and 2, the best so far, and at the end"
    trainer.engine.close()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"checkpoint__best": "validation.loss", "validation__every": 0}, "--validation.every"),
        ({"checkpoint__patience": 3}, "--checkpoint.best"),
        ({"checkpoint__best": "probes.knn"}, "with --hooks probes"),
    ],
)
def test_what_cannot_be_kept_is_refused(changes: dict[str, Any], said: str, text_dataset: Path, tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match=said):
        pretrain_here(flags(text_dataset, tmp_path / "run", **changes))


def stats(loss: float, norm: float = 1.0, tasks: tuple[float, ...] = (2.0, 3.0), applied: bool = True) -> StepStats:
    return StepStats(
        applied=applied,
        grad_norm=norm,
        loss=loss,
        lr=0.1,
        task_losses=tasks,
        task_counts=tuple(float(t > 0) for t in tasks),
    )


def watch(kind: str = "skip", **settings: float) -> SpikeWatch:
    return SpikeWatch(ReliabilityConfig(spikes=kind, **settings), ("noun", "verb"))  # type: ignore[arg-type]


STEPS = 60


def settled(found: SpikeWatch, steps: int = STEPS) -> SpikeWatch:
    """After steps, from 1, of a loss that falls from 9 to 6, with noise of 5 %."""
    draw = random.Random(0)
    for step in range(steps):
        noise = [math.exp(draw.gauss(0, 0.05)) for _ in range(4)]
        level = 9 - 3 * step / steps
        assert found.judge(step + 1, stats(level * noise[0], noise[1], (level * noise[2], level * noise[3]))) == []
    return found


@pytest.mark.parametrize(
    ("spoilt", "names"),
    [
        (stats(6000.0), ["loss"]),
        (stats(6.5, norm=400.0), ["grad_norm"]),
        (stats(6.5, tasks=(7.0, 900.0)), ["loss of verb"]),
        (stats(90.0, 50.0, (6.0, 90.0)), ["loss", "grad_norm", "loss of verb"]),
        (stats(8.5, 1.3, (7.5, 7.0)), []),
        (stats(0.001), []),
        (stats(6.5, tasks=(0.0, 7.0)), []),
        (stats(math.nan, math.inf, applied=False), []),
    ],
)
def test_what_is_one(spoilt: StepStats, names: list[str]) -> None:
    found = settled(watch()).judge(STEPS + 1, spoilt)
    assert [each.name for each in found] == names
    assert all(each.score > 10 and each.value > 2 * each.usual for each in found)


def test_nothing_is_judged_before_enough_is_known() -> None:
    early = watch()
    for step in range(1, AT_LEAST + 1):  # the last of them is not in the next one's past
        early.judge(step, stats(6.0))
    assert early.judge(AT_LEAST + 1, stats(6e6)) == []
    early = watch()
    for step in range(1, AT_LEAST + 2):
        early.judge(step, stats(6.0))
    assert early.judge(AT_LEAST + 2, stats(6e6))


def test_a_spike_is_not_remembered_and_a_new_level_is() -> None:
    found = settled(watch())
    before = found.state()
    assert found.judge(STEPS + 1, stats(6000.0)) and found.state() == before
    assert found.judge(STEPS + 2, stats(math.nan, applied=False)) == [] and found.state() == before
    last = STEPS + 3 + WINDOW
    for step in range(STEPS + 3, last + 1):
        found.judge(step, stats(11.0, tasks=(11.0, 11.0)))
    assert found.judge(last + 1, stats(21.0, tasks=(11.0, 11.0))) == [], "not twice the median"
    assert found.judge(last + 2, stats(23.0, tasks=(11.0, 11.0)))


@pytest.mark.parametrize(("kind", "acts"), [("warn", False), ("skip", True), ("rollback", True)])
def test_limits_are_what_the_judge_goes_by(kind: str, acts: bool) -> None:
    found = settled(watch(kind))
    limits = found.limits(STEPS + 1)
    assert (limits is not None) == acts
    if limits is not None:
        loss, norm, *tasks = limits.tolist()
        assert found.judge(STEPS + 1, stats(loss * 0.99, norm * 0.99, tuple(each * 0.99 for each in tasks))) == []
        found = settled(watch(kind))
        assert len(found.judge(STEPS + 1, stats(loss * 1.01, norm * 1.01, tuple(each * 1.01 for each in tasks)))) == 4
    unknown = watch("skip").limits(1)
    assert unknown is not None and bool(torch.isinf(unknown).all())


def test_limits_are_the_same_whether_the_step_before_has_been_read_or_not() -> None:
    """A step is decided before its predecessor's numbers are read, but for a checkpoint between them."""
    found, step = settled(watch()), STEPS + 2
    unread = found.limits(step)
    found.judge(STEPS + 1, stats(11.0, 1.5, (11.0, 11.0)))
    read = found.limits(step)
    assert unread is not None and read is not None and unread.tolist() == read.tolist()
    after = found.limits(step + 1)
    assert after is not None and after.tolist() != read.tolist()
    for number in range(step, step + 2 * WINDOW):  # full, so that what is remembered pushes something out
        before = found.limits(number + 1)
        found.judge(number, stats(11.0 + number / 1000))
        behind = found.limits(number + 1)
        assert before is not None and behind is not None and before.tolist() == behind.tolist()


def test_it_goes_on_where_it_was() -> None:
    whole, broken = watch(), watch()
    for half in (whole, broken):
        settled(half, 50)
    resumed = watch()
    resumed.load(json.loads(json.dumps(broken.state())))
    for number in range(20):
        whole.judge(51 + number, stats(6 + number / 10))
        resumed.judge(51 + number, stats(6 + number / 10))
    assert json.dumps(resumed.state()) == json.dumps(whole.state())
    resumed.load({})
    assert resumed.state() == watch().state()
