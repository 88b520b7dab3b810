"""A fault, and the checkpoint from before it; garbage is collected between steps; a step leaves nothing behind; the
learning rate of each step."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from transformers import get_cosine_schedule_with_warmup as cosine_with_warmup
from transformers import get_linear_schedule_with_warmup as linear_with_warmup
from transformers import get_wsd_schedule as wsd_with_warmup

from tests.runs import flags, pretrain_here
from tests.synthetic import Layout, RecordingTrainer, SilentObserver, small_config, trainer_for
from trp_scale.checkpoint.document import read_document
from trp_scale.checkpoint.run_directory import checkpoint_path, checkpoints
from trp_scale.config import OptimizerConfig
from trp_scale.config.loader import load_recipe
from trp_scale.core.batch import Batch
from trp_scale.core.hooks import StepContext
from trp_scale.engines.plain import PlainEngine
from trp_scale.training import loop
from trp_scale.training.loop import CALM_STEPS, Trainer, TrainingState, learning_rate


@pytest.mark.parametrize(
    ("skipped", "steps", "fault"),
    [
        ([], 5, 0),
        ([3], 5, 3),
        ([3, 4, 60], 100, 3),
        ([3], 2 + CALM_STEPS, 3),
        ([3], 3 + CALM_STEPS, 0),
        ([3, 60], 59 + CALM_STEPS, 3),
        ([3, 300], 301, 300),
    ],
)
def test_a_fault_begins_with_a_skipped_step_and_ends_after_calm_ones(
    skipped: list[int], steps: int, fault: int
) -> None:
    state = TrainingState()
    for step in range(1, steps + 1):
        state.record_step(step, skipped=step in skipped)
    assert (state.fault, state.skipped) == (fault, len(skipped))


def test_the_last_checkpoint_from_before_a_fault_stays(text_dataset: Path, tmp_path: Path) -> None:
    """Also when the run is started again and again: each start makes a step and a checkpoint."""
    changes = {"checkpoint__every": 2, "checkpoint__keep": 1, "training__steps": 40, "training__max_skipped_steps": 3}
    original, made = PlainEngine.check_gradients, [0]

    def spoils(engine: PlainEngine) -> Tensor:
        made[0] += 1
        norm = original(engine)
        return torch.full_like(norm, torch.nan) if made[0] > 7 else norm

    with mock.patch.object(PlainEngine, "check_gradients", spoils):
        for _ in range(3):
            assert pretrain_here(flags(text_dataset, tmp_path, **changes)) == 3
            left = [step for step, _ in checkpoints(tmp_path)]
            assert left[0] == 6 and len(left) == 2, "step 8 is the first that was skipped"
    assert read_document(checkpoint_path(tmp_path, left[-1])).extra["fault"][0] == 8


STEPS, EVERY = 9, 3


class Told(SilentObserver):
    """Keeps its messages."""

    def __init__(self) -> None:
        self.messages: list[str] = []

    def message(self, text: str) -> None:
        self.messages.append(text)


class Cycle:
    """Held by itself."""

    def __init__(self) -> None:
        self.itself = self


class Watched:
    """A run's trainer, with the steps done when the collector ran, and those within which it ran."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        config = small_config(Layout(), training={"steps": STEPS}, validation={"every": 0}, checkpoint={"every": 0})
        self.trainer: RecordingTrainer = trainer_for(Layout(), config)
        self.trainer.observer = self.told = Told()  # type: ignore[assignment]
        self.trainer.control.save = lambda: None
        self.between: list[int] = []
        self.within: list[int] = []
        self.left: list[weakref.ref[Cycle]] = []
        self.alive: list[int] = []
        self.stepping = False
        train_step = self.trainer.train_step

        def watched() -> str | None:
            self.stepping = True
            kept: list[Any] = [[] for _ in range(1000)]  # many more objects than the collector waits for
            self.left.append(weakref.ref(Cycle()))
            try:
                return train_step()
            finally:
                self.stepping = False
                kept.clear()

        monkeypatch.setattr(self.trainer, "train_step", watched)

    def noted(self, phase: str, info: dict[str, int]) -> None:
        if phase == "stop":
            self.alive.append(sum(each() is not None for each in self.left))
        else:
            (self.within if self.stepping else self.between).append(self.trainer.state.step)


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[Watched]:
    monkeypatch.setattr(loop, "COLLECT_EVERY", EVERY)
    monkeypatch.setattr(loop, "gc", gc)  # tests/shortcuts.py
    thresholds = gc.get_threshold()
    found = Watched(monkeypatch)
    gc.callbacks.append(found.noted)
    gc.set_threshold(100, 2, 2)
    yield found
    gc.set_threshold(*thresholds)
    gc.callbacks.remove(found.noted)


def test_it_runs_between_steps_only_and_frees_what_they_left(watched: Watched) -> None:
    assert watched.trainer.run() == "finished"
    assert watched.within == []
    times = zip(watched.between, watched.alive, strict=True)
    assert [(step, alive) for step, alive in times if 0 < step < STEPS] == [(1, 0), (3, 0), (6, 0)]
    assert gc.isenabled() and gc.get_freeze_count() == 0
    assert not watched.told.messages, "a reader of the log has nothing to do about it"


@pytest.mark.parametrize("enabled", [True, False])
def test_after_an_error_it_is_as_before(watched: Watched, monkeypatch: pytest.MonkeyPatch, enabled: bool) -> None:
    monkeypatch.setattr(watched.trainer, "train_step", lambda: 1 // 0)
    if not enabled:
        gc.disable()
    try:
        with pytest.raises(ZeroDivisionError):
            watched.trainer.run()
        assert gc.isenabled() == enabled and gc.get_freeze_count() == 0
    finally:
        gc.enable()


MANY_STEPS, MICRO_BATCHES = 200, 4


@pytest.fixture
def no_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.exhaustive
@pytest.mark.usefixtures("no_collection")
def test_batches_and_open_files_stay_as_many_over_two_hundred_steps(
    text_dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reference counts alone must free them: the collector may not run for a thousand steps."""
    seen: weakref.WeakSet[Batch] = weakref.WeakSet()
    alive: list[int] = []
    files: list[int] = []
    context = Trainer.context

    def watched(self: Trainer, window: list[Batch], counts: Tensor) -> StepContext:
        alive.append(len(seen))  # of the steps before this one
        files.append(len(list(Path("/proc/self/fd").iterdir())))
        seen.update(window)
        return context(self, window, counts)

    monkeypatch.setattr(Batch, "__hash__", object.__hash__, raising=False)
    monkeypatch.setattr(Trainer, "context", watched)
    small = {"model__layers": 1, "model__hidden_size": 16, "model__heads": 1, "model__intermediate_size": 16}
    sizes = {"batch__global_size": MICRO_BATCHES, "batch__micro_size": 1, "training__steps": MANY_STEPS}
    assert pretrain_here(flags(text_dataset, tmp_path, **small, **sizes, data__workers=1, checkpoint__every=0)) == 0
    assert len(alive) == MANY_STEPS
    assert max(alive) == 0, "a past step's batches are alive"
    # What the loader has ready ahead of the loop comes and goes; a file for each of a step's tensors would not.
    assert max(files[MANY_STEPS // 2 :]) <= max(files[10 : MANY_STEPS // 2]) + MICRO_BATCHES


PEAK, LEAST = 2e-4, 1e-6


def rates(steps: int, **settings: Any) -> list[float]:
    config = OptimizerConfig(**{"lr": PEAK, "min_lr": LEAST, "warmup_steps": 10, **settings})
    return [learning_rate(step, steps, config) for step in range(steps)]


@pytest.mark.parametrize("schedule", ["linear", "cosine", "wsd", "constant", "inverse_sqrt"])
def test_warm_up_rises_in_equal_parts_from_its_first_step_to_the_full_rate(schedule: str) -> None:
    found = rates(100, schedule=schedule)
    assert found[0] == pytest.approx(PEAK / 10, rel=1e-12)
    assert found[:10] == pytest.approx([PEAK * (step + 1) / 10 for step in range(10)], rel=1e-12)
    assert found[9] == pytest.approx(PEAK, rel=1e-12) and max(found) <= PEAK * (1 + 1e-12)


def rates_of(build: Callable[[torch.optim.Optimizer], Any]) -> list[float]:
    """The rates of another library's schedule, over 100 steps."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=PEAK)
    scheduler = build(optimizer)
    expected = []
    for _ in range(100):
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return expected


@pytest.mark.parametrize(("schedule", "theirs"), [("linear", linear_with_warmup), ("cosine", cosine_with_warmup)])
@pytest.mark.parametrize("warmup", [0, 1, 10, 98])
def test_decay_equals_transformers_schedule(schedule: str, theirs: Any, warmup: int) -> None:
    expected = rates_of(lambda optimizer: theirs(optimizer, warmup, 100))[warmup:]
    ours = rates(100, schedule=schedule, warmup_steps=warmup, min_lr=0.0)
    assert ours[warmup:] == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(("warmup", "decay"), [(0, 100), (10, 30), (10, 90), (98, 1)])
def test_wsd_equals_transformers_schedule(warmup: int, decay: int) -> None:
    expected = rates_of(lambda optimizer: wsd_with_warmup(optimizer, warmup, decay, 100, decay_type="1-sqrt"))[warmup:]
    ours = rates(100, schedule="wsd", warmup_steps=warmup, decay_steps=decay, min_lr=0.0)
    assert ours[warmup:] == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
@pytest.mark.parametrize("warmup", [0, 1, 10, 98])
def test_decay_of_earlier_versions_reaches_the_least_rate_at_the_last_step(schedule: str, warmup: int) -> None:
    found = rates(100, schedule=schedule, warmup_steps=warmup, decay_end="last_step")
    assert found[warmup] == pytest.approx(PEAK, rel=1e-12)
    assert found[-1] == pytest.approx(LEAST, rel=1e-9)
    assert all(later < earlier for earlier, later in itertools.pairwise(found[warmup:]))


@pytest.mark.parametrize(("warmup", "milestones"), [(0, [1, 2]), (10, [10, 60]), (10, [30, 31, 99]), (98, [99])])
def test_multistep_equals_torchs_schedule(warmup: int, milestones: list[int]) -> None:
    expected = rates_of(partial(torch.optim.lr_scheduler.MultiStepLR, milestones=milestones, gamma=0.3))
    settings: dict[str, Any] = {"schedule": "multistep", "milestones": milestones, "milestone_factor": 0.3}
    ours = rates(100, warmup_steps=warmup, min_lr=0.0, **settings)
    assert ours[warmup:] == pytest.approx(expected[warmup:], rel=1e-12)
    assert rates(1000, warmup_steps=warmup, min_lr=0.0, **settings)[:100] == ours
    assert min(rates(100, warmup_steps=0, min_lr=PEAK / 2, **settings)) == PEAK / 2


def test_milestones_are_those_of_adpe_as_shares_of_the_run() -> None:
    """fvcore compares milestones of 184,375 steps with int(step / steps x 184,375), for runs of any length."""
    config = load_recipe("detection_coco_vit_b")
    steps, milestones, all_steps = config.training.steps, config.optimizer.milestones, 184_375
    assert [int(step * all_steps / steps) for step in milestones] == [163_889, 177_546]
    assert [int((step - 1) * all_steps / steps) for step in milestones] == [163_888, 177_545]
    assert config.optimizer.warmup_steps == round(250 / all_steps * steps)


@pytest.mark.parametrize("milestones", [[], [0, 5], [5, 5], [7, 5], [5, 20], [-1, 5], [2, 5]], ids=str)
def test_milestones_outside_the_run_or_not_ascending_are_refused(milestones: list[int]) -> None:
    config = load_recipe("pos_bert_tiny")
    config.training.steps, config.optimizer.warmup_steps = 20, 3
    config.optimizer.schedule, config.optimizer.milestones = "multistep", milestones
    value = " ".join(map(str, milestones)) or "empty"
    (problem,) = config.optimizer.problems(config)
    assert problem.startswith(f"--optimizer.milestones is {value};")
    config.optimizer.milestones = [3, 19]
    assert not list(config.optimizer.problems(config))


def test_constant_stays_at_the_full_rate() -> None:
    assert rates(30, schedule="constant")[10:] == [PEAK] * 20
    assert rates(30, schedule="constant", warmup_steps=0) == [PEAK] * 30


def test_the_root_of_the_step_is_what_it_falls_with_whatever_the_length() -> None:
    found = rates(1000, schedule="inverse_sqrt")
    assert found[9:] == pytest.approx([PEAK * (10 / step) ** 0.5 for step in range(10, 1001)], rel=1e-12)
    assert rates(100, schedule="inverse_sqrt") == found[:100]
    assert rates(3, schedule="inverse_sqrt", warmup_steps=0) == pytest.approx([PEAK, PEAK / 2**0.5, PEAK / 3**0.5])
    assert rates(1000, schedule="inverse_sqrt", min_lr=PEAK / 5)[-1] == PEAK / 5


@pytest.mark.parametrize("schedule", ["linear", "cosine", "wsd", "constant", "inverse_sqrt"])
@pytest.mark.parametrize(("steps", "warmup"), [(5, 5), (5, 8), (1, 1), (1, 1000)])
def test_a_warm_up_as_long_as_the_run_never_decays(schedule: str, steps: int, warmup: int) -> None:
    expected = [PEAK * (step + 1) / warmup for step in range(steps)]
    assert rates(steps, schedule=schedule, warmup_steps=warmup) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_one_step_of_decay_has_the_full_rate_and_in_earlier_versions_the_least(schedule: str) -> None:
    assert rates(1, schedule=schedule, warmup_steps=0) == pytest.approx([PEAK])
    assert rates(11, schedule=schedule)[-2:] == pytest.approx([PEAK, PEAK])
    assert rates(1, schedule=schedule, warmup_steps=0, decay_end="last_step") == pytest.approx([LEAST])
    assert rates(11, schedule=schedule, decay_end="last_step")[-2:] == pytest.approx([PEAK, LEAST])
