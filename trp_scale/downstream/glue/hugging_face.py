"""A GLUE task as a Hugging Face dataset directory (save_to_disk); `datasets` is imported only when asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trp_scale.data.index import DataError
from trp_scale.downstream.glue.examples import UNKNOWN, Examples, column
from trp_scale.downstream.glue.formats import GlueFormat

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
    try:
        loaded: Any = datasets.load_from_disk(str(directory))
    except (OSError, ValueError, KeyError) as error:  # pyarrow's and JSON's errors are ValueErrors
        raise DataError(f"{directory}: cannot be read as a dataset directory ({error}); save it again") from error
    found = {}
    for name, stems in files.items():
        there = [stem for stem in stems if split_name(stem) in loaded]
        if there:
            where = f"{directory}, split {split_name(there[0])}"
            found[name] = _read(loaded[split_name(there[0])], task, there[0], where)
    return found


def _read(rows: Any, task: GlueFormat, stem: str, where: str) -> Examples:
    names = rows.column_names
    sentences = tuple(list(rows[names[column(names, allowed, where)]]) for allowed in task.sentences)
    if not len(rows):
        raise DataError(f"{where}: no examples found")
    for texts in sentences:
        for number, text in enumerate(texts):
            if not isinstance(text, str):
                raise DataError(f"{where}, row {number}: {type(text).__name__} found, a sentence expected")
    labels = None
    if any(name in names for name in task.label):
        name = names[column(names, task.label, where)]
        labels = _labels(rows[name], getattr(rows.features[name], "names", None), task, where)
    return Examples(name=stem, sentences=sentences, labels=labels, places=list(range(len(rows))))


def _labels(values: Any, names: list[str] | None, task: GlueFormat, where: str) -> npt.NDArray[np.float64] | None:
    """[n] by our numbers: labels that have names go by them, others are Hugging Face's numbers, which are ours."""
    given = np.array([_number(value) for value in values])  # [n]
    if all(value is None or value != value or str(value) in UNKNOWN for value in values):  # NaN is not itself
        return None
    if not task.names:
        allowed = np.isfinite(given)
        expected = "a number"
    else:
        allowed = np.isin(given, np.arange(len(task.names)))
        expected = f"0 to {len(task.names) - 1}"
    if not allowed.all():
        row = int(np.argmin(allowed))
        raise DataError(f"{where}, row {row}: label {values[row]!r} found, {expected} expected")
    if names is None or not task.names:
        return given
    if sorted(names) != sorted(task.names):
        raise DataError(f"{where}: labels {', '.join(names)} found, {', '.join(task.names)} expected")
    ours: npt.NDArray[np.float64] = np.array([task.names.index(name) for name in names], dtype=np.float64)
    return ours[given.astype(np.int64)]


def _number(value: Any) -> float:
    """NaN for what is no number: no label, or one in words."""
    try:
        return float(value)
    except (TypeError, ValueError):
        return float("nan")
