"""The lines of metrics.jsonl as curves: values over steps, and of long runs means with the least and the largest."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

MOST_POINTS = 500
"""Points of a curve. A longer one is drawn as means of as many logged steps each, with a band from the least to the
largest of them, 1,500 values in all: lines of a single step each would hide one another."""


@dataclass(frozen=True, kw_only=True)
class Points:
    """A curve as it is drawn.

    Attributes:
        steps, values: [P], P at most MOST_POINTS; of `averaged` logged steps each the mean.
        least, largest: [P], of the same steps; empty where nothing was averaged.
        averaged: how many logged steps a point is of; 1 = each has its own.
    """

    steps: list[float]
    values: list[float]
    least: list[float] = field(default_factory=list)
    largest: list[float] = field(default_factory=list)
    averaged: int = 1


class Curve:
    """Values of one name over the steps that have one.

    Attributes:
        steps, values: of equal length, steps rising.
        counts: what each value counts in a mean; empty: all alike.
    """

    __slots__ = ("counts", "steps", "values")

    def __init__(self) -> None:
        self.steps, self.values, self.counts = array("d"), array("d"), array("d")

    def __len__(self) -> int:
        return len(self.steps)

    def add(self, step: int, value: float, count: float | None = None) -> None:
        """A value after a step; one that is not finite is left out."""
        try:
            finite = math.isfinite(value)
        except OverflowError:  # a whole number beyond all floats
            return
        if finite:
            self.steps.append(step)
            self.values.append(value)
            if count is not None:
                self.counts.append(count)

    def cut(self, step: int) -> None:
        """Take out what is of this step and later ones."""
        while self.steps and self.steps[-1] >= step:
            for values in (self.steps, self.values, self.counts):
                if values:
                    values.pop()

    @property
    def varies(self) -> bool:
        """Whether two of its values differ."""
        return len(self) > 0 and min(self.values) < max(self.values)

    def multiply(self, factor: float) -> Curve:
        """Each value times a factor."""
        curve = Curve()
        curve.steps, curve.counts = self.steps, self.counts
        curve.values = array("d", (factor * value for value in self.values))
        return curve

    def below(self, limit: float) -> Curve:
        """The values up to a limit."""
        curve = Curve()
        for step, value in zip(self.steps, self.values, strict=True):
            if value <= limit:
                curve.add(int(step), value)
        return curve

    def points(self, most: int = MOST_POINTS) -> Points:
        """The curve in at most `most` points."""
        steps, values = np.asarray(self.steps), np.asarray(self.values)  # [n]
        if len(steps) <= most:
            return Points(steps=round_values(steps), values=round_values(values))
        averaged = math.ceil(len(steps) / most)
        starts = np.arange(0, len(steps), averaged)  # [P]
        counts = np.asarray(self.counts) if self.counts else np.ones_like(values)  # [n]
        totals = np.add.reduceat(counts, starts)  # [P]
        means = np.add.reduceat(values * counts, starts) / np.where(totals > 0, totals, 1.0)
        least, largest = np.minimum.reduceat(values, starts), np.maximum.reduceat(values, starts)
        sizes = np.diff(np.append(starts, len(steps)))
        return Points(
            steps=round_values(np.add.reduceat(steps, starts) / sizes),
            values=round_values(np.clip(np.where(totals > 0, means, least), least, largest)),
            least=round_values(least),
            largest=round_values(largest),
            averaged=averaged,
        )


def round_values(values: Iterable[float]) -> list[float]:
    """Round to seven digits: more cannot be seen, and would enlarge the page."""
    return [float(f"{value:.7g}") for value in values]


Tree = dict[str, Any]
"""Curves by name; a name that is an object in the line has a Tree of its own."""

OWN_STEP = "step"
"""A hook that measures now and then says by a field of this name after which step it did."""


class RunCurves:
    """All numbers of a run's lines. Where a run went back to a checkpoint, the later start's values stand.

    Attributes:
        losses, weights: by task; losses count by the task's elements.
        held_out: by figure (`loss`, and what else a validation gives), then by task; of the whole under `""`.
        fields: of the line itself, such as `lr`.
        hooks: by the hook's name.
        words: text that hooks logged last, by the hook's name and the text's.
        skipped: steps that were not applied.
    """

    def __init__(self) -> None:
        self.losses: dict[str, Curve] = {}
        self.weights: dict[str, Curve] = {}
        self.held_out: dict[str, dict[str, Curve]] = {}
        self.fields: Tree = {}
        self.hooks: dict[str, Tree] = {}
        self.words: dict[str, dict[str, str]] = {}
        self.skipped: list[int] = []
        self._last = 0

    def take(self, line: Mapping[str, Any]) -> None:
        """One line, as `read_metrics` gives it."""
        step = line["step"]
        if "tasks" in line:
            if step <= self._last:
                self._go_back(step)
            self._last = step
            if not line.get("applied", True):
                self.skipped.append(step)
            self._take_tasks(step, line["tasks"])
        for name, value in line.items():
            if name == "validation" and isinstance(value, Mapping):
                self._take_validation(step, value)
            elif name not in ("step", "tasks") and not isinstance(value, (bool, str, list)):
                if isinstance(value, Mapping):
                    self._take_hook(step, name, value)
                elif value is not None:
                    _add(self.fields, name, step, value)

    def _take_tasks(self, step: int, tasks: Mapping[str, Any]) -> None:
        for name, task in tasks.items():
            if name not in self.losses:
                self.losses[name], self.weights[name] = Curve(), Curve()
            if task["loss"] is not None and task["count"]:
                self.losses[name].add(step, task["loss"], task["count"])
                if task["weight"] is not None:
                    self.weights[name].add(step, task["weight"])

    def _take_validation(self, step: int, validation: Mapping[str, Any]) -> None:
        figures = [("", name, value) for name, value in validation.items()]
        figures += [
            (task, name, value)
            for task, measured in validation.get("tasks", {}).items()
            for name, value in measured.items()
        ]
        for task, name, value in figures:
            if isinstance(value, (int, float)) and not isinstance(value, bool) and name != "count":
                curve = self.held_out.setdefault(name, {}).setdefault(task, Curve())
                curve.cut(step)
                curve.add(step, value)

    def _take_hook(self, step: int, hook: str, values: Mapping[str, Any]) -> None:
        own_step = values.get(OWN_STEP)
        at = own_step if isinstance(own_step, int) and 0 <= own_step <= step else step
        _grow(self.hooks.setdefault(hook, {}), values, at)
        words = {name: value for name, value in values.items() if isinstance(value, str)}
        if words:
            self.words[hook] = words

    def _go_back(self, step: int) -> None:
        self.skipped = [number for number in self.skipped if number < step]
        for curve in self.curves():
            curve.cut(step)

    def curves(self) -> Iterator[Curve]:
        """All of them."""
        for tree in (self.losses, self.weights, self.held_out, self.fields, self.hooks):
            yield from leaves(tree)


def leaves(tree: Mapping[str, Any] | Curve) -> Iterator[Curve]:
    """The curves of a tree."""
    if isinstance(tree, Curve):
        yield tree
    else:
        for child in tree.values():
            yield from leaves(child)


def _grow(tree: Tree, values: Mapping[str, Any], step: int) -> None:
    for name, value in values.items():
        if type(value) is float or type(value) is int:
            _add(tree, name, step, value)
        elif isinstance(value, Mapping):
            inner = tree.setdefault(name, {})
            if isinstance(inner, dict):
                _grow(inner, value, step)


def _add(tree: Tree, name: str, step: int, value: float) -> None:
    curve = tree.get(name)
    if curve is None:
        curve = tree[name] = Curve()
    if isinstance(curve, Curve):
        curve.add(step, value)
