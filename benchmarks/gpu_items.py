"""What the sections of benchmarks/gpu.py are made of: items, each measured by itself, and what becomes of them."""

from __future__ import annotations

import gc
import math
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

import torch

MEGABYTE = 2**20
Value: TypeAlias = "float | int | bool | str | list[float] | list[str] | None"


@dataclass(frozen=True)
class Missing:
    """A figure that cannot be had here, and why; it is printed and written as null with its reason."""

    reason: str


Figures: TypeAlias = "Mapping[str, Value | Missing]"


@dataclass(frozen=True, kw_only=True)
class Item:
    """One thing to measure.

    Attributes:
        name: unique in its section.
        measure: returns the figures by name, units in the names.
        seconds: how long it is expected to take on one H200; an item that does not fit into what is left is skipped.
        lacking: why it cannot be measured here ("deepspeed is not installed"); empty when it can.
        timed: its figures are times, which anything beside it on the GPU would change.
    """

    name: str
    measure: Callable[[], Figures]
    seconds: float
    lacking: str = ""
    timed: bool = False


@dataclass(kw_only=True)
class Outcome:
    """What became of an item.

    Attributes:
        figures: by name; empty when nothing was measured.
        reasons: why a figure is None, by its name.
        reason: why nothing was measured, or "".
        failed: it was tried and raised: a fault, where a lacking GPU or library is none.
        seconds: how long it took.
    """

    section: str
    name: str
    figures: dict[str, Value] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    reason: str = ""
    failed: bool = False
    seconds: float = 0.0

    def line(self) -> str:
        """One plain line."""
        start = f"{self.section}: {self.name}: "
        if self.reason:
            return f"{start}not measured: {self.reason}"
        shown = (
            f"{name} null ({self.reasons[name]})" if value is None else f"{name} {_shown(value)}"
            for name, value in self.figures.items()
        )
        return start + ", ".join(shown)


def measured(section: str, item: Item, seconds_left: float) -> Outcome:
    """Measure an item; an error is reported and does not stop the others: time on a GPU is not had twice."""
    outcome = Outcome(section=section, name=item.name, reason=item.lacking)
    if not item.lacking and item.seconds > seconds_left:
        outcome.reason = f"skipped: takes about {item.seconds:.0f} s, {max(seconds_left, 0):.0f} s left of --seconds"
    if outcome.reason:
        return outcome
    began = time.perf_counter()
    try:
        _take(outcome, item.measure())
    except Exception as error:
        traceback.print_exc()
        outcome.failed, outcome.reason = True, f"{type(error).__name__}: {error}".partition("\n")[0]
    outcome.seconds = time.perf_counter() - began
    release_memory()
    return outcome


def release_memory() -> None:
    """Give back what nobody refers to any more, so that the next measurement finds the GPU empty."""
    if torch.cuda.is_available():  # nothing is short elsewhere, and looking for cycles takes 0.2 s each time
        gc.collect()
        torch.cuda.empty_cache()


def each(items: Iterator[Item], section: str, seconds_left: Callable[[], float]) -> Iterator[Outcome]:
    """Measure the items of a section in their order."""
    for item in items:
        yield measured(section, item, seconds_left())


def _take(outcome: Outcome, figures: Figures) -> None:
    for name, value in figures.items():
        if isinstance(value, Missing):
            outcome.figures[name], outcome.reasons[name] = None, value.reason
        elif isinstance(value, float) and not math.isfinite(value):
            outcome.figures[name], outcome.reasons[name] = None, f"it is {value}"
        else:
            outcome.figures[name] = value


def _shown(value: Value) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    if isinstance(value, list):
        return "[" + ", ".join(_shown(one) for one in value) + "]"
    return str(value)
