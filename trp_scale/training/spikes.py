"""Spikes: a finite loss, of the whole or of one task, or a gradient's norm, that is far above what the last steps had.

Judged by a robust z-score of logarithms: (x - median) / (1.4826 MAD) over the last applied steps. All ranks read the
same numbers, and so judge alike. The median and the MAD of the past give limits, which the device compares a step with
before it is applied: no one waits.
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
        self._past: tuple[deque[float], ...] = tuple(deque(maxlen=WINDOW) for _ in self._names)

    @property
    def acts(self) -> bool:
        """Whether a step that is a spike is left out."""
        return self.settings.spikes in ("skip", "rollback")

    def limits(self) -> Tensor | None:
        """[2 + T] float64 on the host: the most that loss, gradient norm and each task's loss may be; infinite where
        too little is known. None: nothing is left out."""
        if not self.acts:
            return None
        return torch.tensor([self._limit(past) for past in self._past], dtype=torch.float64)

    def judge(self, stats: StepStats) -> list[Spike]:
        """The spikes among a step's numbers; without any, and if it was applied, they are remembered."""
        values = self._values(stats)
        found = [
            Spike(name, value, math.exp(statistics.median(past)), self._score(past, value))
            for name, value, past in zip(self._names, values, self._past, strict=True)
            if value is not None and value > self._limit(past)
        ]
        if stats.applied and not found:
            for past, value in zip(self._past, values, strict=True):
                if value is not None:
                    past.append(math.log(value))
        return found

    def state(self) -> dict[str, Any]:
        """For a checkpoint: JSON values."""
        return {name: list(past) for name, past in zip(self._names, self._past, strict=True)}

    def load(self, state: dict[str, Any]) -> None:
        """Go on from `state`; of a run that kept none from nothing."""
        for name, past in zip(self._names, self._past, strict=True):
            past.clear()
            past.extend(float(value) for value in state.get(name, ()))

    def _values(self, stats: StepStats) -> list[float | None]:
        """By `_names`; None where there is none to judge: an absent task, or one that is not finite or not above 0."""
        tasks = (loss if count else 0.0 for loss, count in zip(stats.task_losses, stats.task_counts, strict=True))
        every = (stats.loss, stats.grad_norm, *tasks)
        return [value if 0.0 < value < math.inf else None for value in every]

    def _spread(self, past: deque[float]) -> tuple[float, float]:
        middle = statistics.median(past)
        return middle, max(SMALLEST_SPREAD, _SCALE * statistics.median(abs(each - middle) for each in past))

    def _score(self, past: deque[float], value: float) -> float:
        middle, spread = self._spread(past)
        return (math.log(value) - middle) / spread

    def _limit(self, past: deque[float]) -> float:
        if len(past) < AT_LEAST:
            return math.inf
        middle, spread = self._spread(past)
        return math.exp(middle + max(self.settings.spike_score * spread, math.log(2.0)))
