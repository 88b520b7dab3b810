"""GradNorm: weights that give all tasks equal training rates (Chen et al., Algorithm 1).

Taps measure the gradient of each task where the tasks branch, in the normal backward pass (core/run.py: Tap).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from trp_scale.config import RefusedError
from trp_scale.core.batch import Batch, TaskLosses
from trp_scale.core.engine import Trains
from trp_scale.core.hooks import StepContext
from trp_scale.core.run import Objective, RunContext, TappedObjective, TapPlace
from trp_scale.methods.balancing.base import LossReadingBalancer, TaskAdam, TaskBalancer
from trp_scale.methods.balancing.settings import GradNormSettings, TapSettings


@dataclass
class _Tapped:
    """Micro-batch with a tap that has not been read."""

    batch: Batch
    tap: Tensor
    shared_inputs: Tensor | None = None


COLUMNS = 2**18
"""Entries per task that are converted to float64 at once: 2 MiB each."""


class TaskGradients:
    """Collects the gradient of each task over a window, one micro-batch at a time.

    A tap is read when the next micro-batch gets its tap, so only one is in memory. At `weights`, the gradients by the
    weights of the shared layer are summed over micro-batches and ranks before their inner products. At
    `representation`, each row is in one micro-batch, so the inner products are summed.

    Args:
        tasks: positions of the measured tasks.
        at: place of the taps.
        pairs: measure the inner products of different tasks too.
    """

    def __init__(
        self, objective: TappedObjective, tasks: Sequence[int], at: TapPlace, device: torch.device, *, pairs: bool
    ) -> None:
        self.objective = objective
        self.pairs = pairs
        self.tasks = tuple(tasks)
        self._places = torch.tensor(self.tasks).to(device)
        self.at = at
        self.device = device
        self._pending: _Tapped | None = None
        self._sums: Tensor | None = None

    def restart(self) -> None:
        """Drop the collected sums and an unread tap."""
        self._pending = self._sums = None

    def attach_tap(self, batch: Batch) -> Batch:
        """Return the batch with a new tap in its extras, and read the previous tap."""
        self._fold()
        key, shape = self.objective.tap(batch, self.at)
        tap = torch.zeros(shape, dtype=torch.float32, device=self.device, requires_grad=True)
        self._pending = _Tapped(batch, tap)
        return batch.adding({key: tap})

    def note(self, losses: TaskLosses) -> None:
        """Store the inputs of the shared layer, by which the gradient of the tap is multiplied."""
        if self._pending is not None:
            self._pending.shared_inputs = losses.shared_inputs

    def norms(self, engine: Trains) -> Tensor:
        """Return the norms of the tasks' gradients, [T] float64, without `pairs`; as `products`."""
        return self.products(engine).sqrt()

    def products(self, engine: Trains) -> Tensor:
        """Return the squared norms of the tasks' gradients over the global batch, [T] float64, or with `pairs` their
        inner products, [T, T]; 0 for tasks not measured. Call it once, after the last backward pass."""
        self._fold()
        assert self._sums is not None, "no micro-batch of this step was tapped"
        sums, self._sums = self._sums, None
        if self.at == "weights":
            gradients = engine.reduce_hook_gradient(sums)
            if self.pairs:
                products = inner_products(gradients)
            else:
                products = torch.linalg.vector_norm(gradients.flatten(1), dim=1, dtype=torch.float64).square()
        else:  # the engine divides by its factor for a gradient; products need it twice
            reduced = engine.reduce_hook_gradient(torch.cat([sums.flatten(), sums.new_ones(1)]))
            products = (reduced[:-1] * (reduced[-1] / engine.data_group.size)).view_as(sums)
        size = len(self.objective.tasks)
        every = torch.zeros((size, size) if self.pairs else (size,), dtype=torch.float64, device=self.device)
        return every.index_put((self._places[:, None], self._places) if self.pairs else (self._places,), products)

    @torch.no_grad()
    def _fold(self) -> None:
        pending, self._pending = self._pending, None
        if pending is None:
            return
        gradient = torch.zeros_like(pending.tap) if pending.tap.grad is None else pending.tap.grad
        pending.tap.grad = None  # frees it: the caller's losses may keep the tap longer
        parts = self.objective.task_gradients(pending.batch, self.at, gradient)
        if self.at == "representation":
            gradients = [parts[task] for task in self.tasks]
            if self.pairs:
                products = inner_products(torch.stack(gradients))  # [tasks, tasks]
            else:
                norms = [torch.linalg.vector_norm(gradient, dtype=torch.float64) for gradient in gradients]
                products = torch.stack(norms).square()  # [tasks]
            self._sums = products if self._sums is None else self._sums + products
        else:
            self._add_products(parts, pending.shared_inputs)

    def _add_products(self, parts: Mapping[int, Tensor], inputs: Tensor | None) -> None:
        """Add each task's gradient by the shared weights: products in the precision of the layer, sums in fp32."""
        assert inputs is not None, "an objective with a tap at weights returns shared_inputs"
        if self._sums is None:
            size = (len(self.tasks), parts[self.tasks[0]].shape[1], inputs.shape[1])
            self._sums = torch.zeros(size, dtype=torch.float32, device=self.device)  # [tasks, D, K]
        for position, task in enumerate(self.tasks):
            self._sums[position] += parts[task].to(inputs.dtype).T @ inputs  # [D, rows] [rows, K]


def inner_products(gradients: Tensor) -> Tensor:
    """Return the Gramian [K, K] float64 of gradients [K, ...]."""
    parts = (part.double() for part in torch.split(gradients.flatten(1), COLUMNS, dim=1))
    return torch.stack([part @ part.T for part in parts]).sum(0)


class TappingBalancer(TaskBalancer):
    """Taps every micro-batch that trains the weights. The subclass reads `gradients_of_tasks` in `gradients`.

    Raises:
        RefusedError: a single balanced task, an objective without taps, or a balanced task that passes no tap.
    """

    settings: TapSettings

    pairs: ClassVar[bool] = False
    """Measure the inner products of different tasks."""

    def __init__(self, settings: TapSettings, run: RunContext) -> None:
        super().__init__(settings, run)
        tapped = check_taps(self.objective, settings)
        self.gradients_of_tasks = TaskGradients(
            tapped, self.objective.balanced, settings.at, self.device, pairs=self.pairs
        )

    def before_step(self, ctx: StepContext) -> None:
        super().before_step(ctx)
        self.gradients_of_tasks.restart()

    def batch(self, ctx: StepContext, micro: Batch) -> Batch:
        if not ctx.trains or not torch.is_grad_enabled():
            return micro
        return self.gradients_of_tasks.attach_tap(micro)

    def total(self, ctx: StepContext, losses: TaskLosses) -> Tensor:
        self.gradients_of_tasks.note(losses)
        return super().total(ctx, losses)


SMALLEST_WEIGHT = 1e-3
"""Lower bound of a weight; their mean is 1. A weight of 0 has no gradient norm and could not recover."""


class GradNorm(TappingBalancer, LossReadingBalancer):
    """Gradient descent on L_grad = sum_t |G_t - mean(G) r_t^alpha| by the weights w, with constant targets.

    G_t = w_t |grad L_t| is the norm of the task's gradient by the last shared weights, or by the shared representation.
    r_t is L_t / L_t(0) divided by its mean. So dL_grad / dw_t = sign(G_t - target_t) |grad L_t|. The w start at 1 and
    always sum to T. `total` scales the weights of the step, not G. An absent task keeps its w and its moments.

    Taps give the gradients, without a backward pass per task (TaskGradients).
    """

    settings: GradNormSettings

    def __init__(self, settings: GradNormSettings, run: RunContext) -> None:
        super().__init__(settings, run)
        self.task_weights = self.vector(1.0)
        self.adam = TaskAdam(self.vector(0.0), settings.lr)
        self._sizes, self._norms, self._targets, self._rates = (self.vector(torch.nan) for _ in range(4))

    def balanced_weights(self, ctx: StepContext, losses: Tensor | None) -> Tensor:
        return self.scale_total(self.task_weights, ctx.counts)

    @torch.no_grad()
    def gradients(self, ctx: StepContext) -> None:
        assert ctx.weights is not None and ctx.sums is not None, "set before the hooks' gradients"
        present = self.present(ctx.counts)
        measured = self.gradients_of_tasks.norms(ctx.engine)  # of the weighted losses, [T]
        self._sizes = torch.where(present, measured / torch.where(present, ctx.weights, 1.0), 0.0)  # |grad L_t|
        self._norms = self.task_weights * self._sizes  # G_t
        self._rates = self.training_rates(ctx.means(ctx.sums), present)
        mean = self._norms.sum() / present.sum().clamp(min=1)
        self._targets = torch.where(present, mean * self._rates**self.settings.alpha, 0.0)

    def training_rates(self, losses: Tensor, present: Tensor) -> Tensor:
        """Return r_t, [T]: each loss divided by its first value, over the mean of these ratios; 0 for absent tasks."""
        first = torch.where(self.first_losses.isnan(), losses, self.first_losses)
        shares = torch.where(present, self.remaining_losses(losses) / self.remaining_losses(first), 0.0)
        mean = shares.sum() / present.sum().clamp(min=1)
        return torch.where(present, shares / mean, 0.0)

    @torch.no_grad()
    def after_step(self, ctx: StepContext) -> None:
        super().after_step(ctx)
        assert ctx.applied is not None, "decided before the hooks' after_step"
        self._descend(self.present(ctx.counts) & ctx.applied)

    def _descend(self, present: Tensor) -> None:
        """Make a step of Adam, and rescale the moved weights to their previous sum."""
        slope = torch.sign(self._norms - self._targets) * self._sizes
        # In half precision a norm may overflow though the gradient does not. Decided on the device.
        moving = present & slope.isfinite().all()
        stepped = self.adam.step(self.task_weights, slope, moving).clamp(min=SMALLEST_WEIGHT)
        held, reached = (torch.where(moving, weights, 0.0).sum() for weights in (self.task_weights, stepped))
        self.task_weights = torch.where(moving, stepped * (held / reached), self.task_weights)

    def metrics(self) -> Mapping[str, Any]:
        """Return `task_weights` (w after this step), `gradient_norms` (G_t), `targets`, `training_rates` (r_t) and
        `loss` (L_grad)."""
        return {
            **super().metrics(),
            "at": self.settings.at,
            "task_weights": self.by_task(self.task_weights),
            "gradient_norms": self.by_task(self._norms),
            "targets": self.by_task(self._targets),
            "training_rates": self.by_task(self._rates),
            "loss": float(torch.where(self.balanced, (self._norms - self._targets).abs(), 0.0).sum()),
        }

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "task_weights": self.task_weights.cpu(), "adam": self.adam.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.task_weights = state["task_weights"].to(self.device)
        self.adam.load_state_dict(state["adam"])


def check_taps(objective: Objective, settings: TapSettings) -> TappedObjective:
    """Return the objective if it can measure the gradients of all balanced tasks at `settings.at`.

    Raises:
        RefusedError: it cannot, or fewer than two tasks are balanced; names the flag to change.
    """
    names = [objective.tasks[position] for position in objective.balanced]
    if len(names) < 2:
        raise RefusedError(
            f"--balancer.kind {settings.kind} compares the gradients of at least two tasks, but {names} are balanced; "
            "allowed: --balancer.kind uniform"
        )
    if not isinstance(objective, TappedObjective):
        raise RefusedError(
            f"--balancer.kind {settings.kind} needs the gradient of each task, but the objective "
            f"{type(objective).__name__} does not measure it; allowed: any other --balancer.kind"
        )
    passing = objective.tapped_tasks(settings.at)
    if aside := [objective.tasks[position] for position in objective.balanced if position not in passing]:
        raise RefusedError(
            f"--balancer.at {settings.at}: the balanced task(s) {', '.join(aside)} do not pass the last layer that the "
            "others share; allowed: --balancer.at representation, a setting that excludes them from balancing "
            "(such as --objective.next_sentence outside), or another --balancer.kind"
        )
    return objective
