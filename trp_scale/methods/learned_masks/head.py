"""Stages II and III: the classification head C learns on D_tr (MLO-MAE eq. 2, 7), and the loss on D_val is
differentiated by the encoder (eq. 3, 9, 11).

C is one linear layer, replicated on all ranks, and its derivatives by the features are in closed form. One backward
pass through the encoder computes both paths of eq. 9: the gradient of the validation loss, and the change of the head's
step by the encoder.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trp_scale.config.images import MaskedAutoencoderConfig
from trp_scale.core.batch import Batch
from trp_scale.core.engine import Engine
from trp_scale.core.pieces import STATE_NAMES, Shards
from trp_scale.core.run import PatchObjective, reseed, tensor_seed
from trp_scale.distributed.groups import Group
from trp_scale.engines.optimizer import decay_groups, empty_state, set_learning_rate
from trp_scale.methods.learned_masks.settings import LabelledSettings
from trp_scale.models.initialise import initial_tensor


@dataclass(frozen=True, kw_only=True)
class HeadParameters:
    """Weight [K, D] and bias [K] of the head."""

    weight: Tensor
    bias: Tensor

    def flat(self) -> Tensor:
        """Return the parameters as one vector, [K D + K]."""
        return torch.cat([self.weight.reshape(-1), self.bias])

    def like(self, flat: Tensor) -> HeadParameters:
        """Return parameters with these values, [K D + K]."""
        size = self.weight.numel()
        weight, bias = flat[:size], flat[size:]
        return HeadParameters(weight=weight.view_as(self.weight), bias=bias)


@dataclass(frozen=True, kw_only=True)
class HeadStep:
    """A step of the head.

    Attributes:
        before, parameters: C and C'.
        response: elementwise derivative of C - C' by the gradient, [K D + K]; eta_C for gradient descent.
    """

    before: HeadParameters
    parameters: HeadParameters
    response: Tensor


@dataclass(frozen=True, kw_only=True)
class HeadInput:
    """Features, labels and weights of one micro-batch.

    Attributes:
        features: [B, D], B = R k, at least fp32.
        labels: [B] int64.
        weights: [B], 0 for padding rows.
        dropout_seed: set for D_tr; `None` for D_val, which has no dropout.
    """

    features: Tensor
    labels: Tensor
    weights: Tensor
    dropout_seed: int | None = None


class Head:
    """Features [B, D] -> logits [B, K], trained by AdamW with decay of the matrix only.

    Args:
        classes: K.
        dtype: fp32, or float64 for checks.
    """

    def __init__(
        self, config: MaskedAutoencoderConfig, classes: int, device: torch.device, dtype: torch.dtype = torch.float32
    ) -> None:
        self.settings: LabelledSettings = config.multilevel
        self.betas, self.eps = (config.optimizer.beta1, config.optimizer.beta2), config.optimizer.eps
        shape = (classes, config.model.hidden_size)
        # The standard deviation is that of a linear probe (He et al., A.1).
        weight = initial_tensor(config.training.seed, "head.weight", shape, 0.01).to(device, dtype)
        self.own = HeadParameters(
            weight=nn.Parameter(weight), bias=nn.Parameter(torch.zeros(classes, device=device, dtype=dtype))
        )
        groups = decay_groups(self._names(), self.settings.head_weight_decay)
        self.optimizer = torch.optim.AdamW(groups, lr=self.settings.head_lr, betas=self.betas, eps=self.eps)
        for _, parameter in self._names():
            state = empty_state(self.optimizer, parameter.detach())
            self.optimizer.state[parameter] = {**state, "step": state["step"].cpu()}

    def _names(self) -> list[tuple[str, nn.Parameter]]:
        return [("weight", cast(nn.Parameter, self.own.weight)), ("bias", cast(nn.Parameter, self.own.bias))]

    def _tensors(self) -> list[Tensor]:
        """Weights and moments."""
        states = [self.optimizer.state[parameter] for _, parameter in self._names()]
        moments = [state[name] for state in states for name in STATE_NAMES]
        return [self.own.weight.detach(), self.own.bias.detach(), *moments]

    @property
    def parameters(self) -> HeadParameters:
        """Return a detached copy, which later steps do not change."""
        return HeadParameters(weight=self.own.weight.detach().clone(), bias=self.own.bias.detach().clone())

    def loss(self, part: HeadInput, parameters: HeadParameters) -> Tensor:
        """Return the weighted sum of the rows' cross-entropies, 0-dimensional. Equal dropout seeds drop equal
        elements."""
        features = part.features
        if self.settings.head_norm == "layer":
            features = F.layer_norm(features, features.shape[-1:])
        if part.dropout_seed is not None and self.settings.head_dropout > 0:
            reseed(features.device, part.dropout_seed)
            features = F.dropout(features, self.settings.head_dropout)
        logits = F.linear(features, parameters.weight, parameters.bias)
        known = torch.where(part.weights > 0, part.labels, torch.zeros_like(part.labels))  # padding rows have label -1
        return (F.cross_entropy(logits, known, reduction="none") * part.weights).sum()

    def adamw_step(self, gradient: Tensor, scale: float) -> HeadStep:
        """Make a step of AdamW. If the gradient is not finite, only the step count of the bias correction changes.

        Args:
            gradient: gradient of the mean loss of the global batch, [K D + K].
            scale: share of the peak learning rate.
        """
        lr, before = self.settings.head_lr * scale, self.parameters
        # Decided on the device, so that the host does not wait.
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
        states = [self.optimizer.state[parameter] for _, parameter in self._names()]
        beta1, beta2 = self.betas
        steps = float(states[0]["step"])  # always on the host
        square = torch.cat([state["exp_avg_sq"].reshape(-1) for state in states]) / (1 - beta2**steps)
        response = lr * (1 - beta1) / (1 - beta1**steps) / (square.sqrt() + self.eps)
        return HeadStep(before=before, parameters=self.parameters, response=response)

    def gradient_step(self, gradient: Tensor, scale: float) -> HeadStep:
        """Return a step of gradient descent (eq. 7) without changing the head."""
        lr = self.settings.head_lr * scale
        present = self.parameters
        moved = present.like(present.flat() - lr * gradient)
        return HeadStep(before=present, parameters=moved, response=torch.full_like(gradient, lr))

    def state_dict(self) -> dict[str, Any]:
        """Return the parameters and their moments, by name."""
        state: dict[str, Any] = {}
        for name, parameter in self._names():
            moments = {key: value.cpu().clone() for key, value in self.optimizer.state.get(parameter, {}).items()}
            state[name] = {"value": parameter.detach().cpu().clone(), **moments}
        return state

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the result of `state_dict`."""
        for name, parameter in self._names():
            stored = dict(state[name])
            parameter.copy_(stored.pop("value"))
            self.optimizer.state[parameter] = {
                key: value.clone() if key == "step" else value.to(parameter) for key, value in stored.items()
            }


HeadRule = Callable[[Tensor], HeadStep]
"""Update rule of the head: gradient of the global batch -> step."""


@dataclass(frozen=True, kw_only=True)
class LossGradients:
    """A sum of losses (0-dimensional) and its gradients by the features [B, D] and by the head [K D + K]."""

    by_features: Tensor
    by_head: Tensor
    loss: Tensor


class HeadLevel:
    """The head and its passes through the encoder.

    Attributes:
        train_loss, validation_loss: mean cross-entropies of the last head step, 0-dimensional; `None` before it.
    """

    def __init__(self, config: MaskedAutoencoderConfig, objective: PatchObjective, head: Head) -> None:
        self.config, self.objective, self.head = config, objective, head
        self.train_loss: Tensor | None = None
        self.validation_loss: Tensor | None = None

    def features(self, engine: Callable[..., Any], batches: Sequence[Batch]) -> list[Tensor]:
        """Return the features [B, D] of the whole images of each micro-batch, in one forward pass over all of them."""
        patches = [self.objective.patches(batch) for batch in batches]  # [B, N, P] each
        joined = torch.cat(patches)
        every = torch.arange(joined.shape[1], device=joined.device).expand(len(joined), -1)
        tokens = engine(joined, every, every[:, :0], output="features")  # [sum B, 1 + N, D]
        pooled = tokens[:, 0] if self.config.multilevel.pooling == "class" else tokens[:, 1:].mean(1)
        wide = pooled.to(torch.promote_types(pooled.dtype, self.head.own.weight.dtype))
        return list(wide.split([len(part) for part in patches]))

    def head_input(self, features: Tensor, batch: Batch, *, learning: bool, step: int) -> HeadInput:
        """Return the features with labels, weights and dropout seed of their rows."""
        crops = batch["images"].shape[1]
        return HeadInput(
            features=features,
            labels=batch["labels"].repeat_interleave(crops),
            weights=batch["row_weights"].repeat_interleave(crops).to(features.dtype),
            dropout_seed=tensor_seed(self.config.training.seed, f"head/{step}/{batch.start}") if learning else None,
        )

    @torch.no_grad()
    def frozen_step(self, engine: Engine, window: Sequence[Batch], step: int, rule: HeadRule) -> HeadStep:
        """Make a head step on D_tr with the frozen encoder: Stage II (eq. 2, 7)."""
        parts = [
            self.head_input(self.features(engine, [micro])[0], micro, learning=True, step=step) for micro in window
        ]
        return self.head_step(engine, parts, rule)

    def head_step(self, engine: Engine, parts: Sequence[HeadInput], rule: HeadRule) -> HeadStep:
        """Make a head step on these features of all ranks."""
        gradients = [self.gradients(part, self.head.parameters) for part in parts]
        by_head = torch.stack([gradient.by_head for gradient in gradients]).sum(0)
        loss = torch.stack([gradient.loss for gradient in gradients]).sum()
        by_head, loss, rows = global_sum(engine.data_group, [by_head, loss, row_count(parts)])
        self.train_loss = loss / rows.clamp(min=1)
        return rule(by_head / rows.clamp(min=1))

    def encoder_gradient(
        self, engine: Engine, train: Sequence[Batch], validation: Sequence[Batch], step: int, rule: HeadRule
    ) -> Shards:
        """Make the head step C' and return dL_val / dE' at the weights that forwards read now: the bracket of eq. 9.

        Args:
            train: this rank's micro-batches of D_tr.
            validation: the same number of micro-batches of D_val.
            step: number of the run's step.
        """
        if len(train) == len(validation) == 1:
            return engine.compute_gradient([partial(self._loss_of_both, engine, train[0], validation[0], step, rule)])
        return engine.compute_gradient(self._losses_of_several(engine, train, validation, step, rule))

    def _loss_of_both(self, engine: Engine, train: Batch, validation: Batch, step: int, rule: HeadRule) -> Tensor:
        """Return a scalar with the gradient of `encoder_gradient`: one micro-batch each, in one encoder pass."""
        features = self.features(engine, [train, validation])
        learned = self.head_input(features[0], train, learning=True, step=step)
        measured = self.head_input(features[1], validation, learning=False, step=step)
        head_step = self.head_step(engine, [learned], rule)
        gradients = self.gradients(measured, head_step.parameters)
        local = [gradients.by_head, gradients.loss, row_count([learned]), row_count([measured])]
        by_head, loss, rows_train, rows = global_sum(engine.data_group, local)
        self.validation_loss = loss / rows.clamp(min=1)
        path = self.through_head(learned, head_step, by_head / rows.clamp(min=1)) / rows_train.clamp(min=1)
        return (learned.features * path).sum() + (measured.features * gradients.by_features / rows.clamp(min=1)).sum()

    def _losses_of_several(
        self, engine: Engine, train: Sequence[Batch], validation: Sequence[Batch], step: int, rule: HeadRule
    ) -> list[Callable[[], Tensor]]:
        """Return scalars with the gradient of `encoder_gradient`, one encoder pass each.

        The gradient on D_val needs the head step, which needs all features of D_tr. The path through the head needs all
        of D_val. So the encoder runs on D_tr first without a gradient, and again at the end.
        """
        head_step = self.frozen_step(engine, train, step, rule)
        rows_train, rows = global_rows(engine, train), global_rows(engine, validation)
        measured: list[LossGradients] = []

        def validation_loss(micro: Batch) -> Tensor:
            part = self.head_input(self.features(engine, [micro])[0], micro, learning=False, step=step)
            measured.append(self.gradients(part, head_step.parameters))
            return (part.features * measured[-1].by_features / rows).sum()

        @cache
        def sum_validation() -> Tensor:
            """Return dL_val / dC over all ranks, [K D + K]; call it after the passes on D_val."""
            by_head = torch.stack([part.by_head for part in measured]).sum(0)
            loss = torch.stack([part.loss for part in measured]).sum()
            by_head, loss = global_sum(engine.data_group, [by_head, loss])
            self.validation_loss = loss / rows
            return by_head / rows

        def train_loss(micro: Batch) -> Tensor:
            part = self.head_input(self.features(engine, [micro])[0], micro, learning=True, step=step)
            return (part.features * self.through_head(part, head_step, sum_validation()) / rows_train).sum()

        return [
            *(partial(validation_loss, micro) for micro in validation),
            *(partial(train_loss, micro) for micro in train),
        ]

    def direct_gradient(self, engine: Engine, window: Sequence[Batch], step: int) -> Shards:
        """Return dL_val / dE at the weights that forwards read now, with a constant head: the first term of eq. 9.

        Args:
            window: this rank's micro-batches of D_val.
            step: number of the run's step.
        """
        rows = global_rows(engine, window)
        losses: list[Tensor] = []

        def loss(micro: Batch) -> Tensor:
            part = self.head_input(self.features(engine, [micro])[0], micro, learning=False, step=step)
            gradients = self.head.loss(part, self.head.parameters) / rows
            losses.append(gradients.detach())
            return gradients

        gradient = engine.compute_gradient([partial(loss, micro) for micro in window])
        (self.validation_loss,) = global_sum(engine.data_group, [torch.stack(losses).sum()])
        return gradient

    @torch.enable_grad()
    def gradients(self, part: HeadInput, parameters: HeadParameters) -> LossGradients:
        """Return the sum of the rows' losses and its gradients."""
        features, flat = leaf(part.features), leaf(parameters.flat())
        loss = self.head.loss(replace(part, features=features), parameters.like(flat))
        by_features, by_head = torch.autograd.grad(loss, (features, flat))
        return LossGradients(by_features=by_features, by_head=by_head, loss=loss.detach())

    @torch.enable_grad()
    def through_head(self, part: HeadInput, step: HeadStep, by_head: Tensor) -> Tensor:
        """Return dL_val / dC' dC' / df for the features f of D_tr, [B, D] (eq. 9, 11; eq. 11 lacks the minus sign):
        - d <response x by_head, dL / dC> / df for the sum of the rows' losses.

        Args:
            by_head: dL_val / dC after the step, [K D + K].
        """
        features, flat = leaf(part.features), leaf(step.before.flat())
        loss = self.head.loss(replace(part, features=features), step.before.like(flat))
        (gradient,) = torch.autograd.grad(loss, flat, create_graph=True)
        (derivative,) = torch.autograd.grad(-(step.response * by_head * gradient).sum(), features)
        return derivative


def leaf(values: Tensor) -> Tensor:
    """Copy the values to a leaf of a new graph."""
    return values.detach().clone().requires_grad_()


def row_count(parts: Sequence[HeadInput]) -> Tensor:
    """Return the number of rows without padding, 0-dimensional."""
    return torch.stack([part.weights.sum() for part in parts]).sum()


def global_rows(engine: Engine, window: Sequence[Batch]) -> Tensor:
    """Return the number of crops without padding over all ranks, 0-dimensional, at least 1."""
    rows = torch.stack([micro["row_weights"].sum() * micro["images"].shape[1] for micro in window]).sum()
    return global_sum(engine.data_group, [rows])[0].clamp(min=1)


def global_sum(group: Group, parts: list[Tensor]) -> list[Tensor]:
    """Sum tensors over ranks in one float64 all-reduce."""
    flat = group.sum(torch.cat([part.detach().double().reshape(-1) for part in parts]))
    sums = torch.split(flat, [part.numel() for part in parts])
    return [total.view(part.shape).to(part.dtype) for total, part in zip(sums, parts, strict=True)]
