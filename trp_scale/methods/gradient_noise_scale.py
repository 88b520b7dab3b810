"""Gradient noise scale: the batch size beyond which larger batches help little (McCandlish et al. 2018).

    B_simple = tr(Sigma) / |G|^2

G is the true gradient, Sigma the covariance of the gradient of one row. The squared norms of the gradient at two batch
sizes give unbiased estimates of both (Appendix A.1): a micro-batch of b rows and the global batch of B rows.

    |G|^2      ~  (B |G_B|^2 - b |G_b|^2) / (B - b)
    tr(Sigma)  ~  (|G_b|^2 - |G_B|^2) / (1/b - 1/B)

|G_b|^2 is the mean over the micro-batches of the global batch. Engines measure it in the normal backward pass
(core/engine.py: micro_batch_squares). The estimates are noisy and their ratio is biased, so each is averaged over steps
before the division, as in the paper. Everything stays on the device; one number is summed over the ranks.

The loss of a micro-batch is divided by the element counts of the global batch. The estimates therefore assume that
micro-batches have similar numbers of elements.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from trp_scale.core.hooks import Hook, StepContext
from trp_scale.core.run import RunContext
from trp_scale.methods.settings import GradientNoiseScaleSettings


def estimates(small: Tensor, big: float | Tensor, *, rows: int, count: int) -> Tensor:
    """Return the unbiased estimates of tr(Sigma) and |G|^2, [2].

    Args:
        small: mean squared norm of the gradient of a batch of `rows` rows.
        big: squared norm of the mean gradient of `count` such batches.
    """
    excess = small - big
    return torch.stack([excess * (rows * count / (count - 1)), big - excess / (count - 1)])


class GradientNoiseScale(Hook):
    """Measures the noise scale in every step.

    Attributes:
        averages: moving averages of tr(Sigma) and |G|^2, [2] float64 on the device. Divide by 1 - smoothing^steps to
            correct the bias of the zero start.
        steps: number of averaged steps, on the device.
    """

    name = "gradient_noise_scale"
    shown = ("noise_scale",)

    def __init__(self, settings: GradientNoiseScaleSettings, run: RunContext) -> None:
        batch = run.config.batch
        self.settings, self.engine = settings, run.engine
        self.rows, self.count = batch.micro_rows, batch.global_size // batch.micro_rows
        self.averages = torch.zeros(2, dtype=torch.float64, device=run.device)
        self.steps = torch.zeros((), dtype=torch.int64, device=run.device)
        self._squares: Tensor | None = None
        run.engine.watch_micro_batches()

    def gradients(self, ctx: StepContext) -> None:
        self._squares = self.engine.micro_batch_squares()

    @torch.no_grad()
    def after_step(self, ctx: StepContext) -> None:
        squares, self._squares = self._squares, None
        if squares is None:
            return
        assert ctx.grad_norm is not None, "decided before the hooks' after_step"
        estimate = estimates(self.count * squares, ctx.grad_norm.double() ** 2, rows=self.rows, count=self.count)
        self.averages = ctx.commit(self.averages.lerp(estimate, 1.0 - self.settings.smoothing), self.averages)
        self.steps = ctx.commit(self.steps + 1, self.steps)

    def metrics(self) -> Mapping[str, Any]:
        """Return `noise_scale` (B_simple, in rows) and the averages `trace` (tr(Sigma)) and `squared_norm` (|G|^2)."""
        if not (steps := int(self.steps)):
            return {}
        trace, squared_norm = (self.averages / (1.0 - self.settings.smoothing**steps)).tolist()
        return {"noise_scale": trace / squared_norm, "trace": trace, "squared_norm": squared_norm}

    def state_dict(self) -> dict[str, Any]:
        return {"averages": self.averages, "steps": int(self.steps)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.averages.copy_(state["averages"])
        self.steps.fill_(state["steps"])
