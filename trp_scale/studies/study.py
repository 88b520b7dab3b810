"""Read a study: a table or figure of a paper as one file of variants, judges, and scales to run it at.

variants    what is compared: settings of a pre-training run that differ, and the paper's figures
judges      commands that measure a run: finetune, probe, evaluate; each writes results.json
scales      cpu, gpu, paper: recipe, data, seeds and judges of each
outcome     the one row that the study's sentence is about, named before anything is run
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
"""Flags of a command by name: a text, a number, true for a switch, or a list of them. `{NAME}` in a text stands for
the directory of the input or of the data set NAME."""


@dataclass(frozen=True, kw_only=True)
class PaperSource:
    """Where the paper has it. Attributes: paper: short name; arxiv: identifier; place: "Table 1"."""

    paper: str
    arxiv: str
    place: str
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One thing that is compared.

    Attributes:
        settings: by `section.field`, over the scale's.
        trained: False: the encoder as the seed draws it.
        at: number on the axis of a figure.
        paper: the paper's figures by row; in its own units.
    """

    title: str
    settings: Flags = field(default_factory=dict)
    trained: bool = True
    at: float | None = None
    paper: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """One setting, chosen for each variant by itself with the same few tries.

    Attributes:
        setting: that is tried, such as optimizer.lr.
        values: in their order; of equal ones the first is taken.
        flags: of the tries alone: fewer steps for runs, other rows for judges.
        judge: of a run's setting: the judge whose `row` decides.
        row: of the judge's rows.
    """

    setting: str
    values: list[float]
    flags: Flags = field(default_factory=dict)
    judge: str = ""
    row: str = AVERAGE

    @property
    def tried(self) -> str:
        """Values as a list in words."""
        return ", ".join(f"{value:g}" for value in self.values)


@dataclass(frozen=True, kw_only=True)
class Judge:
    """A command that measures a run.

    Attributes:
        command: finetune and probe take the run as --from; evaluate gives the losses of the run itself on held-out
            rows, or measures what the judge `of` has trained on it.
        of: a finetune among the judges. evaluate measures its runs on other data; a finetune starts from the encoder
            that it leaves, of its first seed, where that has been fine-tuned for another task before.
        left_out: tasks that average and worst leave out: too few rows measure them, or not all variants have them.
        seeds: of the judging, on each run.
        tuning: of one of its flags, on the run of the first seed; its `flags` must measure other rows than the test's.
        validation: flags that measure rows apart from the test's, for the tuning of runs.
    """

    command: Literal["finetune", "probe", "evaluate"]
    flags: Flags
    of: str = ""
    left_out: list[str] = field(default_factory=list)
    seeds: Positive = 1
    tuning: Tuning | None = None
    validation: Flags = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class DataSet:
    """A data set that the study makes first. Attributes: command: shard-text or shard-images; flags: but --output."""

    command: Literal["shard-text", "shard-images"]
    flags: Flags


@dataclass(frozen=True, kw_only=True)
class OutcomeRow:
    """The row that the sentence is about. Attributes: judges: whose tasks it is over; row: a task, average or worst."""

    judges: list[str]
    row: str = WORST


@dataclass(frozen=True, kw_only=True)
class Scale:
    """How large a study is run.

    Attributes:
        settings: of all variants, over the recipe's.
        variants: those that take part; empty = all.
        variant_settings: by variant, over its own.
        data: made first, by name.
        outcome: in place of the study's, where the scale has other judges.
        seeds: of pre-training, 0, 1, ...
        tuning: of a setting of the runs.
        budgets: steps: all variants make the recipe's steps. time: each also makes as many as take the baseline's time.
        launcher: words before `-m trp_scale`, such as "torchrun --nproc_per_node 8", of pre-training and of judges;
            empty: this interpreter.
        gpu, gpus: for plans; 0: none.
        note: what a reader must know, such as rendered data.
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
    """A study, as its file has it.

    Attributes:
        question: one sentence.
        inputs: what the user gives with --input NAME=PATH, and where it is from.
        baseline: variant that the others are tested against.
        ground: an untrained variant: pre-training must beat it for the rest to mean anything; empty: none takes part.
        axis: what a variant's `at` is, for a figure; empty: the figure has a bar for each variant.
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
        """Return the scale with this name.

        Raises:
            RefusedError: the study has none of that name.
        """
        if name not in self.scales:
            raise RefusedError(f"--scale {name}: not in this study; allowed: {', '.join(self.scales)}")
        return self.scales[name]

    def against(self, baseline: str, scale: str) -> Study:
        """Return the study with another baseline, at equal steps alone: runs of equal time have that of the study's
        own.

        Raises:
            RefusedError: no variant of that name is trained at this scale.
        """
        here = self.scale(scale)
        allowed = [name for name, variant in self.participants(here).items() if variant.trained]
        if baseline not in allowed:
            raise RefusedError(f"--baseline {baseline}: allowed: {', '.join(allowed)}")
        return replace(self, baseline=baseline, scales={**self.scales, scale: replace(here, budgets=["steps"])})

    def participants(self, scale: Scale) -> dict[str, Variant]:
        """Return the participating variants, in the order of the file."""
        return {
            name: variant for name, variant in self.variants.items() if not scale.variants or name in scale.variants
        }

    def outcome_row(self, scale: Scale) -> OutcomeRow:
        """The scale's own, or the study's."""
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
                yield f"{where}: budgets has time, and the baseline {self.baseline!r} is not trained; allowed: steps"
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
            yield f"{where}.{name}.of is {judge.of!r}; allowed: {', '.join(first) or 'a finetune; there is none'}"
        elif judge.of and judge.command == "probe":
            yield f"{where}.{name}.of is {judge.of!r}, allowed: none; a probe reads the pre-trained encoder"
        elif judge.command == "finetune" and judge.of and "downstream.task" not in first[judge.of].flags:
            yield f"{where}.{judge.of}.flags lack downstream.task, which names the directory that {name} starts from"
        if judge.of and judge.tuning is not None:
            yield f"{where}.{name}.tuning is given, allowed: none, since it is of {judge.of!r}"
        if judge.of and scale.tuning is not None and scale.tuning.judge == name:
            yield f"{where}.{name} chooses a setting of the runs, allowed: a judge without `of`"


REPEATED = ("robustness", "modality", "module")
"""Flags that are given once for each value."""


def study_path(name: str) -> Path:
    """The file of a study of the package, or a path to one.

    Raises:
        RefusedError: there is neither.
    """
    path = FILES / f"{name}.yaml"
    if path.is_file():
        return path
    if name.endswith((".yaml", ".yml")) and Path(name).is_file():
        return Path(name)
    known = known_studies()
    raise RefusedError(
        f"study {name!r}: no such file, and no study of that name{nearest(name, known)}; allowed: {', '.join(known)}, "
        "or the path of a .yaml file"
    )


def known_studies() -> list[str]:
    """Names of the package's studies. A file whose name begins with _ has what several of them extend."""
    return sorted(path.stem for path in FILES.glob("*.yaml") if not path.name.startswith("_"))


def _find_parent(name: str, by: Path) -> Path:
    """The file that `extends` names: of the package, or beside the one that extends it."""
    for path in (FILES / f"{name}.yaml", by.parent / name):
        if path.is_file() and path.suffix in (".yaml", ".yml"):  # a message may quote what a file holds
            return path
    raise RefusedError(f"{by} extends {name!r}: there is no such study; allowed: a study of the package, or a path")


def load_study(name: str) -> Study:
    """Read a study.

    Raises:
        RefusedError: no such file, a field that is missing, unknown or of a wrong type, or parts that do not fit.
    """
    path = study_path(name)
    document = inherit(path, _find_parent).document
    study = record(Study, document, str(path), RefusedError)
    if problems := list(study.problems()):
        raise RefusedError("\n".join(f"{path}: {problem}" for problem in problems))
    return study


def parse_inputs(study: Study, scale: Scale, flags: list[str]) -> dict[str, str]:
    """{name: path} of --input NAME=PATH, which must be those that the scale's flags name.

    Raises:
        RefusedError: one is missing or unknown, or its path is not there.
    """
    inputs = {}
    for words in flags:
        name, equals, path = words.partition("=")
        if not equals or name not in study.inputs:
            raise RefusedError(
                f"--input {words}: NAME=PATH expected, with a NAME of {', '.join(study.inputs) or 'none'}"
            )
        if not Path(path).exists():
            raise RefusedError(f"--input {words}: there is no {path}; allowed: {study.inputs[name]}")
        inputs[name] = str(Path(path).resolve())
    if missing := [name for name in needed_inputs(study, scale) if name not in inputs]:
        wanted = "\n".join(f"  --input {name}=PATH  {study.inputs[name]}" for name in missing)
        raise RefusedError(f"inputs are missing:\n{wanted}")
    return inputs


def needed_inputs(study: Study, scale: Scale) -> list[str]:
    """Inputs that flags of the scale name."""
    texts = "".join(map(str, (scale.settings, scale.variant_settings, scale.data, scale.judges, study.variants)))
    return [name for name in study.inputs if f"{{{name}}}" in texts]


def fill_placeholders(flags: Mapping[str, Any], directories: Mapping[str, str], where: str) -> Flags:
    """The flags with directories in place of {NAME}.

    Raises:
        RefusedError: a name that is none of `directories`.
    """

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
    """{"optimizer.lr": 0.001, "inputs": ["a", "b"], "embedded": True} -> ["--optimizer.lr", "0.001", "--inputs", "a",
    "b", "--embedded"]: switches take no value in every command, so that what is true is said by the flag alone."""
    words: list[str] = []
    for name, value in flags.items():
        items = value if isinstance(value, list) else [] if value is True else [value]
        texts = [str(item).lower() if isinstance(item, bool) else str(item) for item in items]
        if name in REPEATED:
            words += chain.from_iterable((f"--{name}", text) for text in texts)
        else:
            words += [f"--{name}", *texts]
    return words
