"""Average precision of detections: that of COCO, or that of Pascal VOC 2007 (IoU 0.5, eleven recall points; Everingham
et al. 2010, 4.2), there with precision and recall at several IoUs (MLO-MAE D.1); and the speed of inference."""

from __future__ import annotations

import contextlib
import io
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torchvision.ops import box_iou

from trp_scale.config import RefusedError
from trp_scale.core.batch import Batch
from trp_scale.distributed.groups import Group, on_rank_zero
from trp_scale.finetuning.detection.annotations import Annotations, Floats, encode, mask_functions
from trp_scale.finetuning.detection.model import Target, paste
from trp_scale.reporting.results import SPEED
from trp_scale.storage.files import write_text

POINTS = 11

OVERLAPS = (0.5, 0.6, 0.7, 0.8, 0.9)
"""IoU thresholds of precision and recall. D.1 names none."""
CONFIDENT = 0.5
"""Smallest score of the detections that precision and recall count. D.1 names none."""


Truth = tuple[Floats, npt.NDArray[np.bool_]]
"""Objects of one class in one image: boxes [n, 4] left, top, right, bottom, and difficult [n]. Detections of difficult
objects are neither true nor false positives."""


class ClassDetections(NamedTuple):
    """Detections of one class in all images: index [n] of the image, boxes [n, 4], scores [n]."""

    image: npt.NDArray[np.int64]
    boxes: Floats
    scores: Floats


def average_precision(truths: Sequence[Truth], detections: ClassDetections) -> float | None:
    """Return the mean over recalls 0, 0.1, ..., 1 of the highest precision at that recall or above.

    Detections are sorted by descending score, stably. Each is matched with the object of largest IoU in its image. At
    an IoU of 0.5 or more, the first detection of an object is a true positive and further ones are false positives;
    matches with difficult objects are ignored. All other detections are false positives.

    Returns:
        `None` if all objects are difficult.
    """
    objects = count_objects(truths)
    if objects == 0:
        return None
    right = np.cumsum(match_detections(truths, detections))  # [k]
    precision = right / np.arange(1, len(right) + 1)
    # Integers: in floating point 3 of 10 objects do not reach the recall 3 x 0.1.
    reached = [right * (POINTS - 1) >= point * objects for point in range(POINTS)]
    return float(np.mean([precision[beyond].max() if beyond.any() else 0.0 for beyond in reached]))


def count_objects(truths: Sequence[Truth]) -> int:
    """Count the objects that are not difficult."""
    return sum(int((~difficult).sum()) for _, difficult in truths)


def match_detections(
    truths: Sequence[Truth], detections: ClassDetections, overlap: float = 0.5
) -> npt.NDArray[np.bool_]:
    """Return for each detection that is not ignored whether it is a true positive, [k] by descending score. `overlap`:
    smallest IoU of a match."""
    seen = [np.zeros(len(boxes), dtype=np.bool_) for boxes, _ in truths]
    right = []
    for rank in np.argsort(-detections.scores, kind="stable").tolist():
        image = int(detections.image[rank])
        box, boxes = torch.from_numpy(detections.boxes[rank][None]), torch.from_numpy(truths[image][0])
        shares = box_iou(box, boxes)[0]  # [n]
        best = int(shares.argmax()) if len(shares) else -1
        if best < 0 or shares[best] < overlap:
            right.append(False)
        elif not truths[image][1][best]:
            right.append(not seen[image][best])
            seen[image][best] = True
    return np.array(right, dtype=np.bool_)


COCO_FIGURES = ("AP", "AP50", "AP75", "APs", "APm", "APl")
"""First six statistics of COCOeval: mean over IoU 0.5, 0.55 ... 0.95; at 0.5; at 0.75; and for objects below 32^2
pixels, up to 96^2, and above."""

VOC_METRIC = "AP50_11_points"


@dataclass(frozen=True, kw_only=True)
class ImageDetections:
    """Detections of one image in pixels of the stored image.

    Attributes:
        position: of the row in the measured source.
        address: number of the data set, and of the image in it.
        size: height and width.
        boxes: [n, 4] left, top, right, bottom.
        scores, labels: [n], by descending score.
        masks: run lengths of each detection; empty without masks.
    """

    position: int
    address: tuple[int, int]
    size: tuple[int, int]
    boxes: Floats
    scores: Floats
    labels: npt.NDArray[np.int64]
    masks: list[bytes]

    def entries(self, image_id: int | str, categories: Sequence[int | None]) -> Iterator[dict[str, Any]]:
        """Yield the detections in COCO's result format, by descending score.

        Args:
            image_id: of the annotation file.
            categories: category id of each class; detections of classes with `None` are skipped.
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
        self._detections: list[ImageDetections] = []

    def add(self, outputs: list[Target], batch: Batch) -> None:
        """Add detections of a micro-batch in pixels of its squares."""
        columns = ("row_weights", "sizes", "resized", "image")
        present, sizes, resized, images = (batch[name].tolist() for name in columns)
        for row, target in enumerate(outputs):
            if present[row] > 0:
                member, image = images[row]
                values = to_image_pixels(target, sizes[row], resized[row])
                self._detections.append(ImageDetections(position=batch.start + row, address=(member, image), **values))

    def gather(self, group: Group) -> list[ImageDetections]:
        """Gather the detections of all ranks in stored order. Collective."""
        gathered = [image for part in group.gather_objects(self._detections) for image in part]
        return sorted(gathered, key=lambda image: image.position)


class InferenceSpeed:
    """Times forward passes from images on the device to detections. It waits for the device."""

    def __init__(self) -> None:
        self._passes, self._images, self._seconds = 0, 0, 0.0

    @contextlib.contextmanager
    def measure(self, images: torch.Tensor) -> Iterator[None]:
        """Time the pass of a micro-batch of images [B, ...]."""
        _wait(images.device)
        began = time.perf_counter()
        yield
        _wait(images.device)
        self._passes += 1
        if self._passes > 2:  # the first ones allocate memory and choose kernels
            self._images += len(images)
            self._seconds += time.perf_counter() - began

    def images_per_second(self, group: Group) -> float | None:
        """Return the images per second of one rank, the mean over ranks; `None` without a timed pass. Collective."""
        images, seconds = np.sum(group.gather_objects((self._images, self._seconds)), axis=0).tolist()
        return images / seconds if seconds else None


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


class DetectionMetrics(CollectedDetections):
    """Average precision of all ranks' detections; see `Metrics`. `speed`: of the passes; `None` = not measured."""

    def __init__(self, datasets: Sequence[Annotations], speed: InferenceSpeed | None = None) -> None:
        super().__init__()
        self._datasets, self._speed = list(datasets), speed

    def finish(self, group: Group) -> dict[str, Any]:
        """Return AP, AP50 ... of boxes and mask_AP ... of masks (COCO), or the mean over classes of the eleven-point AP
        with precision and recall (VOC); "detail" has AP by class, and images_per_second. Metrics without objects are
        omitted. Collective.

        Raises:
            RefusedError: the measured images have no objects.
        """
        gathered = self.gather(group)
        figures, detail = (voc_figures if self._datasets[0].voc else coco_figures)(self._datasets, gathered)
        if not self._datasets[0].voc and any(image.masks for image in gathered):
            masks, of_masks = coco_figures(self._datasets, gathered, "segm")
            figures |= {f"mask_{name}": value for name, value in masks.items()}
            detail |= {f"mask_{name}": value for name, value in of_masks.items()}
        speed = None if self._speed is None else self._speed.images_per_second(group)
        return {**figures, "detail": detail if speed is None else {**detail, SPEED: speed}}


def to_image_pixels(target: Target, size: Sequence[int], resized: Sequence[int]) -> dict[str, Any]:
    """Transform detections of a letterboxed image to pixels of the stored image, clipped to it.

    Args:
        target: output of `Detector`.
        size: height and width of the image.
        resized: height and width in the square.
    """
    (height, width), (tall, wide) = size, resized
    whole = target["boxes"].double().cpu() * torch.tensor([width / wide, height / tall] * 2, dtype=torch.float64)
    boxes = torch.minimum(whole, torch.tensor([width, height] * 2, dtype=torch.float64))
    kept = ((boxes[:, 2:] - boxes[:, :2]) > 0).all(dim=1)
    boxes = boxes[kept]
    masks = []
    if "masks" in target:
        inside = target["masks"].float().cpu()[kept]  # [n, 1, 28, 28]
        # The mask belongs to the unclipped box; pasted into the clipped box it would be squeezed.
        shares = paste(inside[:, 0], whole[kept], (height, width))  # [n, H, W]
        masks = [encode(mask) for mask in (shares > 0.5).byte().numpy()]
    return {
        "size": (height, width),
        "boxes": boxes.numpy(),
        "scores": target["scores"].double().cpu()[kept].numpy(),
        "labels": target["labels"].cpu()[kept].numpy(),
        "masks": masks,
    }


Figures = tuple[dict[str, float], dict[str, Any]]
"""Metrics by name, and values by class."""


def voc_figures(datasets: Sequence[Annotations], images: Sequence[ImageDetections]) -> Figures:
    """Return the mean over classes of the average precision, the values by class, and precision and recall of all
    classes together at each IoU, of detections with a score of CONFIDENT or more. Precision is 0 without detections."""
    of_class = {}
    total, counts = 0, np.zeros((len(OVERLAPS), 2), dtype=np.int64)  # true positives, detections that are not ignored
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
        total += count_objects(truths)
        confident = ClassDetections(*(part[detections.scores >= CONFIDENT] for part in detections))  # type: ignore[arg-type]
        matches = [match_detections(truths, confident, overlap) for overlap in OVERLAPS]
        counts += [(int(right.sum()), len(right)) for right in matches]
    if not of_class:
        raise _refuse_no_objects(datasets)
    figures = {VOC_METRIC: float(np.mean(list(of_class.values())))}
    for overlap, (right, detected) in zip(OVERLAPS, counts.tolist(), strict=True):
        figures[f"precision{100 * overlap:.0f}"] = right / max(1, detected)
        figures[f"recall{100 * overlap:.0f}"] = right / total
    return figures, {VOC_METRIC: of_class}


def coco_figures(datasets: Sequence[Annotations], images: Sequence[ImageDetections], kind: str = "bbox") -> Figures:
    """Return COCO's metrics by name and AP by class, through pycocotools; `kind` is bbox or segm."""
    mask_functions()  # refuses if pycocotools is missing
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    truths, categories = COCO(), range(1, 1 + len(datasets[0].classes))
    truths.dataset = {
        "images": [
            {"id": number, "height": image.size[0], "width": image.size[1]}
            for number, image in enumerate(images, start=1)
        ],
        "categories": [{"id": n, "name": name} for n, name in zip(categories, datasets[0].classes, strict=True)],
        "annotations": [
            {"id": number, **entry} for number, entry in enumerate(_coco_truths(datasets, images, kind), start=1)
        ],
    }
    detections = [entry for n, image in enumerate(images, start=1) for entry in image.entries(n, categories)]
    for entry in detections if kind == "segm" else ():
        del entry["bbox"]  # areas are those of masks
    with contextlib.redirect_stdout(io.StringIO()):  # pycocotools prints a table
        truths.createIndex()
        evaluation = COCOeval(truths, truths.loadRes(detections) if detections else COCO(), kind)
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    figures = {name: float(value) for name, value in zip(COCO_FIGURES, evaluation.stats, strict=False) if value >= 0}
    if "AP" not in figures:
        raise _refuse_no_objects(datasets)
    precision = evaluation.eval["precision"][:, :, :, 0, -1]  # [overlaps, recalls, classes]
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
                assert data.masks is not None, "masks are measured only if the annotations have them"
                entry["segmentation"] = {"size": list(image.size), "counts": data.masks[number]}
            yield entry


def corner_and_size(box: Floats) -> list[float]:
    """Convert left, top, right, bottom to COCO's left, top, width, height."""
    left, top, right, bottom = (float(side) for side in box)
    return [left, top, right - left, bottom - top]


def _refuse_no_objects(datasets: Sequence[Annotations]) -> RefusedError:
    return RefusedError(
        f"{datasets[0].path}: the measured images have no objects; raise --data.validation_fraction, or set "
        "--downstream.test_path"
    )


class PredictedObjects(CollectedDetections):
    """Writes a JSON file with an entry for each detection; see `Predictions`.

    Ids are those of the annotation file, so `COCO.loadRes` can read the predictions. For Pascal VOC they are image
    names and 1 + number of the class. Detections of classes without an id in the file are skipped.
    """

    def __init__(self, path: Path, datasets: Sequence[Annotations], group: Group) -> None:
        super().__init__()
        self._path, self._datasets, self._group = path, datasets, group

    def finish(self) -> list[Path]:
        images = self.gather(self._group)

        def write() -> None:
            entries: list[dict[str, Any]] = []
            for image in images:
                data, number = self._datasets[image.address[0]], image.address[1]
                entries += image.entries(data.image_ids[number], data.category_ids)
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_text(self._path, json.dumps(entries))

        on_rank_zero(self._group, f"writing {self._path}", write)
        return [self._path]
