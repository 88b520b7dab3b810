"""Encoder, decoder and head learn in one step: two levels in place of three (BLO-MAE, MLO-MAE eq. 5)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from trp_scale.adversary.positions import reduced_gradient
from trp_scale.config import Config
from trp_scale.core.batch import Batch
from trp_scale.core.hooks import StepContext
from trp_scale.core.pieces import Shards
from trp_scale.data.downstream import Downstream
from trp_scale.masks.clock import LevelClock
from trp_scale.masks.held_head import HeldHeadFeedback
from trp_scale.masks.hypergradient import Reading
from trp_scale.masks.joint_objective import HEAD, STEP
from trp_scale.masks.masks import MaskedWindow
from trp_scale.masks.second_level import HeadLevel, leaf


class JointFeedback(HeldHeadFeedback):
    """The head's loss on D_val after a joint step. The head is a leaf outside the engine whose gradient comes out of
    the pass that trains the weights; it steps by AdamW of its own whenever they do.

    Its step, C' = C - eta grad_C L_cls(D_tr; E, C), is of the encoder before the step: the masks act on L_val through
    E' alone, and there by gamma x L_rec, which the step's task weights carry.

    Args:
        level: the head of the joint objective.
    """

    def __init__(
        self, config: Config, reading: Reading, clock: LevelClock, *, level: HeadLevel, sources: Downstream
    ) -> None:
        super().__init__(config, reading, clock, level=level, sources=sources)
        self.leaf = leaf(level.head.parameters.flat())
        self.gradient = torch.zeros_like(self.leaf, requires_grad=False)

    def counts(self, ctx: StepContext, window: MaskedWindow) -> Tensor:
        return torch.cat([window.counts[:-1], ctx.counts[-1:]])  # classification is the last task

    def joined(self, ctx: StepContext, micro: Batch) -> Batch:
        return replace(micro, extras={**micro.extras, HEAD: self.leaf, STEP: torch.tensor(ctx.step)})

    def gradients(self, ctx: StepContext) -> None:
        self.gradient = reduced_gradient(ctx, self.leaf)

    def stepped(self, ctx: StepContext) -> None:
        assert ctx.sums is not None, "the step is through"
        self.level.train_loss = ctx.means(ctx.sums)[-1]
        self.level.head.descend(self.gradient, self.scale(ctx))
        self.leaf = leaf(self.level.head.parameters.flat())

    def update(self, ctx: StepContext) -> None:
        """The head has learned in every step of the cycle."""

    def direction(self, ctx: StepContext) -> Shards:
        return self.asked(ctx, ctx.engine)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.leaf = leaf(self.level.head.parameters.flat())
