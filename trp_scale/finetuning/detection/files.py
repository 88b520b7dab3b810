"""Objects as files have them, or why a file is refused.

COCO: images, annotations, categories (cocodataset.org, "Data format", object detection).
Pascal VOC: Annotations/*.xml, JPEGImages/*.jpg, ImageSets/Main/*.txt.
"""

from __future__ import annotations

import hashlib
import math
from pathlib import Path
from typing import Any, TypeGuard
from xml.etree import ElementTree

from trp_scale.config.json_files import LARGEST_INDEX, can_be_written, parse_json, read_content, read_lines
from trp_scale.config.schema import LARGEST, is_finite, is_plain_name, is_within
from trp_scale.errors import LONGEST_QUOTE, DataError, error_text, quote, shorten
from trp_scale.finetuning.detection.annotations import Annotations, Collected, encode_segmentation

LONGEST_SIDE = 1 << 20
"""Pixels of an image, each way."""

FARTHEST_BOX = 1e9
"""Pixels that a side of a box may lie from the image's corner."""

LARGEST_XML = 16 << 20
"""Bytes of one annotation of Pascal VOC."""


def read_coco(path: Path, images: str = "", *, masks: bool = True) -> Annotations:
    """Read a COCO file.

    The classes are its categories by ascending id, which need not be contiguous.

    Args:
        path: the JSON file.
        images: folder of the images; empty = looked for.
        masks: read masks too.

    Raises:
        DataError: it is not JSON or lacks what the format demands; names the annotation.
    """
    document, digest = _read(path)
    categories = {_integer(entry, "id", path, "category"): entry for entry in document["categories"]}
    ids = sorted(categories)
    labels = {category: number + 1 for number, category in enumerate(ids)}
    classes = [_class_name(categories[category].get("name", str(category)), path) for category in ids]
    if not classes or len(set(classes)) != len(classes) or len(ids) != len(document["categories"]):
        raise DataError(f"{path}: {len(document['categories'])} categories, allowed: one or more, ids and names once")
    listed: dict[int, dict[str, Any]] = {}
    for entry in document["images"]:
        number = _integer(entry, "id", path, "image")
        if number in listed:
            raise DataError(f"{path}: image id {number} is given twice")
        listed[number] = entry
    of_image: dict[int, list[dict[str, Any]]] = {number: [] for number in listed}
    for entry in document["annotations"]:
        number = _integer(entry, "image_id", path, "annotation")
        if number not in of_image:
            raise DataError(f"{_name_annotation(path, entry)}: image_id {number} is not among the images")
        of_image[number].append(entry)
    collected = Collected(path)
    for number, image in listed.items():
        height, width = (_integer(image, side, path, "image") for side in ("height", "width"))
        collected.image(_file_name(image, path), height, width)
        for entry in of_image[number]:
            _add(collected, entry, labels, height, width, path, masks=masks)
    names = [_file_name(image, path) for image in listed.values()]
    return collected.finish(
        folder=_folder(path, images, names),
        voc=False,
        classes=classes,
        digest=digest,
        image_ids=list(listed),
        category_ids=ids,
    )


def _read(path: Path) -> tuple[dict[str, Any], str]:
    """The document, and a hash of its bytes."""
    content = read_content(path, DataError, largest=LARGEST_INDEX)
    document = parse_json(content, str(path), DataError, looked_through=False)
    for name in ("images", "annotations", "categories"):
        entries = document.get(name) if isinstance(document, dict) else None
        if not isinstance(entries, list) or any(not isinstance(entry, dict) for entry in entries):
            raise DataError(f"{path}: no list {name!r} of objects; a COCO file has images, annotations and categories")
    return document, hashlib.blake2b(content, digest_size=16).hexdigest()


def _class_name(name: object, path: Path) -> str:
    if not isinstance(name, str) or not can_be_written(name) or len(name) > LONGEST_QUOTE:
        raise DataError(f"{path}: category {quote(name)} found, a name expected")
    return name


def _add(
    collected: Collected,
    annotation: dict[str, Any],
    labels: dict[int, int],
    height: int,
    width: int,
    path: Path,
    *,
    masks: bool,
) -> None:
    category = _integer(annotation, "category_id", path, "annotation")
    if category not in labels:
        raise DataError(f"{_name_annotation(path, annotation)}: category_id {category} is not among the categories")
    box = annotation.get("bbox")
    numbers = isinstance(box, list) and all(map(_is_length, box))
    if not numbers or len(box) != 4:  # type: ignore[arg-type]
        where = _name_annotation(path, annotation)
        raise DataError(f"{where}: bbox is {quote(box)}, four numbers (left, top, width, height) expected")
    left, top, wide, tall = (float(side) for side in box)  # type: ignore[union-attr]
    segmentation = annotation.get("segmentation") if masks else None
    runs = None
    if segmentation:
        runs = encode_segmentation(segmentation, height, width, where=_name_annotation(path, annotation))
    area = annotation.get("area")
    collected.add(
        (left, top, left + wide, top + tall),
        labels[category],
        bool(annotation.get("iscrowd", 0)),
        runs,
        float(area) if _is_length(area) else None,
    )


def _is_length(value: object) -> TypeGuard[float]:
    """Whether it is a number that pixels can be measured by."""
    return is_finite(value) and abs(value) < FARTHEST_BOX


def _name_annotation(path: Path, annotation: dict[str, Any]) -> str:
    return f"{path}: annotation {shorten(str(annotation.get('id', '(without id)')))}"


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
    """Folder of the images: `images`, or the first of the usual folders that has the first image."""
    if images:
        return Path(images)
    split = path.stem.removeprefix("instances_")
    folders = [path.parent / "images", path.parent.parent / split, path.parent / split, path.parent]
    for folder in folders:
        if names and (folder / names[0]).is_file():
            return folder
    listed = ", ".join(str(folder) for folder in folders)
    raise DataError(
        f"{path}: {names[0] if names else 'no image'} is in none of {listed}; say where the images are with "
        "--detection.images or --detection.test_images"
    )


VocObject = tuple[str, bool, tuple[float, float, float, float]]


def read_voc(path: Path, images: str = "") -> Annotations:
    """Read the annotations of a folder, or of the images that a list of it names.

    The classes are the names that occur, sorted. VOC's boxes name their first and last pixel, counted from 1: here the
    left side of a box is that of its first pixel, the right side that of its last.

    Args:
        path: the folder (VOC2007), or a list in it (VOC2007/ImageSets/Main/trainval.txt).
        images: folder of the images; empty = JPEGImages.

    Raises:
        DataError: something is missing or is not what the format demands; names the file.
    """
    root, names = _list_images(path)
    digest = hashlib.blake2b(digest_size=16)
    described = []
    for name in names:
        file = root / "Annotations" / f"{name}.xml"
        try:
            content = read_content(file, DataError, largest=LARGEST_XML)
        except DataError as error:
            raise DataError(f"{error}; {path} names it") from error
        digest.update(content)
        described.append(_parse_annotation(file, content))
    classes = sorted({label for _, _, _, objects in described for label, _, _ in objects})
    collected = Collected(path)
    for file_name, height, width, objects in described:
        collected.image(file_name, height, width)
        for label, difficult, box in objects:
            collected.add(box, 1 + classes.index(label), difficult, None, None)
    folder = Path(images) if images else root / "JPEGImages"
    return collected.finish(
        folder=folder,
        voc=True,
        classes=classes,
        digest=digest.hexdigest(),
        image_ids=names,
        category_ids=range(1, 1 + len(classes)),
    )


def _list_images(path: Path) -> tuple[Path, list[str]]:
    """The folder that has Annotations, and the names of the images."""
    if path.is_dir():
        return path, sorted(file.stem for file in (path / "Annotations").glob("*.xml"))
    root = next((parent for parent in path.parents if (parent / "Annotations").is_dir()), None)
    if root is None:
        raise DataError(f"{path}: no folder above it has Annotations; a list of Pascal VOC lies in ImageSets/Main")
    lines = read_lines(path, DataError)
    names = []
    for number, line in enumerate(lines, start=1):
        words = line.split()
        if len(words) > 2 or (len(words) == 2 and words[1] not in ("1", "0", "-1")):
            raise DataError(f"{path}, line {number}: {quote(line)}, the name of an image expected")
        if words and not is_plain_name(words[0]):
            raise DataError(f"{path}, line {number}: {quote(words[0])}, a plain file name expected")
        if words:
            names.append(words[0])
    return root, names


def _parse_annotation(file: Path, content: bytes) -> tuple[str, int, int, list[VocObject]]:
    """Name of the image's file, height, width, and the objects of one annotation."""
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
