"""Objects of a Pascal VOC folder: Annotations/*.xml, JPEGImages/*.jpg, ImageSets/Main/*.txt."""

from __future__ import annotations

import hashlib
from pathlib import Path
from xml.etree import ElementTree

from trp_scale.data.index import DataError
from trp_scale.downstream.detection.annotations import Annotations, Collected

Found = tuple[str, bool, tuple[float, float, float, float]]


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
    root, names = _listed(path)
    digest = hashlib.blake2b(digest_size=16)
    described = []
    for name in names:
        file = root / "Annotations" / f"{name}.xml"
        try:
            content = file.read_bytes()
        except OSError as error:
            raise DataError(f"{file}: cannot be read ({error.strerror}); {path} names it") from error
        digest.update(content)
        described.append(_described(file, content))
    classes = sorted({label for _, _, _, objects in described for label, _, _ in objects})
    collected = Collected(path)
    for file_name, height, width, objects in described:
        collected.image(file_name, height, width)
        for label, difficult, box in objects:
            collected.add(box, 1 + classes.index(label), difficult, None, None)
    folder = Path(images) if images else root / "JPEGImages"
    return collected.finish(folder=folder, voc=True, classes=classes, digest=digest.hexdigest())


def _listed(path: Path) -> tuple[Path, list[str]]:
    """The folder that has Annotations, and the names of the images."""
    if path.is_dir():
        return path, sorted(file.stem for file in (path / "Annotations").glob("*.xml"))
    root = next((parent for parent in path.parents if (parent / "Annotations").is_dir()), None)
    if root is None:
        raise DataError(f"{path}: no folder above it has Annotations; a list of Pascal VOC lies in ImageSets/Main")
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: not a text file that can be read ({error})") from error
    names = []
    for number, line in enumerate(lines, start=1):
        words = line.split()
        if len(words) > 2 or (len(words) == 2 and words[1] not in ("1", "0", "-1")):
            raise DataError(f"{path}, line {number}: {line!r}, the name of an image expected")
        if words:
            names.append(words[0])
    return root, names


def _described(file: Path, content: bytes) -> tuple[str, int, int, list[Found]]:
    """Name of the image's file, height, width, and the objects of one annotation."""
    try:
        tree = ElementTree.fromstring(content)
    except ElementTree.ParseError as error:
        raise DataError(f"{file}: not XML ({error})") from error
    objects = []
    for number, one in enumerate(tree.findall("object"), start=1):
        where = f"{file}: object {number}"
        label = (one.findtext("name") or "").strip()
        if not label:
            raise DataError(f"{where} has no name")
        left, top, right, bottom = (_number(one, f"bndbox/{side}", where) for side in ("xmin", "ymin", "xmax", "ymax"))
        difficult = (one.findtext("difficult") or "0").strip() == "1"
        objects.append((label, difficult, (left - 1.0, top - 1.0, right, bottom)))
    height, width = (int(_number(tree, f"size/{side}", str(file))) for side in ("height", "width"))
    return f"{file.stem}.jpg", height, width, objects


def _number(tree: ElementTree.Element, name: str, where: str) -> float:
    text = tree.findtext(name)
    try:
        return float(text)  # type: ignore[arg-type]
    except (TypeError, ValueError) as error:
        raise DataError(f"{where}: {name} is {text!r}, a number expected") from error
