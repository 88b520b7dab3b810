"""Detections that are saved, in COCO's form of results (cocodataset.org, "Results format")."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from trp_scale.checkpoint.agreement import on_rank_zero
from trp_scale.distributed.groups import Group
from trp_scale.finetuning.detection.annotations import Annotations
from trp_scale.finetuning.detection.metrics import CollectedDetections, ImageDetections, corner_and_size


class PredictedObjects(CollectedDetections):
    """One JSON file with an entry for each detection; see `Predictions`. Ids are those of the measured file, so that
    `COCO.loadRes` reads it beside that; of Pascal VOC they are the images' names and 1 + number of the class. What is
    detected of a class that the file has not is left out: it has no id.

    Args:
        path: of the file.
        datasets: that are measured.
        group: ranks that predict.
    """

    def __init__(self, path: Path, datasets: Sequence[Annotations], group: Group) -> None:
        super().__init__()
        self._path, self._datasets, self._group = path, datasets, group

    def finish(self) -> list[Path]:
        found = self.gather(self._group)

        def write() -> None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            temporary = self._path.with_name(f".{self._path.name}.tmp")
            temporary.write_text(json.dumps([entry for one in found for entry in self.entries(one)]), encoding="utf-8")
            temporary.replace(self._path)

        on_rank_zero(self._group, f"writing {self._path}", write)
        return [self._path]

    def entries(self, found: ImageDetections) -> Iterator[dict[str, Any]]:
        """Of one image, by falling score."""
        member, image = found.address
        data = self._datasets[member]
        for place in range(len(found.scores)):
            category = data.category_ids[int(found.labels[place]) - 1]
            if category is None:
                continue
            entry: dict[str, Any] = {
                "image_id": data.image_ids[image],
                "category_id": category,
                "bbox": corner_and_size(found.boxes[place]),
                "score": float(found.scores[place]),
            }
            if found.masks:
                entry["segmentation"] = {"size": list(found.size), "counts": found.masks[place].decode("ascii")}
            yield entry
