"""The loss on D_val as a function of one encoder's weights, where the head's step has nothing to do with the masks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from trp_scale.core.batch import Batch
from trp_scale.core.engine import Engine
from trp_scale.core.hooks import StepContext
from trp_scale.core.pieces import Shards
from trp_scale.masks.feedback import HeadFeedback, LastUpdate, on_device
from trp_scale.masks.head import HeadStep, global_sum
from trp_scale.masks.second_level import HeadLevel


class HeldHeadFeedback(HeadFeedback):
    """The head's loss on D_val, with no path through the head."""

    def asked(self, ctx: StepContext, engine: Engine) -> Shards:
        """dL_val / d weights of the encoder that an engine holds, on the next window of D_val."""
        with self.clock("validation"):
            window, head = on_device(self.sources.validation.next_window(), ctx), self.level.head.parameters
            held = HeadStep(before=head, parameters=head, response=torch.zeros_like(head.flat()))
            self.note(LastUpdate(head=held, train=window, validation=window))
            return validation_gradient(self.level, engine, window, ctx.step)


def validation_gradient(level: HeadLevel, engine: Engine, window: Sequence[Batch], step: int) -> Shards:
    """dL_val / d weights at the weights that forwards read now, the head as it is; notes the loss itself.

    Args:
        level: the head.
        engine: holds the encoder.
        window: this rank's micro-batches of D_val.
        step: number of the run's step.
    """
    rows = global_rows(engine, window)
    losses: list[Tensor] = []

    def loss(micro: Batch) -> Tensor:
        part = level.labelled(level.features(engine, [micro])[0], micro, learning=False, step=step)
        found = level.loss(part, level.head.parameters) / rows
        losses.append(found.detach())
        return found

    gradient = engine.gradient_of([partial(loss, micro) for micro in window])
    (level.validation_loss,) = global_sum(engine.data_group, [torch.stack(losses).sum()])
    return gradient


def global_rows(engine: Engine, window: Sequence[Batch]) -> Tensor:
    """0-dimensional: crops that are there, over all ranks; 1 where there are none."""
    own = torch.stack([micro["row_weights"].sum() * micro["images"].shape[1] for micro in window]).sum()
    return global_sum(engine.data_group, [own])[0].clamp(min=1)
