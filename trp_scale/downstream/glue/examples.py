"""Labelled sentences of one file, as text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from trp_scale.data.index import DataError
from trp_scale.downstream.glue.formats import GlueFormat


@dataclass(frozen=True, kw_only=True)
class Examples:
    """What a file of a task holds.

    Attributes:
        name: of the split: train, dev_matched, ...
        sentences: one list for each sentence of an example, n texts each.
        labels: [n] float64, the label's number or its score; None where the file has none, as GLUE's test files.
        places: [n] line in the file, or row in the table.
        left_out: lines that do not have the columns of the others, each named.
    """

    name: str
    sentences: tuple[list[str], ...]
    labels: npt.NDArray[np.float64] | None
    places: list[int]
    left_out: list[str] = field(default_factory=list)


UNKNOWN = ("", "-1", "-1.0")
"""What stands for a label that is kept back."""


def column(names: Sequence[str], allowed: tuple[str, ...], where: str) -> int:
    """Place of a column that has one of the allowed names.

    Raises:
        DataError: there is none.
    """
    for name in allowed:
        if name in names:
            return list(names).index(name)
    raise DataError(f"{where}: no column {' or '.join(map(repr, allowed))}; found: {', '.join(map(repr, names))}")


def number_labels(
    texts: Sequence[str], task: GlueFormat, places: Sequence[int], where: str
) -> npt.NDArray[np.float64] | None:
    """[n] numbers of labels as a file spells them; None where none is known.

    Raises:
        DataError: a label that is none of the task's, or known for some only; names file and line.
    """
    if all(text in UNKNOWN for text in texts):
        return None
    numbers = {value: float(number) for number, value in enumerate(task.values)}
    labels = np.empty(len(texts))
    for row, (text, place) in enumerate(zip(texts, places, strict=True)):
        if task.values:
            if text not in numbers:
                raise DataError(f"{where}:{place}: label {text!r} found, allowed: {', '.join(task.values)}")
            labels[row] = numbers[text]
            continue
        try:
            labels[row] = float(text)
        except ValueError:
            labels[row] = np.nan
        if not np.isfinite(labels[row]):
            raise DataError(f"{where}:{place}: score {text!r} found, a number expected")
    return labels
