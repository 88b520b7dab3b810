"""The gradient noise scale: the batch size beyond which larger batches bring little (McCandlish et al. 2018).

    B_simple = tr(Sigma) / |G|^2

G is the true gradient, Sigma the covariance of one row's gradient. Both are estimated without bias from the squared
norm of the gradient at two batch sizes (Appendix A.1), here a micro-batch of b rows and the global batch of B:

    |G|^2      ~  (B |G_B|^2 - b |G_b|^2) / (B - b)
    tr(Sigma)  ~  (|G_b|^2 - |G_B|^2) / (1/b - 1/B)

|G_b|^2 is the mean over the global batch's micro-batches, whose gradients every engine sees under the one backward pass
(core/engine.py: micro_batch_squares). The estimates are noisy and their ratio is biased, so that each is averaged over
steps before they are divided, as the paper does. All stays on the device; one number is summed over the ranks.

A micro-batch's loss is its share of the global one. Its gradient is that of a batch of b rows as far as the rows'
numbers of elements, which the global counts divide by, are alike over micro-batches.
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
    """[2] unbiased estimates of tr(Sigma) and |G|^2.

    Args:
        small: mean squared norm of the gradient of a batch of `rows` rows.
        big: squared norm of the gradient of `count` of them together.
    """
    excess = small - big
    return torch.stack([excess * (rows * count / (count - 1)), big - excess / (count - 1)])


class GradientNoiseScale(Hook):
    """Measures the noise scale in every step; see the head of this file.

    Args:
        settings: of the measurement.
        run: of the run.
    Attributes:
        averages: [2] float64 on the device, of tr(Sigma) and |G|^2, weighted by 1 - smoothing^steps in all.
        steps: that they are of, on the device.
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
        """noise_scale: B_simple, in rows; trace: tr(Sigma), squared_norm: |G|^2, both averaged."""
        if not (steps := int(self.steps)):
            return {}
        trace, squared_norm = (self.averages / (1.0 - self.settings.smoothing**steps)).tolist()
        return {"noise_scale": trace / squared_norm, "trace": trace, "squared_norm": squared_norm}

    def state_dict(self) -> dict[str, Any]:
        return {"averages": self.averages, "steps": int(self.steps)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.averages.copy_(state["averages"])
        self.steps.fill_(state["steps"])
