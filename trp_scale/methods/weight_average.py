"""Exponential moving average of the weights, as a hook on any engine (Polyak and Juditsky 1992; "mean teacher",
Tarvainen and Valpola 2017).

After the t-th applied step since `start_step`, t = 0, 1, 2, ...,

    average <- d_t average + (1 - d_t) weights,     d_t = min(decay, (1 + t) / (10 + t)) with warm-up, else decay.

The average is sharded like the weights. Each rank updates its shards without communication or device synchronisation.
The checkpoint stores the average under the weights' names (core/hooks.py: sharded_state). The commands export,
finetune, evaluate, probe and represent read it with `--weights average`.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from trp_scale.core.hooks import Hook, StepContext
from trp_scale.core.pieces import WEIGHT_AVERAGE, Shards, foreach_chunks
from trp_scale.core.run import RunContext
from trp_scale.methods.settings import WeightAverageSettings


class WeightAverage(Hook):
    """Exponential moving average of the weights.

    Attributes:
        average: sharded like the weights.
        updates: t, on the device.
    """

    name = "weight_average"

    def __init__(self, settings: WeightAverageSettings, run: RunContext) -> None:
        self.settings = settings
        self.engine = run.engine
        self.average: Shards = run.engine.weights()
        self.updates = torch.zeros((), dtype=torch.float64, device=run.device)

    def decay(self) -> Tensor:
        """d_t of the next update, 0-dimensional."""
        decay = torch.full_like(self.updates, self.settings.decay)
        return decay.minimum((1 + self.updates) / (10 + self.updates)) if self.settings.warmup else decay

    @torch.no_grad()
    def after_step(self, ctx: StepContext) -> None:
        weights = [piece.tensors["weight"] for piece in self.engine.pieces()]
        if ctx.step < self.settings.start_step:
            torch._foreach_copy_(self.average.parts, weights)  # correct for a skipped step too: it kept the weights
            return
        share = ctx.commit(1.0 - self.decay(), torch.zeros_like(self.updates))
        for average, present in foreach_chunks(self.average.parts, weights):  # bounds the memory of the differences
            difference = torch._foreach_sub(present, average)
            torch._foreach_mul_(difference, share.to(difference[0]))
            torch._foreach_add_(average, difference)
        self.updates = ctx.commit(self.updates + 1, self.updates)

    def validation(self) -> AbstractContextManager[None]:
        return self.engine.exchange_weights(self.average) if self.settings.validate else nullcontext()

    def metrics(self) -> Mapping[str, Any]:
        """Return `decay` of the next update and the number of `updates`."""
        return {"decay": float(self.decay()), "updates": int(self.updates)}

    def state_dict(self) -> dict[str, Any]:
        return {"updates": int(self.updates)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.updates.fill_(state["updates"])

    def sharded_state(self) -> Mapping[str, Shards]:
        return {WEIGHT_AVERAGE: self.average}
