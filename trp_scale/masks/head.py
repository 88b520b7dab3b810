"""The classification head of level II: one linear layer, the same on every rank (MLO-MAE eq. 2, 7)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trp_scale.config import Config
from trp_scale.core.pieces import STATE_NAMES
from trp_scale.distributed.groups import Group
from trp_scale.engines.optimizer import decay_groups, empty_adamw_state, set_learning_rate
from trp_scale.models.initialise import initial_tensor, reseed

HEAD_DEVIATION = 0.01
"""Of the head's initial matrix, as of a linear probe's (He et al., A.1)."""


@dataclass(frozen=True, kw_only=True)
class HeadParameters:
    """The layer. Attributes: weight: [K, D]; bias: [K]."""

    weight: Tensor
    bias: Tensor

    def flat(self) -> Tensor:
        """[K D + K]."""
        return torch.cat([self.weight.reshape(-1), self.bias])

    def like(self, flat: Tensor) -> HeadParameters:
        """The layer with these values."""
        size = self.weight.numel()
        weight, bias = flat[:size], flat[size:]
        return HeadParameters(weight=weight.view_as(self.weight), bias=bias)


@dataclass(frozen=True, kw_only=True)
class HeadStep:
    """A step of the head.

    Attributes:
        before, parameters: before and after it.
        response: [K D + K] derivative of the descent by the gradient, element by element.
    """

    before: HeadParameters
    parameters: HeadParameters
    response: Tensor


class Head:
    """Features [B, D] -> logits [B, K], learned by AdamW with decay of the matrix alone.

    Args:
        config: settings of the run.
        classes: K.
        device: where it lives.
        dtype: fp32, or float64 for checks.
    """

    def __init__(self, config: Config, classes: int, device: torch.device, dtype: torch.dtype = torch.float32) -> None:
        self.settings = config.multilevel
        self.betas, self.eps = (config.optimizer.beta1, config.optimizer.beta2), config.optimizer.eps
        shape = (classes, config.model.hidden_size)
        weight = initial_tensor(config.training.seed, "head.weight", shape, HEAD_DEVIATION).to(device, dtype)
        self.own = HeadParameters(
            weight=nn.Parameter(weight), bias=nn.Parameter(torch.zeros(classes, device=device, dtype=dtype))
        )
        groups = decay_groups(self._named(), self.settings.head_weight_decay)
        self.optimizer = torch.optim.AdamW(groups, lr=self.settings.head_lr, betas=self.betas, eps=self.eps)
        for _, parameter in self._named():
            state = empty_adamw_state(parameter.detach())
            self.optimizer.state[parameter] = {**state, "step": state["step"].cpu()}

    def _named(self) -> list[tuple[str, nn.Parameter]]:
        return [("weight", cast(nn.Parameter, self.own.weight)), ("bias", cast(nn.Parameter, self.own.bias))]

    def _tensors(self) -> list[Tensor]:
        """Weights and moments."""
        states = [self.optimizer.state[parameter] for _, parameter in self._named()]
        moments = [state[name] for state in states for name in STATE_NAMES]
        return [self.own.weight.detach(), self.own.bias.detach(), *moments]

    @property
    def parameters(self) -> HeadParameters:
        """A copy that stays as it is when the head steps; takes part in no graph."""
        return HeadParameters(weight=self.own.weight.detach().clone(), bias=self.own.bias.detach().clone())

    def prepare(self, features: Tensor, dropout_seed: int | None) -> Tensor:
        """[B, D] -> [B, D] what the layer sees. A seed means that the head learns: the same seed drops the same."""
        if self.settings.head_norm == "layer":
            features = F.layer_norm(features, features.shape[-1:])
        if dropout_seed is not None and self.settings.head_dropout > 0:
            reseed(features.device, dropout_seed)
            features = F.dropout(features, self.settings.head_dropout)
        return features

    def loss(
        self, features: Tensor, labels: Tensor, weights: Tensor, parameters: HeadParameters, dropout_seed: int | None
    ) -> Tensor:
        """0-dimensional: sum of the rows' cross-entropies, each times its weight.

        Args:
            features: [B, D]; labels: [B] int64; weights: [B], 0 for rows that are not there.
        """
        logits = F.linear(self.prepare(features, dropout_seed), parameters.weight, parameters.bias)
        known = torch.where(weights > 0, labels, torch.zeros_like(labels))  # rows that are not there have label -1
        return (F.cross_entropy(logits, known, reduction="none") * weights).sum()

    def descend(self, gradient: Tensor, scale: float) -> HeadStep:
        """Commit a step of AdamW; where the gradient is not finite, only the count of its bias correction does.

        Args:
            gradient: [K D + K] of the global batch's mean loss.
            scale: share of the peak learning rate.
        """
        lr, before = self.settings.head_lr * scale, self.parameters
        # Decided on the device: the host would have to wait to know.
        finite = gradient.isfinite().all()
        kept = [tensor.clone() for tensor in self._tensors()]
        parts = self.own.like(gradient)
        self.own.weight.grad, self.own.bias.grad = parts.weight.clone(), parts.bias.clone()
        set_learning_rate(self.optimizer, lr)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            for tensor, value in zip(self._tensors(), kept, strict=True):
                tensor.copy_(torch.where(finite, tensor, value))
        states = [self.optimizer.state[parameter] for _, parameter in self._named()]
        beta1, beta2 = self.betas
        steps = float(states[0]["step"])  # on the host, also where the head is on a GPU
        square = torch.cat([state["exp_avg_sq"].reshape(-1) for state in states]) / (1 - beta2**steps)
        response = lr * (1 - beta1) / (1 - beta1**steps) / (square.sqrt() + self.eps)
        return HeadStep(before=before, parameters=self.parameters, response=response)

    def look_ahead(self, gradient: Tensor, scale: float) -> HeadStep:
        """A step of gradient descent that is not kept (eq. 7)."""
        lr = self.settings.head_lr * scale
        present = self.parameters
        moved = present.like(present.flat() - lr * gradient)
        return HeadStep(before=present, parameters=moved, response=torch.full_like(gradient, lr))

    def state_dict(self) -> dict[str, Any]:
        """For the checkpoint: the layer and its moments, by name."""
        found: dict[str, Any] = {}
        for name, parameter in self._named():
            moments = {key: value.cpu().clone() for key, value in self.optimizer.state.get(parameter, {}).items()}
            found[name] = {"value": parameter.detach().cpu().clone(), **moments}
        return found

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what state_dict gave."""
        for name, parameter in self._named():
            stored = dict(state[name])
            parameter.copy_(stored.pop("value"))
            self.optimizer.state[parameter] = {
                key: value.clone() if key == "step" else value.to(parameter) for key, value in stored.items()
            }


TakeStep = Callable[[Tensor], HeadStep]
"""How the head steps, given the gradient of the global batch."""


def global_sum(group: Group, parts: list[Tensor]) -> list[Tensor]:
    """Tensors summed over ranks in one all-reduce, in float64."""
    flat = group.sum(torch.cat([part.detach().double().reshape(-1) for part in parts]))
    sums = torch.split(flat, [part.numel() for part in parts])
    return [one.view(part.shape).to(part.dtype) for one, part in zip(sums, parts, strict=True)]
