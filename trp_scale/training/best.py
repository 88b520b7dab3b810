"""The best weights so far, by one figure: its checkpoint stays, and the run may end where none better comes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from trp_scale.config import CheckpointConfig
from trp_scale.errors import RefusedError, nearest
from trp_scale.training.records import NO_BETTER

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
