"""Listing of image samples before decoding: image folders, with optional class sub-folders and folders of aligned maps;
and WebDataset tars, where the members of one key are one sample."""

from __future__ import annotations

import hashlib
import logging
import os
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol

from PIL.Image import Image

from trp_scale.data.hashing import name_hash
from trp_scale.data.images.maps import CLASS, IMAGE, known_suffixes, map_formats, ordered_suffixes, read_names
from trp_scale.data.raw_files import (
    IMAGE_SUFFIXES,
    list_counts,
    modality_command,
    modality_folders,
    open_regular,
    walk_files,
)
from trp_scale.errors import DataError, escape_name
from trp_scale.pretraining.modalities import modalities as known_modalities
from trp_scale.pretraining.modalities.base import MapFiles
from trp_scale.sharding.images.tars import find_tars, tar_members
from trp_scale.sharding.parts import PortionReport
from trp_scale.sharding.workers import Portion
from trp_scale.storage.transfer import is_url

SKIP_REASONS = {
    "unreadable": "the file cannot be opened or read",
    "not_a_file": "a link to a file outside the tar, a sparse file or a special file",
    "empty": "no bytes",
    "not_an_image": "not JPEG, PNG, WebP, BMP, GIF, TIFF or PPM",
    "damaged": "truncated or damaged",
    "too_many_pixels": "more pixels than --max_pixels",
    "unsupported_mode": "32-bit pixels of unknown range",
    "no_image": "no .jpg, .jpeg or .png member under this key",
    "no_class": "no class, although other samples have one",
    "bad_class": "the class is not a number >= 0, or has no name in --class_names",
    "duplicate_key": "another file has the same name with a different suffix",
    "no_map": "no map, although other samples have one",
    "bad_map": "a map in a wrong format; depth, for example, must be a 16-bit grey PNG or an array",
    "bad_map_number": "a map value out of range, such as a class without a name in --semseg.classes, or a depth that "
    "does not fit 16 bits at --depth.scale",
    "map_size": "a map whose size differs from its upright image",
}
"""Why an image is skipped."""

MAX_KEY_BYTES = 80
"""Maximum bytes of a key, so that member names fit one tar header."""

_NOT_PLAIN = re.compile(r"[^A-Za-z0-9_/-]")


class FileRange(NamedTuple):
    """Byte range of a file; length -1 means the whole file."""

    path: str
    offset: int
    length: int


class Sample(NamedTuple):
    """One image of the input.

    Attributes:
        key: in the data set.
        origin: path, or path and member, for messages.
        label: class number; None without a class, or if it is read with the image.
        row: number in the source; -1 for files.
        parts: (suffix, file range) of each file. The image has the suffix "jpg" in every format.
    """

    key: str
    origin: str
    label: int | None
    row: int = -1
    parts: tuple[tuple[str, FileRange], ...] = ()


@dataclass(kw_only=True)
class Loaded:
    """A sample before encoding: image file or decoded image, class, bytes of the maps by suffix."""

    image: bytes | Image
    label: int | None = None
    maps: dict[str, bytes] = field(default_factory=dict)


@dataclass(kw_only=True)
class ImageReport(PortionReport):
    """Counts of a portion of images.

    Attributes:
        images: number of stored images.
        bytes: of these images, without maps.
        pixels: of these images.
        per_class: images by class number (a string, as in JSON).
    """

    images: int = 0
    bytes: int = 0
    pixels: int = 0
    per_class: dict[str, int] = field(default_factory=dict)

    def count(self, size: int, label: int | None) -> None:
        """Count an image of `size` bytes."""
        self.images += 1
        self.bytes += size
        if label is not None:
            self.per_class[str(label)] = self.per_class.get(str(label), 0) + 1


class UnusableError(Exception):
    """An image is skipped. `reason` is a key of SKIP_REASONS; `detail` is listed after the location."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(reason, detail)
        self.reason = reason
        self.detail = detail

    def located(self, place: str) -> str:
        """Return the location with the detail."""
        return f"{place} ({self.detail})" if self.detail else place


class ImageSource(Protocol):
    """Reader of images. It is pickled to every process, so it contains no listing and opens files in `read`."""

    def read(self, sample: Sample) -> Loaded:
        """Read a sample; raise UnusableError if it must be skipped."""
        ...


@dataclass(kw_only=True)
class Listing:
    """All images of an input.

    Attributes:
        samples: complete samples with unique keys, in any order.
        suffixes: members of each stored sample.
        classes: name of each class number; None without classes or names.
        fingerprint: hash that changes with the input.
        skipped: (reason, location) of the other samples.
        maps: conversion of the maps of each modality, and their description in dataset.json.
    """

    source: ImageSource
    samples: list[Sample]
    suffixes: tuple[str, ...]
    classes: list[str] | None
    fingerprint: str
    skipped: list[tuple[str, str]] = field(default_factory=list)
    maps: dict[str, MapFiles] = field(default_factory=dict)


def make_key(name: str) -> str:
    """Return a unique key of a name, without dots (WebDataset splits there), of at most MAX_KEY_BYTES bytes."""
    key = _NOT_PLAIN.sub(lambda match: "".join(f"%{byte:02X}" for byte in os.fsencode(match[0])), name)
    if len(key) > MAX_KEY_BYTES:
        key = f"{key[: MAX_KEY_BYTES - 17].rstrip('/')}-{hashlib.blake2b(os.fsencode(name), digest_size=8).hexdigest()}"
    return key


def list_members(ignored: Mapping[str, int]) -> str:
    """Format the counts of ignored members by suffix. "": hidden members and those without a suffix."""
    most = Counter(ignored).most_common(20)
    return ", ".join(f"{count} {f'.{suffix}' if suffix else 'hidden or without a suffix'}" for suffix, count in most)


ImagePortion = Portion[Sample]
"""Images of one shard."""


def cut_into_portions(samples: list[Sample], samples_per_shard: int, rows_per_block: int) -> list[ImagePortion]:
    """Split the samples into shards, ordered by a hash of their keys so that each shard mixes the classes."""
    ordered = sorted(samples, key=lambda sample: (name_hash(sample.key), sample.key))
    if samples_per_shard == 0:
        wanted = min(2048, -(-len(ordered) // 16))
        samples_per_shard = -(-wanted // rows_per_block) * rows_per_block
    starts = range(0, len(ordered), max(1, samples_per_shard))
    parts = [ordered[start : start + samples_per_shard] for start in starts]
    return [Portion(number, part, len(part)) for number, part in enumerate(parts)]


def split_duplicates(samples: list[Sample]) -> tuple[list[Sample], list[tuple[str, str]]]:
    """Return the first sample of each key, and (reason, location) of the others."""
    if len({sample.key for sample in samples}) == len(samples):
        return samples, []
    kept, skipped = [], []
    seen: Counter[str] = Counter()
    for sample in samples:
        if seen[sample.key]:
            skipped.append(("duplicate_key", sample.origin))
        else:
            kept.append(sample)
        seen[sample.key] += 1
    return kept, skipped


class FileSource:
    """Reader of samples that are files or byte ranges of files."""

    def read(self, sample: Sample) -> Loaded:
        content = {suffix: _read(part) for suffix, part in sample.parts}
        label = sample.label
        if "cls" in content:
            text = content.pop("cls").strip()
            if not text.isdigit() or len(text) > 18:  # bytes.isdigit accepts ASCII digits only
                raise UnusableError("bad_class")
            label = int(text)
        return Loaded(image=content.pop("jpg"), label=label, maps=content)


def _read(part: FileRange) -> bytes:
    try:
        with open_regular(part.path) as stream:
            if part.length < 0:
                return stream.read()
            stream.seek(part.offset)
            return stream.read(part.length)
    except OSError as error:
        raise UnusableError("unreadable") from error


def list_folder(folder: Path, modalities: dict[str, Path]) -> Listing:
    """List all images of a folder.

    Args:
        folder: its sub-folders are classes, numbered by sorted name; files may be nested deeper. A flat folder has no
            classes.
        modalities: folder of each aligned modality. A map has the relative path of its image, with .png or another
            suffix of its modality.

    Raises:
        DataError: the folder has no images, has images at both levels, its sub-folders are modalities, or an image has
            two maps.
    """
    left_out: Counter[str] = Counter()
    files = sorted(walk_files(folder, left_out))
    images = [(name, size) for name, size in files if name.lower().endswith(IMAGE_SUFFIXES)]
    left_out.update(Path(name).suffix for name, _ in sorted(set(files) - set(images)))
    if left_out:
        log.warning("--inputs %s: left out: %s", folder, list_counts(left_out))
    if not images:
        raise DataError(f"--inputs {folder}: no file there ends in {', '.join(IMAGE_SUFFIXES)}")
    flat = [name for name, _ in images if "/" not in name]
    if 0 < len(flat) < len(images):
        raise DataError(
            f"--inputs {folder}: images are both in the folder ({flat[0]}) and in its sub-folders; sub-folders are "
            f"classes; move these images into one, or give another folder"
        )
    if not flat and (folders := modality_folders(folder)):
        raise DataError(
            f"--inputs {folder}: its sub-folders {', '.join(folders)} are modalities of the same images, not classes; "
            f"give {modality_command(folders)}"
        )
    classes = None if flat else sorted({name.partition("/")[0] for name, _ in images})
    numbers = {name: number for number, name in enumerate(classes or [])}
    digest = hashlib.sha256()
    for name, size in images:
        digest.update(f"{name}\0{size}\0".encode("utf-8", "surrogateescape"))
    maps = {map_formats()[name].suffix: _find_maps(name, path, digest) for name, path in modalities.items()}
    samples, skipped = [], []
    for suffix, paths in maps.items():
        if unused := paths.keys() - {name.rpartition(".")[0] for name, _ in images}:
            log.warning("%d maps (.%s) have no image, such as %s", len(unused), suffix, paths[min(unused)])
    for name, _ in images:
        path = f"{folder}/{name}"
        sample = escape_name(path)
        stem = name.rpartition(".")[0]
        missing = [suffix for suffix, path_of_stem in maps.items() if stem not in path_of_stem]
        if missing:
            skipped.append(("no_map", sample))
            continue
        parts = [
            ("jpg", FileRange(path, 0, -1)),
            *((suffix, FileRange(path_of_stem[stem], 0, -1)) for suffix, path_of_stem in maps.items()),
        ]
        label = numbers[name.partition("/")[0]] if classes else None
        samples.append(Sample(make_key(stem), sample, label, parts=tuple(parts)))
    samples, twice = split_duplicates(samples)
    return Listing(
        source=FileSource(),
        samples=samples,
        suffixes=ordered_suffixes({"jpg", *(["cls"] if classes else []), *maps}),
        classes=None if classes is None else list(map(escape_name, classes)),
        fingerprint=digest.hexdigest(),
        skipped=skipped + twice,
    )


def _find_maps(modality: str, folder: Path, digest: hashlib._Hash) -> dict[str, str]:
    """Return the path of each map by the relative path of its image without suffix."""
    paths: dict[str, str] = {}
    left_out: Counter[str] = Counter()
    for name, size in sorted(walk_files(folder, left_out)):
        if not name.lower().endswith(known_modalities()[modality].file_suffixes):
            left_out[Path(name).suffix] += 1
        else:
            digest.update(f"{name}\0{size}\0".encode("utf-8", "surrogateescape"))
            stem = name.rpartition(".")[0]
            if stem in paths:
                raise DataError(
                    f"--modality {modality}={folder}: {paths[stem]} and {folder}/{name} are maps of one image; "
                    "remove one of them"
                )
            paths[stem] = f"{folder}/{name}"
    if left_out:
        log.warning("--modality %s=%s: left out: %s", modality, folder, list_counts(left_out))
    return paths


STORED_AS = {"jpeg": IMAGE, "png": IMAGE}
"""Members stored under another suffix, in lower case. Members with unknown suffixes are counted and never opened."""

log = logging.getLogger(__name__)


def tars_on_disk(inputs: list[str]) -> list[Path]:
    """Return the tars of the inputs (`find_tars`) without duplicates.

    Raises:
        DataError: an input is no tar, or a URL.
    """
    tars: list[str] = []
    for item in inputs:
        if is_url(item):
            raise DataError(f"--inputs {item}: a URL; local files expected; trp-scale index reads tars from a URL")
        try:
            tars += find_tars(item)
        except DataError as error:
            raise DataError(f"--inputs {error}; only tars can be combined") from error
    return [Path(tar) for tar in dict.fromkeys(tars)]


def list_tars(tars: list[Path], class_names: str) -> Listing:
    """List all images of the tars. If any sample has a class or a map, all need one.

    Args:
        class_names: text file with one name per line, or "".

    Raises:
        DataError: a tar cannot be read to its end, or there is no image.
    """
    stored_as = {**STORED_AS, **{suffix: suffix for suffix in known_suffixes()}}
    groups: dict[tuple[Path, str], dict[str, FileRange]] = {}
    skipped: list[tuple[str, str]] = []
    ignored: Counter[str] = Counter()
    digest = hashlib.sha256()
    for tar in tars:
        _read_headers(tar, stored_as, groups, skipped, ignored, digest)
    suffixes = ordered_suffixes({suffix for parts in groups.values() for suffix in parts})
    if IMAGE not in suffixes:
        raise DataError(f"--inputs {tars[0]}: no .jpg, .jpeg or .png member in {len(tars)} tars")
    if ignored:
        log.warning("ignored members: %s", list_members(ignored))
    # Some writers number samples from 0 in each tar; then the tar name becomes part of the key.
    repeated = len({key for _, key in groups}) < len(groups)
    samples = []
    for (tar, key), parts in groups.items():
        name = escape_name(f"{tar}:{key}")
        reason = _skip_reason(parts, suffixes)
        if reason:
            skipped.append((reason, name))
            continue
        ordered = tuple((suffix, parts[suffix]) for suffix in suffixes)
        samples.append(Sample(make_key(f"{tar.stem}/{key}" if repeated else key), name, None, parts=ordered))
    samples, twice = split_duplicates(samples)
    classes = None
    if class_names:
        classes, content = read_names("--class_names", class_names)
        digest.update(content)
    return Listing(
        source=FileSource(),
        samples=samples,
        suffixes=suffixes,
        classes=classes,
        fingerprint=digest.hexdigest(),
        skipped=skipped + twice,
    )


def _read_headers(
    tar: Path,
    stored_as: dict[str, str],
    groups: dict[tuple[Path, str], dict[str, FileRange]],
    skipped: list[tuple[str, str]],
    ignored: Counter[str],
    digest: hashlib._Hash,
) -> None:
    """Add the members of a tar to `groups`, by (tar, key) and stored suffix."""
    try:
        stream = open_regular(tar)
    except OSError as error:
        raise DataError(f"--inputs {tar}: cannot be opened ({error.strerror})") from error
    with stream:
        for member in tar_members(f"--inputs {tar}", stream):
            if member.kind == "folder":
                continue
            stored = stored_as.get("" if member.hidden else member.suffix)
            if stored is None:
                ignored["" if member.hidden else escape_name(member.suffix)] += 1
                continue
            if not member.plain:
                skipped.append(("not_a_file", escape_name(f"{tar}:{member.name}")))
                continue
            parts = groups.setdefault((tar, member.key), {})
            if stored in parts:
                skipped.append(("duplicate_key", escape_name(f"{tar}:{member.name}")))
                continue
            parts[stored] = FileRange(str(tar), member.offset, member.length)
            digest.update(f"{member.name}\0{member.length}\0{member.checksum}\0".encode("utf-8", "surrogateescape"))


def _skip_reason(parts: dict[str, FileRange], suffixes: tuple[str, ...]) -> str:
    """Return the reason to skip a sample with missing members, or ""."""
    if IMAGE not in parts:
        return "no_image"
    if CLASS in suffixes and CLASS not in parts:
        return "no_class"
    return "" if set(suffixes) <= set(parts) else "no_map"
