"""The training loop. Read aloud it is the method; it knows no method by name. With it: losses over the held-out rows,
and the learning rate of a step. What the ranks agree on before a step is in decisions.py.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trp_scale.checkpoint.writer import CheckpointWriter
from trp_scale.config import Config, OptimizerConfig
from trp_scale.core.batch import Batch, LateStats, WindowSource
from trp_scale.core.engine import Engine, Trains
from trp_scale.core.hooks import Hooks, StepContext
from trp_scale.core.objective import Objective, task_losses
from trp_scale.core.run import RunContext
from trp_scale.data.fetch import StoppedWaitingError
from trp_scale.training.decisions import Best, SpikeWatch, StepAgreement, of_validation
from trp_scale.training.metrics import FINISHED, StepRecord, TaskRecord, worst_task
from trp_scale.training.observer import Observer
from trp_scale.training.rundir import Incidents

SECONDS_AFTER_AN_ERROR = 5.0
"""How long the numbers of the last step are waited for when an error ends the run."""

COLLECT_EVERY = 50
"""Steps from one run of Python's garbage collector to the next. A step leaves it next to nothing: 600 objects in 200
steps, which it looks through in 0.2 ms; all that a run has made before takes it 0.5 s."""


ROLLED_BACK = "going back because of the spike"
"""How the reason begins for which a run ends that goes back to a checkpoint."""

SKIP_WINDOW = 1000
"""Steps among which skipped ones are counted against training.max_skipped_steps."""

CALM_STEPS = 100
"""Applied steps after which a fault is over, and the checkpoint from before it may go."""

ASK_EVERY = 8
"""Batches of a validation from one question to the next whether a rank was asked to stop: one number over all ranks."""


@dataclass(kw_only=True)
class TrainingState:
    """Progress of a run.

    Attributes:
        step: steps done.
        skipped: how many of them moved nothing, a loss scaler's search left out.
        skips: numbers of those among the last SKIP_WINDOW steps.
        unvalidated: the validation of this step was left for a stop.
        roll_back_from: step of a spike, after which the run goes back to a checkpoint before it; 0: there was none.
        fault: first skipped step of the present fault, 0 without one. It ends after CALM_STEPS steps without another.
        last_fault: its last skipped step so far.
    """

    step: int = 0
    skipped: int = 0
    skips: list[int] = field(default_factory=list)
    unvalidated: bool = False
    roll_back_from: int = 0
    fault: int = 0
    last_fault: int = 0

    def record_step(self, step: int, *, skipped: bool) -> None:
        """Count a step whose statistics have been read."""
        if skipped:
            self.skipped += 1
            self.skips = [*(skip for skip in self.skips if skip > step - SKIP_WINDOW), step]
            self.fault, self.last_fault = self.fault or step, step
        elif self.fault and step - self.last_fault >= CALM_STEPS:
            self.fault = 0


@dataclass(frozen=True, kw_only=True)
class PendingStep:
    """A queued step whose statistics have not reached the host.

    Attributes:
        step: its number, from 1.
        late: its numbers, on their way to the host.
        keys: [R] of this rank's rows, a copy; empty where spikes are not looked for.
        searched: a loss scaler's ordinary search left it out; it does not count as skipped.
        step_seconds, processor_seconds, data_wait_seconds, hooks: as in StepRecord.
    """

    step: int
    late: LateStats
    keys: Tensor
    searched: bool
    step_seconds: float
    processor_seconds: float
    data_wait_seconds: float
    hooks: Mapping[str, Any]


@dataclass(kw_only=True)
class RunControl:
    """Callbacks from the loop to the run around it.

    Attributes:
        save: writes a checkpoint of the present state, or begins to.
        validate: losses over the held-out rows, reported to the observer; None where it did not come to its end, on all
            ranks alike: a request to stop ends it.
        stop_requested: reason this rank was asked to stop, or None.
        begin_step: called with the number of each step when it begins; the first is 1.
        waited_seconds: time that the run's sources have kept this rank waiting for windows so far.
        mark: notes where the sources are; what it returns goes back there.
        can_roll_back: whether there is a checkpoint; the same on all ranks.
        checkpoints: those that `save` has begun; None: it writes them whole.
    """

    save: Callable[[], None] = lambda: None
    validate: Callable[[], Mapping[str, Any] | None] = dict
    stop_requested: Callable[[], str | None] = lambda: None
    begin_step: Callable[[int], None] = lambda step: None
    waited_seconds: Callable[[], float] = lambda: 0.0
    mark: Callable[[], Callable[[], None]] = lambda: lambda: None
    can_roll_back: Callable[[], bool] = lambda: False
    checkpoints: CheckpointWriter | None = None
    incidents: Incidents = field(default_factory=lambda: Incidents(Path(), enabled=False))


@dataclass(kw_only=True)
class Trainer:
    """One run's parts, and the loop over its steps.

    Attributes:
        control: what the loop calls on the run around it.
        spikes: judges the numbers of each step; None: nothing does.
        best: judges what is measured; None: no checkpoint is kept for it.
        measured: after this step, by the names of figures.
        pending: the step whose statistics are not on the host yet.
    """

    run_context: RunContext
    hooks: Hooks
    source: WindowSource
    observer: Observer
    agreement: StepAgreement
    control: RunControl = field(default_factory=RunControl)
    spikes: SpikeWatch | None = None
    best: Best | None = None
    state: TrainingState = field(default_factory=TrainingState)
    measured: dict[str, float | None] = field(default_factory=dict, init=False)
    pending: PendingStep | None = field(default=None, init=False)

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
        try:
            with garbage_collected_between_steps() as collect:
                if self._too_many_skipped():  # when it stopped: nothing was changed since
                    return str(self._reason_to_stop(asked=False))
                stop = self._validate() if self.state.unvalidated else None
                if self._better():
                    self.control.save()
                if stop := stop or self._nothing_better():
                    return stop
                while self.state.step < self.config.training.steps:
                    before = self.state.step
                    stop = self.train_step()
                    if self.state.step > before:
                        self.measured.update(self.hooks.measured())
                        if self._due(self.config.validation.every):
                            stop = self._validate() or stop
                    if self.state.roll_back_from:  # what is here is not worth a checkpoint
                        if self.control.checkpoints is not None:
                            self.control.checkpoints.close()
                        return str(stop)
                    better = self._better()
                    stop = stop or self._nothing_better()
                    if stop or better or self._due(self.config.checkpoint.every):
                        self.control.save()
                    stop = stop or self._checkpoints_given_up()
                    if stop:
                        if self.control.checkpoints is not None:
                            self.control.checkpoints.finish(self.control.save)
                        return stop
                    collect(self.state.step)
        except BaseException:
            self._read_what_has_arrived()
            raise
        return FINISHED

    def _validate(self) -> str | None:
        """Validate; returns why that was left, if it was: then it is done first when the run goes on."""
        losses = self.control.validate()
        self.state.unvalidated = losses is None
        if losses:
            self.measured.update(of_validation(losses))
        return self.agreement.reason(self.control.stop_requested()) if self.state.unvalidated else None

    def _better(self) -> bool:
        """Whether what was measured since the last call is the best so far; its step's line is then written."""
        measured, self.measured = self.measured, {}
        if self.best is None or not self.best.judge(self.state.step, measured):
            return False
        self.read_stats()
        self.observer.message(f"the best so far: {self.best}")
        return True

    def _nothing_better(self) -> str | None:
        done = self.state.step >= self.config.training.steps
        return None if self.best is None or done else self.best.given_up()

    def _checkpoints_given_up(self) -> str | None:
        return None if self.control.checkpoints is None else self.control.checkpoints.given_up()

    def train_step(self) -> str | None:
        """One optimizer step; returns why it must be the last, or None.

        Nothing in it waits for the device. The numbers of the step before are read and reported once this one is
        queued; those of this step at once where something needs them.
        """
        self.control.begin_step(self.state.step + 1)
        started, used, waited = time.perf_counter(), time.process_time(), self.control.waited_seconds()
        go_back = self.control.mark()
        window = self._next_window()
        counts = [self.objective.count(micro) for micro in window] or [self._no_counts()]
        written = self.control.checkpoints is not None and self.control.checkpoints.has_written()
        local_counts = torch.stack(counts).sum(0)  # [T], on the host
        agreed = self.agreement.reach(
            local_counts, window, stop=self.control.stop_requested() is not None, written=written
        )
        if agreed.without_rows:
            go_back()
            self.report_unreadable_blocks(f"after step {self.state.step}", agreed.new_corrupt)
            self.read_stats()
            return self._reason_to_stop(asked=True)
        ctx = self.context(window, agreed.counts)
        self.hooks.before_step(ctx)
        sums = torch.zeros_like(ctx.counts)
        for number, micro in enumerate(ctx.window):
            losses = ctx.compute_losses(micro)
            self.engine.backward(self.hooks.total(ctx, losses), last=number == len(window) - 1)
            sums += losses.sums.detach()
        ctx.gather_sums(sums)
        searched = self.finish(ctx)
        ctx.release()
        self.state.step += 1
        self.report_unreadable_blocks(f"step {self.state.step}", agreed.new_corrupt)
        self.read_stats()
        assert ctx.late is not None, "the step is decided"
        self.pending = PendingStep(
            step=self.state.step,
            late=ctx.late,
            keys=torch.empty(0) if self.spikes is None else torch.cat([micro.keys for micro in window]),
            searched=searched,
            step_seconds=time.perf_counter() - started,
            processor_seconds=time.process_time() - used,
            data_wait_seconds=self.control.waited_seconds() - waited,
            hooks=self.hooks.metrics() if self.observer.enabled and self.observer.wants(self.state.step) else {},
        )
        if agreed.written and self.control.checkpoints is not None:
            self.control.checkpoints.settle()
        measured = bool(self.hooks.measured())  # it may be the best, or the reason to stop
        rests = measured or self._due(self.config.validation.every) or self._due(self.config.checkpoint.every)
        if rests or agreed.stop or self._too_many_skipped() or self.state.step >= self.config.training.steps:
            self.read_stats()
        return self._reason_to_stop(agreed.stop)

    def _next_window(self) -> list[Batch]:
        """Empty where the run was asked to stop and rows do not come: no rank makes this step then."""
        try:
            return self.source.next_window()
        except StoppedWaitingError as error:
            self.observer.message(str(error))
            return []

    def _no_counts(self) -> Tensor:
        return torch.zeros(len(self.objective.tasks), dtype=torch.float64)

    def report_unreadable_blocks(self, when: str, reasons: Mapping[str, str]) -> None:
        """Log the blocks that could not be read."""
        for key, reason in reasons.items():
            why = f" ({reason})" if reason else ""
            self.observer.message(f"{when}: block {key} could not be read and is left out{why}")
            self.control.incidents.add("unreadable", self.state.step, key=key, reason=reason)

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

    def finish(self, ctx: StepContext) -> bool:
        """Update, or skip on all ranks together when the loss or the gradient is not finite.

        Returns:
            whether a loss scaler's ordinary search left the step out.
        """
        self.hooks.gradients(ctx)
        ctx.decide(self.engine.check_gradients(), None if self.spikes is None else self.spikes.limits(ctx.step + 1))
        searched = False
        if self.engine.decides_on_host and not ctx.stats().applied:
            searched = self.engine.skip()
        else:
            self.engine.step(ctx.lr, ctx.applied)
        self.hooks.after_step(ctx)
        return searched

    def read_stats(self, *, judge: bool = True) -> None:
        """Read and report the step that is pending, if one is; waits until the device has made it.

        Args:
            judge: look for spikes, on all ranks together.
        """
        if self.pending is not None:
            pending, self.pending = self.pending, None
            self.state.record_step(pending.step, skipped=not (pending.late.read().applied or pending.searched))
            self.report(pending)
            if judge and self.spikes is not None:
                self._judge(pending, self.spikes)

    def _judge(self, pending: PendingStep, spikes: SpikeWatch) -> None:
        """Look for spikes in a step; the same on all ranks, whose numbers are the same."""
        detected, action = spikes.judge(pending.step, pending.late.read()), spikes.settings.spikes
        if not detected:
            return
        rows = [key for keys in self.agreement.group.gather_objects(pending.keys.tolist()) for key in keys]
        self.observer.message(f"step {pending.step}: a spike: {', '.join(map(str, detected))}")
        self.control.incidents.add(
            "spike",
            pending.step,
            action=action,
            found=[spike._asdict() for spike in detected],
            keys=rows,
        )
        if action == "rollback" and self.control.can_roll_back():
            self.state.roll_back_from = self.state.roll_back_from or pending.step

    def _read_what_has_arrived(self) -> None:
        """Before an error is passed on. A device may wait for a rank that is gone: give it a few seconds."""
        until = time.monotonic() + SECONDS_AFTER_AN_ERROR
        while self.pending is not None and not self.pending.late.has_arrived() and time.monotonic() < until:
            time.sleep(0.01)
        if self.pending is not None and self.pending.late.has_arrived():
            self.read_stats(judge=False)

    def report(self, pending: PendingStep) -> None:
        """Hand the step to the observer; an absent task has count 0 and no loss."""
        if not self.observer.enabled:
            return
        stats = pending.late.read()
        columns = zip(self.objective.tasks, stats.task_losses, stats.task_weights, stats.task_counts, strict=True)
        record = StepRecord(
            step=pending.step,
            loss=stats.loss,
            lr=stats.lr,
            grad_norm=stats.grad_norm,
            tasks={
                task: TaskRecord(loss=loss if count else None, weight=weight if count else 0.0, count=int(count))
                for task, loss, weight, count in columns
            },
            step_seconds=pending.step_seconds,
            processor_seconds=pending.processor_seconds,
            data_wait_seconds=pending.data_wait_seconds,
            applied=stats.applied,
            hooks=pending.hooks,
        )
        self.observer.step(record)

    def _too_many_skipped(self) -> bool:
        return len(self.state.skips) > self.config.training.max_skipped_steps

    def _reason_to_stop(self, asked: bool) -> str | None:
        if self._too_many_skipped():
            allowed = self.config.training.max_skipped_steps
            return f"{len(self.state.skips)} steps skipped, --training.max_skipped_steps allows {allowed}"
        if self.state.roll_back_from:
            return f"{ROLLED_BACK} of step {self.state.roll_back_from}"
        if self.state.step >= self.config.training.steps:  # whoever asks: nothing is left that could be stopped
            return FINISHED
        return self.agreement.reason(self.control.stop_requested()) if asked else None

    def _due(self, every: int) -> bool:
        return every > 0 and (self.state.step % every == 0 or self.state.step >= self.config.training.steps)


@contextmanager
def garbage_collected_between_steps() -> Iterator[Callable[[int], None]]:
    """Python's collector of reference cycles runs when it is asked to, at the same steps on all ranks. By itself it
    would run in the middle of a step, on each rank in another one, and all ranks wait for the slowest.

    What there is when training begins, and after the first step, which compiles and makes the optimizer's state, is set
    aside until the end: the collector does not look through it again.

    Yields:
        what is called after each step, with its number from 1.
    """

    begun = False

    def set_aside() -> None:
        gc.collect()
        gc.freeze()

    def collect(step: int) -> None:
        nonlocal begun
        if not begun:
            begun = True
            set_aside()
        elif step % COLLECT_EVERY == 0:
            gc.collect()

    by_itself = gc.isenabled()
    set_aside()
    gc.disable()
    try:
        yield collect
    finally:
        gc.unfreeze()
        if by_itself:
            gc.enable()


@torch.no_grad()
def validate(
    engine: Trains,
    objective: Objective,
    batches: Iterable[Batch],
    corrupt: dict[str, str],
    *,
    leave: Callable[[], bool] = lambda: False,
) -> dict[str, Any] | None:
    """Mean loss of each task over the split, without dropout; all ranks call it with as many batches.

    Args:
        corrupt: why blocks could not be read is added to it, by their keys.
        leave: asked after each ASK_EVERY batches whether to leave it; the same on all ranks.

    Returns:
        None if it was left; else
        {"loss": mean over the balanced tasks that occur, or where none is balanced over all that do; None if none does,
         "worst_task": of the balanced tasks (training/metrics.py: worst_task),
         "tasks": {name: {"loss": mean over its elements or None, "count": elements,
                          "accuracy": share of them that are right, where the objective knows}}}
    """
    engine.train(False)
    size = len(objective.tasks)
    sums = torch.zeros(3, size, dtype=torch.float64, device=engine.device)
    judged = False
    for number, batch in enumerate(batches, 1):
        corrupt.update((key, batch.reasons.get(key, "")) for key in batch.corrupt)
        if number % ASK_EVERY == 0 and leave():
            engine.train(True)
            return None
        losses = task_losses(objective, engine, batch.to(engine.device))
        judged = losses.hits is not None
        sums += torch.stack([losses.sums, losses.counts, losses.counts if losses.hits is None else losses.hits])
    engine.train(True)
    totals, counts, hits = engine.data_group.sum(sums).tolist()
    tasks: dict[str, dict[str, Any]] = {
        name: {"loss": total / count if count else None, "count": int(count)}
        for name, total, count in zip(objective.tasks, totals, counts, strict=True)
    }
    if judged:
        for task, right in zip(tasks.values(), hits, strict=True):
            task["accuracy"] = right / task["count"] if task["count"] else None
    indices = objective.balanced or range(size)
    balanced = {name: tasks[name]["loss"] for name in (objective.tasks[index] for index in indices)}
    known = {name: loss for name, loss in balanced.items() if loss is not None}
    return {
        "loss": sum(known.values()) / len(known) if known else None,
        "worst_task": worst_task(known, {name: tasks[name]["count"] for name in known}),
        "tasks": tasks,
    }


def learning_rate(step: int, steps: int, config: OptimizerConfig) -> float:
    """Learning rate of step `step` (from 0) of `steps`.

    Linear warm-up over `warmup_steps`: the first step has lr / warmup_steps, the last of the warm-up the full lr. After
    it linear or cosine decay to `min_lr`, decay with the root of the step, or none. The decay is that of transformers,
    (steps - step) / (steps - warmup_steps), or reaches its end one step earlier (`decay_end`).
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    if config.schedule == "inverse_sqrt":
        return max(config.min_lr, config.lr * math.sqrt(max(1, config.warmup_steps) / (step + 1)))
    if config.schedule == "constant":
        return config.lr
    decay_steps = steps - config.warmup_steps - (config.decay_end == "last_step")
    done = min(1.0, (step - config.warmup_steps) / decay_steps) if decay_steps > 0 else 1.0
    factor = 1.0 - done if config.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return config.min_lr + (config.lr - config.min_lr) * factor
