"""GradNorm's own ways, beside the reference run: its target, its weights, what it taps and what it refuses; on a small
PoS-BERT, its norms from taps against a backward pass for each task."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.synthetic import Layout, RecordingTrainer, small_config, trainer_for
from tests.unit.methods.balancing.branching import Branched, Branching, BranchingObjective, elements, window
from tests.unit.methods.balancing.toy import StandInEngine, ToyObjective, balancer, take_step
from trp_scale.config import RefusedError
from trp_scale.core.batch import Batch
from trp_scale.core.hooks import Hook, Hooks, StepContext
from trp_scale.core.run import RunContext, TapPlace
from trp_scale.methods.adversary.ascent import run_own_pass
from trp_scale.methods.balancing.gradnorm import SMALLEST_WEIGHT, GradNorm
from trp_scale.pretraining.pos_bert.settings import PosBertConfig

THREE = BranchingObjective(tasks=("a", "b", "c"))
NEVER: Mapping[int, tuple[int, ...]] = {}


def gradnorm(**settings: Any) -> GradNorm:
    return balancer(THREE, "gradnorm", **settings)


def step_of(weigher: GradNorm, model: Any, step: int = 0, micro_batches: int = 3, **arguments: Any) -> Any:
    return take_step(weigher, THREE, model, window(elements(step, NEVER, 3), micro_batches), step=step, **arguments)


def test_the_target_is_the_mean_norm_times_the_relative_rate_to_the_power_of_alpha() -> None:
    weigher, model = gradnorm(alpha=1.5), Branching(3)
    found = []
    for step in range(2):
        taken = step_of(weigher, model, step)
        found.append((weigher.metrics(), taken.ctx.means(taken.ctx.sums).tolist()))
    (first, before), (second, after) = found
    assert first["training_rates"] == pytest.approx(dict.fromkeys("abc", 1.0))
    shares = [now / then for now, then in zip(after, before, strict=True)]
    rates = [share / (sum(shares) / 3) for share in shares]
    mean = sum(second["gradient_norms"].values()) / 3
    assert second["training_rates"] == pytest.approx(dict(zip("abc", rates, strict=True)), rel=1e-12)
    assert second["targets"] == pytest.approx({t: mean * r**1.5 for t, r in zip("abc", rates, strict=True)}, rel=1e-12)
    apart = sum(abs(second["gradient_norms"][t] - second["targets"][t]) for t in "abc")
    assert second["loss"] == pytest.approx(apart, rel=1e-12)
    assert max(rates) > 1.02 * min(rates), "the rates are too alike to tell alpha"


@pytest.mark.parametrize("at", ["weights", "representation"])
def test_the_norms_do_not_depend_on_what_the_step_s_weights_sum_to_or_on_the_split(at: str) -> None:
    found = []
    for total in ("1", "paper"):
        for micro_batches in (1, 3):
            weigher = gradnorm(at=at, total=total)
            taken = step_of(weigher, Branching(3), micro_batches=micro_batches)
            assert sum(taken.weights) == pytest.approx(1.0 if total == "1" else 3.0)
            found.append(weigher.metrics()["gradient_norms"])
    assert all(other == pytest.approx(found[0], rel=1e-6) for other in found[1:])


def test_a_weight_is_kept_above_zero_and_all_of_them_sum_to_their_number() -> None:
    weigher, model = gradnorm(lr=1.5), Branching(3)
    for step in range(4):
        step_of(weigher, model, step)
        weights = weigher.state_dict()["task_weights"]
        assert float(weights.sum()) == pytest.approx(3.0, rel=1e-12)
        assert weights.min() > 0.2 * SMALLEST_WEIGHT
        if step == 0:  # a step of 1.5 from 1 would have ended below 0
            assert weights.min() < 2 * SMALLEST_WEIGHT


def test_a_norm_that_is_not_finite_moves_nothing() -> None:
    """In half precision a task's own product may overflow where the whole gradient does not."""
    weigher, model = gradnorm(), Branching(3)
    step_of(weigher, model)
    before = weigher.state_dict()
    parts = window(elements(1, NEVER, 3), 3)
    original = THREE.task_gradients

    class Overflowing(BranchingObjective):
        def task_gradients(self, *arguments: Any) -> dict[int, Tensor]:
            return {t: part * (torch.inf if t == 1 else 1.0) for t, part in original(*arguments).items()}

    weigher.gradients_of_tasks.objective = Overflowing(tasks=THREE.tasks)
    take_step(weigher, THREE, model, parts, step=1)
    after = weigher.state_dict()
    assert torch.equal(after["task_weights"], before["task_weights"])
    assert all(torch.equal(after["adam"][name], before["adam"][name]) for name in before["adam"])


class Watched:
    """The model, keeping weak references to the taps that it was called with; None where it had none."""

    def __init__(self) -> None:
        self.model = Branching(3)
        self.taps: list[weakref.ref[Tensor] | None] = []
        self.gradients: list[int] = []

    def alive(self) -> list[Tensor]:
        return [tensor for tap in self.taps if tap is not None and (tensor := tap()) is not None]

    def __call__(self, inputs: Tensor, task: Tensor, **extras: Tensor) -> Branched:
        self.gradients.append(sum(tap.grad is not None for tap in self.alive()))
        self.taps.append(weakref.ref(extras["weights_tap"]) if extras else None)
        return self.model(inputs, task, **extras)  # type: ignore[no-any-return]


def test_what_a_micro_batch_s_tap_received_is_gone_when_the_next_one_runs() -> None:
    watched = Watched()
    weigher = gradnorm()
    step_of(weigher, watched)
    assert watched.gradients == [0, 0, 0]
    assert watched.alive() == []
    assert weigher.gradients_of_tasks._sums is None, "the products are held until the next step"


class OwnPasses(Hook):
    """Runs passes of its own before the step, as an adversary does; and one without gradients, as minimax does."""

    name = "own"

    def before_step(self, ctx: StepContext) -> None:
        run_own_pass(ctx)
        with torch.no_grad():
            ctx.compute_losses(ctx.window[0])


@dataclass
class PassEngine(StandInEngine):
    """What run_own_pass needs."""

    def backward(self, loss: Tensor, *, last: bool) -> None:
        loss.backward()  # type: ignore[no-untyped-call]

    def discard_gradients(self) -> None:
        self.forward.model.zero_grad()  # type: ignore[union-attr]


def test_passes_of_other_hooks_are_not_tapped_and_change_nothing() -> None:
    watched, weigher = Watched(), gradnorm()
    parts = window(elements(0, NEVER, 3), 3)
    hooks = Hooks(weigher, [OwnPasses()])
    engine: Any = PassEngine(forward=watched)
    counts = torch.stack([THREE.count(micro) for micro in parts]).sum(0)
    run = RunContext(config=PosBertConfig(), objective=THREE, engine=engine)
    ctx = StepContext(run=run, hooks=hooks, step=0, window=parts, counts=counts, lr=1.0)
    hooks.before_step(ctx)
    assert watched.taps == [None] * 4
    ctx.compute_losses(parts[0])  # begun, and given up by a new before_step: its tap must not be read
    with torch.no_grad():
        ctx.compute_losses(parts[0])
    weigher.before_step(ctx)
    assert watched.taps[4] is not None and watched.taps[5] is None
    alone = gradnorm()
    step_of(alone, Branching(3))
    taken = take_step(weigher, THREE, watched, parts)
    assert taken.passes == 3
    assert weigher.metrics() == alone.metrics()


@pytest.mark.parametrize("kind", ["gradnorm", "jd"])
@pytest.mark.parametrize(
    ("objective", "message"),
    [
        (ToyObjective(tasks=("a", "b")), "--balancer.kind {} .*ToyObjective"),
        (BranchingObjective(tasks=("a", "far"), outside={1: 1.0}), r"--balancer.kind {} compares .* \['a'\]"),
        (BranchingObjective(tasks=("a", "b", "next"), beside=(2,)), "--balancer.at weights.* next .*at representation"),
    ],
)
def test_what_cannot_be_told_apart_is_refused_at_start(kind: str, objective: Any, message: str) -> None:
    with pytest.raises(RefusedError, match=message.format(kind)):
        balancer(objective, kind)


def test_a_task_beside_the_shared_layer_is_fine_outside_the_balance_or_at_the_representation() -> None:
    names = ("a", "b", "next")
    balancer(BranchingObjective(tasks=names, beside=(2,), outside={2: 1.0}), "gradnorm")
    balancer(BranchingObjective(tasks=names, beside=(2,)), "gradnorm", at="representation")


TEN_TASKS: dict[str, Any] = {"other": "task"}
WITH_SENTENCES: dict[str, Any] = {"other": "task", "next_sentence": "inside"}


def trainer_with(at: TapPlace, objective: dict[str, Any], **training: Any) -> RecordingTrainer:
    layout = Layout(micro_size=4)  # two micro-batches
    balancer = {"kind": "gradnorm", "at": at, "lr": 0.1}
    model = {"layers": 1 if training else 2}
    sections = {"balancer": balancer, "objective": objective, "training": training, "model": model}
    return trainer_for(layout, small_config(layout, **sections))


def naive_norms(trainer: RecordingTrainer, window: list[Batch], at: TapPlace) -> Tensor:
    """[T] |grad L_t|, each task's mean loss over the window in a backward pass of its own."""
    model = copy.deepcopy(trainer.engine.module)
    read: list[Tensor] = []
    model.layers[-1].register_forward_hook(lambda module, inputs, output: read.append(output))
    counts = torch.stack([trainer.objective.count(micro) for micro in window]).sum(0)
    sums = torch.stack([trainer.objective(model, micro).sums for micro in window]).sum(0)
    places = [model.cls.predictions.transform.dense.weight] if at == "weights" else read
    norms = torch.zeros(len(counts), dtype=torch.float64)
    for task in trainer.objective.balanced:
        if counts[task]:
            parts = torch.autograd.grad(sums[task] / counts[task], places, retain_graph=True)
            norms[task] = torch.stack([part.double().norm() for part in parts]).norm()
    return norms


@pytest.mark.parametrize(
    ("at", "objective"),
    [("weights", TEN_TASKS), ("representation", TEN_TASKS), ("representation", WITH_SENTENCES)],
    ids=["weights", "representation", "representation with sentences"],
)
def test_norms_from_taps_are_those_of_a_backward_pass_for_each_task(at: TapPlace, objective: dict[str, Any]) -> None:
    trainer = trainer_with(at, objective)
    weigher = trainer.hooks.balancer
    assert len(trainer.objective.balanced) == (11 if "inside" in str(objective) else 10)
    trainer.engine.train(True)
    for step in range(3):
        window, before = trainer.source.next_window(), weigher.task_weights.clone()
        trainer.source.cursor -= trainer.config.batch.global_size  # the loop takes the same window
        expected = before * naive_norms(trainer, window, at)
        trainer.train_step()
        names = trainer.objective.tasks
        norms = {names[task]: float(expected[task]) for task in trainer.objective.balanced}
        assert weigher.metrics()["gradient_norms"] == pytest.approx(norms, rel=1e-5, abs=1e-12), step
    present = [norm for norm in norms.values() if norm > 0]
    assert len(present) > 5 and max(present) > 1.5 * min(present)
    assert float((before - 1).abs().max()) > 0.05, "the weights hardly moved from where they start"


def test_next_sentence_prediction_inside_the_balance_does_not_pass_the_transform() -> None:
    with pytest.raises(RefusedError, match=r"(?s)at weights.*next_sentence.*--balancer.at represent"):
        trainer_with("weights", WITH_SENTENCES)


@pytest.mark.exhaustive
def test_a_compiled_model_takes_taps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Traced by aot_eager; the default backend would add minutes of a C++ compiler."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    found = []
    for compiled in ("none", "whole", "blocks"):
        trainer = trainer_with("weights", TEN_TASKS, compile=compiled)
        trainer.engine.train(True)
        for _ in range(2):
            trainer.train_step()
        found.append(trainer.hooks.balancer.metrics())
    plain, *others = found
    for traced in others:
        for name in ("gradient_norms", "task_weights"):
            assert traced[name] == pytest.approx(plain[name], rel=1e-5)
