"""Read a run directory: history, state, settings, incidents, and the curves in metrics.jsonl."""

from __future__ import annotations

import dataclasses
import math
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from trp_scale.checkpoint.run_directory import Start, find_recipe, read_start
from trp_scale.config import Config
from trp_scale.config.files import read_optional_object, read_yaml
from trp_scale.config.loader import flat, from_dict, load_recipe, to_dict
from trp_scale.config.schema import Fields
from trp_scale.distributed.liveness import lease_holder
from trp_scale.errors import ExitStatus, RefusedError, shorten
from trp_scale.training.metrics import FINISHED, RunHistory, nothing_left, read_history
from trp_scale.training.report import is_fine_tuning, read_summary
from trp_scale.training.rundir import CONFIG_FILE, STOP_RECORD, read_incidents

MOST_POINTS = 500
"""Points of a curve. A longer one is drawn as means of equal numbers of logged steps, with a band from the least to the
largest: lines of single steps would hide one another."""


@dataclass(frozen=True, kw_only=True)
class Points:
    """Curve to draw.

    Attributes:
        steps, values: [P], P <= MOST_POINTS; means of `averaged` logged steps.
        least, largest: [P] over the same steps; empty if nothing is averaged.
        averaged: logged steps per point.
    """

    steps: list[float]
    values: list[float]
    least: list[float] = field(default_factory=list)
    largest: list[float] = field(default_factory=list)
    averaged: int = 1


class Curve:
    """Values of one name over the steps that have one.

    Attributes:
        steps, values: of equal length; steps increase.
        counts: weight of each value in a mean; empty: equal weights.
    """

    __slots__ = ("counts", "steps", "values")

    def __init__(self) -> None:
        self.steps, self.values, self.counts = array("d"), array("d"), array("d")

    def __len__(self) -> int:
        return len(self.steps)

    def add(self, step: int, value: float, count: float | None = None) -> None:
        """Append a value; skip it if it is not finite."""
        try:
            finite = math.isfinite(value)
        except OverflowError:  # an integer that no float can represent
            return
        if finite:
            self.steps.append(step)
            self.values.append(value)
            if count is not None:
                self.counts.append(count)

    def cut(self, step: int) -> None:
        """Remove values from this step on."""
        while self.steps and self.steps[-1] >= step:
            for values in (self.steps, self.values, self.counts):
                if values:
                    values.pop()

    @property
    def varies(self) -> bool:
        """Whether two values differ."""
        return len(self) > 0 and min(self.values) < max(self.values)

    def multiply(self, factor: float) -> Curve:
        curve = Curve()
        curve.steps, curve.counts = self.steps, self.counts
        curve.values = array("d", (factor * value for value in self.values))
        return curve

    def below(self, limit: float) -> Curve:
        """Return the values up to a limit."""
        curve = Curve()
        for step, value in zip(self.steps, self.values, strict=True):
            if value <= limit:
                curve.add(int(step), value)
        return curve

    def points(self, most: int = MOST_POINTS) -> Points:
        """Reduce the curve to at most `most` points."""
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
    """Round to seven digits: more would only enlarge the page."""
    return [float(f"{value:.7g}") for value in values]


Tree = dict[str, Any]
"""Curves by name; nested for objects in the line."""

OWN_STEP = "step"
"""Field with the step of a measurement, for hooks that do not measure at every step."""


class RunCurves:
    """Curves of a run. After a rollback the repeated steps replace the earlier ones.

    Attributes:
        losses, weights: by task; losses are weighted by the task's elements.
        held_out: by figure, such as `loss`, then by task; the total has the name "".
        fields: of the line itself, such as `lr`.
        hooks: by hook.
        words: latest text that hooks logged, by hook and name.
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
        """Add a line of `read_metrics`."""
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
        for tree in (self.losses, self.weights, self.held_out, self.fields, self.hooks):
            yield from leaves(tree)


def leaves(tree: Mapping[str, Any] | Curve) -> Iterator[Curve]:
    """Yield the curves of a tree."""
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


@dataclass(frozen=True, kw_only=True)
class State:
    """State of a run.

    Attributes:
        word: finished, stopped, failed, diverged, running, or end not known.
        sentence: reason and advice.
        goes_on: whether the run can be resumed.
    """

    word: str
    mood: Literal["good", "bad", "open"]
    sentence: str
    goes_on: bool


@dataclass(frozen=True, kw_only=True)
class Changed:
    """Settings that differ from the recipe.

    Attributes:
        recipe: as given on the command line.
        settings: (setting, value in the recipe or else the default, value in the run).
        problem: why they were not compared; empty if they were.
    """

    recipe: str = ""
    settings: Sequence[tuple[str, Any, Any]] = ()
    problem: str = ""


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """Contents of a run directory.

    Attributes:
        summary: summary.json; empty before the run ends.
        start: from environment.json; empty if it is missing or damaged.
        settings: config.yaml; empty if it is missing.
        config: typed settings; `None` if this version cannot read them.
        incidents: oldest first.
    """

    run_dir: Path
    history: RunHistory
    curves: RunCurves
    summary: Mapping[str, Any]
    start: Start
    settings: Mapping[str, Any]
    config: Config | None
    changed: Changed
    state: State
    incidents: Sequence[Mapping[str, Any]] = field(default_factory=list)
    fine_tuning: bool = False

    @property
    def name(self) -> str:
        return self.run_dir.resolve().name

    @property
    def command(self) -> list[str]:
        """Command line of the last start without the interpreter; empty if unknown."""
        words = list(self.start.command)
        script = next((n for n, word in enumerate(words) if Path(word).name in _SCRIPTS), len(words))
        arguments = words[script:]
        return (
            [Path(arguments[0]).name, *arguments[1:]] if arguments and arguments[0].endswith("trp-scale") else arguments
        )


_SCRIPTS = ("trp-scale", "pretrain.py", "finetune.py")


def read_run(run_dir: Path) -> RunRecord:
    """Read a run directory in one pass over metrics.jsonl. Raises RefusedError if that file is missing or damaged."""
    curves = RunCurves()
    history = read_history(run_dir, curves.take)
    settings = _settings(run_dir)
    start = read_start(run_dir)
    config, problem = _config(settings, run_dir)
    return RunRecord(
        run_dir=run_dir,
        history=history,
        curves=curves,
        summary=(summary := read_summary(run_dir)),
        start=start,
        settings=settings,
        config=config,
        changed=_changed_settings(settings, start, config, problem),
        state=read_state(run_dir, summary),
        incidents=read_incidents(run_dir),
        fine_tuning=is_fine_tuning(run_dir),
    )


def _settings(run_dir: Path) -> Mapping[str, Any]:
    path = run_dir / CONFIG_FILE
    if not path.is_file():
        return {}
    return Fields(read_yaml(path) or {}, str(path)).document


def _config(settings: Mapping[str, Any], run_dir: Path) -> tuple[Config | None, str]:
    """Return the settings, or the reason why they cannot be read: a missing --module, or another version."""
    if not settings:
        return None, ""
    try:
        return from_dict(settings, str(run_dir / CONFIG_FILE)), ""
    except RefusedError as error:
        return None, shorten(str(error), 500)


def _changed_settings(settings: Mapping[str, Any], start: Start, config: Config | None, problem: str) -> Changed:
    recipe = find_recipe(start)
    if config is None or not recipe or problem:
        return Changed(recipe=recipe, problem=problem)
    try:
        before = _defaults(config) | flat(to_dict(load_recipe(recipe)))
    except RefusedError as error:
        return Changed(recipe=recipe, problem=f"the recipe cannot be read here: {shorten(str(error), 300)}")
    values = flat(settings)
    names = [name for name in values if before.get(name) != values[name]]
    return Changed(recipe=recipe, settings=[(name, before.get(name), values[name]) for name in names])


def _defaults(config: Config) -> dict[str, Any]:
    """Return the defaults of the run's sections."""
    sections: dict[str, Any] = {entry.name: getattr(config, entry.name) for entry in dataclasses.fields(config)}
    kinds: dict[str, Any] = {
        name: type(section) for name, section in sections.items() if dataclasses.is_dataclass(section)
    }
    defaults: dict[str, Any] = {name: kind() for name, kind in kinds.items()}
    return flat(to_dict(dataclasses.replace(config, **defaults)))


def read_state(run_dir: Path, summary: Mapping[str, Any]) -> State:
    """Return the state of a run. `summary`: its summary.json, empty without one."""
    stop = read_optional_object(run_dir / STOP_RECORD)
    if stop:
        why, advice = str(stop.get("why", "")), str(stop.get("advice", ""))
        sentence = f"{shorten(why, 400)}; {advice}".removesuffix("; ")
        if stop.get("status") == ExitStatus.DIVERGED:
            return State(word="diverged", mood="bad", sentence=f"It diverged: {sentence}.", goes_on=True)
        if stop.get("status") != 0:
            return State(word="failed", mood="bad", sentence=f"It failed: {sentence}.", goes_on=True)
        if why == FINISHED:
            return State(word="finished", mood="good", sentence="All steps are done.", goes_on=False)
        if nothing_left(why):
            return State(word="finished", mood="good", sentence=f"It ended early: {sentence}.", goes_on=False)
        return State(word="stopped", mood="open", sentence=f"It was stopped: {sentence}.", goes_on=True)
    holder = lease_holder(run_dir)
    if holder and not holder.get("gone"):
        return State(word="running", mood="open", sentence="It is running.", goes_on=False)
    if reason := str(summary.get("exit_reason", "")):
        done = nothing_left(reason)
        sentence = "All steps are done." if reason == FINISHED else f"It ended: {shorten(reason, 400)}."
        word: Literal["finished", "stopped"] = "finished" if done else "stopped"
        return State(word=word, mood="good" if done else "open", sentence=sentence, goes_on=not done)
    return State(
        word="end not known",
        mood="open",
        sentence="It is still running or was killed: no record of its end exists.",
        goes_on=True,
    )
