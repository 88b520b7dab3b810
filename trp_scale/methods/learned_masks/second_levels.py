"""Alternatives to a head on the frozen encoder. Joint: encoder, decoder and head learn in one step (BLO-MAE, MLO-MAE
eq. 5). Fine-tuning: a second encoder, kept near the first, learns with the head (MLO-MAE D.5, eq. 13)."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from trp_scale.config.images import MaskedAutoencoderConfig
from trp_scale.core.batch import Batch, Extra, TaskLosses
from trp_scale.core.engine import Engine
from trp_scale.core.hooks import StepContext
from trp_scale.core.pieces import Shards, foreach_chunks
from trp_scale.core.run import PatchObjective, RunContext
from trp_scale.methods.learned_masks.finite_difference import MaskDerivative, Weights, whole
from trp_scale.methods.learned_masks.head import Head, HeadLevel, global_rows, global_sum, leaf
from trp_scale.methods.learned_masks.hypergradient import Clock, ValidationLoss, on_device
from trp_scale.methods.learned_masks.masks import MaskedWindow
from trp_scale.methods.learned_masks.settings import FineTuningSettings

HEAD, STEP = Extra("head"), Extra("step")
"""Extras of a micro-batch of D_tr: the head as a leaf [K D + K], and the step number."""


class JointObjective(PatchObjective):
    """Inner objective of eq. 5, gamma x reconstruction + classification. gamma weighs both tasks, so neither is
    balanced and only the balancer uniform is allowed.

    Joined micro-batches are of D_tr. Their crops are the elements of the last task, the mean cross-entropy of the head
    on the encoder's features of whole images. Other micro-batches, including held-out rows, have only the tasks of the
    reconstruction.

    Args:
        reconstruction: objective on D_u.
        classes: K.
        device, dtype: of the head.
    Attributes:
        level: the head and its passes through the encoder.
    """

    balanced: tuple[int, ...] = ()
    in_a_graph = False  # the host reads the step number

    def __init__(
        self,
        config: MaskedAutoencoderConfig,
        reconstruction: PatchObjective,
        *,
        classes: int,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.gamma = config.multilevel.gamma
        self.reconstruction = reconstruction
        self.tasks = (*reconstruction.tasks, "classification")
        self.regression = reconstruction.regression
        self.level = HeadLevel(config, reconstruction, Head(config, classes, device, dtype))

    def count(self, batch: Batch) -> Tensor:
        """Return the elements of the reconstruction's tasks and the crops with a class, [T] float64; one of the two is
        0."""
        if not batch.joined:
            return append_value(self.reconstruction.count(batch))
        crops = batch["row_weights"].double().sum() * batch["images"].shape[1]
        return torch.cat([crops.new_zeros(len(self.tasks) - 1), crops.reshape(1)])

    def outside_weights(self, counts: Tensor) -> Tensor:
        """Return gamma, split equally among the balanced tasks of the reconstruction, and 1 for classification."""
        weights = append_value(self.reconstruction.outside_weights(counts[:-1]), 1.0)
        for position in self.reconstruction.balanced:
            weights[position].fill_(self.gamma / len(self.reconstruction.balanced))
        return weights

    def __call__(self, forward: Callable[..., Any], batch: Batch) -> TaskLosses:
        """Return the task losses; the sums are float64."""
        if not batch.joined:
            return pad_absent_task(self.reconstruction(forward, batch))
        level, head, step = self.level, batch.extras[HEAD], int(batch.extras[STEP])
        part = level.head_input(level.features(forward, [batch])[0], batch, learning=True, step=step)
        loss = level.head.loss(part, level.head.own.like(head)).double()
        absent = loss.new_zeros(len(self.tasks) - 1)
        return TaskLosses(sums=torch.cat([absent, loss.reshape(1)]), counts=self.count(batch))

    def losses(self, errors: Tensor, batch: Batch) -> TaskLosses:
        """Return the losses for errors [R, k, M], linear in them. The last task is absent."""
        return pad_absent_task(self.reconstruction.losses(errors, batch))

    def errors(self, forward: Callable[..., Any], batch: Batch) -> Tensor:
        """Return the error of each masked patch, [R, k, M]."""
        return self.reconstruction.errors(forward, batch)

    def patches(self, batch: Batch, pixel_shift: Tensor | None = None) -> Tensor:
        """Return the patches of the batch's crops, [B, N, P]."""
        return self.reconstruction.patches(batch, pixel_shift)


def pad_absent_task(losses: TaskLosses) -> TaskLosses:
    """Append an absent last task, [T - 1] -> [T]."""
    return TaskLosses(sums=append_value(losses.sums), counts=append_value(losses.counts))


def append_value(values: Tensor, last: float = 0.0) -> Tensor:
    """Append a value, [T - 1] -> [T]."""
    return torch.cat([values, values.new_full((1,), last)])


class JointValidationLoss(ValidationLoss):
    """L_val after a joint inner step. The head is a leaf outside the engine. The pass that trains the weights gives its
    gradient, and its own AdamW steps whenever the weights do.

    The head's step, C' = C - eta grad_C L_cls(D_tr; E, C), uses the encoder before the inner step. The masks therefore
    act on L_val only through E', by gamma x L_rec; the task weights of the step contain gamma.
    """

    def __init__(self, run: RunContext, derivative: MaskDerivative, clock: Clock) -> None:
        super().__init__(run, derivative, clock)
        self.leaf = leaf(self.level.head.parameters.flat())
        self.gradient = torch.zeros_like(self.leaf, requires_grad=False)

    def head_level(self, run: RunContext) -> HeadLevel:
        """Return the level of the joint objective."""
        assert isinstance(run.objective, JointObjective), "the upstream makes the objective of this kind"
        return run.objective.level

    def counts(self, ctx: StepContext, window: MaskedWindow) -> Tensor:
        return torch.cat([window.counts[:-1], ctx.counts[-1:]])  # classification is the last task

    def joined_view(self, ctx: StepContext, micro: Batch) -> Batch:
        return micro.adding({HEAD: self.leaf, STEP: torch.tensor(ctx.step)})

    def gradients(self, ctx: StepContext) -> None:
        self.gradient = ctx.reduced_gradient(self.leaf)

    def after_step(self, ctx: StepContext) -> None:
        self.level.train_loss = ctx.losses[-1]
        self.level.head.adamw_step(self.gradient, self.scale(ctx))
        self.leaf = leaf(self.level.head.parameters.flat())

    def head_step(self, ctx: StepContext) -> None:
        """Do nothing: the head learns in every inner step."""

    def encoder_gradient(self, ctx: StepContext) -> Shards:
        return self.direct_path(ctx, ctx.engine)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.leaf = leaf(self.level.head.parameters.flat())


FINE_TUNED = "fine_tuned"
"""Name of the second encoder's engine, and prefix of its tensors in a checkpoint."""


class FineTunedValidationLoss(ValidationLoss):
    """L_val of a second encoder F and the head. Both learn on D_tr at the end of each cycle.

    F takes a step of the run's optimizer down L_cls(D_tr; F, C) and moves towards E, at the same learning rate:
    F' = F - step(grad L_cls) - 2 eta lambda (F - E). With plain gradient descent this is the step down
    L_cls + lambda ||F - E||^2. Like weight decay, the move does not enter AdamW's moments. The head's step depends on F
    alone, so the masks act on L_val by dF' / dE = 2 eta lambda.

    Attributes:
        tuned: engine of F, sharded like the run's engine.
    """

    settings: FineTuningSettings

    def __init__(self, run: RunContext, derivative: MaskDerivative, clock: Clock) -> None:
        super().__init__(run, derivative, clock)
        self.tuned = second_encoder(run)
        self.distance: Tensor | None = None

    def head_step(self, ctx: StepContext) -> None:
        with self.clock("head"):
            self.learn(ctx, on_device(self.sources.train.next_window(), ctx))

    def encoder_gradient(self, ctx: StepContext) -> Shards:
        self.head_step(ctx)
        return self.direct_path(ctx, self.tuned).times(self.settings.pull(ctx.lr))

    def outer_encoder(self, ctx: StepContext, after: Weights, response: Weights) -> tuple[Weights, Weights]:
        """Return F and its derivative: F moves by the share dF' / dE of the move of E."""
        pulled = {name: self.settings.pull(ctx.lr) * value for name, value in response.items()}
        return whole(self.tuned, self.tuned.weights()), pulled

    def learn(self, ctx: StepContext, window: list[Batch]) -> None:
        """Make a step of F and of the head. F moves towards E even if its gradient is not finite, so that dF' / dE does
        not change."""
        level, tuned = self.level, self.tuned
        rows = global_rows(tuned, window)
        offset = distance_between(ctx.engine, tuned)
        head = leaf(level.head.parameters.flat())
        losses: list[Tensor] = []
        tuned.clear_unused_gradients()  # the decoder is not used
        for number, micro in enumerate(window):
            part = level.head_input(level.features(tuned, [micro])[0], micro, learning=True, step=ctx.step)
            losses.append(level.head.loss(part, level.head.own.like(head)) / rows)
            tuned.backward(losses[-1], last=number == len(window) - 1)
            losses[-1] = losses[-1].detach()
        assert head.grad is not None, "every micro-batch passes the head"
        gradient = tuned.reduce_hook_gradient(head.grad)
        (level.train_loss,) = global_sum(tuned.data_group, [torch.stack(losses).sum()])
        if math.isfinite(float(tuned.check_gradients())):  # waits for the device once per cycle
            tuned.step(ctx.lr)
            level.head.adamw_step(gradient, self.scale(ctx))
        else:
            tuned.skip()
        self.distance = offset.norm()
        move(tuned, offset, self.settings.pull(ctx.lr))

    def engines(self) -> Mapping[str, Engine]:
        return {FINE_TUNED: self.tuned}

    def metrics(self) -> Mapping[str, Any]:
        """Return the metrics and `distance`: ||F - E|| before the last update."""
        return {**super().metrics(), "distance": self.distance}


def second_encoder(run: RunContext) -> Engine:
    """Return an engine with a copy of the run's model and weights. It includes the unused decoder, so that both engines
    are sharded alike."""
    assert run.make_engine is not None and run.make_model is not None, "the run can make a second encoder"
    engine, tuned = run.engine, run.make_engine(run.make_model(), copy.deepcopy(run.config))
    tuned.create_optimizer_state()  # also of the decoder: checkpoints contain it, but no step creates it
    with torch.no_grad():
        for mine, theirs in foreach_chunks(current_weights(tuned).parts, current_weights(engine).parts):
            torch._foreach_copy_(mine, theirs)
    tuned.publish_weights()
    return tuned


def current_weights(engine: Engine) -> Shards:
    """Return the weights without a copy."""
    pieces = list(engine.pieces())
    return Shards(
        parts=[piece.tensors["weight"] for piece in pieces],
        owned=[piece.owner for piece in pieces],
        group=engine.shard_group,
    )


@torch.no_grad()
def distance_between(engine: Engine, tuned: Engine) -> Shards:
    """Return the weights of the first engine minus those of the second."""
    return current_weights(engine).plus(current_weights(tuned), -1.0)


@torch.no_grad()
def move(engine: Engine, offset: Shards, share: float) -> None:
    """Add share x offset to the weights in place."""
    for weights, parts in foreach_chunks(current_weights(engine).parts, offset.parts):
        torch._foreach_add_(weights, parts, alpha=share)
    engine.publish_weights()
