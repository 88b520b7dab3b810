"""Opened data sets with boxes: one image is one block of one row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trp_scale.config import RefusedError
from trp_scale.data.index import DataError
from trp_scale.data.mixture import MemberPath
from trp_scale.data.rows import Rows
from trp_scale.downstream.detection.annotations import Annotations, check_images
from trp_scale.downstream.detection.batch import DetectionBatchBuilder
from trp_scale.downstream.detection.files import read_coco, read_voc
from trp_scale.downstream.detection.settings import DetectionTaskConfig


@dataclass(frozen=True, kw_only=True)
class DetectionMeta:
    """What all rows have in common: names of the classes, by number, and whether the objects have masks."""

    classes: tuple[str, ...]
    masks: bool


def open_detection(paths: Sequence[MemberPath], images: str, *, masks: bool) -> list[Annotations]:
    """Read the annotations of data sets, and look for their images.

    Args:
        paths: each a COCO file (.json) or a folder with one in it, or a Pascal VOC folder or list (.txt).
        images: folder of the images; empty = looked for.
        masks: read masks too.

    Raises:
        DataError: something is missing, damaged or of another format.
        RefusedError: COCO's and Pascal VOC's in one mixture.
    """
    found = [_open(path, images, masks=masks) for path in paths]
    for one in found:
        check_images(one)
    if len({one.voc for one in found}) > 1:
        raise RefusedError("--data.path mixes COCO's and Pascal VOC's data sets, which are measured differently")
    classes = list(dict.fromkeys(name for one in found for name in one.classes))
    return [one.with_classes(classes) for one in found]


def _open(member: MemberPath, images: str, *, masks: bool) -> Annotations:
    path = member.path
    if path.suffix == ".json" and path.is_file():
        return read_coco(path, images, masks=masks)
    if (path / "Annotations").is_dir() or (path.suffix == ".txt" and path.is_file()):
        return read_voc(path, images)
    inside = sorted(path.glob("*.json")) if path.is_dir() else []
    if len(inside) == 1:
        return read_coco(inside[0], images, masks=masks)
    raise DataError(
        f"{path}: allowed: a COCO file (.json) or a folder with one, a folder of Pascal VOC (with Annotations and "
        f"JPEGImages) or a list in its ImageSets/Main (.txt); found {_found(member, len(inside))}"
    )


def _found(member: MemberPath, files: int) -> str:
    if not member.path.exists():
        return "nothing of that name"
    return f"a folder with {files} .json files" if member.path.is_dir() else "a file"


def settle_masks(config: DetectionTaskConfig, datasets: Sequence[Annotations]) -> None:
    """detection.masks: auto becomes what all data has, in place.

    Args:
        datasets: to learn from and to measure on.

    Raises:
        RefusedError: they are asked for and are not there.
    """
    without = [one for one in datasets if one.masks is None]
    if config.detection.masks == "on" and without:
        raise RefusedError(
            f"--detection.masks on: objects of {without[0].path} have no masks; allowed there: auto, off"
        )
    if config.detection.masks == "auto":
        config.detection.masks = "off" if without else "on"


def detection_rows(config: DetectionTaskConfig, datasets: Sequence[Annotations], *, augment: bool) -> Rows:
    """Data sets as rows.

    Args:
        config: the run; detection.masks is on or off.
        datasets: of the same classes.
        augment: for training.
    """
    masks = config.detection.masks == "on"
    return Rows(
        blocks=datasets,
        meta=DetectionMeta(classes=datasets[0].classes, masks=masks),  # type: ignore[arg-type]  # of a kind of its own
        limit=0,
        builder=DetectionBatchBuilder(config, datasets, augment=augment),
        digests=[one.digest for one in datasets],
    )


def learned(config: DetectionTaskConfig, datasets: Sequence[Annotations]) -> list[npt.NDArray[np.bool_]]:
    """[n] of each data set, the images that may be trained on.

    Raises:
        RefusedError: no image has an object.
    """
    counts = [one.counts() for one in datasets]
    if not any((each > 0).any() for each in counts):
        raise RefusedError(f"{datasets[0].path}: no image has an object to learn from")
    kept = config.detection.without_objects == "kept"
    return [np.ones(len(each), dtype=np.bool_) if kept else each > 0 for each in counts]


def training_notices(config: DetectionTaskConfig, datasets: Sequence[Annotations]) -> list[str]:
    """What a user should know of the training images: objects that are skipped or cut, images that are left out."""
    counts = np.concatenate([one.counts() for one in datasets])
    found = [notice for one in datasets for notice in one.notices()]
    most = config.detection.max_objects
    if cut := int((counts > most).sum()):
        found.append(f"{cut} images have more than --detection.max_objects {most} objects: the first ones are learned")
    if config.detection.without_objects == "left_out" and (empty := int((counts == 0).sum())):
        found.append(f"{empty} images without an object are left out of training (--detection.without_objects kept)")
    return found
