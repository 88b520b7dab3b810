"""Jacobian descent: weights of TorchJD (Quinton & Rey) from the Gramian of the tasks' gradients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from trp_scale.config import RefusedError
from trp_scale.core.batch import PendingTensor, TaskLosses
from trp_scale.core.hooks import StepContext
from trp_scale.core.run import RunContext, tensor_seed
from trp_scale.errors import error_text
from trp_scale.methods.balancing.base import normalise
from trp_scale.methods.balancing.gradnorm import SMALLEST_WEIGHT, TappingBalancer
from trp_scale.methods.balancing.settings import JdSettings

WEIGHTINGS: dict[str, tuple[str, dict[str, float]]] = {
    "upgrad": ("UPGradWeighting", {}),
    "dualproj": ("DualProjWeighting", {}),
    "pcgrad": ("PCGradWeighting", {}),
    "mgda": ("MGDAWeighting", {}),
    "aligned_mtl": ("AlignedMTLWeighting", {}),
    "imtl_g": ("IMTLGWeighting", {}),
    "fairgrad": ("FairGradWeighting", {"alpha": 1.0}),
    "cagrad": ("CAGradWeighting", {"c": 0.5}),
}
"""Class in torchjd.aggregation and its arguments; stateful ones and those that read the Jacobian are left out. FairGrad
with alpha 1 solves G w = 1 / w, the equation of Nash-MTL (Navon et al. 2022), whose class in TorchJD is stateful."""


class JacobianDescent(TappingBalancer):
    """The weights of step k are TorchJD's for the Gramian of the tasks' gradients in step k - 1, with sum 1.

    The tapped gradients are of weighted losses, so the Gramian is divided by the weights of its step. No weight is
    below SMALLEST_WEIGHT of the mean, since a task without a weight has no gradient; negative weights (Aligned-MTL,
    IMTL-G) end there too. The first step has equal weights. A task that was absent, or had no finite gradient above 0,
    is left out of the Gramian and keeps its weight; the others share the sum of their previous weights.

    The Gramian's copy to the host is queued at the end of a step. The host reads it when the first forward pass of the
    next step is queued, so that the device computes while the host solves for the weights.

    Raises:
        RefusedError: TorchJD or a solver of the method is not installed.
    """

    settings: JdSettings

    pairs = True

    def __init__(self, settings: JdSettings, run: RunContext) -> None:
        super().__init__(settings, run)
        name, arguments = WEIGHTINGS[settings.method]
        try:
            from torchjd import aggregation

            self.weighting = getattr(aggregation, name)(**arguments)
        except ImportError as error:
            raise RefusedError(
                f"--balancer.kind jd --balancer.method {settings.method}: {error_text(error)}; install it with pip "
                "install 'trp-scale[torchjd]' (cagrad: also cvxpy and clarabel), or use another --balancer.method"
            ) from error
        self.task_weights = self.balanced.double()  # [T], mean 1 over the balanced tasks
        self.gramian = torch.outer(self.task_weights, self.task_weights) * 0.0  # [T, T]
        self._on_host = PendingTensor(self.gramian)
        self._solved: tuple[int, Tensor] | None = None
        self._measured = self.gramian

    def before_step(self, ctx: StepContext) -> None:
        self._last = ctx  # `total` sets the weights

    def total(self, ctx: StepContext, losses: TaskLosses) -> Tensor:
        if ctx.weights is None:
            self.set_weights(ctx, None)
        return super().total(ctx, losses)

    def solve(self, step: int) -> Tensor:
        """Return the task weights [T] for the Gramian of the last applied step; waits for the end of that step."""
        gramian = self._on_host.read()
        squares = gramian.diagonal()
        seen = ((squares > 0) & squares.isfinite()).nonzero()[:, 0]
        if len(seen) < 2:
            return self.task_weights
        part = gramian[seen][:, seen] * (len(seen) / squares[seen].sum())  # TorchJD has absolute thresholds
        with torch.random.fork_rng(devices=[]):  # PCGrad draws an order
            torch.default_generator.manual_seed(tensor_seed(self.run.seed, f"jd/{step}"))
            weights = normalise(self.weighting(part).clamp(min=0.0))
        weights = normalise(weights.clamp(min=SMALLEST_WEIGHT / len(seen)))
        places = seen.to(self.device, non_blocking=True)
        held = self.task_weights[places].sum()
        return self.task_weights.index_copy(0, places, weights.to(self.device, non_blocking=True) * held)

    def balanced_weights(self, ctx: StepContext, losses: Tensor | None) -> Tensor:
        if self._solved is None or self._solved[0] != ctx.step:
            self._solved = (ctx.step, self.solve(ctx.step))
        return normalise(torch.where(self.present(ctx.counts), self._solved[1], 0.0))

    @torch.no_grad()
    def gradients(self, ctx: StepContext) -> None:
        assert ctx.weights is not None, "set before the hooks' gradients"
        present = self.present(ctx.counts)
        weights = torch.where(present, ctx.weights, 1.0)
        products = self.gradients_of_tasks.products(ctx.engine) / torch.outer(weights, weights)
        self._measured = torch.where(present & present[:, None], products, 0.0)

    @torch.no_grad()
    def after_step(self, ctx: StepContext) -> None:
        solved, self._solved = self._solved, None
        assert solved is not None, "set before the step"
        self.task_weights = ctx.commit(solved[1], self.task_weights)
        self.gramian = ctx.commit(self._measured, self.gramian)
        self._on_host = PendingTensor(self.gramian)

    def metrics(self) -> Mapping[str, Any]:
        """Return `at`, `method`, `task_weights` and `conflicts` (pairs of tasks with opposed gradients)."""
        return {
            **super().metrics(),
            "at": self.settings.at,
            "method": self.settings.method,
            "task_weights": self.by_task(self.task_weights),
            "conflicts": int((self.gramian < 0).sum()) // 2,
        }

    def state_dict(self) -> dict[str, Any]:
        return {"task_weights": self.task_weights.cpu(), "gramian": self.gramian.cpu()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.task_weights = state["task_weights"].to(self.device)
        self.gramian = state["gramian"].to(self.device)
        self._on_host, self._solved = PendingTensor(self.gramian), None
