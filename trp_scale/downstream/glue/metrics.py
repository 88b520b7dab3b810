"""GLUE's figures as TRP's Table 1 has them, through scikit-learn and scipy (extra `evaluation`).

Where a figure is undefined, because predictions or labels are all the same, it is 0 and a warning says so.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from trp_scale.config import RefusedError
from trp_scale.core.batch import Batch
from trp_scale.distributed.groups import Group
from trp_scale.downstream.glue.examples import FORMATS
from trp_scale.downstream.task import GatheredRows

logger = logging.getLogger(__name__)

Values = npt.NDArray[Any]
Figure = Callable[[Values, Values], float]


def require_libraries() -> None:
    """Before a run is trained that could not be measured.

    Raises:
        RefusedError: scikit-learn or scipy is not installed.
    """
    for name, package in (("sklearn", "scikit-learn"), ("scipy", "scipy")):
        if importlib.util.find_spec(name) is None:
            raise RefusedError(f"GLUE's metrics need {package}: pip install 'trp-scale[evaluation]'")


def accuracy(predicted: Values, labels: Values) -> float:
    """Share of rows whose label is predicted."""
    from sklearn.metrics import accuracy_score

    return float(accuracy_score(labels, predicted))


def f1(predicted: Values, labels: Values) -> float:
    """F1 of label 1: 2 TP / (2 TP + FP + FN)."""
    from sklearn.metrics import f1_score

    if not (predicted == 1).any() and not (labels == 1).any():
        return _undefined("F1", "no row has label 1, and none is predicted to")
    return float(f1_score(labels, predicted, zero_division=0.0))


def matthews(predicted: Values, labels: Values) -> float:
    """Matthews' correlation coefficient."""
    from sklearn.metrics import matthews_corrcoef

    if reason := _constant(predicted, labels):
        return _undefined("Matthews' correlation", reason)
    return float(matthews_corrcoef(labels, predicted))


def pearson(predicted: Values, scores: Values) -> float:
    """Pearson's correlation of scores."""
    from scipy.stats import pearsonr  # type: ignore[import-untyped]

    if reason := _constant(predicted, scores):
        return _undefined("Pearson's correlation", reason)
    return float(pearsonr(predicted, scores).statistic)


def spearman(predicted: Values, scores: Values) -> float:
    """Spearman's correlation of scores: Pearson's of their ranks, equal ones sharing the mean of theirs."""
    from scipy.stats import spearmanr  # type: ignore[import-untyped]

    if reason := _constant(predicted, scores):
        return _undefined("Spearman's correlation", reason)
    return float(spearmanr(predicted, scores).statistic)


def _constant(predicted: Values, labels: Values) -> str:
    if not np.isfinite(predicted).all():
        return "predictions are not finite"
    if (predicted == predicted[0]).all():
        return f"all {len(predicted)} predictions are {predicted[0]:g}"
    return f"all {len(labels)} labels are {labels[0]:g}" if (labels == labels[0]).all() else ""


def _undefined(figure: str, reason: str) -> float:
    logger.warning("%s is undefined (%s); 0 is reported", figure, reason)
    return 0.0


FIGURES: dict[str, dict[str, Figure]] = {
    "cola": {"matthews": matthews, "accuracy": accuracy},
    "sst2": {"accuracy": accuracy},
    "mrpc": {"f1": f1, "accuracy": accuracy},
    "stsb": {"spearman": spearman, "pearson": pearson},
    "qqp": {"f1": f1, "accuracy": accuracy},
    "mnli": {"accuracy": accuracy},
    "qnli": {"accuracy": accuracy},
    "rte": {"accuracy": accuracy},
    "wnli": {"accuracy": accuracy},
}
"""By task; the first is the one of TRP's Table 1, by which the task is judged."""


class GlueMetrics:
    """The figures of one task over each of its measured sets; see `Metrics`.

    Args:
        task: name of the task.
        sets: names of the measured sets ("" for a single one, whose figures bear no set's name).
    """

    def __init__(self, task: str, sets: list[str]) -> None:
        self._task, self._sets = task, sets
        self._rows = GatheredRows()

    def add(self, outputs: Tensor, batch: Batch) -> None:
        """[R, C] logits, or one score for each row."""
        predicted = outputs[:, 0] if outputs.shape[1] == 1 else outputs.argmax(1)  # [R]
        self._rows.add(batch, predicted=predicted, labels=batch["labels"], measured_set=batch["measured_set"])

    def finish(self, group: Group) -> dict[str, Any]:
        rows = self._rows.gather(group)
        return group.broadcast_object(self._figures(rows) if group.rank == 0 else {})  # one rank warns

    def _figures(self, rows: dict[str, Values]) -> dict[str, Any]:
        found: dict[str, Any] = {"detail": {}}
        for number, name in enumerate(self._sets):
            of_set = rows["measured_set"] == number
            predicted, labels = rows["predicted"][of_set], rows["labels"][of_set]
            for figure, compute in FIGURES[self._task].items():
                found[figure_name(figure, name)] = compute(predicted, labels)
            found["detail"][name or "all"] = {"rows": len(labels), **_by_label(self._task, predicted, labels)}
        return found


def figure_name(figure: str, measured_set: str) -> str:
    """accuracy, or accuracy_matched."""
    return f"{figure}_{measured_set}" if measured_set else figure


def _by_label(task: str, predicted: Values, labels: Values) -> dict[str, Any]:
    """Counts for each label: rows that have it, rows predicted to have it, rows of both."""
    return {
        name: {
            "rows": int((labels == number).sum()),
            "predicted": int((predicted == number).sum()),
            "right": int(((labels == number) & (predicted == number)).sum()),
        }
        for number, name in enumerate(FORMATS[task].names)
    }
