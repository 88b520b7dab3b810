"""Batch norm over ranks against torch's, and its running statistics. tests/distributed/test_finetune.py has training on
several ranks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.ranks import Ranks
from trp_scale.distributed.groups import Group
from trp_scale.errors import RefusedError
from trp_scale.models.batch_norm import BatchNorm, RunningStatistics


def maps(rows: int = 6) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return 3 * torch.randn(rows, 4, 5, 7, generator=generator, dtype=torch.float64) + 2


def pair() -> tuple[BatchNorm, nn.BatchNorm2d]:
    ours, theirs = BatchNorm(4).double(), nn.BatchNorm2d(4).double()
    with torch.no_grad():
        for norm in (ours, theirs):
            norm.weight.copy_(torch.arange(1.0, 5.0))
            norm.bias.copy_(torch.arange(4.0) - 2)
    return ours, theirs


def run_context(module: nn.Module, *, micro: int = 6, group: Group | None = None) -> Any:
    group = group or Group("data")
    batch = SimpleNamespace(micro_rows=micro, global_size=6)
    return SimpleNamespace(config=SimpleNamespace(batch=batch), engine=SimpleNamespace(module=module, data_group=group))


def gradients(norm: nn.Module, values: Tensor) -> tuple[Tensor, ...]:
    """Output, and gradients of values, weight and bias, of a loss that weighs all outputs differently."""
    values = values.clone().requires_grad_()
    output = norm(values)
    weights = torch.sin(torch.arange(output[0].numel(), dtype=torch.float64)).view(output[0].shape)
    (output.square() * weights).sum().backward()
    return output.detach(), values.grad, norm.weight.grad, norm.bias.grad  # type: ignore[return-value]


def test_one_rank_computes_what_torch_does() -> None:
    ours, theirs = pair()
    for found, expected in zip(gradients(ours, maps()), gradients(theirs, maps()), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def on_a_rank(rank_of: int) -> tuple[Tensor, ...]:
    rank = torch.distributed.get_rank()
    ours, _ = pair()
    RunningStatistics(run_context(ours, micro=3, group=Group("data", rank, 2)))
    return (*gradients(ours, maps()[3 * rank : 3 * rank + 3]), ours.present)


def test_two_ranks_compute_what_one_does(two_ranks: Ranks) -> None:
    """Outputs and their gradients by row; gradients of parameters in sum."""
    ours, _ = pair()
    output, values, weight, bias = gradients(ours, maps())
    found = two_ranks(on_a_rank, 0)
    torch.testing.assert_close(torch.cat([rank[0] for rank in found]), output, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(torch.cat([rank[1] for rank in found]), values, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found[0][2] + found[1][2], weight, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found[0][3] + found[1][3], bias, rtol=1e-12, atol=1e-12)
    for rank in found:
        torch.testing.assert_close(rank[4], ours.present, rtol=1e-12, atol=1e-12)


def test_running_statistics_are_torch_s_after_applied_steps_and_kept_by_skipped_ones() -> None:
    ours, theirs = pair()
    module = nn.Sequential(ours)
    hook = RunningStatistics(run_context(module))
    for step, applied in enumerate((True, False, True)):
        values = maps() * (step + 1)
        for _ in range(2):  # a second pass of the step changes nothing
            module(values)
        if applied:
            theirs(values)
        context: Any = SimpleNamespace(
            commit=lambda new, old, applied=applied: torch.where(torch.tensor(applied), new, old)
        )
        hook.after_step(context)
    expected = torch.stack([theirs.running_mean, theirs.running_var])  # type: ignore[list-item]
    torch.testing.assert_close(ours.running, expected, rtol=1e-12, atol=1e-12)
    again = BatchNorm(4).double()
    RunningStatistics(run_context(nn.Sequential(again))).load_state_dict(hook.state_dict())
    torch.testing.assert_close(again.running, expected, rtol=1e-12, atol=1e-12)
    again.weight, again.bias = ours.weight, ours.bias
    torch.testing.assert_close(again.eval()(maps()), theirs.eval()(maps()), rtol=1e-12, atol=1e-12)


def test_several_micro_batches_are_refused() -> None:
    with pytest.raises(RefusedError, match=r"--batch.micro_size is 2, .*: 6"):
        RunningStatistics(run_context(nn.Sequential(BatchNorm(4)), micro=2))
