"""Spikes: a finite loss, of the whole or of one task, or a gradient's norm, that is far above what the last steps had.

Judged by a robust z-score of logarithms: (x - median) / (1.4826 MAD) over the last applied steps. All ranks read the
same numbers, and so judge alike. The median and the MAD of the past give limits, which the device compares a step with
before it is applied: no one waits. The numbers of the step just before may still be on their way then, so that they are
never in its past, even where they have been read. Thus the host finds what the device found, and a run that was stopped
what one would that was not.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trp_scale.config import ReliabilityConfig
from trp_scale.core.batch import StepStats

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
        value: found.
        usual: the median.
        score: robust z-score.
    """

    name: str
    value: float
    usual: float
    score: float

    def __str__(self) -> str:
        return f"{self.name} {self.value:.4g}, usually {self.usual:.4g} (score {self.score:.0f})"


class SpikeWatch:
    """Remembers the numbers of applied steps without spikes, and judges new ones.

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
