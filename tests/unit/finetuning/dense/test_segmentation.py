"""Figures of segmentation against scikit-learn's, and what counts nowhere."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.metrics import confusion_matrix, jaccard_score, recall_score

from trp_scale.config import RefusedError
from trp_scale.core.batch import Batch
from trp_scale.distributed.groups import ALONE
from trp_scale.finetuning.dense.segmentation import Confusion, figures

NAMES = ("sky", "road", "tree", "car", "sign")


def batch_of(maps: list[torch.Tensor]) -> Batch:
    """Labels of different sizes in one batch, as WholeBatchBuilder pads them."""
    tall, wide = (max(each.shape[side] for each in maps) for side in (0, 1))
    whole = torch.full((len(maps), tall, wide), 255, dtype=torch.uint8)
    for row, each in enumerate(maps):
        whole[row, : each.shape[0], : each.shape[1]] = each
    sizes = torch.tensor([each.shape for each in maps])
    return Batch(fields={"whole_semseg": whole, "sizes": sizes}, keys=torch.arange(len(maps)), start=0)


def drawn(classes: int, *sizes: tuple[int, int], seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, classes, size, generator=generator, dtype=torch.uint8) for size in sizes]


def test_figures_are_scikit_learn_s_and_void_counts_nowhere() -> None:
    sizes = ((7, 9), (5, 20), (13, 4))
    labels, predicted = drawn(5, *sizes), drawn(5, *sizes, seed=1)
    for each in labels:
        each[:2, :3] = 255
    metric = Confusion(NAMES)
    for chosen in ([0, 1], [2]):
        metric.add([predicted[i].long() for i in chosen], batch_of([labels[i] for i in chosen]))
    found = metric.finish(ALONE)
    true, guess = (np.concatenate([each.numpy().ravel() for each in maps]) for maps in (labels, predicted))
    true, guess = true[true != 255], guess[np.concatenate([each.numpy().ravel() for each in labels]) != 255]
    assert found["mean_iou"] == pytest.approx(jaccard_score(true, guess, average="macro"), abs=1e-12)
    assert found["pixel_accuracy"] == pytest.approx((true == guess).mean(), abs=1e-12)
    assert found["class_accuracy"] == pytest.approx(recall_score(true, guess, average="macro"), abs=1e-12)
    per_class = jaccard_score(true, guess, average=None)
    assert list(found["detail"]["iou"].values()) == pytest.approx(per_class.tolist(), abs=1e-12)
    assert list(found["detail"]["pixels"].values()) == confusion_matrix(true, guess).sum(1).tolist()


def test_a_class_that_is_nowhere_is_left_out_of_the_means() -> None:
    counts = torch.tensor([[3, 1, 0, 0], [0, 4, 0, 2], [0, 0, 0, 0], [0, 0, 0, 0]])
    found = figures(counts, ("a", "b", "nowhere", "only predicted"))
    assert found["mean_iou"] == pytest.approx((3 / 4 + 4 / 7 + 0) / 3)
    assert found["class_accuracy"] == pytest.approx((3 / 4 + 4 / 6) / 2), "what is not labelled has no accuracy"
    detail = found["detail"]
    assert detail["iou"]["nowhere"] is None and detail["iou"]["only predicted"] == 0.0
    assert detail["accuracy"]["only predicted"] is None


def test_classes_of_one_name_are_told_apart_by_their_number() -> None:
    detail = figures(torch.tensor([[3, 0, 0], [0, 1, 1], [0, 0, 2]]), ("crane", "sky", "crane"))["detail"]
    assert detail["pixels"] == {"crane (0)": 3, "sky": 2, "crane (2)": 2}
    assert detail["accuracy"] == {"crane (0)": 1.0, "sky": 0.5, "crane (2)": 1.0}
    assert list(detail["iou"]) == list(detail["pixels"])


def test_the_constant_prediction_s_figure_is_what_it_would_get() -> None:
    labels = drawn(4, (30, 40))[0]
    labels[:20] = 2
    metric, constant = Confusion(NAMES), Confusion(NAMES)
    metric.add([drawn(5, (30, 40), seed=3)[0].long()], batch_of([labels]))
    constant.add([torch.full((30, 40), 2)], batch_of([labels]))
    assert metric.finish(ALONE)["constant_mean_iou"] == pytest.approx(constant.finish(ALONE)["mean_iou"], abs=1e-12)


def test_maps_of_nothing_but_void_are_refused() -> None:
    metric = Confusion(NAMES)
    metric.add([torch.zeros(4, 4, dtype=torch.long)], batch_of([torch.full((4, 4), 255, dtype=torch.uint8)]))
    with pytest.raises(RefusedError, match=r"--dense.ignored"):
        metric.finish(ALONE)
