"""Tasks small enough to be worked out by hand, and a step over them in the order that core/hooks.py documents."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor

from trp_scale.config.registry import Settings, make_settings
from trp_scale.core.batch import Batch, TaskLosses
from trp_scale.core.engine import Engine
from trp_scale.core.hooks import Hooks, StepContext, build_hooks
from trp_scale.core.run import RunContext
from trp_scale.distributed.groups import ALONE, Group
from trp_scale.methods.balancing.base import TaskBalancer
from trp_scale.pretraining.pos_bert.settings import PosBertConfig

CPU = torch.device("cpu")


class Twins(Group):
    """A group of two ranks of which the other holds the same rows as this one."""

    def __init__(self) -> None:
        super().__init__("data", rank=0, size=2)

    def sum(self, value: Tensor) -> Tensor:
        return value.detach() * 2


@dataclass
class ToyObjective:
    """An objective whose batch lists single elements: `inputs` [E, ...] and the `task` of each [E].

    `forward` gives the loss of each element. `outside` holds the weights of tasks outside the balance; `regression`
    the tasks whose loss is a distance.
    """

    in_a_graph = False

    tasks: tuple[str, ...]
    outside: Mapping[int, float] = field(default_factory=dict)
    regression: tuple[int, ...] = ()

    @property
    def balanced(self) -> tuple[int, ...]:
        return tuple(t for t in range(len(self.tasks)) if t not in self.outside)

    def count(self, batch: Batch) -> Tensor:
        return torch.bincount(batch["task"], minlength=len(self.tasks)).double()

    def outside_weights(self, counts: Tensor) -> Tensor:
        weights = torch.zeros_like(counts)
        for task, weight in self.outside.items():
            weights[task] = weight
        return weights

    def __call__(self, forward: Callable[..., Any], batch: Batch) -> TaskLosses:
        return TaskLosses(sums=self.sums(batch, forward(batch["inputs"])), counts=self.count(batch))

    def sums(self, batch: Batch, losses: Tensor) -> Tensor:
        """[E] -> [T]."""
        return torch.stack([losses[batch["task"] == t].sum() for t in range(len(self.tasks))])


def batch(elements: Mapping[int, Sequence[Any]]) -> Batch:
    """One micro-batch: for each task the inputs of its elements."""
    pairs = [(task, value) for task, values in elements.items() for value in values]
    inputs = torch.tensor([value for _, value in pairs], dtype=torch.float64)
    task = torch.tensor([task for task, _ in pairs])
    return Batch(fields={"inputs": inputs, "task": task}, keys=torch.arange(len(pairs)), start=0)


def balancer(objective: Any, kind: str = "minimax", **settings: Any) -> TaskBalancer:
    """The balancer of these settings."""
    made = build_hooks(stand_in_run(make_settings("balancer", kind, **settings), objective)).balancer
    return cast(TaskBalancer, made)


def stand_in_run(settings: Settings, objective: Any, steps_per_epoch: int = 0) -> RunContext:
    """What a balancer is told of a run."""
    engine = cast(Engine, StandInEngine())
    return RunContext(
        config=PosBertConfig(balancer=settings), objective=objective, engine=engine, steps_per_epoch=steps_per_epoch
    )


@dataclass
class StandInEngine:
    """What a balancer may ask of an engine."""

    graphs = captured_graphs = None

    data_group: Group = ALONE
    device: torch.device = CPU
    forward: Callable[..., Any] | None = None

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        assert self.forward is not None, "no forward pass was given"
        return self.forward(*arguments, **named)

    def reduce_hook_gradient(self, gradient: Tensor) -> Tensor:
        return self.data_group.sum(gradient)


@dataclass(kw_only=True)
class Step:
    """What a step did. `totals`: the loss of each micro-batch; `passes`: forward passes in all."""

    ctx: StepContext
    totals: list[float]
    passes: int

    @property
    def weights(self) -> list[float]:
        return [float(weight) for weight in self.ctx.weights]


def take_step(
    weigher: TaskBalancer,
    objective: Any,
    forward: Callable[..., Any],
    window: Sequence[Batch],
    *,
    step: int = 0,
    group: Group = ALONE,
    applied: bool = True,
) -> Step:
    """One step: gradients of the total are left in forward's parameters; the update itself is the caller's."""
    hooks = Hooks(weigher)
    passes = 0

    def counted(*arguments: Any, **named: Any) -> Any:
        nonlocal passes
        passes += 1
        return forward(*arguments, **named)

    counts = group.sum(torch.stack([objective.count(micro) for micro in window]).sum(0))
    engine = cast(Engine, StandInEngine(group, forward=counted))
    run = RunContext(config=PosBertConfig(), objective=objective, engine=engine)
    ctx = StepContext(run=run, hooks=hooks, step=step, window=window, counts=counts, lr=1.0)
    hooks.before_step(ctx)
    totals: list[float] = []
    sums = torch.zeros_like(counts)
    for micro in window:
        losses = ctx.compute_losses(micro)
        total = hooks.total(ctx, losses)
        if total.requires_grad:
            total.backward()  # type: ignore[no-untyped-call]
        totals.append(float(total.detach()))
        sums += losses.sums.detach()
    ctx.gather_sums(sums)
    hooks.gradients(ctx)
    assert ctx.weights is not None
    ctx.decide(torch.tensor(1.0 if applied else torch.nan))
    hooks.after_step(ctx)
    return Step(ctx=ctx, totals=totals, passes=passes)


def given(values: Tensor) -> Tensor:
    """A forward pass for batches whose inputs are the losses themselves."""
    return values


def weigh_history(
    weigher: TaskBalancer, objective: Any, history: Sequence[Mapping[int, float]], *, applied: bool = True
) -> list[list[float]]:
    """Weights of steps in which each task that is there has one element, with this loss."""
    windows = [[batch({t: [loss] for t, loss in losses.items()})] for losses in history]
    return [
        take_step(weigher, objective, given, window, step=number, applied=applied).weights
        for number, window in enumerate(windows)
    ]


class ClosedForm(ToyObjective):
    """An objective of `size` tasks with one element each, whose losses [T] are a function of a point [D]."""

    def __init__(self, losses: Callable[[Tensor], Tensor], size: int) -> None:
        super().__init__(tasks=tuple(f"f{number}" for number in range(size)))
        self.losses = losses

    def count(self, batch: Batch) -> Tensor:
        return torch.ones(len(self.tasks), dtype=torch.float64)

    def __call__(self, forward: Callable[..., Any], batch: Batch) -> TaskLosses:
        return TaskLosses(sums=self.losses(forward()), counts=self.count(batch))

    def worst(self, point: Tensor) -> float:
        """max_t f_t(point)."""
        return float(self.losses(point).max())


@dataclass(kw_only=True)
class Path:
    """Points before each step, [K, D], and the weights of each step, [K, T]."""

    points: Tensor
    weights: Tensor


def descend(
    problem: ClosedForm,
    weigher: TaskBalancer,
    start: Sequence[float],
    *,
    steps: int,
    rate: Callable[[int], float],
) -> Path:
    """TRP Algorithm 1: K steps along the weighted gradient."""
    point = torch.tensor(start, dtype=torch.float64, requires_grad=True)
    window = [batch({0: [0.0]})]
    points: list[Tensor] = []
    weights: list[Tensor] = []

    def here() -> Tensor:
        return point

    for step in range(steps):
        points.append(point.detach().clone())
        point.grad = None
        taken = take_step(weigher, problem, here, window, step=step)
        weights.append(taken.ctx.weights)
        with torch.no_grad():
            point -= rate(step) * point.grad
    return Path(points=torch.stack(points), weights=torch.stack(weights))
