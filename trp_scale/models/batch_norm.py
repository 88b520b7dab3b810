"""Batch norm over the rows of all ranks (synchronised batch norm), with the same result for every number of ranks.

torch.nn.SyncBatchNorm runs on a GPU only and updates its running statistics in each forward pass. Here a hook updates
them once per applied step, and the checkpoint stores them with the hook.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.nn.functional import all_reduce

from trp_scale.core.hooks import Hook, StepContext
from trp_scale.core.run import RunContext
from trp_scale.distributed.groups import ALONE, Group
from trp_scale.errors import RefusedError

EPS, MOMENTUM = 1e-5, 0.1  # as torch.nn.BatchNorm2d


class BatchNorm(nn.Module):
    """torch.nn.BatchNorm2d over the pixels of all ranks, which have equally many, in fp32 or fp64.

    Attributes:
        group: ranks that split the batch, set by `RunningStatistics`.
        running: [2, C] mean and variance for evaluation.
        present: [2, C] mean and unbiased variance of the last batch in training.
    """

    group: Group = ALONE
    running: Tensor
    present: Tensor

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(channels)), nn.Parameter(torch.zeros(channels))
        self.register_buffer("running", torch.tensor([[0.0], [1.0]]).repeat(1, channels), persistent=False)

    def forward(self, maps: Tensor) -> Tensor:
        """Normalise [B, C, H, W]."""
        values = maps.to(torch.promote_types(maps.dtype, torch.float32)).movedim(1, -1)  # [B, H, W, C]
        if self.training:
            mean = self._mean(values)
            values = values - mean
            variance, count = self._mean(values.square()), values[..., 0].numel() * self.group.size
            self.present = torch.stack([mean, variance * (count / max(1, count - 1))]).detach()
        else:
            mean, variance = self.running.to(values)
            values = values - mean
        normalised = values * (variance + EPS).rsqrt() * self.weight.to(values) + self.bias.to(values)
        return normalised.movedim(-1, 1).to(maps.dtype)

    def _mean(self, values: Tensor) -> Tensor:
        """Return the mean over all ranks' pixels, [C]. The gradients of all ranks add up, as their losses do."""
        mean = values.mean((0, 1, 2))
        return mean if self.group.size == 1 else all_reduce(mean, group=self.group.handle) / self.group.size  # type: ignore[no-untyped-call,no-any-return]


class RunningStatistics(Hook):
    """Updates the running statistics of a model's batch norms after each applied step. Raises RefusedError: a step has
    several micro-batches, each of which would have other statistics."""

    name = "batch_norm"

    def __init__(self, run: RunContext) -> None:
        self._norms = batch_norms(run.engine.module)
        rows, ranks = run.config.batch.micro_rows, run.engine.data_group.size
        if rows * ranks != run.config.batch.global_size:
            raise RefusedError(
                f"--batch.micro_size is {rows}, allowed with --dense.norm batch on {ranks} ranks: "
                f"{run.config.batch.global_size // ranks}, one micro-batch per rank and step; or set --dense.norm group"
            )
        for norm in self._norms.values():
            norm.group = run.engine.data_group

    def after_step(self, ctx: StepContext) -> None:
        for norm in self._norms.values():
            norm.running.copy_(ctx.commit(norm.running.lerp(norm.present.to(norm.running), MOMENTUM), norm.running))

    def state_dict(self) -> dict[str, Any]:
        return {name: norm.running.cpu().clone() for name, norm in self._norms.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        load_statistics(self._norms, state)


def batch_norms(module: nn.Module) -> dict[str, BatchNorm]:
    """Return the batch norms of a model by name."""
    return {name: part for name, part in module.named_modules() if isinstance(part, BatchNorm)}


def load_statistics(norms: Mapping[str, BatchNorm], state: Mapping[str, Any]) -> None:
    """Set running statistics to the state of `RunningStatistics`."""
    for name, norm in norms.items():
        norm.running.copy_(state[name])
