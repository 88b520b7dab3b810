"""The optimizer of a run: AdamW with decay groups, or plain gradient descent."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from trp_scale.config import OptimizerConfig
from trp_scale.engines.base import EngineError

if TYPE_CHECKING:
    from trp_scale.engines.base import Engine
    from trp_scale.engines.shards import Shards


def decay_groups(parameters: Iterable[tuple[str, nn.Parameter]], weight_decay: float) -> list[dict[str, Any]]:
    """Two groups: matrices with `weight_decay`, biases and norms (one-dimensional) without."""
    matrices: list[nn.Parameter] = []
    vectors: list[nn.Parameter] = []
    for _, parameter in parameters:
        (matrices if parameter.ndim >= 2 else vectors).append(parameter)
    return [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]


def build_optimizer(module: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    """AdamW in one fused kernel per tensor list, or SGD without momentum or decay."""
    groups = decay_groups(module.named_parameters(), config.weight_decay)
    if config.kind == "sgd":
        for group in groups:
            group["weight_decay"] = 0.0
        return torch.optim.SGD(groups, lr=config.lr)
    return torch.optim.AdamW(groups, lr=config.lr, betas=(config.beta1, config.beta2), eps=config.eps, fused=True)


def empty_adamw_state(parameter: torch.Tensor) -> dict[str, torch.Tensor]:
    """The state fused AdamW makes at its first step, before that step."""
    return {
        "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
        "exp_avg": torch.zeros_like(parameter),
        "exp_avg_sq": torch.zeros_like(parameter),
    }


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """The same learning rate in all groups."""
    for group in optimizer.param_groups:
        group["lr"] = lr


def adamw_response(
    engine: Engine, direction: Shards, config: OptimizerConfig, *, lr: float, grad_norm: float
) -> Shards:
    """direction times the derivative of the last step's descent by its gradient; see Engine.step_response."""
    scale = lr * (min(1.0, config.clipping / (grad_norm + 1e-6)) if config.clipping > 0 else 1.0)
    if config.kind == "sgd":
        return direction.times(scale)
    steps = engine.optimizer_steps()
    if steps == 0:
        raise EngineError("step_response is of the last step, and no step has been made; call it after one")
    scale *= (1 - config.beta1) / (1 - config.beta1**steps)
    parts = [
        scale * part / ((piece.tensors["exp_avg_sq"] / (1 - config.beta2**steps)).sqrt() + config.eps)
        for piece, part in zip(engine.pieces(), direction.parts, strict=True)
    ]
    return replace(direction, parts=parts)
