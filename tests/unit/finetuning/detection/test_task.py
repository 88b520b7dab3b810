"""Detection as a task: what of its data is learned and measured, and what is refused before anything is trained."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.unit.finetuning.detection.small_sets import coco_document, detection_config, write_coco, write_voc
from trp_scale.config import RefusedError
from trp_scale.distributed.groups import ALONE
from trp_scale.finetuning.detection.task import DetectionTask
from trp_scale.reporting.results import SPEED


def task(path: Path, test_path: Path | None = None, fraction: float = 0.0, **detection: Any) -> DetectionTask:
    config = detection_config(**detection)
    config.data.path, config.data.workers, config.data.validation_fraction = str(path), 0, fraction
    config.downstream.test_path = str(test_path or "")
    config.batch.global_size = config.batch.micro_size = 2
    return DetectionTask(config, SimpleNamespace(data=ALONE, device=torch.device("cpu"), cpus=1))  # type: ignore[arg-type]


def test_masks_are_measured_only_where_the_measured_data_has_them(tmp_path: Path) -> None:
    with_masks = write_coco(tmp_path / "train", coco_document())
    document = copy.deepcopy(coco_document())
    for one in document["annotations"]:
        one.pop("segmentation")
    without = write_coco(tmp_path / "test", document)
    assert "mask" in task(with_masks, with_masks, masks="auto").objective.tasks
    boxes_alone = task(with_masks, without, masks="auto")
    assert "mask" not in boxes_alone.objective.tasks
    assert [batch["counts"].tolist() for batch in boxes_alone.sources.validation.windows()] == [[2, 1]]
    with pytest.raises(RefusedError, match=r"--detection.masks on: .*test"):
        task(with_masks, without, masks="on")


def test_an_only_image_with_objects_that_is_held_out_is_refused(tmp_path: Path) -> None:
    document = coco_document()
    document["annotations"] = [one for one in document["annotations"] if one["image_id"] == 3]
    path = write_coco(tmp_path, document)
    for number in range(20):
        document["images"].append({**document["images"][0], "id": 100 + number, "file_name": f"{number}.png"})
        shutil.copy(tmp_path / "images" / "a.png", tmp_path / "images" / f"{number}.png")
    path = write_coco(tmp_path, document)
    assert task(path, fraction=0.1, masks="off").source.rows == 1
    with pytest.raises(RefusedError, match=r"--data.validation_fraction"):
        task(path, fraction=0.9, masks="off")


def test_the_speed_of_inference_is_measured_but_is_no_figure(tmp_path: Path) -> None:
    listed = write_voc(tmp_path, {str(number): [("cat", 0, (1, 1, 10, 10))] for number in range(6)})
    measured = task(listed, listed, masks="off")

    def forward(images: torch.Tensor) -> list[dict[str, torch.Tensor]]:
        none = {"boxes": torch.zeros(0, 4), "labels": torch.zeros(0, dtype=torch.int64), "scores": torch.zeros(0)}
        return [none for _ in images]

    metrics = measured.metrics()
    for batch in measured.sources.validation.windows():
        metrics.add(measured.predict(forward, batch), batch)
    figures = metrics.finish(ALONE)
    detail = figures.pop("detail")
    assert detail[SPEED] > 0 and SPEED not in figures and figures["recall50"] == 0.0
