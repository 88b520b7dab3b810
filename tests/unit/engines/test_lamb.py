"""LAMB against timm's, step by step; and the steps that it leaves out."""

from __future__ import annotations

import math
from typing import Any

import pytest
import timm.optim
import torch
from torch import Tensor, nn

from trp_scale.config import OptimizerConfig
from trp_scale.engines.optimizer import Lamb, build_optimizer

SETTINGS = {"lr": 0.05, "beta1": 0.8, "beta2": 0.95, "eps": 1e-6, "weight_decay": 0.1}


def network(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 3)).to(dtype)
    nn.init.zeros_(matrix(module, 2))  # a matrix of length 0: its first step is AdamW's
    return module


def matrix(module: nn.Sequential, place: int = 0) -> Tensor:
    layer = module[place]
    assert isinstance(layer, nn.Linear)
    return layer.weight


def lamb_of(module: nn.Module, **changes: Any) -> Lamb:
    optimizer = build_optimizer(module, OptimizerConfig(kind="lamb", **{**SETTINGS, **changes}))
    assert isinstance(optimizer, Lamb)
    return optimizer


def give_gradients(module: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(parameter.dtype)


def state_of(module: nn.Module, optimizer: Lamb) -> list[Tensor]:
    states = [optimizer.state[p] for p in module.parameters()]
    return [p.detach().clone() for p in module.parameters()] + [
        state[name].clone() for state in states for name in ("exp_avg", "exp_avg_sq", "step")
    ]


@pytest.mark.parametrize("weight_decay", [0.1, 0.0])
def test_it_steps_as_timm_does(weight_decay: float) -> None:
    ours, theirs = network(), network()
    optimizer = lamb_of(ours, weight_decay=weight_decay)
    groups = [
        {"params": [p for p in theirs.parameters() if p.ndim >= 2], "weight_decay": weight_decay, "always_adapt": True},
        {"params": [p for p in theirs.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    reference = timm.optim.Lamb(groups, lr=0.05, betas=(0.8, 0.95), eps=1e-6, max_grad_norm=None)
    for step in range(6):
        for module in (ours, theirs):
            give_gradients(module, step)
        optimizer.step()
        reference.step()
        for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-7, atol=1e-9)


def test_a_large_matrix_moves_by_the_rate_times_its_length_in_fp32() -> None:
    module = nn.Sequential(nn.Linear(4096, 4096, bias=False))
    optimizer = lamb_of(module, lr=0.5)
    before = matrix(module).detach().double()
    give_gradients(module, 0)
    optimizer.step()
    moved = matrix(module).detach().double() - before
    assert float(moved.norm() / before.norm()) == pytest.approx(0.5, rel=1e-5)


def test_each_matrix_moves_by_the_rate_times_its_length() -> None:
    module = network()
    optimizer = lamb_of(module)
    before = [p.detach().clone() for p in module.parameters()]
    give_gradients(module, 0)
    optimizer.step()
    moved = matrix(module).detach() - before[0]
    assert float(moved.norm() / before[0].norm()) == pytest.approx(0.05, rel=1e-9)
    pairs = zip(module.parameters(), before, strict=True)
    vectors = [float((p.detach() - old).norm()) / p.numel() ** 0.5 for p, old in pairs if p.ndim == 1]
    assert vectors == pytest.approx([0.05] * 4, rel=1e-4)  # AdamW's first step: the signs


@pytest.mark.parametrize("done", [0, 3])
def test_a_step_that_is_left_out_changes_nothing(done: int) -> None:
    module = network(torch.float32)
    optimizer = lamb_of(module)
    for step in range(done):
        give_gradients(module, step)
        optimizer.step()
    for parameter in module.parameters():
        if not done:
            optimizer.state[parameter] = {
                "step": torch.zeros(()),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }
    before = state_of(module, optimizer)
    give_gradients(module, 9)
    gradient = matrix(module).grad
    assert gradient is not None
    gradient[0, 0] = math.nan
    optimizer.found_inf = torch.ones(())
    optimizer.step()
    for old, new in zip(before, state_of(module, optimizer), strict=True):
        assert torch.equal(old, new)
    optimizer.found_inf = torch.zeros(())
    give_gradients(module, 10)
    optimizer.step()
    assert all(torch.isfinite(p).all() for p in module.parameters())
    assert not torch.equal(before[0], matrix(module))
