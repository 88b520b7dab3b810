"""The adversary on positions: one vector, shared by all images, that ascends while the weights descend (AdPE 4)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from trp_scale.adversary.agreement import AgreementCheck
from trp_scale.adversary.ascent import ASCENTS
from trp_scale.adversary.effect import NEGLIGIBLE, EffectWatch
from trp_scale.adversary.log_line import log_line
from trp_scale.adversary.own_pass import run_own_pass
from trp_scale.adversary.projection import Balls
from trp_scale.adversary.saturation import Saturation
from trp_scale.adversary.stored_state import described, load_tensors
from trp_scale.config import Config
from trp_scale.core.batch import Batch, StepStats
from trp_scale.core.hooks import Hook, StepContext
from trp_scale.models.perturbation import PerturbationShape

NAME = "adversary"


class ParallelPositions(Hook):
    """Updates in parallel: the backward pass that trains the weights also gives the adversary's gradient.

    The vector is a leaf of its own, outside the engine: never decayed, never clipped, in no norm of the weights. Its
    gradient is of the global batch's loss, so that all ranks climb alike.

    Args:
        config: settings of the run; `adversary` and the optimizer's betas and eps are read.
        shape: what the model expects.
        device: where the vector lives, in fp32.
    """

    name = NAME

    def __init__(self, config: Config, shape: PerturbationShape, device: torch.device) -> None:
        self.settings = config.adversary
        self.shape = shape
        self.balls = Balls(shape, config.adversary.norm, config.adversary.eps)
        self.ascent = ASCENTS[config.adversary.ascent](config.adversary, config.optimizer, self.balls)
        self.saturation = Saturation.of(config, self.balls, device)
        self.vector = torch.zeros(shape.numel, dtype=torch.float32, device=device, requires_grad=True)
        self.state = self.ascent.start(self.vector.detach())
        self.gradient = torch.zeros_like(self.vector, requires_grad=False)
        self.agreement = AgreementCheck(config.adversary.check_every)
        self.effect = EffectWatch(device)
        self._moved = torch.zeros((), dtype=torch.bool, device=device)

    @property
    def seen(self) -> Tensor:
        """[numel] what the model sees now."""
        return self.vector

    def before_step(self, ctx: StepContext) -> None:
        self.vector.grad = None  # passes that other hooks have made between steps leave theirs here

    def batch(self, ctx: StepContext, micro: Batch) -> Batch:
        return replace(micro, extras={**micro.extras, "perturbation": self.seen})

    def gradients(self, ctx: StepContext) -> None:
        self.gradient = reduced_gradient(ctx, self.vector)
        self.agreement.start(ctx, (self.vector, *self.state.values()))

    def after_step(self, ctx: StepContext, stats: StepStats) -> None:
        self.agreement.finish(ctx)
        if stats.applied:
            self.ascend(stats.lr)
            self.note_effect(stats.loss)

    @torch.no_grad()
    def ascend(self, lr: float) -> None:
        """Climb along the last gradient and project; where anything is not finite, nothing changes at all."""
        candidate, state = self.ascent.step(self.vector, self.gradient, self.state, lr)
        candidate = self.balls.project(candidate)
        if self.saturation is not None and self.settings.on_saturation == "reset":
            candidate, state = self.saturation.restarted(candidate, state)
        # Decided on the device: the host would have to wait to know.
        finite = torch.stack([each.isfinite().all() for each in (self.gradient, candidate, *state.values())]).all()
        self._moved = finite & (candidate != self.vector).any()
        self.vector.copy_(torch.where(finite, candidate, self.vector))
        self.state = {name: torch.where(finite, value, self.state[name]) for name, value in state.items()}

    @torch.no_grad()
    def note_effect(self, loss: float) -> None:
        """Whether this step's gradient could change the loss, and the vector moved or stands at its ball's edge."""
        reach = self.balls.reach(self.gradient)
        at_edge = self.balls.sizes(self.vector).max() >= self.settings.eps * (1 - 1e-6)
        matters = reach.isfinite() & (reach > NEGLIGIBLE * abs(loss))
        self.effect.note(matters & (self._moved | at_edge))

    @torch.no_grad()
    def metrics(self) -> Mapping[str, Any]:
        """norm: of each ball, mean and largest; share_of_eps: the mean over eps; sensitivity: |dL/da|, l2 over all
        balls; saturated: share of offsets beyond the relative table (relative_coordinate only)."""
        shares = {} if self.saturation is None else {"saturated": self.saturation.share(self.vector)}
        sizes, sensitivity = self.balls.sizes(self.vector), self.gradient.double().norm()
        return log_line(self.settings, self.effect, sizes=sizes, sensitivity=sensitivity, **shares)

    def state_dict(self) -> dict[str, Any]:
        tensors = {"vector": self.vector, "idle": self.effect.idle, **self.state}
        return described(self.settings, self.shape, tensors)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        expected = {"vector": self.vector, "idle": self.effect.idle, **self.state}
        tensors = load_tensors(state, self.settings, self.shape, expected)
        with torch.no_grad():
            self.vector.copy_(tensors.pop("vector"))
        self.effect.idle = tensors.pop("idle")
        self.state = tensors


class SequentialPositions(ParallelPositions):
    """Updates in sequence: a pass of its own gives the gradient, then the weights see the new perturbation."""

    def __init__(self, config: Config, shape: PerturbationShape, device: torch.device) -> None:
        super().__init__(config, shape, device)
        self._seen = self.vector.detach()
        self._before = (self.vector.detach().clone(), self.state)

    @property
    def seen(self) -> Tensor:
        return self._seen

    def before_step(self, ctx: StepContext) -> None:
        super().before_step(ctx)
        self._before = (self.vector.detach().clone(), self.state)
        origin = self.ascent.origin(self.vector.detach()).clone().requires_grad_()
        self._seen = origin
        run_own_pass(ctx)
        self._seen = self.vector.detach()  # the weights' pass asks for no gradient of it
        self.gradient = reduced_gradient(ctx, origin)
        self.ascend(ctx.lr)

    def gradients(self, ctx: StepContext) -> None:
        self.agreement.start(ctx, (self.vector, *self.state.values()))

    @torch.no_grad()
    def after_step(self, ctx: StepContext, stats: StepStats) -> None:
        self.agreement.finish(ctx)
        if stats.applied:
            self.note_effect(stats.loss)
        else:
            vector, self.state = self._before
            self.vector.copy_(vector)


POSITIONS: dict[str, type[ParallelPositions]] = {"parallel": ParallelPositions, "sequential": SequentialPositions}


def reduced_gradient(ctx: StepContext, leaf: Tensor) -> Tensor:
    """The global batch's gradient of a leaf, taken out of its `.grad`; zero where no loss depends on it."""
    local, leaf.grad = leaf.grad, None
    return ctx.engine.reduce_hook_gradient(torch.zeros_like(leaf) if local is None else local).detach()
