"""The losses of detection as sums over images."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from trp_scale.core.batch import Batch
from trp_scale.finetuning.detection.task import LOSSES, Detection, targets


def batch(weights: list[float], masks: bool = True) -> Batch:
    rows = len(weights)
    fields = {
        "images": torch.full((rows, 3, 16, 16), 100, dtype=torch.uint8),
        "boxes": torch.tensor([[[2.0, 2.0, 10.0, 12.0], [0.0, 0.0, 0.0, 0.0]]] * rows),
        "classes": torch.tensor([[3, 0]] * rows),
        "counts": torch.tensor([1] * rows),
        "row_weights": torch.tensor(weights),
    }
    fields["images"][:, 0] = torch.arange(rows).view(-1, 1, 1) * 10
    if masks:
        fields["masks"] = torch.full((rows, 2, 8, 8), 255, dtype=torch.uint8)
    return Batch(fields=fields, keys=torch.arange(rows), start=0)


class Forward:
    """Gives each loss its place as value, and keeps what it was called with."""

    def __call__(self, images: Tensor, given: Any = None) -> Any:
        self.images, self.given = images, given
        return {name: torch.tensor(place + 1.0) for place, name in enumerate(LOSSES.values())}


def test_sums_are_means_times_present_images() -> None:
    objective, forward = Detection(masks=True), Forward()
    losses = objective(forward, batch([1.0, 0.0, 1.0]))
    assert objective.tasks == ("rpn_objectness", "rpn_box", "class", "box", "mask")
    assert losses.sums.tolist() == [2.0, 4.0, 6.0, 8.0, 10.0] and losses.counts.tolist() == [2.0] * 5
    assert losses.sums.dtype == torch.float64
    assert len(forward.given) == 2
    red = forward.images[:, 0, 0, 0]
    assert float(red[1] - red[0]) == pytest.approx(20 / 255 / 0.229, rel=1e-4), "rows 0 and 2, normalised once"
    assert objective.balanced == (0, 1, 2, 3, 4)
    assert [objective.tasks[place] for place in objective.regression] == ["rpn_box", "box"]


def test_a_batch_without_any_row_runs_the_model_and_counts_nothing() -> None:
    losses = Detection(masks=True)(forward := Forward(), batch([0.0, 0.0]))
    assert losses.sums.tolist() == [0.0] * 5 and losses.counts.tolist() == [0.0] * 5
    assert len(forward.given) == 1


def test_targets_have_boxes_labels_and_masks() -> None:
    (target,) = targets(batch([1.0]), [0])
    assert target["boxes"].tolist() == [[2, 2, 10, 12]] and target["labels"].tolist() == [3]
    exact = torch.zeros(16, 16, dtype=torch.uint8)
    exact[2:12, 2:10] = 1
    assert torch.equal(target["masks"], exact[None])


def test_without_masks_the_mask_task_is_absent() -> None:
    objective = Detection(masks=False)
    assert objective.tasks == ("rpn_objectness", "rpn_box", "class", "box")
    assert objective(Forward(), batch([1.0], masks=False)).sums.tolist() == [1.0, 2.0, 3.0, 4.0]
    assert "masks" not in targets(batch([1.0], masks=False), [0])[0]
