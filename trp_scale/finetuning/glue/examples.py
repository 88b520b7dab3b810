"""The tasks of GLUE (Wang et al. 2018): folders, files, columns, the order of their labels; and a file's examples as
text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from trp_scale.errors import DataError, quote, shorten


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

    def files(self, split: str) -> dict[str, tuple[str, ...]]:
        """The files of the dev or the test set."""
        return self.dev if split == "dev" else self.test


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
    """What a file of a task holds.

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


def column(names: Sequence[str], allowed: tuple[str, ...], where: str) -> int:
    """Place of a column that has one of the allowed names.

    Raises:
        DataError: there is none.
    """
    for name in allowed:
        if name in names:
            return list(names).index(name)
    raise DataError(
        f"{where}: no column {' or '.join(map(repr, allowed))}; found: {shorten(', '.join(map(repr, names)))}"
    )


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
                raise DataError(f"{where}:{place}: label {quote(text)} found, allowed: {', '.join(task.values)}")
            labels[row] = numbers[text]
            continue
        try:
            labels[row] = float(text)
        except ValueError:
            labels[row] = np.nan
        if not np.isfinite(labels[row]):
            raise DataError(f"{where}:{place}: score {quote(text)} found, a number expected")
    return labels
