"""Object annotations of COCO and Pascal VOC as arrays, small enough to copy to every worker.

COCO: images, annotations, categories (cocodataset.org, "Data format", object detection).
Pascal VOC: Annotations/*.xml, JPEGImages/*.jpg, ImageSets/Main/*.txt.
Masks are COCO's run lengths, through pycocotools, which does not validate its input.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard
from xml.etree import ElementTree

import numpy as np
import numpy.typing as npt

from trp_scale.config import RefusedError
from trp_scale.config.files import LARGEST_INDEX, parse_json, read_content, read_lines
from trp_scale.config.schema import LARGEST, is_finite, is_plain_name, is_within
from trp_scale.data.hashing import Integers, Words, name_hash
from trp_scale.errors import LONGEST_QUOTE, DataError, can_be_written, error_text, quote, shorten

Floats = npt.NDArray[np.float64]
Bits = npt.NDArray[np.uint8]

BOX, OUTSIDE, MASK = "boxes without an area", "boxes outside their image", "masks without an area"
"""Reasons to skip an object."""


@dataclass(frozen=True, kw_only=True)
class StoredMasks:
    """Concatenated COCO run lengths of m masks.

    Attributes:
        runs: all bytes.
        ends: [m + 1] offsets in `runs`.
    """

    runs: bytes
    ends: Integers

    def __getitem__(self, number: int) -> bytes:
        return self.runs[self.ends[number] : self.ends[number + 1]]


@dataclass(frozen=True, kw_only=True)
class Annotations:
    """The m objects of n images. As `plan.Blocks`, each image is a block of one row.

    Attributes:
        path: file or folder of the annotations.
        folder: of the images.
        voc: Pascal VOC with its own metric; otherwise COCO.
        keys: [n] unique file names of the images in the folder.
        identities: [n] uint64, `hashing.name_hash` of the key.
        rows: [n] ones.
        sizes: [n, 2] height and width in pixels; 0 = unknown.
        firsts: [n + 1] index of each image's first object, and m.
        boxes: [m, 4] left, top, right, bottom in pixels; the first pixel extends from 0 to 1.
        labels: [m] 1 + number of the class.
        ignored: [m] crowds (COCO) and difficult objects (VOC), which are neither learned nor required.
        areas: [m] pixels of the mask, or of the box.
        masks: of all objects; `None` if an object has no mask.
        classes: names, by number.
        skipped: number of skipped objects, by reason.
        digest: hash of the files.
        image_ids: [n] COCO's ids or Pascal VOC's names of the images.
        category_ids: COCO's id of each class, by number; `None` if the file lacks the class. 1 + number for Pascal VOC.
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
        """Return the indices of an image's objects."""
        return range(int(self.firsts[image]), int(self.firsts[image + 1]))

    def learned_objects(self, image: int) -> list[int]:
        """Return the indices of an image's objects without ignored ones."""
        return [number for number in self.objects(image) if not self.ignored[number]]

    def counts(self) -> Integers:
        """Return the number of objects of each image without ignored ones, [n]."""
        before = np.concatenate([[0], np.cumsum(~self.ignored)])
        counts: Integers = before[self.firsts[1:]] - before[self.firsts[:-1]]
        return counts

    def with_classes(self, classes: Sequence[str]) -> Annotations:
        """Return a copy with classes renumbered in the order of `classes`.

        Raises:
            DataError: an object has another class.
        """
        if tuple(classes) == self.classes:
            return self
        numbers = {name: number for number, name in enumerate(classes)}
        used = set(np.unique(self.labels).tolist())
        lacking = [name for number, name in enumerate(self.classes) if number + 1 in used and name not in numbers]
        if lacking:
            raise DataError(
                f"{self.path}: objects of class {lacking[0]!r} found; classes of the training data: "
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
        """Return a notice about skipped objects, if any."""
        listed = [f"{count} {reason}" for reason, count in self.skipped.items() if count]
        return [f"{self.path}: skipped {' and '.join(listed)}"] if listed else []


class ReadObject(NamedTuple):
    """One object of an image.

    Attributes:
        box: left, top, right, bottom.
        label, ignored: as in `Annotations`.
        runs: run lengths of the mask; b"" for a mask without area; `None` = no mask.
        area: of the mask; `None` = that of the box.
    """

    box: tuple[float, float, float, float]
    label: int
    ignored: bool
    runs: bytes | None = None
    area: float | None = None


ReadImage = tuple[str, int, int, Iterable[ReadObject]]


def join_images(path: Path, images: Iterable[ReadImage], *, digest: str, **fields: Any) -> Annotations:
    """Convert images and objects to arrays, and skip empty objects and those outside their image.

    Args:
        images: key, height, width and objects of each image.
        fields: further fields of `Annotations`.
    """
    skipped = dict.fromkeys((BOX, OUTSIDE, MASK), 0)
    keys, sizes, firsts, objects = list[str](), list[tuple[int, int]](), [0], list[ReadObject]()
    for key, height, width, to_image_pixels in images:
        keys.append(key)
        sizes.append((height, width))
        for read in to_image_pixels:
            left, top, right, bottom = read.box
            if not (right > left and bottom > top):
                skipped[BOX] += 1
            elif right <= 0 or bottom <= 0 or (width and left >= width) or (height and top >= height):
                skipped[OUTSIDE] += 1
            elif read.runs == b"":
                skipped[MASK] += 1
            else:
                objects.append(read)
        firsts.append(len(objects))
    if not keys:
        raise DataError(f"{path}: no images listed")
    if len(set(keys)) != len(keys):
        twice = next(key for key, count in Counter(keys).items() if count > 1)
        raise DataError(f"{path}: image {quote(twice)} is listed twice")
    boxes = np.array([read.box for read in objects], dtype=np.float64).reshape(-1, 4)
    box_areas = (boxes[:, 2:] - boxes[:, :2]).prod(axis=1).tolist()
    areas = [area if read.area is None else read.area for read, area in zip(objects, box_areas, strict=True)]
    runs = [read.runs for read in objects if read.runs is not None]
    names = "\n".join(keys)
    return Annotations(
        path=path,
        keys=keys,
        identities=np.array([name_hash(key) for key in keys], dtype=np.uint64),
        rows=np.ones(len(keys), dtype=np.int64),
        sizes=np.array(sizes, dtype=np.int64),
        firsts=np.array(firsts, dtype=np.int64),
        boxes=boxes,
        labels=np.array([read.label for read in objects], dtype=np.int64),
        ignored=np.array([read.ignored for read in objects], dtype=np.bool_),
        areas=np.array(areas, dtype=np.float64),
        masks=StoredMasks(runs=b"".join(runs), ends=np.cumsum([0, *map(len, runs)]))
        if objects and len(runs) == len(objects)
        else None,
        skipped=skipped,
        digest=hashlib.blake2b(f"{digest}\n{names}".encode(), digest_size=16).hexdigest(),
        **fields,
    )


def check_images(annotations: Annotations) -> None:
    """Raise `DataError` if files of listed images are missing."""
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
            f"(the first: {shorten(missing[0])}); copy them there, or set --detection.images or "
            "--detection.test_images"
        )


LONGEST_SIDE = 1 << 20
"""Largest height or width of an image in pixels."""


def read_coco(path: Path, images: str = "", *, masks: bool = True) -> Annotations:
    """Read a COCO file; see `open_detection`. Classes are its categories by ascending id, which may have gaps.

    Raises:
        DataError: the file is damaged or of another format; names the annotation.
    """
    document, digest = _read(path)
    categories = {_integer(entry, "id", path, "category"): entry for entry in document["categories"]}
    ids = sorted(categories)
    labels = {category: number + 1 for number, category in enumerate(ids)}
    classes = [_class_name(categories[category].get("name", str(category)), path) for category in ids]
    if not classes or len(set(classes)) != len(classes) or len(ids) != len(document["categories"]):
        raise DataError(
            f"{path}: {len(document['categories'])} categories; allowed: one or more with unique ids and names"
        )
    listed: dict[int, dict[str, Any]] = {}
    for entry in document["images"]:
        number = _integer(entry, "id", path, "image")
        if number in listed:
            raise DataError(f"{path}: image id {number} is repeated; expected: unique ids")
        listed[number] = entry
    of_image: dict[int, list[dict[str, Any]]] = {number: [] for number in listed}
    for entry in document["annotations"]:
        number = _integer(entry, "image_id", path, "annotation")
        if number not in of_image:
            name = shorten(str(entry.get("id", "(without id)")))
            raise DataError(f"{path}: annotation {name}: image_id {number} is not among the images")
        of_image[number].append(entry)
    names = [_file_name(image, path) for image in listed.values()]

    def read_images() -> Iterator[ReadImage]:
        for name, (number, image) in zip(names, listed.items(), strict=True):
            height, width = (_integer(image, side, path, "image") for side in ("height", "width"))
            yield (
                name,
                height,
                width,
                [_read_object(entry, labels, height, width, path, masks=masks) for entry in of_image[number]],
            )

    return join_images(
        path,
        read_images(),
        folder=_folder(path, images, names),
        voc=False,
        classes=tuple(classes),
        digest=digest,
        image_ids=list(listed),
        category_ids=tuple(ids),
    )


def _read(path: Path) -> tuple[dict[str, Any], str]:
    content = read_content(path, DataError, largest=LARGEST_INDEX)
    document = parse_json(content, str(path), DataError, check_limits=False)
    for name in ("images", "annotations", "categories"):
        entries = document.get(name) if isinstance(document, dict) else None
        if not isinstance(entries, list) or any(not isinstance(entry, dict) for entry in entries):
            raise DataError(f"{path}: no list {name!r} of objects; a COCO file has images, annotations and categories")
    return document, hashlib.blake2b(content, digest_size=16).hexdigest()


def _class_name(name: object, path: Path) -> str:
    if not isinstance(name, str) or not can_be_written(name) or len(name) > LONGEST_QUOTE:
        raise DataError(f"{path}: category {quote(name)} found, a name expected")
    return name


def _read_object(
    annotation: dict[str, Any], labels: dict[int, int], height: int, width: int, path: Path, *, masks: bool
) -> ReadObject:
    where = f"{path}: annotation {shorten(str(annotation.get('id', '(without id)')))}"
    category = _integer(annotation, "category_id", path, "annotation")
    if category not in labels:
        raise DataError(f"{where}: category_id {category} is not among the categories")
    box = annotation.get("bbox")
    if not isinstance(box, list) or not all(map(_is_length, box)) or len(box) != 4:
        raise DataError(f"{where}: bbox is {quote(box)}, four numbers (left, top, width, height) expected")
    left, top, wide, tall = (float(side) for side in box)
    segmentation = annotation.get("segmentation") if masks else None
    area = annotation.get("area")
    return ReadObject(
        box=(left, top, left + wide, top + tall),
        label=labels[category],
        ignored=bool(annotation.get("iscrowd", 0)),
        runs=encode_segmentation(segmentation, height, width, where=where) if segmentation else None,
        area=float(area) if _is_length(area) else None,
    )


def _is_length(value: object) -> TypeGuard[float]:
    """Return whether the value is a valid coordinate or length in pixels."""
    return is_finite(value) and abs(value) < 1e9


def _integer(entry: dict[str, Any], name: str, path: Path, kind: str) -> int:
    value = entry.get(name)
    side = name in ("height", "width")
    if type(value) is not int or abs(value) > LARGEST or (side and not 1 <= value <= LONGEST_SIDE):
        number = shorten(str(entry.get("id", "(without id)")))
        raise DataError(f"{path}: {kind} {number}: {name} is {quote(value)}, a whole number expected")
    return value


def _file_name(image: dict[str, Any], path: Path) -> str:
    name = image.get("file_name")
    if not is_within(name):
        raise DataError(
            f"{path}: image {image.get('id')}: file_name is {quote(name)}, a path within the folder expected"
        )
    return str(name)


def _folder(path: Path, images: str, names: list[str]) -> Path:
    """Return `images`, or the first of the usual folders that contains the first image."""
    if images:
        return Path(images)
    split = path.stem.removeprefix("instances_")
    folders = [path.parent / "images", path.parent.parent / split, path.parent / split, path.parent]
    for folder in folders:
        if names and (folder / names[0]).is_file():
            return folder
    listed = ", ".join(str(folder) for folder in folders)
    raise DataError(
        f"{path}: {names[0] if names else 'no image'} is in none of {listed}; set the folder with "
        "--detection.images or --detection.test_images"
    )


def read_voc(path: Path, images: str = "") -> Annotations:
    """Read a Pascal VOC folder (VOC2007), or a list in it (VOC2007/ImageSets/Main/trainval.txt); see `open_detection`.

    Classes are the sorted names of objects. VOC's boxes are first and last pixel, counted from 1; here a box extends
    from the left side of the first pixel to the right side of the last.

    Raises:
        DataError: a file is missing, damaged or of another format; names the file.
    """
    if path.is_dir():
        root, names = path, sorted(file.stem for file in (path / "Annotations").glob("*.xml"))
    else:
        parent = next((parent for parent in path.parents if (parent / "Annotations").is_dir()), None)
        if parent is None:
            raise DataError(
                f"{path}: no parent folder has Annotations; expected: a list in Pascal VOC's ImageSets/Main"
            )
        root, names = parent, [words[0] for line in read_lines(path, DataError) if (words := line.split())]
        if wrong := next((name for name in names if not is_plain_name(name)), ""):
            raise DataError(f"{path}: {quote(wrong)} found, a plain file name expected")
    digest = hashlib.blake2b(digest_size=16)
    described = []
    for name in names:
        file = root / "Annotations" / f"{name}.xml"
        try:
            content = read_content(file, DataError, largest=16 << 20)
        except DataError as error:
            raise DataError(f"{error}; the file is listed in {path}") from error
        digest.update(content)
        described.append(_parse_annotation(file, content))
    classes = sorted({name for _, _, _, objects in described for name, _, _ in objects})
    labels = {name: number for number, name in enumerate(classes, start=1)}
    return join_images(
        path,
        (
            (key, height, width, [ReadObject(box, labels[name], difficult) for name, difficult, box in objects])
            for key, height, width, objects in described
        ),
        folder=Path(images) if images else root / "JPEGImages",
        voc=True,
        classes=tuple(classes),
        digest=digest.hexdigest(),
        image_ids=names,
        category_ids=tuple(range(1, 1 + len(classes))),
    )


def _parse_annotation(
    file: Path, content: bytes
) -> tuple[str, int, int, list[tuple[str, bool, tuple[float, float, float, float]]]]:
    """Return the image's file name, height, width, and (class, difficult, box) of each object."""
    try:
        tree = ElementTree.fromstring(content)
    except ElementTree.ParseError as error:
        raise DataError(f"{file}: not XML ({error_text(error)})") from error
    objects = []
    for number, element in enumerate(tree.findall("object"), start=1):
        where = f"{file}: object {number}"
        label = (element.findtext("name") or "").strip()
        if not label or len(label) > LONGEST_QUOTE:
            raise DataError(f"{where} has no name" if not label else f"{where}: name is {quote(label)}")
        left, top, right, bottom = (
            _number(element, f"bndbox/{side}", where) for side in ("xmin", "ymin", "xmax", "ymax")
        )
        difficult = (element.findtext("difficult") or "0").strip() == "1"
        objects.append((label, difficult, (left - 1.0, top - 1.0, right, bottom)))
    height, width = (int(_number(tree, f"size/{side}", str(file))) for side in ("height", "width"))
    if not (0 <= height <= LONGEST_SIDE and 0 <= width <= LONGEST_SIDE):
        raise DataError(
            f"{file}: size of {quote(height)} x {quote(width)} found, up to {LONGEST_SIDE} each way allowed"
        )
    return f"{file.stem}.jpg", height, width, objects


def _number(tree: ElementTree.Element, name: str, where: str) -> float:
    text = tree.findtext(name)
    try:
        value = float((text or "")[:LONGEST_QUOTE])
    except ValueError:
        value = math.nan
    if not _is_length(value):
        raise DataError(f"{where}: {name} is {quote(text)}, a number expected")
    return value


FARTHEST = 1e6
"""Largest coordinate of a polygon in pixels. pycocotools crashes on much longer edges and on non-finite numbers."""

LONGEST_OUTLINE = 1e7
"""Largest total length of a mask's polygon edges in pixels. pycocotools allocates about 40 bytes per pixel unchecked:
200 edges across the image, in 4 KB, crashed the process."""


def mask_functions() -> Any:
    """Import pycocotools.mask."""
    try:
        from pycocotools import mask
    except ImportError as error:
        raise RefusedError(
            "masks and COCO's metric need pycocotools; run `pip install trp-scale[evaluation]`, or use Pascal VOC, "
            "whose metric does not need it"
        ) from error
    return mask


def encode_segmentation(segmentation: object, height: int, width: int, *, where: str) -> bytes:
    """Return compressed run lengths for a COCO mask of polygons, run lengths or compressed run lengths.

    Masks without an area give b"".

    Raises:
        DataError: the mask is of another format or size.
    """
    functions = mask_functions()
    if height * width >= 1 << 32:
        raise DataError(f"{where}: the image has {height} x {width} pixels; masks allow fewer than 2^32")
    if isinstance(segmentation, list):
        polygons = [xy for xy in segmentation if isinstance(xy, list) and len(xy) >= 6 and len(xy) % 2 == 0]
        if any(not (is_finite(number) and abs(number) <= FARTHEST) for number in chain(*polygons)):
            raise DataError(f"{where}: invalid coordinate in a polygon; allowed: finite numbers up to {FARTHEST:.0f}")
        if not polygons:
            return b""
        # Pixels along all edges of the closed polygons x, y, x, y, ..., as pycocotools counts
        points = [np.array(polygon, dtype=np.float64).reshape(-1, 2) for polygon in polygons]
        outline = sum(float(np.abs(xy - np.roll(xy, 1, axis=0)).max(axis=1).sum()) for xy in points)
        if outline > LONGEST_OUTLINE:
            raise DataError(
                f"{where}: polygons with an outline of {outline:.0f} pixels; allowed: at most {LONGEST_OUTLINE:.0f}"
            )
        encoded = functions.merge(functions.frPyObjects(polygons, height, width))
    elif isinstance(segmentation, dict) and segmentation.get("size") == [height, width]:
        counts = segmentation.get("counts")
        if not isinstance(counts, (list, str)):
            raise DataError(f"{where}: segmentation.counts is {type(counts).__name__}, a list or a text expected")
        lengths = counts if isinstance(counts, list) else _lengths(counts)
        if lengths is None or any(type(length) is not int or not 0 <= length < 1 << 32 for length in lengths):
            raise DataError(f"{where}: invalid run length in segmentation.counts; expected: numbers of pixels")
        if sum(lengths) != height * width:
            raise DataError(f"{where}: run lengths of {sum(lengths)} pixels, {height} x {width} expected")
        encoded = functions.frPyObjects({"size": [height, width], "counts": lengths}, height, width)
    else:
        raise DataError(
            f"{where}: segmentation is neither a list of polygons nor run lengths of size [{height}, {width}]"
        )
    return bytes(encoded["counts"]) if functions.area(encoded) > 0 else b""


def _lengths(text: str) -> list[int] | None:
    """Decode COCO's compressed run lengths; `None` if the text is invalid.

    Each character has five bits of a number, lowest first, and a continuation bit. From the fourth number on, a number
    is the difference to the number two before. pycocotools accepts any text, and reads uninitialised memory for masks
    of too few pixels.
    """
    lengths: list[int] = []
    number = shift = 0
    for character in text:
        bits = ord(character) - 48
        if not 0 <= bits < 64 or shift > 60:  # pixel counts have 32 bits; decoding millions of bits took hours
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
    """Return the mask [height, width], 0 or 1."""
    bits: Bits = mask_functions().decode({"size": [height, width], "counts": runs})
    return bits


def encode(bits: Bits) -> bytes:
    """Return compressed run lengths of a mask [height, width], 0 or 1."""
    return bytes(mask_functions().encode(np.asfortranarray(bits))["counts"])
