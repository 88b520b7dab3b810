"""Objects of a data set of images as arrays: small enough to hand to every worker, whatever format they came in."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from trp_scale.data.hashing import Integers, Words, name_hash
from trp_scale.errors import DataError, quote, shorten

Floats = npt.NDArray[np.float64]

BOX, OUTSIDE, MASK = "boxes without an area", "boxes outside their image", "masks without an area"
"""Why objects are skipped."""


@dataclass(frozen=True, kw_only=True)
class StoredMasks:
    """Masks in COCO's compressed run lengths, one after the other.

    Attributes:
        runs: all bytes.
        ends: [m + 1] where each ends, from 0.
    """

    runs: bytes
    ends: Integers

    def __getitem__(self, number: int) -> bytes:
        return self.runs[self.ends[number] : self.ends[number + 1]]


@dataclass(frozen=True, kw_only=True)
class Annotations:
    """What is known of n images with m objects. As blocks of order and split: one image each.

    Attributes:
        path: file or folder it was read from.
        folder: of the images.
        voc: whether it is Pascal VOC's, with its own metric; otherwise COCO's.
        keys: [n] names of the images' files in the folder, each once.
        identities: [n] uint64, `hashing.name_hash` of the key.
        rows: [n] ones.
        sizes: [n, 2] height and width in pixels; 0 where the file says nothing.
        firsts: [n + 1] number of each image's first object; the objects of an image follow each other.
        boxes: [m, 4] left, top, right, bottom in pixels; a pixel is one unit wide, the first from 0 to 1.
        labels: [m] 1 + number of the class.
        ignored: [m] crowds (COCO) and difficult objects (VOC): neither learned nor required.
        areas: [m] pixels of the mask, or of the box.
        masks: of all objects; None where one that counts has none.
        classes: names, by number.
        skipped: objects that were left out, by reason.
        digest: hash of all that was read.
        image_ids: [n] what the file calls each image: COCO's ids, Pascal VOC's names.
        category_ids: COCO's id of each class, by number; None where the file has no such class. Pascal VOC's are
            1 + number of the class.
    """

    path: Path
    folder: Path
    voc: bool
    keys: list[str]
    identities: Words
    rows: Integers
    sizes: Integers
    firsts: Integers
    boxes: Floats
    labels: Integers
    ignored: npt.NDArray[np.bool_]
    areas: Floats
    masks: StoredMasks | None
    classes: tuple[str, ...]
    skipped: dict[str, int] = field(default_factory=dict)
    digest: str = ""
    image_ids: Sequence[int | str] = ()
    category_ids: tuple[int | None, ...] = ()

    def objects(self, image: int) -> range:
        """Numbers of an image's objects."""
        return range(int(self.firsts[image]), int(self.firsts[image + 1]))

    def counted(self, image: int) -> list[int]:
        """Numbers of an image's objects that are learned."""
        return [number for number in self.objects(image) if not self.ignored[number]]

    def counts(self) -> Integers:
        """[n] objects of each image that are learned."""
        before = np.concatenate([[0], np.cumsum(~self.ignored)])
        counts: Integers = before[self.firsts[1:]] - before[self.firsts[:-1]]
        return counts

    def with_classes(self, classes: Sequence[str]) -> Annotations:
        """The same with other numbers of the classes.

        Raises:
            DataError: a class of an object is not among them.
        """
        if tuple(classes) == self.classes:
            return self
        numbers = {name: number for number, name in enumerate(classes)}
        used = set(np.unique(self.labels).tolist())
        lacking = [name for number, name in enumerate(self.classes) if number + 1 in used and name not in numbers]
        if lacking:
            raise DataError(
                f"{self.path}: objects of class {lacking[0]!r} found, which the training data does not have; it has "
                f"{', '.join(classes)}"
            )
        new = np.array([0, *(numbers.get(name, -1) + 1 for name in self.classes)], dtype=np.int64)
        ids = dict(zip(self.classes, self.category_ids, strict=False))
        return replace(
            self,
            classes=tuple(classes),
            labels=new[self.labels],
            category_ids=tuple(ids.get(name) for name in classes),
        )

    def notices(self) -> list[str]:
        """What a user should know of it."""
        listed = [f"{count} {reason}" for reason, count in self.skipped.items() if count]
        return [f"{self.path}: left out {' and '.join(listed)}"] if listed else []


class Collected:
    """Annotations while they are read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.skipped = dict.fromkeys((BOX, OUTSIDE, MASK), 0)
        self._keys: list[str] = []
        self._sizes: list[tuple[int, int]] = []
        self._firsts: list[int] = [0]
        self._boxes: list[tuple[float, ...]] = []
        self._labels: list[int] = []
        self._ignored: list[bool] = []
        self._areas: list[float] = []
        self._runs: list[bytes | None] = []

    def image(self, key: str, height: int, width: int) -> None:
        """Begin an image."""
        self._keys.append(key)
        self._sizes.append((height, width))
        self._firsts.append(len(self._boxes))

    def add(
        self, box: tuple[float, float, float, float], label: int, ignored: bool, runs: bytes | None, area: float | None
    ) -> None:
        """An object of the last image, or a count of what is wrong with it.

        Args:
            box: left, top, right, bottom.
            runs: its mask; b"" if that has no area, None if there is none.
            area: of the mask; None = the box's.
        """
        height, width = self._sizes[-1]
        left, top, right, bottom = box
        if not (right > left and bottom > top):
            self.skipped[BOX] += 1
        elif right <= 0 or bottom <= 0 or (width and left >= width) or (height and top >= height):
            self.skipped[OUTSIDE] += 1
        elif runs == b"":
            self.skipped[MASK] += 1
        else:
            self._boxes.append(box)
            self._labels.append(label)
            self._ignored.append(ignored)
            self._runs.append(runs)
            self._areas.append((right - left) * (bottom - top) if area is None else area)
            self._firsts[-1] = len(self._boxes)

    def finish(
        self,
        *,
        folder: Path,
        voc: bool,
        classes: Sequence[str],
        digest: str,
        image_ids: Sequence[int | str],
        category_ids: Sequence[int],
    ) -> Annotations:
        """The arrays.

        Raises:
            DataError: no images, or one twice.
        """
        keys = self._keys
        if not keys:
            raise DataError(f"{self.path}: no images listed")
        if len(set(keys)) != len(keys):
            twice = next(key for key, count in Counter(keys).items() if count > 1)
            raise DataError(f"{self.path}: image {quote(twice)} is listed twice")
        masked = all(runs is not None or ignored for runs, ignored in zip(self._runs, self._ignored, strict=True))
        runs = [each or b"" for each in self._runs]
        names = "\n".join(keys)
        return Annotations(
            path=self.path,
            folder=folder,
            voc=voc,
            keys=keys,
            identities=np.array([name_hash(key) for key in keys], dtype=np.uint64),
            rows=np.ones(len(keys), dtype=np.int64),
            sizes=np.array(self._sizes, dtype=np.int64).reshape(-1, 2),
            firsts=np.array(self._firsts, dtype=np.int64),
            boxes=np.array(self._boxes, dtype=np.float64).reshape(-1, 4),
            labels=np.array(self._labels, dtype=np.int64),
            ignored=np.array(self._ignored, dtype=np.bool_),
            areas=np.array(self._areas, dtype=np.float64),
            masks=StoredMasks(runs=b"".join(runs), ends=np.cumsum([0, *map(len, runs)])) if masked and runs else None,
            classes=tuple(classes),
            skipped=self.skipped,
            image_ids=image_ids,
            category_ids=tuple(category_ids),
            digest=hashlib.blake2b(f"{digest}\n{names}".encode(), digest_size=16).hexdigest(),
        )


def check_images(annotations: Annotations) -> None:
    """Look for every listed image's file, folder by folder.

    Raises:
        DataError: naming how many are missing, and the first.
    """
    there: dict[Path, set[str]] = {}
    missing = []
    for key in annotations.keys:
        place = annotations.folder / key
        if place.parent not in there:
            there[place.parent] = {one.name for one in place.parent.iterdir()} if place.parent.is_dir() else set()
        if place.name not in there[place.parent]:
            missing.append(key)
    if missing:
        raise DataError(
            f"{annotations.path}: {len(missing)} of {len(annotations.keys)} images are not in {annotations.folder} "
            f"(the first: {shorten(missing[0])}); copy them there, or say where they are with --detection.images or "
            "--detection.test_images"
        )
