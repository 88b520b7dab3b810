"""Read GLUE tasks from GLUE's own files (tab-separated, unquoted, most with a header) or from Hugging Face dataset
directories (save_to_disk)."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from trp_scale.config import RefusedError
from trp_scale.config.files import read_content
from trp_scale.data.raw_files import check_rows, open_dataset
from trp_scale.errors import DataError, error_text, quote, shorten


def read_tsv(path: Path, task: GlueFormat, *, max_bad_lines: int = 0, group_column: str = "") -> Examples:
    """Read one file of a task, with or without byte-order mark, with line ends LF or CR LF. Quotation marks are text.

    Args:
        max_bad_lines: largest number of lines with a wrong number of columns, which are skipped. The published QQP has
            some, with line ends within questions.
        group_column: column with the groups of the examples; "" = none.

    Raises:
        DataError: the file is missing, damaged or of another format, or has too many bad lines; names file and line.
    """
    lines = _lines(path)
    # Only CoLA's training and dev files have no header.
    names, first = list(task.headerless), 0
    if not names or not lines or all(any(name in lines[0].split("\t") for name in c) for c in task.sentences):
        names, first = (lines[0].split("\t") if lines else []), 1
    sentences, label, index = find_columns(names, task, f"{path}:1")
    cells = {number: line.split("\t") for number, line in enumerate(lines[first:], start=first + 1)}
    left_out = [
        f"{path}:{number}: {len(row)} columns found, {len(names)} expected"
        for number, row in cells.items()
        if len(row) != len(names)
    ]
    if len(left_out) > max_bad_lines:
        more = f" (and {len(left_out) - 1} more such lines)" if len(left_out) > 1 else ""
        raise DataError(
            f"{left_out[0]}{more}; repair the file, or set --data.max_corrupt_blocks {len(left_out)} to skip them"
        )
    rows = {number: row for number, row in cells.items() if len(row) == len(names)}
    if not rows:
        raise DataError(f"{path}: no examples found")
    line_numbers, columns = list(rows), list(zip(*rows.values(), strict=True))
    labels = None
    if label is not None:
        labels = number_labels(columns[label], task.values, task, [f"{path}:{line}" for line in line_numbers])
    return Examples(
        name=path.stem,
        sentences=tuple(list(columns[number]) for number in sentences),
        labels=labels,
        line_numbers=line_numbers,
        indices=[] if index is None else list(columns[index]),
        left_out=left_out,
        groups=list(columns[names.index(group_column)]) if group_column in names else [],
    )


def _lines(path: Path) -> list[str]:
    """Split a file at line feeds only; `splitlines` would split at other characters, which sentences contain."""
    content = read_content(path, DataError, largest=4 << 30)  # the largest, of MNLI, has 80 MB
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = 1 + content.count(b"\n", 0, error.start)
        raise DataError(f"{path}:{line}: not UTF-8 ({error.reason})") from error
    lines = text.split("\n")
    if not lines[-1]:
        lines.pop()
    return [line.removesuffix("\r") for line in lines]


DICT_FILE = "dataset_dict.json"
"""File that save_to_disk writes for a DatasetDict."""


def split_name(file: str) -> str:
    """Convert the stem of GLUE's file to Hugging Face's split: dev_matched -> validation_matched."""
    return file.replace("dev", "validation", 1)


def read_splits(
    directory: Path, task: GlueFormat, files: dict[str, tuple[str, ...]], group_column: str = ""
) -> dict[str, Examples]:
    """Read splits of one task from a dataset directory: of each set in `files` the first stem that exists."""
    try:
        import datasets
    except ImportError as error:
        raise DataError(f"{directory}: reading a dataset directory needs `pip install trp-scale[datasets]`") from error
    loaded = open_dataset(directory, str(directory))
    if not isinstance(loaded, datasets.DatasetDict):
        raise DataError(f"{directory}: not a dataset directory with splits; save a DatasetDict")
    examples = {}
    for name, stems in files.items():
        stem = next((stem for stem in stems if split_name(stem) in loaded), None)
        if stem is not None:
            where, rows = f"{directory}, split {split_name(stem)}", loaded[split_name(stem)]
            check_rows(rows, 0, len(rows), where)
            try:
                examples[name] = _read(rows, task, stem, where, group_column)
            except RefusedError:
                raise
            except Exception as error:  # pyarrow raises many types for damaged columns
                raise DataError(f"{where}: cannot be read ({error_text(error)}); save it again") from error
    return examples


def _read(rows: Any, task: GlueFormat, stem: str, where: str, group_column: str) -> Examples:
    names = rows.column_names
    numbers, label, index = find_columns(names, task, where)
    sentences = tuple(list(rows[names[number]]) for number in numbers)
    if not len(rows):
        raise DataError(f"{where}: no examples found")
    for texts in sentences:
        for number, text in enumerate(texts):
            if not isinstance(text, str):
                raise DataError(f"{where}, row {number}: {type(text).__name__} found, a sentence expected")
    labels = None
    if label is not None:
        values, named = rows[names[label]], getattr(rows.features[names[label]], "names", None)
        if named and task.names and sorted(named) != sorted(task.names):
            raise DataError(
                f"{where}: labels {shorten(', '.join(map(str, named)))} found, {', '.join(task.names)} expected"
            )
        if named and task.names:  # renumber in the order of task.names
            values = [named[value] if value in range(len(named)) else value for value in values]
        places = [f"{where}, row {number}" for number in range(len(rows))]
        labels = number_labels(values, task.names if named else (), task, places)
    return Examples(
        name=stem,
        sentences=sentences,
        labels=labels,
        line_numbers=list(range(len(rows))),
        indices=[] if index is None else [str(index) for index in rows[names[index]]],
        groups=[str(group or "") for group in rows[group_column]] if group_column in names else [],
    )


class GlueData(NamedTuple):
    """Examples of a task.

    Attributes:
        train: training examples.
        measured: examples of each measured set; the name is "" for a single set.
        notices: messages about the files for the user.
        unlabelled: why measured examples have no labels; "" if they have labels.
    """

    train: Examples
    measured: dict[str, Examples]
    notices: list[str]
    unlabelled: str


def find_folder(root: Path, task: str) -> Path:
    """Return the task's directory: `root`/CoLA, /cola, /STS_B and so on, or `root` if it has the task's name.

    Raises:
        DataError: no or several directories match.
    """
    if not root.is_dir():
        raise DataError(
            f"--data.path {root}: no such directory; allowed: the GLUE directory, with a folder for each task"
        )
    standard = root / FORMATS[task].folder
    if standard.is_dir():
        return standard
    matches = sorted(path for path in root.iterdir() if path.is_dir() and _normalise_name(path.name) == task)
    if len(matches) > 1:
        raise DataError(f"{root}: {' and '.join(path.name for path in matches)} both match {task}; remove all but one")
    if matches:
        return matches[0]
    if _normalise_name(root.resolve().name) == task:
        return root
    folders = sorted(path.name for path in root.iterdir() if path.is_dir())
    raise DataError(
        f"--data.path {root}: no folder {FORMATS[task].folder} for the task {task}; found: {', '.join(folders) or '-'}"
    )


def require_folders(root: Path, tasks: Sequence[str]) -> None:
    """Raise `DataError` if folders of tasks are missing, before the first task is trained."""
    problems: dict[str, str] = {}
    for task in tasks:
        try:
            find_folder(root, task)
        except DataError as error:
            problems[task] = str(error)
    if problems:
        complete = ",".join(task for task in tasks if task not in problems)
        wrong = "\n".join(dict.fromkeys(problems.values()))
        raise DataError(wrong + (f"\nallowed with this data: --task {complete}" if complete else ""))


def read_glue(root: Path, task: str, *, split: str, max_bad_lines: int, group_column: str = "") -> GlueData:
    """Read the training and measured examples of a task, with the groups of a column; skip up to `max_bad_lines` lines
    of each file.

    Raises:
        DataError: a file or folder is missing, damaged or of another format.
        RefusedError: the training examples have no labels.
    """
    folder, form = find_folder(root, task), FORMATS[task]
    if group_column and form.outputs == 1:
        raise RefusedError(f"groups {group_column}: {task} has scores; allowed: tasks with labels")
    wanted = {"train": ("train",), **(form.dev if split == "dev" else form.test)}
    if (folder / DICT_FILE).is_file():
        read = read_splits(folder, form, wanted, group_column)
    else:
        paths = {name: [folder / f"{stem}.tsv" for stem in stems] for name, stems in wanted.items()}
        stored = {name: path for name, several in paths.items() for path in several[::-1] if path.is_file()}
        limits: dict[str, Any] = {"max_bad_lines": max_bad_lines, "group_column": group_column}
        read = {name: read_tsv(path, form, **limits) for name, path in stored.items()}
    for name in list(wanted)[:2]:  # the training set and the first measured set are required
        if name not in read:
            raise DataError(f"{folder}: no {_missing(folder, wanted[name])}")
    for examples in read.values() if group_column else ():
        if examples.labels is not None and not examples.groups:
            raise DataError(f"{folder}: {examples.name} has no column {quote(group_column)} for groups; name another")
    unlabelled = {name: _explain_missing_labels(folder, examples, form, split) for name, examples in read.items()}
    if reason := unlabelled["train"]:
        raise RefusedError(reason)
    notices = [f"skipped: {line}" for examples in read.values() for line in examples.left_out]
    notices += [f"{folder}: no {wanted[name][0]}; it is not measured" for name in wanted if name not in read]
    return GlueData(read.pop("train"), read, notices, next(filter(None, unlabelled.values()), ""))


def _normalise_name(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "")


def _missing(folder: Path, stems: Sequence[str]) -> str:
    if (folder / DICT_FILE).is_file():
        return f"split {' or '.join(map(split_name, stems))} in its {DICT_FILE}"
    return f"{' or '.join(f'{stem}.tsv' for stem in stems)}, and no {DICT_FILE}"


def _explain_missing_labels(folder: Path, examples: Examples, form: GlueFormat, split: str) -> str:
    """Return why the examples have no labels; "" if they have labels."""
    if examples.labels is not None:
        return ""
    hidden = (
        "; GLUE does not publish test labels: use --downstream.split dev, and trp-scale evaluate --split test "
        "--predictions DIR to write files for GLUE's server"
    )
    return (
        f"{folder}: {examples.name} has no labels (column {' or '.join(form.label)}), which training and metrics "
        f"need{hidden if split == 'test' else ''}"
    )


@dataclass(frozen=True, kw_only=True)
class GlueFormat:
    """File format of one task.

    Attributes:
        folder: standard name; other spellings differ only in case, "-" and "_".
        sentences: for each sentence of an example, the possible names of its column (GLUE's, Hugging Face's).
        label: possible names of the label's column.
        names: of the labels, in the order of their numbers (Hugging Face's); empty = scores.
        values: labels in GLUE's files, in the same order.
        headerless: columns of training and dev files without header; test files have a header.
        dev, test: possible file stems of each measured set; the set is named "" if the task has a single set.
        submitted: stems of the files for GLUE's server by measured set; default: the folder's name.
    """

    folder: str
    sentences: tuple[tuple[str, ...], ...]
    label: tuple[str, ...] = ("label",)
    names: tuple[str, ...] = ()
    values: tuple[str, ...] = ()
    headerless: tuple[str, ...] = ()
    dev: dict[str, tuple[str, ...]] = field(default_factory=lambda: {"": ("dev",)})
    test: dict[str, tuple[str, ...]] = field(default_factory=lambda: {"": ("test",)})
    submitted: dict[str, str] = field(default_factory=dict)

    @property
    def outputs(self) -> int:
        """Width of the head: the number of labels, or 1 for scores."""
        return max(1, len(self.names))


_BINARY = ("0", "1")
_ENTAILMENT = ("entailment", "not_entailment")
_PAIR = (("sentence1",), ("sentence2",))

FORMATS: dict[str, GlueFormat] = {
    "cola": GlueFormat(
        folder="CoLA",
        sentences=(("sentence",),),
        names=("unacceptable", "acceptable"),
        values=_BINARY,
        headerless=("source", "label", "notes", "sentence"),
    ),
    "sst2": GlueFormat(folder="SST-2", sentences=(("sentence",),), names=("negative", "positive"), values=_BINARY),
    "mrpc": GlueFormat(
        folder="MRPC",
        sentences=(("#1 String", "sentence1"), ("#2 String", "sentence2")),
        label=("Quality", "label"),
        names=("not_equivalent", "equivalent"),
        values=_BINARY,
    ),
    "stsb": GlueFormat(folder="STS-B", sentences=_PAIR, label=("score", "label")),
    "qqp": GlueFormat(
        folder="QQP",
        sentences=(("question1",), ("question2",)),
        label=("is_duplicate", "label"),
        names=("not_duplicate", "duplicate"),
        values=_BINARY,
    ),
    "mnli": GlueFormat(
        folder="MNLI",
        sentences=(("sentence1", "premise"), ("sentence2", "hypothesis")),
        label=("gold_label", "label"),
        names=("entailment", "neutral", "contradiction"),
        values=("entailment", "neutral", "contradiction"),
        dev={"matched": ("dev_matched", "dev"), "mismatched": ("dev_mismatched",)},
        test={"matched": ("test_matched", "test"), "mismatched": ("test_mismatched",)},
        submitted={"matched": "MNLI-m", "mismatched": "MNLI-mm"},
    ),
    "qnli": GlueFormat(folder="QNLI", sentences=(("question",), ("sentence",)), names=_ENTAILMENT, values=_ENTAILMENT),
    "rte": GlueFormat(folder="RTE", sentences=_PAIR, names=_ENTAILMENT, values=_ENTAILMENT),
    "wnli": GlueFormat(folder="WNLI", sentences=_PAIR, names=("not_entailment", "entailment"), values=_BINARY),
}
"""Formats by the names of --task."""


@dataclass(frozen=True, kw_only=True)
class Examples:
    """Examples of one file of a task.

    Attributes:
        name: of the split: train, dev_matched, ...
        sentences: n texts for each sentence of an example.
        labels: [n] float64 numbers of labels, or scores; `None` for files without labels.
        line_numbers: [n] line numbers of the file, or rows of the table.
        indices: [n] values of the index column; empty without such a column.
        left_out: messages about skipped lines.
        groups: [n] values of the column of groups; empty without such a column.
    """

    name: str
    sentences: tuple[list[str], ...]
    labels: npt.NDArray[np.float64] | None
    line_numbers: list[int]
    indices: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    groups: list[str] = field(default_factory=list)


UNKNOWN = ("", "-1", "-1.0")
"""Values of unpublished labels."""


def find_columns(names: list[str], task: GlueFormat, where: str) -> tuple[list[int], int | None, int | None]:
    """Return the numbers of the columns of sentences, label and index; `None` for a missing label or index."""

    def find(allowed: Sequence[str]) -> int | None:
        return next((names.index(name) for name in allowed if name in names), None)

    sentences = [find(allowed) for allowed in task.sentences]
    if None in sentences:
        allowed = " or ".join(map(repr, task.sentences[sentences.index(None)]))
        raise DataError(f"{where}: no column {allowed}; found: {shorten(', '.join(map(repr, names)))}")
    # The index that GLUE's server reads is so called in GLUE's files, in QQP, and in Hugging Face's data sets.
    index = find(("index", "id", "idx"))
    return [number for number in sentences if number is not None], find(task.label), index


def number_labels(
    values: Sequence[Any], names: Sequence[str], task: GlueFormat, places: Sequence[str]
) -> npt.NDArray[np.float64] | None:
    """Convert labels to numbers [n]; `None` if all are unknown.

    Args:
        values: names, or numbers if `names` is empty.
        names: of the labels, in the order of their numbers.
        places: of the rows, for messages.
    """
    if all(value is None or value != value or str(value) in UNKNOWN for value in values):  # NaN is not itself
        return None
    known: Sequence[Any] = names or range(len(task.names))
    labels = np.full(len(values), np.nan)
    for row, value in enumerate(values):
        with suppress(TypeError, ValueError):  # missing labels are no numbers
            labels[row] = float(value) if not known else known.index(value if names else float(value))
    if not np.isfinite(labels).all():
        row = int(np.argmin(np.isfinite(labels)))
        expected = f"allowed: {', '.join(map(str, known))}" if known else "a number expected"
        kind = "label" if task.names else "score"
        raise DataError(f"{places[row]}: {kind} {quote(values[row])} found, {expected}")
    return labels
