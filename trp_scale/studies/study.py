"""Read a study: one YAML file that describes a table or figure of a paper.

variants    pre-training runs to compare: their settings, and the paper's figures
judges      commands that measure a run: finetune, probe, evaluate; each writes results.json
scales      cpu, gpu, paper: recipe, data, seeds and judges of each
outcome     the row that the conclusion is about, fixed before any run
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any, Literal

from trp_scale.config.recipes import inherit
from trp_scale.config.schema import Positive, record
from trp_scale.errors import RefusedError, nearest
from trp_scale.reporting.results import AVERAGE, WORST

FILES = Path(__file__).parent / "files"

Flags = dict[str, Any]
"""Flags of a command by name. A value is a text, a number, true for a switch, or a list. `{NAME}` in a text is replaced
by the directory of the input or data set NAME."""


@dataclass(frozen=True, kw_only=True)
class PaperSource:
    """Source in the paper. Attributes: paper: short name; arxiv: identifier; place: "Table 1"."""

    paper: str
    arxiv: str
    place: str
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One compared variant.

    Attributes:
        settings: by `section.field`; override those of the scale.
        trained: False keeps the initial weights.
        at: position on the axis of a figure.
        paper: the paper's figures by row, in its units.
    """

    title: str
    settings: Flags = field(default_factory=dict)
    trained: bool = True
    at: float | None = None
    paper: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """Choice of one setting, made separately for each variant from the same values.

    Attributes:
        setting: setting to tune, such as optimizer.lr.
        values: to try, in order; the first wins a tie.
        flags: only for the tries: fewer steps for runs, other rows for judges.
        judge: for a setting of the runs: the judge whose `row` decides.
        row: row of the judge.
    """

    setting: str
    values: list[float]
    flags: Flags = field(default_factory=dict)
    judge: str = ""
    row: str = AVERAGE

    @property
    def tried(self) -> str:
        """Values as text."""
        return ", ".join(f"{value:g}" for value in self.values)


@dataclass(frozen=True, kw_only=True)
class Judge:
    """Command that measures a run.

    Attributes:
        command: finetune and probe read the run with --from. evaluate measures the run's losses on held-out rows, or
            the results of the judge `of`.
        of: another judge with command finetune. evaluate measures its runs on other data; finetune starts from the
            encoder of its first seed.
        left_out: tasks that average and worst exclude: too few rows, or missing in some variants.
        seeds: judging seeds per run.
        validation: flags that select rows other than the test rows, to tune runs.
    """

    command: Literal["finetune", "probe", "evaluate"]
    flags: Flags
    of: str = ""
    left_out: list[str] = field(default_factory=list)
    seeds: Positive = 1
    validation: Flags = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class DataSet:
    """Data set that the study creates. Attributes: command: shard-text or shard-images; flags: without --output."""

    command: Literal["shard-text", "shard-images"]
    flags: Flags


@dataclass(frozen=True, kw_only=True)
class OutcomeRow:
    """Row of the conclusion. Attributes: judges: whose tasks it covers; row: a task, average or worst."""

    judges: list[str]
    row: str = WORST


@dataclass(frozen=True, kw_only=True)
class Scale:
    """Size of a study.

    Attributes:
        settings: of all variants; override the recipe.
        variants: participants; empty = all.
        variant_settings: by variant; override the variant's settings.
        data: data sets to create, by name.
        outcome: replaces the study's outcome if the judges differ.
        seeds: pre-training seeds 0, 1, ...
        tuning: of a setting of the runs.
        budgets: steps: all variants train for the recipe's steps. time: each also trains for the baseline's time.
        launcher: prefix of `-m trp_scale` for runs and judges, such as "torchrun --nproc_per_node 8"; empty: this
            interpreter.
        gpu, gpus: for plans; 0: none.
        note: for readers of the report, such as "rendered data".
    """

    recipe: str
    settings: Flags = field(default_factory=dict)
    variants: list[str] = field(default_factory=list)
    variant_settings: dict[str, Flags] = field(default_factory=dict)
    data: dict[str, DataSet] = field(default_factory=dict)
    judges: dict[str, Judge]
    outcome: OutcomeRow | None = None
    seeds: Positive
    tuning: Tuning | None = None
    budgets: list[Literal["steps", "time"]] = field(default_factory=lambda: ["steps"])
    launcher: str = ""
    gpu: str = "a100-80"
    gpus: int = 0
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Study:
    """Contents of a study file.

    Attributes:
        question: one sentence.
        inputs: NAME of --input NAME=PATH, and its source.
        baseline: variant that the others are tested against.
        ground: untrained variant that pre-training must beat; empty: none.
        axis: label of the axis for `at`; empty: one bar per variant.
    """

    title: str
    source: PaperSource
    question: str
    baseline: str
    ground: str = ""
    outcome: OutcomeRow
    inputs: dict[str, str] = field(default_factory=dict)
    axis: str = ""
    variants: dict[str, Variant]
    scales: dict[str, Scale]

    def scale(self, name: str) -> Scale:
        """Return the scale with this name. Raises RefusedError if it does not exist."""
        if name not in self.scales:
            raise RefusedError(f"--scale {name}: not in this study; allowed: {', '.join(self.scales)}")
        return self.scales[name]

    def with_baseline(self, baseline: str, scale: str) -> Study:
        """Return the study with another baseline. Equal-time runs are dropped, since they depend on the original
        baseline. Raises RefusedError if it is not a trained variant of this scale."""
        here = self.scale(scale)
        allowed = [name for name, variant in self.participants(here).items() if variant.trained]
        if baseline not in allowed:
            raise RefusedError(f"--baseline {baseline}: allowed: {', '.join(allowed)}")
        return replace(self, baseline=baseline, scales={**self.scales, scale: replace(here, budgets=["steps"])})

    def participants(self, scale: Scale) -> dict[str, Variant]:
        """Return the participating variants in the order of the file."""
        return {
            name: variant for name, variant in self.variants.items() if not scale.variants or name in scale.variants
        }

    def outcome_row(self, scale: Scale) -> OutcomeRow:
        return scale.outcome or self.outcome

    def problems(self) -> Iterator[str]:
        """Yield inconsistencies, one line each."""
        for name, scale in self.scales.items():
            where = f"scales.{name}"
            here = self.participants(scale)
            for variant in (*scale.variants, *scale.variant_settings):
                if variant not in self.variants:
                    yield f"{where}: the variant {variant!r} is not among {', '.join(self.variants)}"
            if self.baseline not in here:
                yield f"{where}: the baseline {self.baseline!r} does not take part"
            elif "time" in scale.budgets and not here[self.baseline].trained:
                yield f"{where}: budgets has time, but the baseline {self.baseline!r} is not trained; allowed: steps"
            for judge in self.outcome_row(scale).judges or ["none"]:
                if judge not in scale.judges:
                    yield f"{where}: the outcome's judge {judge!r} is not among {', '.join(scale.judges)}"
            if scale.tuning is not None and scale.tuning.judge not in scale.judges:
                yield f"{where}.tuning.judge {scale.tuning.judge!r} is not among {', '.join(scale.judges)}"
            yield from _problems_of_judges(scale, f"{where}.judges")
            if self.ground and self.ground in here and here[self.ground].trained:
                yield f"ground {self.ground!r} is trained; allowed: a variant with trained: false"
        if self.ground and self.ground not in self.variants:
            yield f"ground {self.ground!r} is not among {', '.join(self.variants)}"
        for name in self.variants:
            if not name.replace("_", "").replace("-", "").replace(".", "").isalnum():
                yield f"variant {name!r}: allowed: letters, digits, - _ and ."


def _problems_of_judges(scale: Scale, where: str) -> Iterator[str]:
    first = {name: judge for name, judge in scale.judges.items() if judge.command == "finetune" and not judge.of}
    for name, judge in scale.judges.items():
        if judge.of and judge.of not in first:
            yield f"{where}.{name}.of is {judge.of!r}; allowed: {', '.join(first) or 'a finetune; none exists'}"
        elif judge.of and judge.command == "probe":
            yield f"{where}.{name}.of is {judge.of!r}, allowed: none; a probe reads the pre-trained encoder"
        elif judge.command == "finetune" and judge.of and "downstream.task" not in first[judge.of].flags:
            yield f"{where}.{judge.of}.flags have no downstream.task, which names the directory that {name} starts from"
        if judge.of and scale.tuning is not None and scale.tuning.judge == name:
            yield f"{where}.{name} tunes a setting of the runs; allowed: a judge without `of`"


REPEATED = ("robustness", "modality", "module")
"""Flags that are repeated for each value."""


def study_path(name: str) -> Path:
    """Return the path of a study, given its name or a .yaml file. Raises RefusedError if neither exists."""
    path = FILES / f"{name}.yaml"
    if path.is_file():
        return path
    if name.endswith((".yaml", ".yml")) and Path(name).is_file():
        return Path(name)
    known = known_studies()
    raise RefusedError(
        f"study {name!r}: no such file or study{nearest(name, known)}; allowed: {', '.join(known)}, "
        "or the path of a .yaml file"
    )


def known_studies() -> list[str]:
    """Names of the package's studies. Files with a leading _ are only extended by others."""
    return sorted(path.stem for path in FILES.glob("*.yaml") if not path.name.startswith("_"))


def _find_parent(name: str, by: Path) -> Path:
    """Return the file that `extends` names: in the package, or next to the extending file."""
    for path in (FILES / f"{name}.yaml", by.parent / name):
        if path.is_file() and path.suffix in (".yaml", ".yml"):  # a message may quote the file
            return path
    raise RefusedError(f"{by} extends {name!r}: no such study; allowed: a study of the package, or a path")


def load_study(name: str) -> Study:
    """Read and check a study. Raises RefusedError for missing, unknown or inconsistent fields."""
    path = study_path(name)
    document = inherit(path, _find_parent).document
    study = record(Study, document, str(path), RefusedError)
    if problems := list(study.problems()):
        raise RefusedError("\n".join(f"{path}: {problem}" for problem in problems))
    return study


def parse_inputs(study: Study, scale: Scale, flags: list[str]) -> dict[str, str]:
    """Return {name: path} of --input NAME=PATH. Raises RefusedError if an input is missing or unknown."""
    inputs = {}
    for words in flags:
        name, equals, path = words.partition("=")
        if not equals or name not in study.inputs:
            raise RefusedError(
                f"--input {words}: NAME=PATH expected, with a NAME of {', '.join(study.inputs) or 'none'}"
            )
        if not Path(path).exists():
            raise RefusedError(f"--input {words}: {path} does not exist; expected: {study.inputs[name]}")
        inputs[name] = str(Path(path).resolve())
    if missing := [name for name in needed_inputs(study, scale) if name not in inputs]:
        wanted = "\n".join(f"  --input {name}=PATH  {study.inputs[name]}" for name in missing)
        raise RefusedError(f"missing inputs:\n{wanted}")
    return inputs


def needed_inputs(study: Study, scale: Scale) -> list[str]:
    """Inputs that the flags of a scale refer to."""
    texts = "".join(map(str, (scale.settings, scale.variant_settings, scale.data, scale.judges, study.variants)))
    return [name for name in study.inputs if f"{{{name}}}" in texts]


def fill_placeholders(flags: Mapping[str, Any], directories: Mapping[str, str], where: str) -> Flags:
    """Replace {NAME} in flags by directories. Raises RefusedError for an unknown name."""

    def fill(value: Any) -> Any:
        if isinstance(value, list):
            return [fill(item) for item in value]
        if not isinstance(value, str):
            return value
        try:
            return value.format_map(directories)
        except (KeyError, ValueError, IndexError) as error:
            raise RefusedError(
                f"{where}: {value!r} names {error}; allowed: {', '.join(f'{{{name}}}' for name in directories)}"
            ) from None

    return {name: fill(value) for name, value in flags.items()}


def to_arguments(flags: Mapping[str, Any]) -> list[str]:
    """Convert {"optimizer.lr": 0.001, "inputs": ["a", "b"], "embedded": True} to ["--optimizer.lr", "0.001",
    "--inputs", "a", "b", "--embedded"]. No command has a switch that takes a value, so True adds only the flag."""
    words: list[str] = []
    for name, value in flags.items():
        items = value if isinstance(value, list) else [] if value is True else [value]
        texts = [str(item).lower() if isinstance(item, bool) else str(item) for item in items]
        if name in REPEATED:
            words += chain.from_iterable((f"--{name}", text) for text in texts)
        else:
            words += [f"--{name}", *texts]
    return words
