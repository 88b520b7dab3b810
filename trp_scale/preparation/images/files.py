"""Images that are files: a folder of them, with or without class sub-folders and folders of aligned maps."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

from trp_scale.data.images.maps import map_formats
from trp_scale.data.images.reader import ordered_suffixes
from trp_scale.data.index import DataError
from trp_scale.preparation.images.samples import (
    Listing,
    Loaded,
    Part,
    Sample,
    UnusableError,
    plain_key,
    without_duplicates,
)

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm")
"""Files of a folder that are taken for images, in capitals too; others are not looked at."""


class FileSource:
    """Samples whose parts are files or byte ranges of files."""

    def read(self, sample: Sample) -> Loaded:
        content = {suffix: _read(part) for suffix, part in sample.parts}
        label = sample.label
        if "cls" in content:
            text = content.pop("cls").strip()
            if not text.isdigit():  # of bytes: ASCII digits alone
                raise UnusableError("bad_class")
            label = int(text)
        return Loaded(image=content.pop("jpg"), label=label, maps=content)


def _read(part: Part) -> bytes:
    try:
        with open(part.path, "rb") as stream:  # noqa: PTH123 - a path of the listing, kept as text
            if part.length < 0:
                return stream.read()
            stream.seek(part.offset)
            return stream.read(part.length)
    except OSError as error:
        raise UnusableError("unreadable") from error


def list_folder(folder: Path, modalities: dict[str, Path]) -> Listing:
    """All images of a folder.

    Args:
        folder: sub-folders are classes, numbered by sorted name, as deep as their files lie; a folder whose images
            lie in it directly has no classes.
        modalities: folder of each aligned modality; a map has its image's relative path and ends in .png.

    Raises:
        DataError: no images, or images both in the folder and in sub-folders.
    """
    files = sorted(_walk(folder, ""))
    images = [(name, size) for name, size in files if name.lower().endswith(IMAGE_SUFFIXES)]
    if not images:
        raise DataError(f"--inputs {folder}: no file there ends in {', '.join(IMAGE_SUFFIXES)}")
    flat = [name for name, _ in images if "/" not in name]
    if 0 < len(flat) < len(images):
        raise DataError(
            f"--inputs {folder}: images lie both in it ({flat[0]}) and in sub-folders; sub-folders are classes, "
            f"so move them into one, or give another folder"
        )
    classes = None if flat else sorted({name.partition("/")[0] for name, _ in images})
    numbers = {name: number for number, name in enumerate(classes or [])}
    digest = hashlib.sha256()
    for name, size in images:
        digest.update(f"{name}\0{size}\0".encode("utf-8", "surrogateescape"))
    maps = {map_formats()[name].suffix: _maps(path, digest) for name, path in modalities.items()}
    samples, skipped = [], []
    for name, _ in images:
        place = f"{folder}/{name}"
        stem = name.rpartition(".")[0]
        missing = [suffix for suffix, found in maps.items() if stem not in found]
        if missing:
            skipped.append(("no_map", place))
            continue
        parts = [("jpg", Part(place, 0, -1)), *((suffix, Part(found[stem], 0, -1)) for suffix, found in maps.items())]
        label = numbers[name.partition("/")[0]] if classes else None
        samples.append(Sample(plain_key(stem), place, label, parts=tuple(parts)))
    samples, twice = without_duplicates(samples)
    return Listing(
        source=FileSource(),
        samples=samples,
        suffixes=ordered_suffixes({"jpg", *(["cls"] if classes else []), *maps}),
        classes=classes,
        fingerprint=digest.hexdigest(),
        skipped=skipped + twice,
    )


def _walk(folder: Path, prefix: str) -> Iterator[tuple[str, int]]:
    """(path relative to the first folder, size) of every file that is not hidden."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith("."):
                continue
            if entry.is_dir():
                yield from _walk(Path(entry.path), f"{prefix}{entry.name}/")
            else:
                try:
                    size = entry.stat().st_size
                except OSError:  # a link to nothing: named as unreadable when its turn comes
                    size = -1
                yield prefix + entry.name, size


def _maps(folder: Path, digest: hashlib._Hash) -> dict[str, str]:
    """Path of each map by the relative path of its image without the suffix."""
    found = {}
    for name, size in sorted(_walk(folder, "")):
        if name.lower().endswith(".png"):
            digest.update(f"{name}\0{size}\0".encode("utf-8", "surrogateescape"))
            found[name[:-4]] = f"{folder}/{name}"
    return found
