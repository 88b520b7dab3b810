"""The optimizer of a run: AdamW with decay groups, or plain gradient descent."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from torch import nn

from trp_scale.config import OptimizerConfig
from trp_scale.core.engine import EngineError

if TYPE_CHECKING:
    from trp_scale.core.engine import Engine
    from trp_scale.core.pieces import Shards


@runtime_checkable
class Layered(Protocol):
    """A module whose parameters have a depth, for `optimizer.layer_decay`.

    Attributes:
        depth: of the deepest parameters, the head's.
    """

    depth: int

    def depth_of(self, name: str) -> int:
        """From 0 for the embeddings to `depth`, by the parameter's name."""
        ...


LEARNED_POSITIONS = "pos_embed"
"""Name of an image encoder's learned positions: a table, but not decayed, as in timm."""


def decay_groups(
    parameters: Iterable[tuple[str, nn.Parameter]],
    weight_decay: float,
    scale_of: Callable[[str], float] = lambda _: 1.0,
) -> list[dict[str, Any]]:
    """Matrices with `weight_decay`; vectors (biases, norms, class and mask tokens, embeddings of classes and
    modalities) and LEARNED_POSITIONS without: two groups for each scale of the learning rate, `lr_scale`.

    The code of MAE and of AdPE decays class and mask tokens, since they have three dimensions there. MultiMAE's spares
    its global and mask tokens, as here, but not the embeddings of classes and tasks, whose names its list misses.
    """
    found: dict[float, tuple[list[nn.Parameter], list[nn.Parameter]]] = {}
    for name, parameter in parameters:
        matrices, vectors = found.setdefault(scale_of(name), ([], []))
        decayed = parameter.ndim >= 2 and not name.endswith(LEARNED_POSITIONS)
        (matrices if decayed else vectors).append(parameter)
    return [
        {"params": members, "weight_decay": decay, "lr_scale": scale}
        for scale, groups in found.items()
        for members, decay in zip(groups, (weight_decay, 0.0), strict=True)
        if members
    ]


def layer_scales(module: nn.Module, layer_decay: float) -> Callable[[str], float]:
    """By a parameter's name, layer_decay^(depth - its depth), by which its learning rate is multiplied.

    Raises:
        EngineError: the module does not know how deep its parameters are.
    """
    if layer_decay == 1.0:
        return lambda _: 1.0
    if not isinstance(module, Layered):
        raise EngineError(f"--optimizer.layer_decay is {layer_decay}, allowed here: 1; it is for fine-tuning")
    return lambda name: float(layer_decay ** (module.depth - module.depth_of(name)))


def build_optimizer(module: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    """AdamW in one fused kernel per tensor list, or SGD without momentum or decay."""
    scales = layer_scales(module, config.layer_decay)
    groups = decay_groups(module.named_parameters(), config.weight_decay, scales)
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
    """`lr` in all groups, times each one's own scale."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group["lr_scale"]


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
