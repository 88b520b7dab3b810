"""Learning rates by depth: each parameter has the scale and the decay that timm gives it. LAMB against timm's, step by
step, and the steps that it leaves out."""

from __future__ import annotations

from typing import Any

import pytest
import timm.optim
import torch
from timm.optim import param_groups_layer_decay
from torch import Tensor, nn

from tests.unit.models.encoder_peers import finetune_config, timm_vit
from trp_scale.config import OptimizerConfig
from trp_scale.core.engine import EngineError
from trp_scale.engines.optimizer import Lamb, build_optimizer, set_learning_rate
from trp_scale.finetuning.classification.task import ImageClassifier

POOL = {"mean": "avg", "class": "token"}
OPTIMIZER = OptimizerConfig(lr=1.0, weight_decay=0.05, layer_decay=0.65)


def by_name(module: nn.Module, groups: list[dict[str, object]]) -> dict[str, tuple[float, float]]:
    """(scale of the learning rate, weight decay) of each parameter."""
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    found = {}
    for group in groups:
        for parameter in group["params"]:  # type: ignore[attr-defined]
            found[names.pop(id(parameter))] = (group["lr_scale"], group["weight_decay"])
    assert names == {}, "parameters without a group"
    return found  # type: ignore[return-value]


@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize("pooling", POOL)
def test_scales_and_decays_are_timms(pooling: str, learned: bool) -> None:
    settings = finetune_config(pooling=pooling, learned_positions=learned)
    settings.model.layers = 5
    model, peer = ImageClassifier(settings), timm_vit(depth=5, global_pool=POOL[pooling])
    groups = param_groups_layer_decay(
        peer, weight_decay=0.05, no_weight_decay_list=peer.no_weight_decay(), layer_decay=0.65
    )
    expected = by_name(peer, groups)
    theirs = {name.replace("patch_embed.proj.", "patch_embed."): values for name, values in expected.items()}
    if not learned:
        del theirs["pos_embed"]
    found = by_name(model, build_optimizer(model, OPTIMIZER).param_groups)
    assert {name.removeprefix("encoder."): values for name, values in found.items()} == {
        name: pytest.approx(values, rel=1e-12) for name, values in theirs.items()
    }
    assert len({scale for scale, _ in theirs.values()}) == 5 + 2  # embeddings, blocks, head


def test_the_rate_of_a_step_is_scaled_in_every_group() -> None:
    model = ImageClassifier(finetune_config())
    optimizer = build_optimizer(model, OPTIMIZER)
    set_learning_rate(optimizer, 0.5)
    assert sorted({group["lr"] for group in optimizer.param_groups}) == pytest.approx(
        [0.5 * 0.65**depth for depth in (3, 2, 1, 0)]
    )


def test_gradient_descent_moves_each_layer_by_its_own_rate() -> None:
    """With one gradient for all, a step of SGD shows the scales themselves."""
    model = ImageClassifier(finetune_config())
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer = build_optimizer(model, OptimizerConfig(kind="sgd", lr=1.0, layer_decay=0.5))
    set_learning_rate(optimizer, 1.0)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    moved = {name: float((before[name] - parameter.detach()).mean()) for name, parameter in model.named_parameters()}
    for name, scale in {"encoder.cls_token": 1 / 8, "encoder.blocks.0.norm1.bias": 1 / 4, "head.bias": 1.0}.items():
        assert moved[name] == pytest.approx(scale, rel=1e-5), name


def test_a_module_without_depths_is_refused() -> None:
    with pytest.raises(EngineError, match=r"layer_decay is 0.65, allowed here: 1"):
        build_optimizer(nn.Linear(2, 2), OPTIMIZER)


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
