"""Levels II and III: the head learns on D_tr, and the loss on D_val is followed back to the encoder (MLO-MAE eq. 7-11).

The head is linear, so that everything about it is in closed form on the encoder's features. One backward pass through
the encoder then carries both paths: the validation loss's own, and the one by which the encoder changes the head's
step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from trp_scale.config import Config
from trp_scale.core.batch import Batch
from trp_scale.core.engine import Engine
from trp_scale.core.objective import PatchObjective
from trp_scale.core.pieces import Shards
from trp_scale.masks.head import Head, HeadParameters, HeadStep, TakeStep, global_sum
from trp_scale.models.initialise import tensor_seed


@dataclass(frozen=True, kw_only=True)
class Labelled:
    """Features of one micro-batch and what is known of its rows.

    Attributes:
        features: [B, D], B = R k, fp32 at least.
        labels: [B] int64.
        weights: [B], 0 for rows that are not there.
        dropout_seed: while the head learns from them; None where it is only asked.
    """

    features: Tensor
    labels: Tensor
    weights: Tensor
    dropout_seed: int | None = None


class HeadLevel:
    """The head, and the passes of the encoder that it needs.

    Args:
        config: settings of the run.
        objective: cuts images into patches.
        head: the head.
    Attributes:
        train_loss, validation_loss: mean cross-entropies of the last update, 0-dimensional; None before it.
    """

    def __init__(self, config: Config, objective: PatchObjective, head: Head) -> None:
        self.config, self.objective, self.head = config, objective, head
        self.train_loss: Tensor | None = None
        self.validation_loss: Tensor | None = None

    def features(self, engine: Callable[..., Any], batches: Sequence[Batch]) -> list[Tensor]:
        """[B, D] of each micro-batch, of whole images, in one forward pass over all of them."""
        patches = [self.objective.patches(batch) for batch in batches]  # [B, N, P] each
        joined = torch.cat(patches)
        every = torch.arange(joined.shape[1], device=joined.device).expand(len(joined), -1)
        tokens = engine(joined, every, every[:, :0], give="features")  # [sum B, 1 + N, D]
        pooled = tokens[:, 0] if self.config.multilevel.pooling == "class" else tokens[:, 1:].mean(1)
        wide = pooled.to(torch.promote_types(pooled.dtype, self.head.own.weight.dtype))
        return list(wide.split([len(each) for each in patches]))

    def labelled(self, features: Tensor, batch: Batch, *, learning: bool, step: int) -> Labelled:
        """The features beside what is known of their rows."""
        crops = batch["images"].shape[1]
        return Labelled(
            features=features,
            labels=batch["labels"].repeat_interleave(crops),
            weights=batch["row_weights"].repeat_interleave(crops).to(features.dtype),
            dropout_seed=tensor_seed(self.config.training.seed, f"head/{step}/{batch.start}") if learning else None,
        )

    def loss(self, part: Labelled, parameters: HeadParameters) -> Tensor:
        """0-dimensional: sum over the rows."""
        return self.head.loss(part.features, part.labels, part.weights, parameters, part.dropout_seed)

    @torch.no_grad()
    def learn(self, engine: Engine, window: Sequence[Batch], step: int, take: TakeStep) -> HeadStep:
        """A step of the head alone, the encoder as it is (eq. 2, 7)."""
        parts = [self.labelled(self.features(engine, [micro])[0], micro, learning=True, step=step) for micro in window]
        return self.stepped(engine, parts, take)

    def stepped(self, engine: Engine, parts: Sequence[Labelled], take: TakeStep) -> HeadStep:
        """The step that these features give, over all ranks."""
        slopes = [self.slopes(part, self.head.parameters) for part in parts]
        gradient = torch.stack([slope.of_head for slope in slopes]).sum(0)
        loss = torch.stack([slope.loss for slope in slopes]).sum()
        gradient, loss, rows = global_sum(engine.data_group, [gradient, loss, row_count(parts)])
        self.train_loss = loss / rows.clamp(min=1)
        return take(gradient / rows.clamp(min=1))

    def direction(
        self, engine: Engine, train: Sequence[Batch], validation: Sequence[Batch], step: int, take: TakeStep
    ) -> Shards:
        """The head's step, and dL_val / dE at the weights that forwards read now, by both paths (eq. 9).

        Args:
            train: this rank's micro-batches of D_tr.
            validation: of D_val, as many.
            step: number of the run's step.
            take: how the head steps.
        """
        passes = _OnePass if len(train) == len(validation) == 1 else _SeveralPasses
        return engine.gradient_of(passes(self, engine, train, validation, step, take).losses())

    @torch.enable_grad()
    def slopes(self, part: Labelled, parameters: HeadParameters) -> Slopes:
        """First derivatives of the sum of the rows' losses."""
        features, flat = leaf(part.features), leaf(parameters.flat())
        loss = self.loss(replace(part, features=features), parameters.like(flat))
        of_features, of_head = torch.autograd.grad(loss, (features, flat))
        return Slopes(of_features=of_features, of_head=of_head, loss=loss.detach())

    @torch.enable_grad()
    def path(self, part: Labelled, step: HeadStep, of_head: Tensor) -> Tensor:
        """[B, D]: how the features change L_val by changing the head's step, - d <response x of_head, dL / dC> / df
        (eq. 11, whose minus sign is missing in print), for the sum of the rows' losses.

        Args:
            of_head: [K D + K] dL_val / dC after the step.
        """
        features, flat = leaf(part.features), leaf(step.before.flat())
        loss = self.loss(replace(part, features=features), step.before.like(flat))
        (gradient,) = torch.autograd.grad(loss, flat, create_graph=True)
        (path,) = torch.autograd.grad(-(step.response * of_head * gradient).sum(), features)
        return path


@dataclass(frozen=True, kw_only=True)
class Slopes:
    """Derivatives of a sum of losses. Attributes: of_features: [B, D]; of_head: [K D + K]; loss: 0-dimensional."""

    of_features: Tensor
    of_head: Tensor
    loss: Tensor


class _Passes:
    """The losses whose gradient is the direction; see HeadLevel.direction."""

    def __init__(
        self,
        level: HeadLevel,
        engine: Engine,
        train: Sequence[Batch],
        validation: Sequence[Batch],
        step: int,
        take: TakeStep,
    ) -> None:
        self.level, self.engine, self.step, self.take = level, engine, step, take
        self.train, self.validation = train, validation

    def losses(self) -> list[Callable[[], Tensor]]:
        """One for each pass of the encoder."""
        raise NotImplementedError(f"{type(self).__name__} does not say what the encoder is passed through for")

    def learning(self, features: Tensor, batch: Batch) -> Labelled:
        return self.level.labelled(features, batch, learning=True, step=self.step)

    def asking(self, features: Tensor, batch: Batch) -> Labelled:
        return self.level.labelled(features, batch, learning=False, step=self.step)


class _OnePass(_Passes):
    """One micro-batch of each: one pass of the encoder holds both."""

    def losses(self) -> list[Callable[[], Tensor]]:
        return [self.loss]

    def loss(self) -> Tensor:
        level, group = self.level, self.engine.data_group
        features = level.features(self.engine, [*self.train, *self.validation])
        learned, asked = self.learning(features[0], self.train[0]), self.asking(features[1], self.validation[0])
        head_step = level.stepped(self.engine, [learned], self.take)
        slopes = level.slopes(asked, head_step.parameters)
        local = [slopes.of_head, slopes.loss, row_count([learned]), row_count([asked])]
        of_head, loss, rows_train, rows = global_sum(group, local)
        level.validation_loss = loss / rows.clamp(min=1)
        path = level.path(learned, head_step, of_head / rows.clamp(min=1)) / rows_train.clamp(min=1)
        return (learned.features * path).sum() + (asked.features * slopes.of_features / rows.clamp(min=1)).sum()


class _SeveralPasses(_Passes):
    """The head's step needs all features of D_tr before D_val has a slope, and the path through the head all of D_val:
    D_tr is passed through once without a gradient, and once more at the end."""

    def losses(self) -> list[Callable[[], Tensor]]:
        level, group = self.level, self.engine.data_group
        self.head_step = level.learn(self.engine, self.train, self.step, self.take)
        counts = [
            torch.stack([each["row_weights"].sum() * each["images"].shape[1] for each in window]).sum()
            for window in (self.train, self.validation)
        ]
        self.rows_train, self.rows = (rows.clamp(min=1) for rows in global_sum(group, counts))
        self.asked: list[Slopes] = []
        return [
            *(partial(self.asked_loss, micro) for micro in self.validation),
            *(partial(self.learned_loss, micro) for micro in self.train),
        ]

    def asked_loss(self, micro: Batch) -> Tensor:
        part = self.asking(self.level.features(self.engine, [micro])[0], micro)
        slopes = self.level.slopes(part, self.head_step.parameters)
        self.asked.append(slopes)
        return (part.features * slopes.of_features / self.rows).sum()

    def learned_loss(self, micro: Batch) -> Tensor:
        part = self.learning(self.level.features(self.engine, [micro])[0], micro)
        return (part.features * self.level.path(part, self.head_step, self.of_head) / self.rows_train).sum()

    @cached_property
    def of_head(self) -> Tensor:
        """[K D + K] dL_val / dC over all ranks; asked for when all of D_val has gone through."""
        gradient = torch.stack([slopes.of_head for slopes in self.asked]).sum(0)
        loss = torch.stack([slopes.loss for slopes in self.asked]).sum()
        gradient, loss = global_sum(self.engine.data_group, [gradient, loss])
        self.level.validation_loss = loss / self.rows
        return gradient / self.rows


def leaf(values: Tensor) -> Tensor:
    """The same values as the start of a graph of their own."""
    return values.detach().clone().requires_grad_()


def row_count(parts: Sequence[Labelled]) -> Tensor:
    """0-dimensional: rows that are there."""
    return torch.stack([part.weights.sum() for part in parts]).sum()
