"""Read a run directory: history and curves, end, settings and incidents."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from trp_scale.config import Config
from trp_scale.config.json_files import read_object
from trp_scale.config.loader import flat, from_dict, load_recipe, to_dict
from trp_scale.config.schema import Fields, PartOf, record
from trp_scale.config.yaml_files import read_yaml
from trp_scale.distributed.lease import lease_holder
from trp_scale.errors import RefusedError, shorten
from trp_scale.reporting.curves import RunCurves
from trp_scale.training.ending import STOP_RECORD
from trp_scale.training.incidents import read_incidents
from trp_scale.training.metrics import RunHistory, read_history
from trp_scale.training.records import FINISHED, nothing_left
from trp_scale.training.report import is_fine_tuning, read_summary
from trp_scale.training.rundir import CONFIG_FILE, ENVIRONMENT_FILE


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
        run_dir: as it was given.
        history, curves: of metrics.jsonl.
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


def _object(path: Path) -> Mapping[str, Any]:
    """A JSON object that adds to the page, or nothing: `doctor RUN_DIR` is the place that examines a damaged one."""
    try:
        return read_object(path)
    except RefusedError:
        return {}


def _start(path: Path) -> Start:
    try:
        return record(Start, _object(path), str(path), RefusedError)
    except RefusedError:  # as above
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
    """Return the settings that differ from the recipe of the command line."""
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
    stop = _object(run_dir / STOP_RECORD)
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
