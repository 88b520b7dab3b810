"""A float64 model whose tasks share two layers and then branch, its batches, and the objective that taps it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tests.unit.methods.balancing.toy import ToyObjective
from trp_scale.core.batch import Batch, TaskLosses
from trp_scale.core.run import Tap, TapPlace

WIDTH = 6
SHARED_INPUTS = 5

TAPS: dict[TapPlace, str] = {"weights": "weights_tap", "representation": "representation_tap"}


class Branched(NamedTuple):
    """losses [E]; inputs [E, SHARED_INPUTS] of the shared layer; what the heads read [E, WIDTH]."""

    losses: Tensor
    shared_inputs: Tensor
    representation: Tensor


class Branching(nn.Module):
    """first -> tanh -> shared -> tanh -> a head for each task; an element's loss is its squared distance from 2."""

    def __init__(self, tasks: int) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.first = nn.Linear(2, SHARED_INPUTS)
        self.shared = nn.Linear(SHARED_INPUTS, WIDTH)
        self.heads = nn.Linear(WIDTH, tasks)
        self.double()

    def forward(
        self, inputs: Tensor, task: Tensor, weights_tap: Tensor | None = None, representation_tap: Tensor | None = None
    ) -> Branched:
        shared_inputs = torch.tanh(self.first(inputs))
        shared = self.shared(shared_inputs)
        if weights_tap is not None:
            shared = shared + weights_tap
        representation = torch.tanh(shared)
        if representation_tap is not None:
            representation = representation + representation_tap
        losses = (self.heads(representation).gather(1, task[:, None]).squeeze(1) - 2.0).square()
        return Branched(losses, shared_inputs, representation)


@dataclass
class BranchingObjective(ToyObjective):
    """`ToyObjective` on `Branching`; `beside`: tasks that do not pass the shared layer."""

    beside: tuple[int, ...] = ()

    def __call__(self, forward: Callable[..., Any], batch: Batch) -> TaskLosses:
        out = forward(batch["inputs"], batch["task"], **batch.extras)
        return TaskLosses(
            sums=self.sums(batch, out.losses),
            counts=self.count(batch),
            shared_inputs=out.shared_inputs.detach() if "weights_tap" in batch.extras else None,
        )

    def tapped_tasks(self, at: TapPlace) -> tuple[int, ...]:
        return tuple(t for t in range(len(self.tasks)) if at == "representation" or t not in self.beside)

    def tap(self, batch: Batch, at: TapPlace) -> Tap:
        return Tap(TAPS[at], (batch.rows, WIDTH))

    def task_gradients(self, batch: Batch, at: TapPlace, gradient: Tensor) -> dict[int, Tensor]:
        return {t: gradient * (batch["task"] == t)[:, None] for t in self.tapped_tasks(at)}


def elements(step: int, absent: Mapping[int, tuple[int, ...]], tasks: int) -> dict[str, Tensor]:
    """Inputs [E, 2] and tasks [E] of a step's global batch: uneven counts, none of the tasks absent at this step."""
    generator = torch.Generator().manual_seed(500 + step)
    share = torch.tensor([6.0, 3.0, 1.5, 1.0][:tasks])
    share[list(absent.get(step, ()))] = 0.0
    task = torch.multinomial(share, 24, replacement=True, generator=generator)
    inputs = torch.randn(24, 2, generator=generator, dtype=torch.float64) + 0.4 * task[:, None]
    return {"inputs": inputs, "task": task}


def window(fields: Mapping[str, Tensor], micro_batches: int) -> list[Batch]:
    """The global batch in unequal parts."""
    size = len(fields["task"])
    sizes = {1: [size], 3: [5, 12, size - 17]}[micro_batches]
    parts = zip(*(value.split(sizes) for value in fields.values()), strict=True)
    return [
        Batch(fields=dict(zip(fields, part, strict=True)), keys=torch.arange(len(part[0])), start=number)
        for number, part in enumerate(parts)
    ]
