"""Muon against a float64 loop and against torch.optim.Muon; the exchange of parts."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from trp_scale.config import OptimizerConfig
from trp_scale.config.loader import load_recipe
from trp_scale.config.registry import engine_rules
from trp_scale.engines.muon import MatrixPart, Muon, covering_parts
from trp_scale.engines.optimizer import block_matrices, build_optimizer, set_learning_rate

SETTINGS: dict[str, Any] = {"lr": 0.02, "beta1": 0.8, "beta2": 0.95, "weight_decay": 0.1, "momentum": 0.9}


class Network(nn.Module):
    """An embedding, two blocks with matrices of three shapes, and a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(9, 16)
        blocks = [nn.Sequential(nn.Linear(16, 48), nn.LayerNorm(48), nn.Linear(48, 16), nn.Linear(16, 16))]
        self.layers = nn.ModuleList([*blocks, nn.Sequential(nn.Linear(16, 48))])
        self.head = nn.Linear(16, 3)


HIDDEN = {"layers.0.0.weight", "layers.0.2.weight", "layers.0.3.weight", "layers.1.0.weight"}


def muon(module: nn.Module, precision: str = "fp32", **changes: Any) -> Muon:
    optimizer = build_optimizer(module, OptimizerConfig(kind="muon", **{**SETTINGS, **changes}), precision=precision)
    assert isinstance(optimizer, Muon)
    return optimizer


def give_gradients(module: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)


def reference_step(weight: Tensor, gradient: Tensor, momentum: Tensor, lr: float) -> tuple[Tensor, Tensor]:
    """Weight and momentum after a step, by the formulas of the paper in float64."""
    momentum = 0.9 * momentum + 0.1 * gradient
    x = 0.9 * momentum + 0.1 * gradient
    x = x.T if x.shape[0] > x.shape[1] else x
    x = x / x.norm()
    for _ in range(5):
        x = 3.4445 * x - 4.7750 * (x @ x.T) @ x + 2.0315 * (x @ x.T) @ (x @ x.T) @ x
    update = 0.2 * math.sqrt(max(weight.shape)) * (x if x.shape == weight.shape else x.T)
    return weight - lr * 0.1 * weight - lr * update, momentum


def test_hidden_matrices_are_those_of_linear_layers_in_blocks() -> None:
    assert block_matrices(Network()) == HIDDEN


def test_steps_equal_the_formulas_in_float64_and_adamw() -> None:
    ours, theirs = Network(), Network()
    optimizer = muon(ours)
    names = {name: parameter for name, parameter in theirs.named_parameters() if name not in HIDDEN}
    adamw = build_optimizer(theirs, OptimizerConfig(**SETTINGS), names.items())
    expected = {name: p.detach().double() for name, p in ours.named_parameters() if name in HIDDEN}
    momenta = {name: torch.zeros_like(value) for name, value in expected.items()}
    for step in range(4):
        for module, optimizer_of in ((ours, optimizer), (theirs, adamw)):
            give_gradients(module, step)
            set_learning_rate(optimizer_of, 0.02 * (step + 1))
            optimizer_of.step()
        for name, parameter in ours.named_parameters():
            if name in HIDDEN:
                assert parameter.grad is not None
                gradient = parameter.grad.double()
                expected[name], momenta[name] = reference_step(
                    expected[name], gradient, momenta[name], 0.02 * (step + 1)
                )
                torch.testing.assert_close(parameter.detach().double(), expected[name], rtol=1e-6, atol=1e-6)
                torch.testing.assert_close(optimizer.state[parameter]["exp_avg"].double(), momenta[name])
            else:
                assert torch.equal(parameter, names[name]), name


def test_bf16_is_torchs_muon() -> None:
    ours, theirs = Network(), Network()
    optimizer = muon(ours, "bf16")
    matrices = [parameter for name, parameter in theirs.named_parameters() if name in HIDDEN]
    reference = torch.optim.Muon(matrices, lr=0.02, weight_decay=0.1, momentum=0.9, adjust_lr_fn="match_rms_adamw")
    started = {name: parameter.detach().clone() for name, parameter in ours.named_parameters()}
    for step in range(3):
        give_gradients(ours, step)
        give_gradients(theirs, step)
        optimizer.step()
        reference.step()
    others = dict(theirs.named_parameters())
    for name in HIDDEN:
        ours_of, theirs_of = dict(ours.named_parameters())[name], others[name]
        apart = (ours_of - theirs_of).detach().norm() / (theirs_of - started[name]).detach().norm()
        assert apart < 2e-2, name


def test_a_matrix_without_gradient_stays() -> None:
    module = Network()
    optimizer = muon(module)
    give_gradients(module, 0)
    unused = module.layers[1][0].weight
    unused.grad = None
    before = unused.detach().clone()
    optimizer.step()
    assert torch.equal(unused, before)


@given(st.lists(st.integers(1, 20), max_size=4), st.integers(0, 3), st.booleans())
def test_covering_parts_contain_each_element_once(cuts: list[int], owner: int, copies: bool) -> None:
    size = 20
    edges = sorted({0, size, *cuts})
    parts = [MatrixPart(rank, 0, start, stop) for rank, (start, stop) in enumerate(pairwise(edges))]
    if copies:
        parts.append(MatrixPart(owner, 0, 0, size))
    chosen = covering_parts(parts, size, owner)
    assert [element for part in chosen for element in range(part.start, part.stop)] == list(range(size))
    if copies:
        assert [part.rank for part in chosen] == [owner]


@pytest.mark.parametrize(("engine", "flag"), [("megatron", "--optimizer.kind"), ("fsdp", "--fsdp.offload")])
def test_engines_without_whole_matrices_are_refused(engine: str, flag: str) -> None:
    config = load_recipe("pos_bert_tiny")
    config.optimizer.kind = "muon"
    config.fsdp.offload = engine == "fsdp"
    refused = list(engine_rules(engine).refusals(config))
    assert any(flag in text and "muon" in text for text in refused)


@pytest.mark.parametrize("kind", ["lamb", "muon"])
def test_learned_masks_need_a_step_that_can_be_differentiated(kind: Any) -> None:
    config: Any = load_recipe("mlo_mae_tiny")
    assert not any("--optimizer.kind" in text for text in config.multilevel.problems(config))
    config.optimizer.kind = kind
    assert any(f"--optimizer.kind is {kind}" in text for text in config.multilevel.problems(config))
