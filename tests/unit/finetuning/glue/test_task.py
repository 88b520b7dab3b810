"""GLUE's figures: by hand, with ties, and where they are undefined."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch

from trp_scale.core.batch import Batch
from trp_scale.distributed.groups import ALONE
from trp_scale.finetuning.glue.task import FIGURES, GlueMetrics, accuracy, f1, matthews, pearson, spearman

PREDICTED = np.array([1, 1, 0, 0, 1, 0])
LABELS = np.array([1, 0, 1, 0, 1, 0])
"""TP 2, FP 1, FN 1, TN 2."""


def test_counts_by_hand() -> None:
    assert accuracy(PREDICTED, LABELS) == pytest.approx(4 / 6)
    assert f1(PREDICTED, LABELS) == pytest.approx(2 * 2 / (2 * 2 + 1 + 1))
    assert matthews(PREDICTED, LABELS) == pytest.approx((2 * 2 - 1 * 1) / math.sqrt(3 * 3 * 3 * 3))
    assert matthews(1 - LABELS, LABELS) == pytest.approx(-1)
    # F1 is that of label 1, not symmetric.
    assert f1(np.array([0, 0, 0, 1]), np.array([0, 0, 1, 1])) == pytest.approx(2 / 3)
    assert f1(np.array([0, 0]), np.array([1, 0])) == 0.0


def test_spearman_shares_ranks_among_ties() -> None:
    predicted, scores = np.array([0.1, 0.4, 0.4, 0.9, 0.2]), np.array([1.0, 3.0, 2.0, 2.0, 0.0])
    ranks = np.array([1, 3.5, 3.5, 5, 2]), np.array([2, 5, 3.5, 3.5, 1])
    assert spearman(predicted, scores) == pytest.approx(np.corrcoef(*ranks)[0, 1], abs=1e-12)
    assert pearson(predicted, scores) == pytest.approx(np.corrcoef(predicted, scores)[0, 1], abs=1e-12)
    assert spearman(np.exp(predicted), scores) == pytest.approx(spearman(predicted, scores), abs=1e-12)


@pytest.mark.parametrize("figure", [matthews, pearson, spearman])
@pytest.mark.parametrize(
    ("predicted", "labels", "reason"),
    [
        ([1.0, 1.0, 1.0], [0.0, 1.0, 1.0], "all 3 predictions are 1"),
        ([0.0, 1.0, 1.0], [0.0, 0.0, 0.0], "all 3 labels are 0"),
        ([math.nan, 1.0, 2.0], [0.0, 1.0, 2.0], "predictions are not finite"),
        ([1.0], [1.0], "all 1 predictions are 1"),
    ],
)
def test_undefined_figures_are_zero_with_a_warning(
    caplog: pytest.LogCaptureFixture,
    figure: Callable[..., float],
    predicted: list[float],
    labels: list[float],
    reason: str,
) -> None:
    with caplog.at_level(logging.WARNING):
        assert figure(np.array(predicted), np.array(labels)) == 0.0
    assert reason in caplog.text and "0 is reported" in caplog.text


def test_f1_without_any_positive(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert f1(np.zeros(3), np.zeros(3)) == 0.0
    assert "F1 is undefined" in caplog.text


def test_tables_figure_of_every_task() -> None:
    """TRP, Table 1."""
    judged = {task: next(iter(figures)) for task, figures in FIGURES.items()}
    assert judged == {
        "cola": "matthews",
        "sst2": "accuracy",
        "mrpc": "f1",
        "stsb": "spearman",
        "qqp": "f1",
        "mnli": "accuracy",
        "qnli": "accuracy",
        "rte": "accuracy",
        "wnli": "accuracy",
    }


def batch(start: int, labels: list[int], measured_set: list[int], weights: list[int]) -> Batch:
    fields = {
        "labels": torch.tensor(labels),
        "measured_set": torch.tensor(measured_set),
        "row_weights": torch.tensor(weights).float(),
    }
    return Batch(fields=fields, keys=torch.arange(len(labels)), start=start)


def test_both_sets_of_mnli_without_rows_that_fill_a_batch() -> None:
    found = GlueMetrics("mnli", ["matched", "mismatched"])
    logits = torch.eye(3)
    # In any order of batches; the last row is not there, and would be right.
    found.add(logits[[2, 0]], batch(2, [2, 0], [1, 1], [1, 0]))
    found.add(logits[[0, 1]], batch(0, [0, 2], [0, 0], [1, 1]))
    figures = found.finish(ALONE)
    detail = figures.pop("detail")
    assert figures == {"accuracy_matched": 0.5, "accuracy_mismatched": 1.0}
    assert detail["matched"]["rows"] == 2 and detail["mismatched"]["rows"] == 1
    assert detail["matched"]["entailment"] == {"rows": 1, "predicted": 1, "right": 1}
    assert detail["matched"]["neutral"] == {"rows": 0, "predicted": 1, "right": 0}
    assert detail["matched"]["contradiction"] == {"rows": 1, "predicted": 0, "right": 0}


def test_a_constant_prediction_is_the_best_of_the_training_rows() -> None:
    """By hand. Measured rows have other labels most often, which nobody may look at."""
    learned = np.array([0.0] * 6 + [1.0] * 4)
    measured = [1, 1, 1, 0]
    for task, expected in (
        ("cola", {"matthews": 0.0, "accuracy": 0.25}),
        ("sst2", {"accuracy": 0.25}),
        ("mrpc", {"f1": 2 * 3 / (2 * 3 + 1), "accuracy": 0.25}),  # label 1 for all: 3 right, 1 wrong
    ):
        found = GlueMetrics(task, [""], learned)
        found.add(torch.eye(2)[measured], batch(0, measured, [0] * 4, [1] * 4))
        figures = found.finish(ALONE)
        for figure, value in expected.items():
            assert figures[f"constant_{figure}"] == pytest.approx(value), (task, figure)
    mnli = GlueMetrics("mnli", ["matched", "mismatched"], np.array([2.0, 2.0, 0.0]))
    mnli.add(torch.eye(3), batch(0, [2, 0, 2], [0, 0, 1], [1, 1, 1]))
    figures = mnli.finish(ALONE)
    assert (figures["constant_accuracy_matched"], figures["constant_accuracy_mismatched"]) == (0.5, 1.0)
    scores = GlueMetrics("stsb", [""], np.array([1.0, 4.0]))
    one = batch(0, [0, 0], [0, 0], [1, 1])
    one.fields["labels"] = torch.tensor([1.0, 2.0])
    scores.add(torch.tensor([[1.0], [3.0]]), one)
    assert scores.finish(ALONE)["constant_spearman"] == 0.0


def test_scores_are_read_from_the_one_output() -> None:
    found = GlueMetrics("stsb", [""])
    scores = torch.tensor([0.0, 2.5, 5.0])
    one = batch(0, [0, 0, 0], [0, 0, 0], [1, 1, 1])
    one.fields["labels"] = scores
    found.add(3 - scores[:, None], one)
    figures = found.finish(ALONE)
    assert figures["spearman"] == pytest.approx(-1) and figures["pearson"] == pytest.approx(-1)
