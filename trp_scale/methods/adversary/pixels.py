"""FGSM: a one-step perturbation of the pixels of each image (AdPE, Appendix B; Goodfellow et al.)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from trp_scale.core.batch import Batch
from trp_scale.core.hooks import Hook, StepContext
from trp_scale.core.run import RunContext
from trp_scale.methods.adversary.ascent import EffectWatch, log_line, run_own_pass, size, steepest
from trp_scale.methods.adversary.settings import PixelAdversarySettings
from trp_scale.models.positions import PIXEL_SHIFT


class PixelAdversary(Hook):
    """Adds eps sign(g) (linf) or eps g / ||g|| (l2, per crop) to the input; g is the gradient at the clean pixels.

    Images are [R, k, C, S, S], or [R, C, S, S] with one crop per image. A separate pass over the window computes g. The
    shifts are kept in fp32 until the step ends. The target stays the clean image. No state passes between steps.
    """

    name = "adversary"
    shown = ("norm", "share_of_eps", "sensitivity")

    def __init__(self, settings: PixelAdversarySettings, run: RunContext) -> None:
        self.settings = settings
        self.device = device = run.device
        self.shifts: dict[int, Tensor] = {}
        self.effect = EffectWatch(run)
        self._sizes = torch.zeros(1, dtype=torch.float64, device=device)
        self._sensitivity = torch.zeros((), dtype=torch.float64, device=device)

    def before_step(self, ctx: StepContext) -> None:
        leaves = {
            micro.start: torch.zeros(micro["images"].shape, device=self.device, requires_grad=True)
            for micro in ctx.own_window
        }
        self.shifts = leaves
        run_own_pass(ctx)
        gradients = {start: read_gradient(leaf) for start, leaf in leaves.items()}
        self.shifts = {start: self.shift(gradient) for start, gradient in gradients.items()}
        self._sizes = torch.cat(
            [size(shift.flatten(-3), self.settings.norm).flatten() for shift in self.shifts.values()]
        )
        self._sensitivity = norm_over_ranks(ctx, gradients.values())

    def shift(self, gradients: Tensor) -> Tensor:
        """Return the one-step perturbation of each crop, [..., C, S, S]; zero if its gradient is not finite."""
        flat = gradients.flatten(-3)  # [..., C * S * S]
        finite = flat.isfinite().all(-1, keepdim=True)
        shifts = steepest(torch.where(finite, flat, 0.0), self.settings.norm, self.settings.eps)
        return shifts.view_as(gradients)

    def batch(self, ctx: StepContext, micro: Batch) -> Batch:
        if micro.joined:
            return micro
        return micro.adding({PIXEL_SHIFT: self.shifts[micro.start]})

    def after_step(self, ctx: StepContext) -> None:
        self.shifts = {}
        self.effect.count_step(ctx, self._sensitivity > 0)

    def metrics(self) -> Mapping[str, Any]:
        """Return the values of `log_line`. `norm` is of this rank's crops, `sensitivity` of the global batch."""
        return log_line(self.settings, self.effect, sizes=self._sizes, sensitivity=self._sensitivity)

    def state_dict(self) -> dict[str, Any]:
        return {"idle": self.effect.idle.cpu()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.effect.idle = state["idle"].to(self.device)


def read_gradient(leaf: Tensor) -> Tensor:
    """Return `.grad` of a leaf; zeros if no loss depends on the leaf."""
    gradient = leaf.grad
    return torch.zeros_like(leaf, requires_grad=False) if gradient is None else gradient


def norm_over_ranks(ctx: StepContext, gradients: Iterable[Tensor]) -> Tensor:
    """Return the l2 norm of a gradient whose parts are on different ranks, without the engine's loss factor."""
    group = ctx.data_group
    norms = torch.zeros(group.size, dtype=torch.float64, device=ctx.engine.device)
    norms[group.rank] = torch.stack([gradient.double().norm() for gradient in gradients]).norm()
    # One element per rank, so that the engine's reduction only removes its loss factor.
    return ctx.engine.reduce_hook_gradient(norms).norm()  # type: ignore[no-any-return]
