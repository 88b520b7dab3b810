"""Decisions that are the same on all ranks: settings at the start; counts, stop requests and unreadable blocks before
each step; the best checkpoint and the spikes after it.

What the ranks tell each other before a step travels in one small all-reduce on the host, so that reading the answer
never waits for the accelerator. What follows from the numbers of a step is decided alike: all ranks read the same.
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
"""Unreadable blocks that a message names."""


@dataclass(kw_only=True)
class Agreed:
    """Agreement of a step, equal on every rank.

    Attributes:
        counts: [T] float64 on the host, elements of each task in the global batch.
        stop: some rank was asked to stop: this step is the last.
        without_rows: some rank was, and has no rows for this step: the step is not made.
        new_corrupt: why blocks of this global batch could not be read, by key; those that were not known before.
        written: every rank's part of the checkpoint that is under way is over.
    """

    counts: Tensor
    stop: bool
    new_corrupt: Mapping[str, str]
    without_rows: bool = False
    written: bool = False


def require_same_settings(world: Group, config: Config) -> None:
    """Check at start that all ranks were started with the same settings; others would lead them into different
    collectives, where they wait for each other.

    Raises:
        RefusedError: on every rank, naming each setting that differs and its value on each rank.
    """
    settings = world.gather_objects(flat(to_dict(config)))
    differing = [
        f"{name}: " + ", ".join(f"rank {rank} has {values.get(name)}" for rank, values in enumerate(settings))
        for name in dict.fromkeys(name for values in settings for name in values)
        if any(values.get(name) != settings[0].get(name) for values in settings)
    ]
    if differing:
        listed = "\n  ".join(differing)
        raise RefusedError(f"the ranks were started with different settings:\n  {listed}\nStart all with one command")


class StepAgreement:
    """One per run.

    Args:
        max_corrupt_blocks: unreadable blocks allowed before the run stops on all ranks.
        max_corrupt_steps: steps in a row allowed that each meet such blocks.
        copies: ranks that read the same rows, as those of a tensor parallel group do.
    """

    def __init__(self, group: Group, max_corrupt_blocks: int, *, copies: int = 1, max_corrupt_steps: int = 10) -> None:
        self.group = group
        self.copies = copies
        self.max_corrupt_blocks, self.max_corrupt_steps = max_corrupt_blocks, max_corrupt_steps
        self.steps_in_a_row = 0
        self.corrupt: set[str] = set()

    def reach(self, counts: Tensor, window: Sequence[Batch], *, stop: bool, written: bool = False) -> Agreed:
        """Sum counts over the ranks and hear every rank's wishes.

        Args:
            counts: [T] float64 on the host, of this rank's window.
            stop: this rank was asked to stop.
            written: this rank's part of the checkpoint that is under way is over.

        Raises:
            UnreadableError: on every rank, when more blocks than allowed could not be read, or in more steps in a row;
                names them.
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
                f"{self.steps_in_a_row} steps in a row met unreadable blocks, the last one {_join_reasons(new)}; "
                f"--reliability.max_corrupt_steps allows {self.max_corrupt_steps}: is the storage there?"
            )
        return Agreed(
            counts=answer[:-4] / self.copies,
            stop=stops > 0,
            without_rows=without > 0,
            new_corrupt=new,
            written=parts == self.group.size,
        )

    def is_stop_requested(self, stop: bool) -> bool:
        """Whether some rank was asked to stop."""
        return bool(self.group.sum(torch.tensor(float(stop), dtype=torch.float64)) > 0)

    def reason(self, own_reason: str | None) -> str:
        """Return why the ranks stop, once they agreed to: the reason of the first rank that has one."""
        reasons = self.group.gather_objects(own_reason)
        rank, reason = next((entry for entry in enumerate(reasons) if entry[1]), (0, None))
        if reason is None:
            return "asked to stop"
        return reason if self.group.size == 1 else f"{reason} (rank {rank})"

    def count_corrupt(self, unreadable: Mapping[str, str]) -> dict[str, str]:
        """Gather the blocks that could not be read, on all ranks together; rare, or after a validation.

        Args:
            unreadable: why, by the keys this rank met; those known already do not count again.

        Returns:
            the new ones of all ranks, by key, in order.

        Raises:
            UnreadableError: on every rank, when there are now more than allowed.
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
    """Keys with their reasons, as many as a person reads."""
    shown = [f"{key}: {why}" if why else key for key, why in list(reasons.items())[-MOST_LISTED:]]
    return ", ".join(shown) + (f" and {len(reasons) - MOST_LISTED} more" if len(reasons) > MOST_LISTED else "")


VALIDATION = "validation"


@dataclass(kw_only=True)
class Best:
    """Best measured value; equal on all ranks.

    Attributes:
        figure: validation.loss, validation.worst, validation.TASK, or HOOK.FIGURE.
        patience: measurements in a row without a better one after which the run ends; 0: it does not.
        value, step: of the best; None and 0 before the first.
        since: measurements after it.
    """

    figure: str
    patience: int
    value: float | None = None
    step: int = 0
    since: int = 0

    def judge(self, step: int, measured: Mapping[str, float | None]) -> bool:
        """Take note of what was measured after `step`, by the figures' names; whether it is the best so far."""
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
        """Return why the run ends, or `None`."""
        if not self.patience or self.since < self.patience:
            return None
        return f"{NO_BETTER}{self.figure} in {self.since} measurements: {self}"

    def __str__(self) -> str:
        return f"{self.figure} {self.value:.4f} at step {self.step}" if self.value is not None else f"no {self.figure}"

    def state(self) -> dict[str, Any]:
        return {"figure": self.figure, "value": self.value, "step": self.step, "since": self.since}

    def load(self, state: Mapping[str, Any]) -> None:
        """Take back what `state` gave; of another figure nothing is known."""
        if state.get("figure") == self.figure:
            self.value, self.step, self.since = state["value"], int(state["step"]), int(state["since"])


def build_best_tracker(settings: CheckpointConfig, tasks: Iterable[str], of_hooks: Iterable[str]) -> Best | None:
    """Return the tracker of a run's best checkpoint; `None` if none is configured.

    Args:
        tasks: of the objective.
        of_hooks: names of the figures that the run's hooks measure.

    Raises:
        RefusedError: no such figure.
    """
    if not settings.best:
        return None
    known = [*(f"{VALIDATION}.{name}" for name in ("loss", "worst", *tasks)), *of_hooks]
    if settings.best not in known:
        raise RefusedError(
            f"--checkpoint.best is {settings.best!r}{nearest(settings.best, known)}; allowed in this run: "
            f"{', '.join(known)} (knn, linear and rank_me with --hooks probes)"
        )
    return Best(figure=settings.best, patience=settings.patience)


def of_validation(losses: Mapping[str, Any]) -> dict[str, float | None]:
    """The figures of a validation (loop.py: validate) by their names."""
    tasks = {name: task["loss"] for name, task in losses["tasks"].items()}
    worst = losses["worst_task"]
    figures = {**tasks, "loss": losses["loss"], "worst": None if worst is None else tasks[worst]}
    return {f"{VALIDATION}.{name}": value for name, value in figures.items()}


WINDOW = 128
"""Steps that are looked back on."""

AT_LEAST = 32
"""Steps that must be known of a number before it is judged."""

SMALLEST_SPREAD = 0.02
"""A MAD of logarithms is taken to be at least this: two steps may well be nearly alike."""

_SCALE = 1.4826  # of the MAD, to the standard deviation of a normal distribution


class Spike(NamedTuple):
    """One number of a step that is one.

    Attributes:
        name: loss, grad_norm, or loss of a task.
    """

    name: str
    value: float
    usual: float
    score: float

    def __str__(self) -> str:
        return f"{self.name} {self.value:.4g}, usually {self.usual:.4g} (score {self.score:.0f})"


class SpikeWatch:
    """Remembers the numbers of applied steps without spikes, and judges new ones.

    A spike is a finite loss, of the whole or of one task, or a gradient's norm, that is far above what the last steps
    had, by a robust z-score of logarithms: (x - median) / (1.4826 MAD) over the last applied steps. The median and the
    MAD of the past give limits, which the device compares a step with before it is applied: no one waits. The numbers
    of the step just before may still be on their way then, so that they are never in its past, even where they have
    been read. Thus the host finds what the device found, and a run that was stopped what one would that was not.

    Args:
        settings: `spikes` and `spike_score` are read.
        tasks: names, in the order of the losses.
    """

    def __init__(self, settings: ReliabilityConfig, tasks: Sequence[str]) -> None:
        self.settings = settings
        self._names = ("loss", "grad_norm", *(f"loss of {task}" for task in tasks))
        # Pairs of a step's number and a logarithm; one more than is looked back on, which may be of the step before.
        self._past: tuple[deque[tuple[int, float]], ...] = tuple(deque(maxlen=WINDOW + 1) for _ in self._names)

    @property
    def acts(self) -> bool:
        """Whether a step that is a spike is left out."""
        return self.settings.spikes in ("skip", "rollback")

    def limits(self, step: int) -> Tensor | None:
        """[2 + T] float64 on the host: the most that loss, gradient norm and each task's loss of a step, by its number,
        may be; infinite where too little is known. None: nothing is left out."""
        if not self.acts:
            return None
        return torch.tensor([self._limit(known) for known in self._history(step)], dtype=torch.float64)

    def judge(self, step: int, stats: StepStats) -> list[Spike]:
        """The spikes among a step's numbers, by the limits that it was decided with. The numbers of a step that was
        applied and has none are remembered."""
        values = self._values(stats)
        spikes = [
            Spike(name, value, math.exp(statistics.median(known)), self._score(known, value))
            for name, value, known in zip(self._names, values, self._history(step), strict=True)
            if value is not None and value > self._limit(known)
        ]
        if stats.applied and not spikes:
            for past, value in zip(self._past, values, strict=True):
                if value is not None:
                    past.append((step, math.log(value)))
        return spikes

    def _history(self, step: int) -> list[list[float]]:
        """Return the history that a step is judged by: the last logarithms of each number, without those of the
        previous step."""
        return [[value for number, value in past if number < step - 1][-WINDOW:] for past in self._past]

    def state(self) -> dict[str, Any]:
        return {name: list(past) for name, past in zip(self._names, self._past, strict=True)}

    def load(self, state: dict[str, Any]) -> None:
        """Go on from `state`; of a run that kept none from nothing."""
        for name, past in zip(self._names, self._past, strict=True):
            past.clear()
            past.extend((int(step), float(value)) for step, value in state.get(name, ()))

    def _values(self, stats: StepStats) -> list[float | None]:
        """Return the values by `_names`; `None` for an absent task, and for one that is not finite or not above 0."""
        tasks = (loss if count else 0.0 for loss, count in zip(stats.task_losses, stats.task_counts, strict=True))
        every = (stats.loss, stats.grad_norm, *tasks)
        return [value if 0.0 < value < math.inf else None for value in every]

    def _spread(self, known: list[float]) -> tuple[float, float]:
        middle = statistics.median(known)
        return middle, max(SMALLEST_SPREAD, _SCALE * statistics.median(abs(value - middle) for value in known))

    def _score(self, known: list[float], value: float) -> float:
        middle, spread = self._spread(known)
        return (math.log(value) - middle) / spread

    def _limit(self, known: list[float]) -> float:
        if len(known) < AT_LEAST:
            return math.inf
        middle, spread = self._spread(known)
        return math.exp(middle + max(self.settings.spike_score * spread, math.log(2.0)))
