"""How large each task's gradient is where the tasks branch, under the one backward pass (core/objective.py: Tap)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trp_scale.core.batch import Batch, TaskLosses
from trp_scale.core.engine import Trains
from trp_scale.core.objective import TappedObjective, TapPlace


@dataclass
class _Tapped:
    """A micro-batch whose backward pass has not been read yet."""

    batch: Batch
    tap: Tensor
    shared_inputs: Tensor | None = None


class TaskGradients:
    """Collects the tasks' gradients over a window, one micro-batch at a time.

    A micro-batch's tap is read when the next one asks for its own, so that only one is held. At `weights` the tasks'
    gradients of the shared layer's weights add up over micro-batches and ranks, and the norm is taken of the sum; at
    `representation` every row belongs to one micro-batch, and squares add up.

    Args:
        objective: gives the taps.
        tasks: positions of the tasks asked about.
        at: where.
        device: where gradients are.
    """

    def __init__(self, objective: TappedObjective, tasks: Sequence[int], at: TapPlace, device: torch.device) -> None:
        self.objective = objective
        self.tasks = tuple(tasks)
        self._places = torch.tensor(self.tasks).to(device)
        self.at = at
        self.device = device
        self._pending: _Tapped | None = None
        self._sums: Tensor | None = None

    def restart(self) -> None:
        """Forget what was collected; a tap that no backward pass reached is dropped."""
        self._pending = self._sums = None

    def tapped(self, batch: Batch) -> Batch:
        """The batch with a fresh tap in its extras; the one before it is read."""
        self._fold()
        key, shape = self.objective.tap(batch, self.at)
        tap = torch.zeros(shape, dtype=torch.float32, device=self.device, requires_grad=True)
        self._pending = _Tapped(batch, tap)
        return batch.adding({key: tap})

    def note(self, losses: TaskLosses) -> None:
        """Keep what a tap's gradient will be multiplied with."""
        if self._pending is not None:
            self._pending.shared_inputs = losses.shared_inputs

    def norms(self, engine: Trains) -> Tensor:
        """[T] float64: norm of each task's gradient of the global batch, 0 where it was not asked for. Call once, after
        the last backward pass."""
        self._fold()
        assert self._sums is not None, "no micro-batch of this step was tapped"
        sums, self._sums = self._sums, None
        if self.at == "representation":
            sums = self._by_rank(sums.sqrt(), engine)
        reduced = engine.reduce_hook_gradient(sums).flatten(1)
        norms = torch.linalg.vector_norm(reduced, dim=1, dtype=torch.float64)  # [tasks]
        every = torch.zeros(len(self.objective.tasks), dtype=torch.float64, device=self.device)
        return every.index_copy(0, self._places, norms)

    def _by_rank(self, norms: Tensor, engine: Trains) -> Tensor:
        """[tasks] norms of this rank's rows -> [tasks, ranks], 0 in the others' places: the engine's reduction then
        divides norms, as it does gradients; squares would need its factor's square."""
        group = engine.data_group
        return torch.nn.functional.pad(norms[:, None], (group.rank, group.size - group.rank - 1))

    @torch.no_grad()
    def _fold(self) -> None:
        pending, self._pending = self._pending, None
        if pending is None:
            return
        gradient = torch.zeros_like(pending.tap) if pending.tap.grad is None else pending.tap.grad
        pending.tap.grad = None  # the caller's losses may keep the tap itself for a while
        parts = self.objective.task_gradients(pending.batch, self.at, gradient)
        if self.at == "representation":
            norms = torch.stack(
                [torch.linalg.vector_norm(parts[task], dtype=torch.float64) for task in self.tasks]
            )  # [tasks]
            self._sums = norms.square() if self._sums is None else self._sums + norms.square()
        else:
            self._add_products(parts, pending.shared_inputs)

    def _add_products(self, parts: Mapping[int, Tensor], inputs: Tensor | None) -> None:
        """Add each task's gradient of the shared layer's weights: products in the layer's precision, sums in fp32."""
        assert inputs is not None, "an objective that was given a tap at weights gives shared_inputs"
        if self._sums is None:
            size = (len(self.tasks), parts[self.tasks[0]].shape[1], inputs.shape[1])
            self._sums = torch.zeros(size, dtype=torch.float32, device=self.device)  # [tasks, D, K]
        for place, task in enumerate(self.tasks):
            self._sums[place] += parts[task].to(inputs.dtype).T @ inputs  # [D, rows] [rows, K]
