"""Read a GLUE task from the GLUE directory.

Files are GLUE's own (columns between tabs, nothing quoted, most with a header), or a Hugging Face dataset directory
(save_to_disk), for which `datasets` is imported when one is met.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from trp_scale.config import RefusedError
from trp_scale.config.json_files import read_content
from trp_scale.data.raw_files import check_rows, open_dataset
from trp_scale.errors import DataError, error_text, quote, shorten


def read_tsv(path: Path, task: GlueFormat, *, allowed_bad: int = 0) -> Examples:
    """Read one file of a task, with or without a byte-order mark, its lines ended by LF or CR LF.

    Quotation marks are text: GLUE quotes nothing, and has single ones in every file.

    Args:
        allowed_bad: lines with too few or too many columns that are left out (the published QQP has some, broken by a
            line end within a question).

    Raises:
        DataError: no such file, not UTF-8, a column is missing, no examples, more bad lines than allowed, or a label
            that is none of the task's; names file and line.
    """
    lines = _lines(path)
    # Only CoLA's training and dev files have no header: what a line of theirs holds is no column's name.
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
    if len(left_out) > allowed_bad:
        more = f" (and {len(left_out) - 1} more such lines)" if len(left_out) > 1 else ""
        raise DataError(
            f"{left_out[0]}{more}; mend the file, or give --data.max_corrupt_blocks {len(left_out)} to leave them out"
        )
    rows = {number: row for number, row in cells.items() if len(row) == len(names)}
    if not rows:
        raise DataError(f"{path}: no examples found")
    places, columns = list(rows), list(zip(*rows.values(), strict=True))
    labels = None if label is None else number_labels(columns[label], task, places, str(path))
    return Examples(
        name=path.stem,
        sentences=tuple(list(columns[number]) for number in sentences),
        labels=labels,
        places=places,
        indices=[] if index is None else list(columns[index]),
        left_out=left_out,
    )


def _lines(path: Path) -> list[str]:
    """Split at line feeds alone: `splitlines` would also do so at characters that occur within sentences."""
    content = read_content(path, DataError, largest=MAX_TSV_BYTES)
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = 1 + content.count(b"\n", 0, error.start)
        raise DataError(f"{path}:{line}: not UTF-8 ({error.reason})") from error
    lines = text.split("\n")
    if not lines[-1]:
        lines.pop()
    return [line.removesuffix("\r") for line in lines]


MAX_TSV_BYTES = 4 << 30
"""Bytes of a file; GLUE's largest, MNLI's, has 80 MB."""

DICT_FILE = "dataset_dict.json"
"""What save_to_disk leaves in the directory of a DatasetDict."""

TRAIN, DEV = "train", "validation"


def split_name(file: str) -> str:
    """Hugging Face's name of a split, from the stem of GLUE's file: dev_matched -> validation_matched."""
    return file.replace("dev", DEV, 1)


def read_splits(directory: Path, task: GlueFormat, files: dict[str, tuple[str, ...]]) -> dict[str, Examples]:
    """Read splits of one task.

    Args:
        files: by the name of a set, the stems of GLUE's files that it may have; the first that is there is taken, and
            a set that is not there is left out.

    Raises:
        DataError: the extra is not installed, the directory is damaged, a column is missing, or labels that are not
            the task's.
    """
    try:
        import datasets
    except ImportError as error:
        raise DataError(f"{directory}: reading a dataset directory needs `pip install trp-scale[datasets]`") from error
    loaded = open_dataset(directory, str(directory))
    if not isinstance(loaded, datasets.DatasetDict):
        raise DataError(f"{directory}: cannot be read as a dataset directory with splits; save a DatasetDict")
    examples = {}
    for name, stems in files.items():
        stem = next((stem for stem in stems if split_name(stem) in loaded), None)
        if stem is not None:
            where, rows = f"{directory}, split {split_name(stem)}", loaded[split_name(stem)]
            check_rows(rows, 0, len(rows), where)
            try:
                examples[name] = _read(rows, task, stem, where)
            except RefusedError:
                raise
            except Exception as error:  # of pyarrow, of many kinds, where the stored columns are damaged
                raise DataError(f"{where}: cannot be read ({error_text(error)}); save it again") from error
    return examples


def _read(rows: Any, task: GlueFormat, stem: str, where: str) -> Examples:
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
        name = names[label]
        labels = _labels(rows[name], getattr(rows.features[name], "names", None), task, where)
    return Examples(
        name=stem,
        sentences=sentences,
        labels=labels,
        places=list(range(len(rows))),
        indices=[] if index is None else [str(index) for index in rows[names[index]]],
    )


def _labels(values: Any, names: list[str] | None, task: GlueFormat, where: str) -> npt.NDArray[np.float64] | None:
    """[n] by our numbers: labels that have names go by them, others are Hugging Face's numbers, which are ours."""
    if all(value is None or value != value or str(value) in UNKNOWN for value in values):  # NaN is not itself
        return None
    numbers = np.array([_number(value) for value in values])  # [n]
    allowed = np.isin(numbers, np.arange(len(task.names))) if task.names else np.isfinite(numbers)
    if not allowed.all():
        row, expected = int(np.argmin(allowed)), f"0 to {len(task.names) - 1}" if task.names else "a number"
        raise DataError(f"{where}, row {row}: label {quote(values[row])} found, {expected} expected")
    if names is None or not task.names:
        return numbers
    if sorted(names) != sorted(task.names):
        raise DataError(
            f"{where}: labels {shorten(', '.join(map(str, names)))} found, {', '.join(task.names)} expected"
        )
    return np.array([task.names.index(name) for name in names], dtype=np.float64)[numbers.astype(np.int64)]


def _number(value: Any) -> float:
    """NaN for what is no number: no label, or one in words."""
    try:
        return float(value)
    except (TypeError, ValueError):
        return float("nan")


class GlueData(NamedTuple):
    """Examples of a task.

    Attributes:
        train: examples to learn from.
        measured: by the name of the set ("" where the task has one).
        notices: remarks on the files for the user.
        unlabelled: why no figure can be given of what is measured, "" if one can.
    """

    train: Examples
    measured: dict[str, Examples]
    notices: list[str]
    unlabelled: str


def find_folder(root: Path, task: str) -> Path:
    """The task's directory: `root`/CoLA, /cola, /STS_B and the like, or `root` itself if it bears the task's name.

    Raises:
        DataError: there is none, or there are several.
    """
    if not root.is_dir():
        raise DataError(f"--data.path {root}: no such directory; allowed: the GLUE directory, one folder for each task")
    standard = root / FORMATS[task].folder
    if standard.is_dir():
        return standard
    matches = sorted(path for path in root.iterdir() if path.is_dir() and _plain(path.name) == task)
    if len(matches) > 1:
        raise DataError(f"{root}: {' and '.join(path.name for path in matches)} may both be {task}; leave one there")
    if matches:
        return matches[0]
    if _plain(root.resolve().name) == task:
        return root
    folders = sorted(path.name for path in root.iterdir() if path.is_dir())
    raise DataError(
        f"--data.path {root}: no folder {FORMATS[task].folder} for the task {task}; found: {', '.join(folders) or '-'}"
    )


def require_folders(root: Path, tasks: Sequence[str]) -> None:
    """Check that all tasks are there before the first is trained.

    Raises:
        DataError: naming each that is not, and those that are.
    """
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


def read_glue(root: Path, task: str, *, split: str, allowed_bad: int) -> GlueData:
    """The training examples of a task and those to measure on.

    Args:
        root: the GLUE directory.
        split: dev or test.
        allowed_bad: lines of each file that may be left out.

    Raises:
        DataError: as `find_folder`, `read_tsv` and `read_splits`, or a file is not there.
        RefusedError: training examples without labels.
    """
    folder, form = find_folder(root, task), FORMATS[task]
    wanted = {"train": ("train",), **(form.dev if split == "dev" else form.test)}
    if (folder / DICT_FILE).is_file():
        read = read_splits(folder, form, wanted)
    else:
        paths = {name: [folder / f"{stem}.tsv" for stem in stems] for name, stems in wanted.items()}
        stored = {name: path for name, several in paths.items() for path in several[::-1] if path.is_file()}
        read = {name: read_tsv(path, form, allowed_bad=allowed_bad) for name, path in stored.items()}
    for name in list(wanted)[:2]:  # the training set, and the first to be measured
        if name not in read:
            raise DataError(f"{folder}: no {_missing(folder, wanted[name])}")
    unlabelled = {name: _explain_missing_labels(folder, examples, form, split) for name, examples in read.items()}
    if reason := unlabelled["train"]:
        raise RefusedError(reason)
    notices = [f"left out: {line}" for examples in read.values() for line in examples.left_out]
    notices += [f"{folder}: no {wanted[name][0]}: nothing is measured on it" for name in wanted if name not in read]
    return GlueData(read.pop("train"), read, notices, next(filter(None, unlabelled.values()), ""))


def _plain(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "")


def _missing(folder: Path, stems: Sequence[str]) -> str:
    if (folder / DICT_FILE).is_file():
        return f"split {' or '.join(map(split_name, stems))} in its {DICT_FILE}"
    return f"{' or '.join(f'{stem}.tsv' for stem in stems)}, and no {DICT_FILE}"


def _explain_missing_labels(folder: Path, examples: Examples, form: GlueFormat, split: str) -> str:
    """Explain that the examples have no labels; "" if they have."""
    if examples.labels is not None:
        return ""
    hidden = (
        "; GLUE keeps the labels of its test sets back: --downstream.split dev, and trp-scale evaluate --split test "
        "--predictions DIR for the files that its server measures"
    )
    return (
        f"{folder}: {examples.name} has no labels (column {' or '.join(form.label)}): nothing can be learned "
        f"from it or measured on it{hidden if split == 'test' else ''}"
    )


@dataclass(frozen=True, kw_only=True)
class GlueFormat:
    """How one task is stored.

    Attributes:
        folder: its standard name; other spellings differ in case, "-" and "_" only.
        sentences: for each sentence of an example, the names its column has: in GLUE's files, in Hugging Face's.
        label: the same of the label's column.
        names: of the labels; a label's number is its place here (Hugging Face's order). Empty = a score.
        values: how GLUE's files spell the labels, in that order.
        headerless: columns of training and dev files that have no header (test files have one).
        dev: for each set to measure on ("" where there is one only), its file; the first that is there.
        test: likewise of the test set.
        submitted: for each measured set, the file of predictions that GLUE's server takes, without its suffix; empty:
            one with the folder's name.
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
        """Width of the head: one for each label, one for a score."""
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
"""By the name that --task takes."""


@dataclass(frozen=True, kw_only=True)
class Examples:
    """Examples of one file of a task.

    Attributes:
        name: of the split: train, dev_matched, ...
        sentences: one list for each sentence of an example, n texts each.
        labels: [n] float64, the label's number or its score; None where the file has none, as GLUE's test files.
        places: [n] line in the file, or row in the table.
        indices: [n] what its column of numbers calls each; empty where it has none.
        left_out: lines that do not have the columns of the others, each named.
    """

    name: str
    sentences: tuple[list[str], ...]
    labels: npt.NDArray[np.float64] | None
    places: list[int]
    indices: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)


INDEX = ("index", "id", "idx")
"""Names of the column by which GLUE's server knows an example: in GLUE's files, in QQP's, in Hugging Face's."""

UNKNOWN = ("", "-1", "-1.0")
"""What stands for a label that is kept back."""


def find_columns(names: list[str], task: GlueFormat, where: str) -> tuple[list[int], int | None, int | None]:
    """Find the sentences, the label and the index among the names of a table's columns; `None` if it lacks one.

    Raises:
        DataError: a sentence's column is missing.
    """

    def find(allowed: Sequence[str]) -> int | None:
        return next((names.index(name) for name in allowed if name in names), None)

    sentences = [find(allowed) for allowed in task.sentences]
    if None in sentences:
        allowed = " or ".join(map(repr, task.sentences[sentences.index(None)]))
        raise DataError(f"{where}: no column {allowed}; found: {shorten(', '.join(map(repr, names)))}")
    return [number for number in sentences if number is not None], find(task.label), find(INDEX)


def number_labels(
    texts: Sequence[str], task: GlueFormat, places: Sequence[int], where: str
) -> npt.NDArray[np.float64] | None:
    """[n] numbers of labels as a file spells them; None where none is known.

    Raises:
        DataError: a label that is none of the task's, or known for some only; names file and line.
    """
    if all(text in UNKNOWN for text in texts):
        return None
    if task.values:
        numbers = [task.values.index(text) if text in task.values else np.nan for text in texts]
        expected = f"allowed: {', '.join(task.values)}"
    else:
        numbers, expected = [_number(text) for text in texts], "a number expected"
    labels = np.array(numbers, dtype=np.float64)
    if not np.isfinite(labels).all():
        row = int(np.argmin(np.isfinite(labels)))
        kind = "label" if task.values else "score"
        raise DataError(f"{where}:{places[row]}: {kind} {quote(texts[row])} found, {expected}")
    return labels
