"""The training loop. Read aloud it is the method; it knows no method by name."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from trp_scale.config import Config
from trp_scale.core.batch import Batch, StepStats
from trp_scale.core.engine import Engine
from trp_scale.core.hooks import Hooks, StepContext
from trp_scale.core.objective import Objective
from trp_scale.core.run import RunContext
from trp_scale.observe.observer import Observer
from trp_scale.observe.records import StepRecord, TaskRecord
from trp_scale.training.agreement import StepAgreement
from trp_scale.training.schedule import learning_rate


class WindowSource(Protocol):
    """Where global batches come from."""

    def next_window(self) -> list[Batch]:
        """This rank's micro-batches of the next global batch."""
        ...


@dataclass(kw_only=True)
class TrainingState:
    """What a run has done. Attributes: step: steps done; skipped: how many of them moved nothing, a loss
    scaler's search left out."""

    step: int = 0
    skipped: int = 0


@dataclass(kw_only=True)
class Trainer:
    """One run's parts, and the loop over its steps.

    Attributes:
        run_context: settings, engine and objective.
        save: writes a checkpoint of the present state.
        validate: losses over the held-out rows, reported to the observer.
        stop_requested: reason this rank was asked to stop, or None.
    """

    run_context: RunContext
    hooks: Hooks
    source: WindowSource
    observer: Observer
    agreement: StepAgreement
    save: Callable[[], None]
    validate: Callable[[], None]
    stop_requested: Callable[[], str | None]
    state: TrainingState = field(default_factory=TrainingState)

    @property
    def config(self) -> Config:
        return self.run_context.config

    @property
    def engine(self) -> Engine:
        return self.run_context.engine

    @property
    def objective(self) -> Objective:
        return self.run_context.objective

    def run(self) -> str:
        """Train up to `training.steps`; returns why the loop ended. The last step always has a checkpoint."""
        self.engine.train(True)
        while self.state.step < self.config.training.steps:
            stop = self.train_step()
            if self._due(self.config.validation.every):
                self.validate()
            if stop or self._due(self.config.checkpoint.every):
                self.save()
            if stop:
                return stop
        return "finished"

    def train_step(self) -> str | None:
        """One optimizer step; returns why it must be the last, or None."""
        started = time.perf_counter()
        window = self.source.next_window()
        waited = time.perf_counter() - started
        counts = torch.stack([self.objective.count(micro) for micro in window]).sum(0)  # [T], on the host
        agreed = self.agreement.reach(counts, window, stop=self.stop_requested() is not None)
        ctx = self.context(window, agreed.counts)
        self.hooks.before_step(ctx)
        sums = torch.zeros_like(ctx.counts)
        for number, micro in enumerate(ctx.window):
            losses = ctx.losses_of(micro)
            self.engine.backward(self.hooks.total(ctx, losses), last=number == len(window) - 1)
            sums += losses.sums.detach()
        ctx.gather_sums(sums)
        stats = self.finish(ctx)
        ctx.release()
        self.state.step += 1
        for key in agreed.new_corrupt:
            self.observer.message(f"step {self.state.step}: block {key} could not be read and is left out")
        self.report(stats, step_seconds=time.perf_counter() - started, data_wait_seconds=waited)
        return self._reason_to_stop(agreed.stop)

    def context(self, window: list[Batch], counts: Tensor) -> StepContext:
        """The step as the hooks see it. Counts are the global batch's."""
        device = self.engine.device
        return StepContext(
            run=self.run_context,
            hooks=self.hooks,
            step=self.state.step,
            window=[micro.to(device) for micro in window],
            counts=counts.to(device, non_blocking=True),
            lr=learning_rate(self.state.step, self.config.training.steps, self.config.optimizer),
        )

    def finish(self, ctx: StepContext) -> StepStats:
        """Update, or skip on all ranks together when the loss or the gradient is not finite."""
        self.hooks.gradients(ctx)
        assert ctx.sums is not None and ctx.weights is not None, "the balancer sets the weights of every step"
        means = ctx.means(ctx.sums)
        head = torch.stack([self.engine.check_gradients(), (ctx.weights * means).sum()])
        # The only wait for the device in a step.
        norm, loss, *rest = torch.cat([head, means, ctx.weights, ctx.counts]).tolist()
        tasks = len(means)
        stats = StepStats(
            applied=math.isfinite(norm) and math.isfinite(loss),
            grad_norm=norm,
            loss=loss,
            lr=ctx.lr,
            task_losses=tuple(rest[:tasks]),
            task_weights=tuple(rest[tasks : 2 * tasks]),
            task_counts=tuple(rest[2 * tasks :]),
        )
        if stats.applied:
            self.engine.step(stats.lr)
        else:
            self.state.skipped += not self.engine.skip()
        self.hooks.after_step(ctx, stats)
        return stats

    def report(self, stats: StepStats, *, step_seconds: float, data_wait_seconds: float) -> None:
        """Hand the step to the observer; an absent task has count 0 and no loss."""
        if not self.observer.enabled:
            return
        columns = zip(self.objective.tasks, stats.task_losses, stats.task_weights, stats.task_counts, strict=True)
        record = StepRecord(
            step=self.state.step,
            loss=stats.loss,
            lr=stats.lr,
            grad_norm=stats.grad_norm,
            tasks={
                task: TaskRecord(loss=loss if count else None, weight=weight if count else 0.0, count=int(count))
                for task, loss, weight, count in columns
            },
            step_seconds=step_seconds,
            data_wait_seconds=data_wait_seconds,
            applied=stats.applied,
            hooks=self.hooks.metrics() if self.observer.wants(self.state.step) else {},
        )
        self.observer.step(record)

    def _reason_to_stop(self, asked: bool) -> str | None:
        if self.state.skipped > self.config.training.max_skipped_steps:
            allowed = self.config.training.max_skipped_steps
            return f"{self.state.skipped} steps skipped, --training.max_skipped_steps allows {allowed}"
        if asked:
            return self.stop_requested() or "asked to stop on another rank"
        return "finished" if self.state.step >= self.config.training.steps else None

    def _due(self, every: int) -> bool:
        return every > 0 and (self.state.step % every == 0 or self.state.step >= self.config.training.steps)
