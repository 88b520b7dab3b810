"""Decisions that are equal on all ranks: settings at the start; counts, stop requests and unreadable blocks before each
step; best checkpoint and spikes after it.

Before a step the ranks exchange one small all-reduce on the host, which never waits for the accelerator. Decisions
after a step need no exchange, because all ranks read the same statistics.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trp_scale.config import CheckpointConfig, Config, ReliabilityConfig
from trp_scale.config.loader import flat, to_dict
from trp_scale.core.batch import Batch, StepStats
from trp_scale.distributed.groups import Group
from trp_scale.errors import RefusedError, UnreadableError, nearest
from trp_scale.training.metrics import NO_BETTER

MOST_LISTED = 20
"""Maximum number of unreadable blocks in a message."""


@dataclass(kw_only=True)
class Agreed:
    """Agreement of a step, equal on every rank.

    Attributes:
        counts: [T] float64 on the host, elements of each task in the global batch.
        stop: a rank was asked to stop: this step is the last.
        without_rows: a rank was asked to stop and has no rows: no rank makes this step.
        new_corrupt: newly unreadable blocks of this global batch, with reasons, by key.
        written: every rank has written its part of the pending checkpoint.
    """

    counts: Tensor
    stop: bool
    new_corrupt: Mapping[str, str]
    without_rows: bool = False
    written: bool = False


def require_same_settings(world: Group, config: Config) -> None:
    """Check that all ranks have the same settings; different settings lead to different collectives and to a hang.

    Raises:
        RefusedError: on every rank, with each setting that differs and its values.
    """
    settings = world.gather_objects(flat(to_dict(config)))
    differing = [
        f"{name}: " + ", ".join(f"rank {rank} has {values.get(name)}" for rank, values in enumerate(settings))
        for name in dict.fromkeys(name for values in settings for name in values)
        if any(values.get(name) != settings[0].get(name) for values in settings)
    ]
    if differing:
        listed = "\n  ".join(differing)
        raise RefusedError(f"the ranks were started with different settings:\n  {listed}\nUse one command on all hosts")


class StepAgreement:
    """Exchange between all ranks before each step; one object per run.

    Args:
        max_corrupt_blocks: number of unreadable blocks allowed in a run.
        max_corrupt_steps: number of consecutive steps with new unreadable blocks allowed.
        copies: ranks that read the same rows (a tensor-parallel group).
    """

    def __init__(self, group: Group, max_corrupt_blocks: int, *, copies: int = 1, max_corrupt_steps: int = 10) -> None:
        self.group = group
        self.copies = copies
        self.max_corrupt_blocks, self.max_corrupt_steps = max_corrupt_blocks, max_corrupt_steps
        self.steps_in_a_row = 0
        self.corrupt: set[str] = set()

    def reach(self, counts: Tensor, window: Sequence[Batch], *, stop: bool, written: bool = False) -> Agreed:
        """Sum counts, stop requests and unreadable blocks over the ranks.

        Args:
            counts: [T] float64 on the host, of this rank's window.
            stop: this rank was asked to stop.
            written: this rank has written its part of the pending checkpoint.

        Raises:
            UnreadableError: on every rank, if more blocks than allowed are unreadable, in all or in consecutive steps.
        """
        unreadable = {
            key: micro.reasons.get(key, "") for micro in window for key in micro.corrupt if key not in self.corrupt
        }
        values = [float(stop), float(not window), float(written), float(len(unreadable))]
        answer = self.group.sum(torch.cat([counts, torch.tensor(values, dtype=torch.float64)]))
        stops, without, parts, corrupt = answer[-4:].tolist()
        new = self.count_corrupt(unreadable) if corrupt > 0 else {}
        self.steps_in_a_row = self.steps_in_a_row + 1 if new else 0
        if self.steps_in_a_row > self.max_corrupt_steps:
            raise UnreadableError(
                f"{self.steps_in_a_row} steps in a row had unreadable blocks, the last one {_join_reasons(new)}; "
                f"--reliability.max_corrupt_steps allows {self.max_corrupt_steps}; check the storage"
            )
        return Agreed(
            counts=answer[:-4] / self.copies,
            stop=stops > 0,
            without_rows=without > 0,
            new_corrupt=new,
            written=parts == self.group.size,
        )

    def is_stop_requested(self, stop: bool) -> bool:
        """Whether any rank was asked to stop."""
        return bool(self.group.sum(torch.tensor(float(stop), dtype=torch.float64)) > 0)

    def reason(self, own_reason: str | None) -> str:
        """Return why the ranks stop: the reason of the first rank that has one."""
        reasons = self.group.gather_objects(own_reason)
        rank, reason = next((entry for entry in enumerate(reasons) if entry[1]), (0, None))
        if reason is None:
            return "asked to stop"
        return reason if self.group.size == 1 else f"{reason} (rank {rank})"

    def count_corrupt(self, unreadable: Mapping[str, str]) -> dict[str, str]:
        """Gather the unreadable blocks of all ranks. Collective; called rarely.

        Args:
            unreadable: reasons by the keys of this rank's blocks.

        Returns:
            Reasons of the new blocks of all ranks, in the order of their keys.

        Raises:
            UnreadableError: on every rank, if the run has more than allowed.
        """
        of_all = {key: why for reasons in self.group.gather_objects(dict(unreadable)) for key, why in reasons.items()}
        new = {key: of_all[key] for key in sorted(of_all) if key not in self.corrupt}
        self.corrupt.update(new)
        if len(self.corrupt) > self.max_corrupt_blocks:
            others = sorted(self.corrupt - new.keys())
            reasons = _join_reasons({**dict.fromkeys(others, ""), **new})
            raise UnreadableError(
                f"{len(self.corrupt)} blocks could not be read ({reasons}); "
                f"--data.max_corrupt_blocks allows {self.max_corrupt_blocks}; "
                "trp-scale verify names the damaged bytes"
            )
        return new


def _join_reasons(reasons: Mapping[str, str]) -> str:
    """Join keys and reasons; the last MOST_LISTED of them."""
    shown = [f"{key}: {why}" if why else key for key, why in list(reasons.items())[-MOST_LISTED:]]
    return ", ".join(shown) + (f" and {len(reasons) - MOST_LISTED} more" if len(reasons) > MOST_LISTED else "")


VALIDATION = "validation"


@dataclass(kw_only=True)
class Best:
    """Best measured value; equal on all ranks.

    Attributes:
        figure: validation.loss, validation.worst, validation.TASK, or HOOK.FIGURE.
        patience: consecutive measurements without a better value after which the run ends; 0: no limit.
        value, step: the best; None and 0 before the first.
        since: measurements since the best.
    """

    figure: str
    patience: int
    value: float | None = None
    step: int = 0
    since: int = 0

    def judge(self, step: int, measured: Mapping[str, float | None]) -> bool:
        """Record the figures measured after `step`; return whether this is the best value so far."""
        if self.figure not in measured:
            return False
        value = measured[self.figure]
        sign = -1.0 if self.figure.startswith(f"{VALIDATION}.") else 1.0  # losses
        if value is None or not math.isfinite(value) or (self.value is not None and sign * value <= sign * self.value):
            self.since += 1
            return False
        self.value, self.step, self.since = value, step, 0
        return True

    def given_up(self) -> str | None:
        """Return why patience ends the run, or `None`."""
        if not self.patience or self.since < self.patience:
            return None
        return f"{NO_BETTER}{self.figure} in {self.since} measurements: {self}"

    def __str__(self) -> str:
        return f"{self.figure} {self.value:.4f} at step {self.step}" if self.value is not None else f"no {self.figure}"

    def state(self) -> dict[str, Any]:
        return {"figure": self.figure, "value": self.value, "step": self.step, "since": self.since}

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore `state()`, unless it is of another figure."""
        if state.get("figure") == self.figure:
            self.value, self.step, self.since = state["value"], int(state["step"]), int(state["since"])


def build_best_tracker(settings: CheckpointConfig, tasks: Iterable[str], hook_figures: Iterable[str]) -> Best | None:
    """Return the tracker of a run's best checkpoint, or `None` without `checkpoint.best`.

    Args:
        tasks: tasks of the objective.
        hook_figures: names of the figures that the run's hooks measure.

    Raises:
        RefusedError: no such figure exists.
    """
    if not settings.best:
        return None
    known = [*(f"{VALIDATION}.{name}" for name in ("loss", "worst", *tasks)), *hook_figures]
    if settings.best not in known:
        raise RefusedError(
            f"--checkpoint.best is {settings.best!r}{nearest(settings.best, known)}; allowed in this run: "
            f"{', '.join(known)} (knn, linear and rank_me with --hooks probes)"
        )
    return Best(figure=settings.best, patience=settings.patience)


def validation_figures(losses: Mapping[str, Any]) -> dict[str, float | None]:
    """Return the figures of a validation (loop.py: validate) by name."""
    tasks = {name: task["loss"] for name, task in losses["tasks"].items()}
    worst = losses["worst_task"]
    figures = {**tasks, "loss": losses["loss"], "worst": None if worst is None else tasks[worst]}
    return {f"{VALIDATION}.{name}": value for name, value in figures.items()}


WINDOW = 128
"""Number of past steps that give the limits."""

AT_LEAST = 32
"""Number of past values needed for a limit."""

SMALLEST_SPREAD = 0.02
"""Minimum of the MAD of logarithms: consecutive steps can be nearly equal."""

_SCALE = 1.4826  # MAD to standard deviation of a normal distribution


class Spike(NamedTuple):
    """A spike: one outlier among the numbers of a step.

    Attributes:
        name: loss, grad_norm, or loss of a task.
        usual: median of the past.
        score: robust z-score.
    """

    name: str
    value: float
    usual: float
    score: float

    def __str__(self) -> str:
        return f"{self.name} {self.value:.4g}, usually {self.usual:.4g} (score {self.score:.0f})"


class SpikeWatch:
    """Detection of spikes from the numbers of the last applied steps without spikes.

    A spike is a finite total loss, task loss or gradient norm far above the last steps, by a robust z-score of
    logarithms: (x - median) / (1.4826 MAD). Median and MAD of the past give limits. The device compares a step with
    them before it applies it, so nothing waits. The statistics of the previous step may not have reached the host by
    then, so they never count. Host and device therefore agree, and so do resumed and uninterrupted runs.

    Args:
        settings: `spikes` and `spike_score` are read.
        tasks: names of the tasks, in the order of the losses.
    """

    def __init__(self, settings: ReliabilityConfig, tasks: Sequence[str]) -> None:
        self.settings = settings
        self._names = ("loss", "grad_norm", *(f"loss of {task}" for task in tasks))
        # Pairs of step and logarithm; one more than WINDOW, since the previous step does not count.
        self._past: tuple[deque[tuple[int, float]], ...] = tuple(deque(maxlen=WINDOW + 1) for _ in self._names)

    @property
    def acts(self) -> bool:
        """Whether a step with a spike is skipped."""
        return self.settings.spikes in ("skip", "rollback")

    def limits(self, step: int) -> Tensor | None:
        """Return the limits of loss, gradient norm and task losses of a step, [2 + T] float64 on the host; infinite
        with too little history. `None` if spikes are not skipped."""
        if not self.acts:
            return None
        return torch.tensor([self._limit(known) for known in self._history(step)], dtype=torch.float64)

    def judge(self, step: int, stats: StepStats) -> list[Spike]:
        """Return the spikes of a step, by the limits it was applied with. An applied step without spikes joins the
        history."""
        values = self._values(stats)
        spikes = [
            Spike(name, value, math.exp(middle), (math.log(value) - middle) / spread)
            for name, value, known in zip(self._names, values, self._history(step), strict=True)
            if value is not None and value > self._limit(known)
            for middle, spread in [self._spread(known)]
        ]
        if stats.applied and not spikes:
            for past, value in zip(self._past, values, strict=True):
                if value is not None:
                    past.append((step, math.log(value)))
        return spikes

    def _history(self, step: int) -> list[list[float]]:
        """Return the last logarithms of each number, without the previous step's."""
        return [[value for number, value in past if number < step - 1][-WINDOW:] for past in self._past]

    def state(self) -> dict[str, Any]:
        return {name: list(past) for name, past in zip(self._names, self._past, strict=True)}

    def load(self, state: dict[str, Any]) -> None:
        """Restore `state()`; an empty state clears the history."""
        for name, past in zip(self._names, self._past, strict=True):
            past.clear()
            past.extend((int(step), float(value)) for step, value in state.get(name, ()))

    def _values(self, stats: StepStats) -> list[float | None]:
        """Return the values in the order of `_names`; `None` for absent tasks and values that are not finite or not
        positive."""
        tasks = (loss if count else 0.0 for loss, count in zip(stats.task_losses, stats.task_counts, strict=True))
        every = (stats.loss, stats.grad_norm, *tasks)
        return [value if 0.0 < value < math.inf else None for value in every]

    def _spread(self, known: list[float]) -> tuple[float, float]:
        middle = statistics.median(known)
        return middle, max(SMALLEST_SPREAD, _SCALE * statistics.median(abs(value - middle) for value in known))

    def _limit(self, known: list[float]) -> float:
        if len(known) < AT_LEAST:
            return math.inf
        middle, spread = self._spread(known)
        return math.exp(middle + max(self.settings.spike_score * spread, math.log(2.0)))
