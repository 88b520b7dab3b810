"""Detections of all ranks, gathered once, and the average precision of COCO or of Pascal VOC 2007 (one threshold of
overlap, eleven points of recall: Everingham et al. 2010, 4.2).
"""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from trp_scale.config import RefusedError
from trp_scale.core.batch import Batch
from trp_scale.distributed.groups import Group, on_rank_zero
from trp_scale.finetuning.detection.annotations import Annotations, Floats
from trp_scale.finetuning.detection.masks import encode, mask_functions
from trp_scale.finetuning.detection.model import Target, paste
from trp_scale.storage.files import write_text

OVERLAP = 0.5
POINTS = 11


Truth = tuple[Floats, npt.NDArray[np.bool_]]
"""Objects of one class in one image: boxes [n, 4] left, top, right, bottom; and [n] which are difficult: they need not
be found, and their detection counts neither way."""


class ClassDetections(NamedTuple):
    """Detections of one class, of all images: [n] number of the image in the list of truths, boxes [n, 4], scores
    [n]."""

    image: npt.NDArray[np.int64]
    boxes: Floats
    scores: Floats


def average_precision(truths: Sequence[Truth], detections: ClassDetections) -> float | None:
    """The mean over the recalls 0, 0.1, ..., 1 of the highest precision at that recall or a higher one.

    Detections are taken by falling score, equal ones in the order they are given. Each belongs to the object of its
    image that it overlaps most. If that is by a half or more, the first detection of the object is right and every
    further one wrong; detections of difficult objects count neither way; all others are wrong.

    Returns:
        None where there is no object that has to be found.
    """
    objects = sum(int((~difficult).sum()) for _, difficult in truths)
    if objects == 0:
        return None
    right = np.cumsum(counted) if len(counted := matches(truths, detections)) else np.zeros(0, dtype=np.int64)  # [k]
    precision = right / np.arange(1, len(right) + 1)
    # In whole numbers, since 3 objects of 10 would not reach the recall 3 x 0.1 in floating point.
    reached = [right * (POINTS - 1) >= point * objects for point in range(POINTS)]
    return float(np.mean([precision[beyond].max() if beyond.any() else 0.0 for beyond in reached]))


def matches(truths: Sequence[Truth], detections: ClassDetections) -> npt.NDArray[np.bool_]:
    """[k] by falling score: whether each detection that counts is right."""
    seen = [np.zeros(len(boxes), dtype=np.bool_) for boxes, _ in truths]
    right = []
    for rank in np.argsort(-detections.scores, kind="stable").tolist():
        image = int(detections.image[rank])
        shares = overlaps(detections.boxes[rank], truths[image][0])  # [n]
        best = int(shares.argmax()) if len(shares) else -1
        if best < 0 or shares[best] < OVERLAP:
            right.append(False)
        elif not truths[image][1][best]:
            right.append(not seen[image][best])
            seen[image][best] = True
    return np.array(right, dtype=np.bool_)


def overlaps(box: Floats, boxes: Floats) -> Floats:
    """[n] intersection over union of a box [4] with boxes [n, 4]."""
    sides = np.minimum(box[2:], boxes[:, 2:]) - np.maximum(box[:2], boxes[:, :2])  # [n, 2]
    both = np.clip(sides, 0.0, None).prod(axis=1)
    either = (box[2:] - box[:2]).prod() + (boxes[:, 2:] - boxes[:, :2]).prod(axis=1) - both
    shares: Floats = both / either
    return shares


COCO_FIGURES = ("AP", "AP50", "AP75", "APs", "APm", "APl")
"""The first six of COCOeval's statistics: means over the overlaps 0.5, 0.55 ... 0.95, at 0.5, at 0.75, and of objects
below 32^2 pixels, up to 96^2, and above."""

VOC_METRIC = "AP50_11_points"


@dataclass(frozen=True, kw_only=True)
class ImageDetections:
    """Detections of one image, in its own pixels.

    Attributes:
        position: of the row in the measured source.
        address: number of the data set, and of the image in it.
        size: height and width.
        boxes: [n, 4] left, top, right, bottom.
        scores, labels: [n], by falling score.
        masks: runs of each; empty if there are none.
    """

    position: int
    address: tuple[int, int]
    size: tuple[int, int]
    boxes: Floats
    scores: Floats
    labels: npt.NDArray[np.int64]
    masks: list[bytes]

    def entries(self, image_id: int | str, categories: Sequence[int | None]) -> Iterator[dict[str, Any]]:
        """Yield the detections in COCO's form of results, by falling score.

        Args:
            image_id: how the file names the image.
            categories: how it numbers each class; `None`: it has no such class, and its detections are left out.
        """
        for rank, label in enumerate(self.labels.tolist()):
            if (category := categories[label - 1]) is None:
                continue
            entry: dict[str, Any] = {
                "image_id": image_id,
                "category_id": category,
                "bbox": corner_and_size(self.boxes[rank]),
                "score": float(self.scores[rank]),
            }
            if self.masks:
                entry["segmentation"] = {"size": list(self.size), "counts": self.masks[rank].decode("ascii")}
            yield entry


class CollectedDetections:
    """Collects the detections of one rank's rows."""

    def __init__(self) -> None:
        self._found: list[ImageDetections] = []

    def add(self, outputs: list[Target], batch: Batch) -> None:
        """Detections of a micro-batch, in pixels of its squares."""
        columns = ("row_weights", "sizes", "resized", "image")
        present, sizes, resized, images = (batch[name].tolist() for name in columns)
        for row, target in enumerate(outputs):
            if present[row] > 0:
                member, image = images[row]
                values = in_image(target, sizes[row], resized[row])
                self._found.append(ImageDetections(position=batch.start + row, address=(member, image), **values))

    def gather(self, group: Group) -> list[ImageDetections]:
        """Gather the detections of all ranks, in stored order. Collective."""
        gathered = [image for part in group.gather_objects(self._found) for image in part]
        return sorted(gathered, key=lambda image: image.position)


class DetectionMetrics(CollectedDetections):
    """The figures of all ranks' detections; see `Metrics`.

    Args:
        datasets: that are measured.
    """

    def __init__(self, datasets: Sequence[Annotations]) -> None:
        super().__init__()
        self._datasets = list(datasets)

    def finish(self, group: Group) -> dict[str, Any]:
        """AP, AP50 ... of boxes, and mask_AP ... of masks (COCO), or the mean over classes of the eleven-point average
        precision (VOC); per class under "detail". Figures without an object to find are left out. Collective.

        Raises:
            RefusedError: the measured images have no object to find.
        """
        gathered = self.gather(group)
        if self._datasets[0].voc:
            return voc_figures(self._datasets, gathered)
        figures, detail = coco_figures(self._datasets, gathered, "bbox")
        if any(image.masks for image in gathered):
            masks, of_masks = coco_figures(self._datasets, gathered, "segm")
            figures |= {f"mask_{name}": value for name, value in masks.items()}
            detail |= {f"mask_{name}": value for name, value in of_masks.items()}
        return {**figures, "detail": detail}


def in_image(target: Target, size: Sequence[int], resized: Sequence[int]) -> dict[str, Any]:
    """Boxes and masks of a letterboxed image in its own pixels; what lies outside it is cut off, or left out.

    Args:
        target: as finetuning/detection/model.py gives it.
        size: height and width of the image.
        resized: what they were resized to.
    """
    (height, width), (tall, wide) = size, resized
    whole = target["boxes"].double().cpu() * torch.tensor([width / wide, height / tall] * 2, dtype=torch.float64)
    boxes = torch.minimum(whole, torch.tensor([width, height] * 2, dtype=torch.float64))
    kept = ((boxes[:, 2:] - boxes[:, :2]) > 0).all(dim=1)
    boxes = boxes[kept]
    masks = []
    if "masks" in target:
        inside = target["masks"].float().cpu()[kept]  # [n, 1, 28, 28]
        # A mask is of the box as it was found, padding and all: in the cut box it would be squeezed.
        shares = paste(inside[:, 0], whole[kept], (height, width))  # [n, H, W]
        masks = [encode(mask) for mask in (shares > 0.5).byte().numpy()]
    return {
        "size": (height, width),
        "boxes": boxes.numpy(),
        "scores": target["scores"].double().cpu()[kept].numpy(),
        "labels": target["labels"].cpu()[kept].numpy(),
        "masks": masks,
    }


def voc_figures(datasets: Sequence[Annotations], images: Sequence[ImageDetections]) -> dict[str, Any]:
    """The mean of the classes' average precisions, and each."""
    of_class = {}
    for number, name in enumerate(datasets[0].classes, start=1):
        truths = []
        for image in images:
            data = datasets[image.address[0]]
            objects = [index for index in data.objects(image.address[1]) if data.labels[index] == number]
            truths.append((data.boxes[objects], data.ignored[objects]))
        chosen = [image.labels == number for image in images]
        detections = ClassDetections(
            image=np.repeat(np.arange(len(images)), [int(mask.sum()) for mask in chosen]),
            boxes=np.concatenate([image.boxes[mask] for image, mask in zip(images, chosen, strict=True)]),
            scores=np.concatenate([image.scores[mask] for image, mask in zip(images, chosen, strict=True)]),
        )
        value = average_precision(truths, detections)
        if value is not None:
            of_class[name] = value
    if not of_class:
        raise _nothing(datasets)
    return {VOC_METRIC: float(np.mean(list(of_class.values()))), "detail": {VOC_METRIC: of_class}}


def coco_figures(
    datasets: Sequence[Annotations], images: Sequence[ImageDetections], kind: str
) -> tuple[dict[str, float], dict[str, dict[str, float]]]:
    """COCO's figures by name, and AP by class, through pycocotools.

    Args:
        kind: bbox or segm.
    """
    mask_functions()  # says what is missing, if it is
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    with contextlib.redirect_stdout(io.StringIO()):  # it prints a page
        sides = []
        for annotations in (
            _coco_truths(datasets, images, kind),
            _coco_detections(images, kind, len(datasets[0].classes)),
        ):
            side = COCO()
            side.dataset = {
                "images": [
                    {"id": number, "height": image.size[0], "width": image.size[1]}
                    for number, image in enumerate(images, start=1)
                ],
                "categories": [{"id": n, "name": name} for n, name in enumerate(datasets[0].classes, start=1)],
                "annotations": [{"id": number, **entry} for number, entry in enumerate(annotations, start=1)],
            }
            side.createIndex()
            sides.append(side)
        judged = COCOeval(*sides, kind)
        judged.evaluate()
        judged.accumulate()
        judged.summarize()
    figures = {name: float(value) for name, value in zip(COCO_FIGURES, judged.stats, strict=False) if value >= 0}
    if "AP" not in figures:
        raise _nothing(datasets)
    precision = judged.eval["precision"][:, :, :, 0, -1]  # [overlaps, recalls, classes]
    of_class = {
        name: float(precision[:, :, number].mean())
        for number, name in enumerate(datasets[0].classes)
        if (precision[:, :, number] >= 0).all()
    }
    return figures, {"AP": of_class}


def _coco_truths(
    datasets: Sequence[Annotations], images: Sequence[ImageDetections], kind: str
) -> Iterator[dict[str, Any]]:
    for position, image in enumerate(images, start=1):
        data = datasets[image.address[0]]
        for number in data.objects(image.address[1]):
            entry = {
                "image_id": position,
                "category_id": int(data.labels[number]),
                "bbox": corner_and_size(data.boxes[number]),
                "area": float(data.areas[number]),
                "iscrowd": int(data.ignored[number]),
            }
            if kind == "segm":
                assert data.masks is not None, "masks are measured only where the truth has them"
                # A crowd may have none; then it is all of its box.
                runs = data.masks[number] or _encode_box(data.boxes[number], image.size)
                entry["segmentation"] = {"size": list(image.size), "counts": runs}
            yield entry


def _coco_detections(images: Sequence[ImageDetections], kind: str, classes: int) -> Iterator[dict[str, Any]]:
    functions = mask_functions()
    for position, image in enumerate(images, start=1):
        for entry in image.entries(position, range(1, 1 + classes)):
            width, height = entry["bbox"][2:]
            area = functions.area(entry["segmentation"]) if kind == "segm" else width * height
            yield {**entry, "area": float(area), "iscrowd": 0}


def _encode_box(box: Floats, size: tuple[int, int]) -> bytes:
    """Encode a mask that fills its box."""
    mask = np.zeros(size, dtype=np.uint8)
    left, top, right, bottom = np.rint(np.clip(box, 0, None)).astype(np.int64).tolist()
    mask[top:bottom, left:right] = 1
    return encode(mask)


def corner_and_size(box: Floats) -> list[float]:
    """COCO's left, top, width, height of left, top, right, bottom."""
    left, top, right, bottom = (float(side) for side in box)
    return [left, top, right - left, bottom - top]


def _nothing(datasets: Sequence[Annotations]) -> RefusedError:
    return RefusedError(
        f"{datasets[0].path}: the measured images have no object to find; hold out more of them "
        "(--data.validation_fraction), or give --downstream.test_path"
    )


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
        images = self.gather(self._group)

        def read_entries() -> Iterator[dict[str, Any]]:
            for image in images:
                member, number = image.address
                data = self._datasets[member]
                yield from image.entries(data.image_ids[number], data.category_ids)

        def write() -> None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_text(self._path, json.dumps(list(read_entries())))

        on_rank_zero(self._group, f"writing {self._path}", write)
        return [self._path]
