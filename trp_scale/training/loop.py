"""The training loop, validation and the learning rate schedule. The loop contains no method by name. decisions.py has
the agreement of the ranks before a step.
"""

from __future__ import annotations

import copy
import gc
import math
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trp_scale.checkpoint.writer import CheckpointWriter
from trp_scale.config import Config, OptimizerConfig
from trp_scale.core.batch import Batch, LateStats, WindowSource
from trp_scale.core.engine import CapturedGraphs, Engine, Trains
from trp_scale.core.hooks import Hooks, StepContext
from trp_scale.core.run import Objective, RunContext, task_losses
from trp_scale.data.fetch import StoppedWaitingError
from trp_scale.training.decisions import Best, SpikeWatch, StepAgreement, validation_figures
from trp_scale.training.metrics import FINISHED, StepRecord, TaskRecord, worst_task
from trp_scale.training.observer import Observer
from trp_scale.training.rundir import Incidents

SECONDS_AFTER_AN_ERROR = 5.0
"""Wait for the statistics of the last step after an error."""

COLLECT_EVERY = 50
"""Steps between runs of Python's garbage collector. 200 steps leave 600 objects, which it scans in 0.2 ms; the objects
from before training take it 0.5 s."""


ROLLED_BACK = "going back because of the spike"
"""Prefix of the end reason of a run that rolls back."""

SKIP_WINDOW = 1000
"""Number of last steps in which training.max_skipped_steps limits the skipped ones."""

CALM_STEPS = 100
"""Applied steps after which a fault is over and the checkpoint from before it may be removed."""

CAPTURED_DISTANCE = {"fp32": 1e-4, "bf16": 1e-2, "fp16": 1e-2}
"""Largest relative distance of losses and gradient norms with captured graphs from those without, by precision. GPU
kernels that add in any order differ in the last digits."""

ASK_EVERY = 8
"""Validation batches between two exchanges of stop requests (one number over all ranks)."""


@dataclass(kw_only=True)
class TrainingState:
    """Progress of a run.

    Attributes:
        step: steps done.
        skipped: skipped steps, without those of a loss scaler's search.
        skips: step numbers of the skipped ones among the last SKIP_WINDOW steps.
        unvalidated: a stop interrupted the validation of this step.
        roll_back_from: step of the spike that causes a rollback; 0: none.
        fault: first skipped step of the present fault, 0 without one. It ends after CALM_STEPS steps without another.
        last_fault: last skipped step of the present fault.
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
        step: number of the step, from 1.
        late: its statistics, being copied to the host.
        keys: [R] keys of this rank's rows, a copy; empty without spike detection.
        searched: a loss scaler's search skipped the step; it does not count as skipped.
        measured: fields of its StepRecord that are known when it is queued.
    """

    step: int
    late: LateStats
    keys: Tensor
    searched: bool
    measured: Mapping[str, Any]


@dataclass(kw_only=True)
class RunControl:
    """Callbacks from the loop to the run around it.

    Attributes:
        save: writes a checkpoint of the present state, or starts to.
        validate: computes and reports the losses of the held-out rows; None on all ranks if a stop request ended it.
        stop_requested: why this rank was asked to stop, or None.
        begin_step: called with the step number (from 1) when a step starts.
        waited_seconds: seconds that this rank has waited for data so far.
        mark: records the data cursors and returns a function that restores them.
        can_roll_back: whether a checkpoint exists; equal on all ranks.
        shapes: yields a micro-batch of every shape that steps have, equally many on all ranks.
        checkpoints: asynchronous writer; None: `save` writes the whole checkpoint.
    """

    save: Callable[[], None] = lambda: None
    validate: Callable[[], Mapping[str, Any] | None] = dict
    stop_requested: Callable[[], str | None] = lambda: None
    begin_step: Callable[[int], None] = lambda step: None
    waited_seconds: Callable[[], float] = lambda: 0.0
    mark: Callable[[], Callable[[], None]] = lambda: lambda: None
    can_roll_back: Callable[[], bool] = lambda: False
    shapes: Callable[[], Iterable[Batch]] = list
    checkpoints: CheckpointWriter | None = None
    incidents: Incidents = field(default_factory=lambda: Incidents(Path(), enabled=False))


@dataclass(kw_only=True)
class Trainer:
    """Parts of a run, and the loop over its steps.

    Attributes:
        control: callbacks to the run.
        spikes: detects spikes; None: no detection.
        best: tracks the best checkpoint; None: no tracking.
        measured: figures measured after this step, by name.
        pending: the step whose statistics have not reached the host.
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
        """Train up to `training.steps` and return why the loop ended. The last step always has a checkpoint."""
        self.engine.train(True)
        if self.engine.captured_graphs is not None and self.state.step < self.config.training.steps:
            self.rehearse(self.engine.captured_graphs)
        try:
            with garbage_collected_between_steps() as collect:
                if self._too_many_skipped():  # already before the resume
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
                    if self.state.roll_back_from:  # this state needs no checkpoint
                        if self.control.checkpoints is not None:
                            self.control.checkpoints.close()
                        return str(stop)
                    better = self._better()
                    stop = stop or self._nothing_better()
                    if stop or better or self._due(self.config.checkpoint.every):
                        self.control.save()
                    if self.control.checkpoints is not None:
                        stop = stop or self.control.checkpoints.given_up()
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
        """Validate; return the stop reason if a request interrupted it. The resumed run then validates first."""
        losses = self.control.validate()
        self.state.unvalidated = losses is None
        if losses:
            self.measured.update(validation_figures(losses))
        return self.agreement.reason(self.control.stop_requested()) if self.state.unvalidated else None

    def _better(self) -> bool:
        """Whether the figures since the last call are the best so far; if so, write the line of their step."""
        measured, self.measured = self.measured, {}
        if self.best is None or not self.best.judge(self.state.step, measured):
            return False
        self.read_stats()
        self.observer.message(f"the best so far: {self.best}")
        return True

    def _nothing_better(self) -> str | None:
        done = self.state.step >= self.config.training.steps
        return None if self.best is None or done else self.best.given_up()

    def train_step(self) -> str | None:
        """Make one optimizer step; return why it must be the last, or `None`.

        Nothing waits for the device: the statistics of the previous step are read after this step is queued. Its own
        statistics are read at once only if something needs them.
        """
        self.control.begin_step(self.state.step + 1)
        started, used, waited = time.perf_counter(), time.process_time(), self.control.waited_seconds()
        captured = self.engine.captured_graphs
        replays = 0 if captured is None else captured.replays
        go_back = self.control.mark()
        window = self._next_window()
        written = self.control.checkpoints is not None and self.control.checkpoints.has_written()
        local_counts = torch.zeros(len(self.objective.tasks), dtype=torch.float64)  # [T], on the host
        for micro in window:
            local_counts += self.objective.count(micro)
        agreed = self.agreement.reach(
            local_counts, window, stop=self.control.stop_requested() is not None, written=written
        )
        if agreed.without_rows:
            go_back()
            self.report_unreadable_blocks(f"after step {self.state.step}", agreed.new_corrupt)
            self.read_stats()
            return self._reason_to_stop(asked=True)
        ctx = self.context(window, agreed.counts)
        self.compute_gradients(ctx)
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
            measured={
                "step_seconds": time.perf_counter() - started,
                "processor_seconds": time.process_time() - used,
                "data_wait_seconds": self.control.waited_seconds() - waited,
                "hooks": self.hooks.metrics() if self.observer.enabled and self.observer.wants(self.state.step) else {},
                "replays": None if captured is None else captured.replays - replays,
            },
        )
        if agreed.written and self.control.checkpoints is not None:
            self.control.checkpoints.settle()
        measured = bool(self.hooks.measured())  # possibly the best value, or the end by patience
        rests = measured or self._due(self.config.validation.every) or self._due(self.config.checkpoint.every)
        if rests or agreed.stop or self._too_many_skipped() or self.state.step >= self.config.training.steps:
            self.read_stats()
        return self._reason_to_stop(agreed.stop)

    def compute_gradients(self, ctx: StepContext) -> None:
        """Run the forward and backward passes of a window."""
        self.hooks.before_step(ctx)
        sums = torch.zeros_like(ctx.counts)
        for number, micro in enumerate(ctx.window):
            losses = ctx.compute_losses(micro)
            self.engine.backward(self.hooks.total(ctx, losses), last=number == len(ctx.window) - 1)
            sums += losses.sums.detach()
        ctx.gather_sums(sums)

    def rehearse(self, captured: CapturedGraphs) -> None:
        """Capture the graphs of all shapes of a window, and compare their results with those of passes without graphs.
        Leaves no trace in weights and hooks. Collective."""
        batch, step = self.config.batch, self.state.step
        # A first, a middle and a last micro-batch, if windows have as many
        count = min(3, batch.global_size // batch.micro_rows // self.engine.data_group.size)
        windows = [[micro] * count for micro in self.control.shapes()]
        without = [self._rehearse_window(window, step + 1) for window in windows]
        with captured.capturing():
            for window in windows:
                self._rehearse_window(window, step)
        graphs = [self._rehearse_window(window, step + 1) for window in windows]  # with other dropout than captured
        values, references = torch.stack(graphs), torch.stack(without)
        distances = (values - references).abs() / references.abs().clamp(min=1e-12)  # of nonnegative numbers
        distance = float(distances.where(values != references, 0.0).max())
        differs = not distance <= CAPTURED_DISTANCE[self.config.training.precision]  # also NaN
        if any(self.engine.data_group.gather_objects(differs)):
            captured.give_up(f"losses or gradient norms of the graphs differ by {distance:.1e} from those without")
        captured.replays = captured.uncaptured = 0

    def _rehearse_window(self, window: list[Batch], step: int) -> Tensor:
        """Run the passes of a window as those of `step`, without an update, and restore the hooks. Return the loss sums
        of the global batch and the norm of its gradient, [T + 1] float64."""
        states = {hook.name: copy.deepcopy(hook.state_dict()) for hook in self.hooks.all}
        counts = torch.stack([self.objective.count(micro) for micro in window]).sum(0)
        ctx = replace(self.context(window, counts * self.engine.data_group.size), step=step)
        self.compute_gradients(ctx)
        self.hooks.gradients(ctx)
        norm = self.engine.check_gradients()
        self.engine.discard_gradients()
        ctx.release()
        for hook in self.hooks.all:
            hook.load_state_dict(states[hook.name])
        assert ctx.sums is not None, "gathered with the gradients"
        return torch.cat([ctx.sums, norm.to(ctx.sums).reshape(1)])

    def _next_window(self) -> list[Batch]:
        """Return the next window; empty after a stop request if no rows arrive. Then no rank makes this step."""
        try:
            return self.source.next_window()
        except StoppedWaitingError as error:
            self.observer.message(str(error))
            return []

    def report_unreadable_blocks(self, when: str, reasons: Mapping[str, str]) -> None:
        """Log the blocks that could not be read."""
        for key, reason in reasons.items():
            why = f" ({reason})" if reason else ""
            self.observer.message(f"{when}: block {key} could not be read and is skipped{why}")
            self.control.incidents.add("unreadable", self.state.step, key=key, reason=reason)

    def context(self, window: list[Batch], counts: Tensor) -> StepContext:
        """Return the context that hooks receive; `counts` of the global batch."""
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
        """Apply the step, or skip it on all ranks if the loss or the gradient is not finite or a spike.

        Returns:
            Whether a loss scaler's search skipped the step.
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
        """Read and report the pending step, if one exists; waits for the device.

        Args:
            judge: look for spikes. Collective.
        """
        if self.pending is not None:
            pending, self.pending = self.pending, None
            self.state.record_step(pending.step, skipped=not (pending.late.read().applied or pending.searched))
            self.report(pending)
            if judge and self.spikes is not None:
                self._judge(pending, self.spikes)

    def _judge(self, pending: PendingStep, spikes: SpikeWatch) -> None:
        """Look for spikes in a step; all ranks have the same statistics and find the same spikes."""
        detected, action = spikes.judge(pending.step, pending.late.read()), spikes.settings.spikes
        if not detected:
            return
        rows = [key for keys in self.agreement.group.gather_objects(pending.keys.tolist()) for key in keys]
        self.observer.message(f"step {pending.step}: spike: {', '.join(map(str, detected))}")
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
        """Report the pending step after an error. The device may wait for a failed rank: wait a few seconds at most."""
        until = time.monotonic() + SECONDS_AFTER_AN_ERROR
        while self.pending is not None and not self.pending.late.has_arrived() and time.monotonic() < until:
            time.sleep(0.01)
        if self.pending is not None and self.pending.late.has_arrived():
            self.read_stats(judge=False)

    def report(self, pending: PendingStep) -> None:
        """Pass the step to the observer; an absent task has count 0 and no loss."""
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
            applied=stats.applied,
            **pending.measured,
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
        if self.state.step >= self.config.training.steps:  # also after a stop request: nothing is left to stop
            return FINISHED
        return self.agreement.reason(self.control.stop_requested()) if asked else None

    def _due(self, every: int) -> bool:
        return every > 0 and (self.state.step % every == 0 or self.state.step >= self.config.training.steps)


@contextmanager
def garbage_collected_between_steps() -> Iterator[Callable[[int], None]]:
    """Context that runs Python's garbage collector at the same steps on all ranks. The automatic collector would run
    inside a step, a different one on each rank, and all ranks wait for the slowest.

    Objects from before training and from the first step (compiled code, optimizer state) are frozen until the end: the
    collector does not scan them again.

    Yields:
        A function to call after each step, with its number from 1.
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
    """Compute the mean loss of each task over the split, without dropout. Collective; all ranks have equally many
    batches.

    Args:
        corrupt: receives the unreadable blocks with reasons, by key.
        leave: called every ASK_EVERY batches; True on all ranks ends the validation.

    Returns:
        None if `leave` ended it; else
        {"loss": mean over the balanced tasks that occur (over all tasks if none is balanced); None if none occurs,
         "worst_task": of the balanced tasks (training/metrics.py: worst_task),
         "tasks": {name: {"loss": mean over its elements or None, "count": elements,
                          "accuracy": share of correct elements, if the objective counts them}}}
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
    """Return the learning rate of step `step` (from 0) of `steps`.

    Linear warm-up over `warmup_steps`, from lr / warmup_steps at the first step to lr at its last. Then linear or
    cosine decay to `min_lr`, constant with a decay in the last `decay_steps` (wsd), inverse square root decay, a factor
    at each milestone from its step on (multistep), or none. The first three decay as in transformers,
    (steps - step) / (steps - warmup_steps), or end one step earlier (`decay_end`).
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    if config.schedule == "inverse_sqrt":
        return max(config.min_lr, config.lr * math.sqrt(max(1, config.warmup_steps) / (step + 1)))
    if config.schedule == "multistep":
        return max(config.min_lr, config.lr * config.milestone_factor ** bisect_right(config.milestones, step))
    if config.schedule == "constant":
        return config.lr
    begin = steps - config.decay_steps if config.schedule == "wsd" else config.warmup_steps
    decay_steps = steps - begin - (config.decay_end == "last_step")
    done = min(1.0, max(0, step - begin) / decay_steps) if decay_steps > 0 else float(step >= begin)
    factor = {"linear": 1.0 - done, "wsd": 1.0 - math.sqrt(done)}.get(
        config.schedule, 0.5 * (1.0 + math.cos(math.pi * done))
    )
    return config.min_lr + (config.lr - config.min_lr) * factor
