"""Read a run directory: history, end, settings and incidents, and the lines of metrics.jsonl as curves: values over
steps, and of long runs means with the least and the largest.
"""

from __future__ import annotations

import dataclasses
import math
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np

from trp_scale.config import Config
from trp_scale.config.json_files import read_optional_object
from trp_scale.config.loader import flat, from_dict, load_recipe, to_dict
from trp_scale.config.schema import Fields, PartOf, record
from trp_scale.config.yaml_files import read_yaml
from trp_scale.distributed.liveness import lease_holder
from trp_scale.errors import RefusedError, shorten
from trp_scale.training.metrics import FINISHED, RunHistory, nothing_left, read_history
from trp_scale.training.report import is_fine_tuning, read_summary
from trp_scale.training.rundir import CONFIG_FILE, ENVIRONMENT_FILE, STOP_RECORD, read_incidents

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


@dataclass(frozen=True, kw_only=True)
class State:
    """How a run stands.

    Attributes:
        word: finished, stopped, failed, running, or not known.
        mood: good, bad or open.
        sentence: why, and what to do.
        goes_on: whether it may go on where it is.
    """

    word: str
    mood: Literal["good", "bad", "open"]
    sentence: str
    goes_on: bool


@dataclass(frozen=True, kw_only=True)
class Changed:
    """Settings that are not the recipe's.

    Attributes:
        recipe: as the command named it.
        settings: (setting, the recipe's value, the run's); where the recipe has no such setting, as of another kind,
            the default takes the place of its value.
        problem: why they could not be compared; empty: they were.
    """

    recipe: str = ""
    settings: Sequence[tuple[str, Any, Any]] = ()
    problem: str = ""


@dataclass(frozen=True, kw_only=True)
class Start(PartOf):
    """Fields read from environment.json. Attributes: command: words of the last start's; directory: where it was."""

    command: list[str] = field(default_factory=list)
    directory: str = ""


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """A run.

    Attributes:
        summary: summary.json; empty of a run that has not ended.
        start: of environment.json; empty if there is none that can be read.
        settings: config.yaml as it is; empty if there is none.
        config: the same as settings of this version; None where they cannot be read as such.
        changed: against the recipe.
        state: how it stands.
        incidents: oldest first.
        fine_tuning: whether it is no pre-training.
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
        """The words of the last start's command line, from `trp-scale` or the script's name on; empty: not known."""
        words = self.start.command
        script = next((n for n, word in enumerate(words) if Path(word).name in _SCRIPTS), len(words))
        arguments = words[script:]
        return (
            [Path(arguments[0]).name, *arguments[1:]] if arguments and arguments[0].endswith("trp-scale") else arguments
        )


_SCRIPTS = ("trp-scale", "pretrain.py", "finetune.py")


def read_run(run_dir: Path) -> RunRecord:
    """Read a run directory; one pass over metrics.jsonl.

    Raises:
        RefusedError: no metrics.jsonl there, or a file that is damaged.
    """
    curves = RunCurves()
    history = read_history(run_dir, curves.take)
    settings = _settings(run_dir)
    start = _start(run_dir / ENVIRONMENT_FILE)
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
        state=_state(run_dir, summary),
        incidents=read_incidents(run_dir),
        fine_tuning=is_fine_tuning(run_dir),
    )


def _start(path: Path) -> Start:
    """Read a start; `doctor RUN_DIR` is the place that examines a damaged file."""
    try:
        return record(Start, read_optional_object(path), str(path), RefusedError)
    except RefusedError:
        return Start()


def _settings(run_dir: Path) -> Mapping[str, Any]:
    path = run_dir / CONFIG_FILE
    if not path.is_file():
        return {}
    return Fields(read_yaml(path) or {}, str(path)).document


def _config(settings: Mapping[str, Any], run_dir: Path) -> tuple[Config | None, str]:
    """The settings, or why they cannot be read: of a module that --module did not name, or of another version."""
    if not settings:
        return None, ""
    try:
        return from_dict(settings, str(run_dir / CONFIG_FILE)), ""
    except RefusedError as error:
        return None, shorten(str(error), 500)


def _changed_settings(settings: Mapping[str, Any], start: Start, config: Config | None, problem: str) -> Changed:
    recipe = _recipe(start)
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
    """Return the defaults of every section of the run, by its kinds."""
    sections: dict[str, Any] = {entry.name: getattr(config, entry.name) for entry in dataclasses.fields(config)}
    kinds: dict[str, Any] = {
        name: type(section) for name, section in sections.items() if dataclasses.is_dataclass(section)
    }
    defaults: dict[str, Any] = {name: kind() for name, kind in kinds.items()}
    return flat(to_dict(dataclasses.replace(config, **defaults)))


def _recipe(start: Start) -> str:
    """--recipe of the last start; a path as it was given, from the directory of that start."""
    words = start.command
    recipes = [after for word, after in pairwise([*words, ""]) if word == "--recipe"]
    recipes += [word.partition("=")[2] for word in words if word.startswith("--recipe=")]
    name = recipes[-1] if recipes else ""
    if name.endswith((".yaml", ".yml")) and not Path(name).is_absolute():
        return str(Path(start.directory) / name)
    return name


def _state(run_dir: Path, summary: Mapping[str, Any]) -> State:
    stop = read_optional_object(run_dir / STOP_RECORD)
    if stop:
        why, advice = str(stop.get("why", "")), str(stop.get("advice", ""))
        sentence = f"{shorten(why, 400)}; {advice}".removesuffix("; ")
        if stop.get("status") != 0:
            return State(word="failed", mood="bad", sentence=f"It failed: {sentence}.", goes_on=True)
        if why == FINISHED:
            return State(word="finished", mood="good", sentence="All its steps are done.", goes_on=False)
        if nothing_left(why):
            return State(word="finished", mood="good", sentence=f"It ended early: {sentence}.", goes_on=False)
        return State(word="stopped", mood="open", sentence=f"It was stopped: {sentence}.", goes_on=True)
    holder = lease_holder(run_dir)
    if holder and not holder.get("gone"):
        return State(word="running", mood="open", sentence="It goes on.", goes_on=False)
    if reason := str(summary.get("exit_reason", "")):
        done = nothing_left(reason)
        sentence = "All its steps are done." if reason == FINISHED else f"It ended: {shorten(reason, 400)}."
        word: Literal["finished", "stopped"] = "finished" if done else "stopped"
        return State(word=word, mood="good" if done else "open", sentence=sentence, goes_on=not done)
    return State(
        word="end not known",
        mood="open",
        sentence="It left no record of an end: it goes on, or was killed.",
        goes_on=True,
    )
