"""Objects of a data set of images as arrays: small enough to hand to every worker, whatever format they came in."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trp_scale.config import RefusedError
from trp_scale.config.schema import is_finite
from trp_scale.data.hashing import Integers, Words, name_hash
from trp_scale.errors import DataError, quote, shorten

Floats = npt.NDArray[np.float64]

BOX, OUTSIDE, MASK = "boxes without an area", "boxes outside their image", "masks without an area"
"""Why objects are skipped."""


Bits = npt.NDArray[np.uint8]

FARTHEST = 1e6
"""Pixels that a polygon's points may lie from the image's corner. pycocotools walks along every edge, and ends the
process where one is much longer or a number is none."""

LONGEST_OUTLINE = 1e7
"""Pixels that all edges of a mask's polygons may have together. pycocotools takes some 40 bytes a pixel, and does not
look whether it got them: 200 edges from one end to the other, in 4 KB, ended the process."""

LONGEST_NUMBER = 60
"""Bits of a run length in text: pixels have 32. One of millions of bits took hours."""


def mask_functions() -> Any:
    """pycocotools.mask.

    Raises:
        RefusedError: it is not installed.
    """
    try:
        from pycocotools import mask
    except ImportError as error:
        raise RefusedError(
            "masks of objects and COCO's metric need `pip install trp-scale[evaluation]` (pycocotools); without it: "
            "Pascal VOC, whose metric needs none"
        ) from error
    return mask


def encode_segmentation(segmentation: object, height: int, width: int, *, where: str) -> bytes:
    """Compressed runs of what a COCO file says of a mask: polygons, run lengths, or compressed ones.

    Args:
        height, width: of the image.
        where: the annotation, for messages.

    Returns:
        The runs; b"" for a mask without an area.

    Raises:
        DataError: it is none of these, or of another size.
    """
    functions = mask_functions()
    if height * width >= 1 << 32:
        raise DataError(f"{where}: an image of {height} x {width} pixels, which has no mask")
    if isinstance(segmentation, list):
        polygons = [xy for xy in segmentation if isinstance(xy, list) and len(xy) >= 6 and len(xy) % 2 == 0]
        if any(not (is_finite(number) and abs(number) <= FARTHEST) for number in chain(*polygons)):
            raise DataError(f"{where}: a polygon holds something else than numbers of pixels, up to {FARTHEST:.0f}")
        if not polygons:
            return b""
        if (outline := sum(map(_outline, polygons))) > LONGEST_OUTLINE:
            raise DataError(
                f"{where}: polygons with an outline of {outline:.0f} pixels, at most {LONGEST_OUTLINE:.0f} are drawn"
            )
        encoded = functions.merge(functions.frPyObjects(polygons, height, width))
    elif isinstance(segmentation, dict) and segmentation.get("size") == [height, width]:
        counts = segmentation.get("counts")
        if not isinstance(counts, (list, str)):
            raise DataError(f"{where}: segmentation.counts is {type(counts).__name__}, a list or a text expected")
        lengths = counts if isinstance(counts, list) else _lengths(counts)
        if lengths is None or any(type(length) is not int or not 0 <= length < 1 << 32 for length in lengths):
            raise DataError(f"{where}: segmentation.counts holds something else than run lengths")
        if sum(lengths) != height * width:
            raise DataError(f"{where}: run lengths of {sum(lengths)} pixels, {height} x {width} expected")
        encoded = functions.frPyObjects({"size": [height, width], "counts": lengths}, height, width)
    else:
        raise DataError(
            f"{where}: segmentation is neither a list of polygons nor run lengths of size [{height}, {width}]"
        )
    return bytes(encoded["counts"]) if functions.area(encoded) > 0 else b""


def _outline(polygon: list[float]) -> float:
    """Pixels along all edges of a closed polygon, x and y in turn, as pycocotools counts them."""
    points = np.array(polygon, dtype=np.float64).reshape(-1, 2)
    return float(np.abs(points - np.roll(points, 1, axis=0)).max(axis=1).sum())


def _lengths(text: str) -> list[int] | None:
    """The run lengths of COCO's text, or None if it is none.

    Each character holds five bits of a number, the lowest first, and a sixth that says that it goes on; from the fourth
    number on they are differences to the number before the last. pycocotools believes any text, and masks of too few
    pixels then end in what the memory held before.
    """
    lengths: list[int] = []
    number = shift = 0
    for character in text:
        bits = ord(character) - 48
        if not 0 <= bits < 64 or shift > LONGEST_NUMBER:
            return None
        number |= (bits & 31) << shift
        shift += 5
        if bits & 32:
            continue
        if bits & 16:
            number -= 1 << shift
        lengths.append(number + lengths[-2] if len(lengths) > 2 else number)
        number = shift = 0
    return lengths if shift == 0 else None


def decode(runs: bytes, height: int, width: int) -> Bits:
    """[height, width] 0 or 1."""
    bits: Bits = mask_functions().decode({"size": [height, width], "counts": runs})
    return bits


def encode(bits: Bits) -> bytes:
    """The compressed runs of [height, width] 0 or 1."""
    return bytes(mask_functions().encode(np.asfortranarray(bits))["counts"])


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
    """Objects of n images, m in all. As blocks of order and split: one image each.

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

    def learned_objects(self, image: int) -> list[int]:
        """Numbers of an image's objects that are learned."""
        return [number for number in self.objects(image) if not self.ignored[number]]

    def counts(self) -> Integers:
        """[n] objects of each image that are learned."""
        before = np.concatenate([[0], np.cumsum(~self.ignored)])
        counts: Integers = before[self.firsts[1:]] - before[self.firsts[:-1]]
        return counts

    def with_classes(self, classes: Sequence[str]) -> Annotations:
        """Return a copy with other numbers of the classes.

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
        """Notices about objects that were left out."""
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
        runs = [mask or b"" for mask in self._runs]
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
    names: dict[Path, set[str]] = {}
    missing = []
    for key in annotations.keys:
        image = annotations.folder / key
        if image.parent not in names:
            names[image.parent] = {file.name for file in image.parent.iterdir()} if image.parent.is_dir() else set()
        if image.name not in names[image.parent]:
            missing.append(key)
    if missing:
        raise DataError(
            f"{annotations.path}: {len(missing)} of {len(annotations.keys)} images are not in {annotations.folder} "
            f"(the first: {shorten(missing[0])}); copy them there, or say where they are with --detection.images or "
            "--detection.test_images"
        )
