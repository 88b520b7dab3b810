"""Samples of the input, listed before anything is decoded."""

from __future__ import annotations

import hashlib
import os
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from PIL.Image import Image

from trp_scale.data.hashing import name_hash
from trp_scale.pretraining.modalities.base import MapFiles

SKIP_REASONS = {
    "unreadable": "the file cannot be opened or read",
    "not_a_file": "a link to what is not in the tar, a sparse or a special file",
    "empty": "no bytes",
    "not_an_image": "no image format that is read (JPEG, PNG, WebP, BMP, GIF, TIFF, PPM)",
    "damaged": "truncated, or broken inside",
    "too_many_pixels": "more pixels than --max_pixels",
    "unsupported_mode": "32-bit pixels, whose range nobody can know",
    "no_image": "no .jpg, .jpeg or .png member under this key",
    "no_class": "no class, where others have one",
    "bad_class": "the class is not a number from 0 on, or has no name in --class_names",
    "duplicate_key": "another file has the same name apart from its suffix",
    "no_map": "no map, where others have one",
    "bad_map": "a map that is not a PNG of its modality's form, such as 16 bits and grey, or an array, for depth",
    "bad_map_number": "a number that a map cannot have, such as a class that has no name in --semseg.classes, or a "
    "depth that 16 bits do not hold at --depth.scale",
    "map_size": "a map of another size than its upright image",
}
"""Why an image is skipped."""

LONGEST_KEY = 80
"""Bytes of a key at most, so that every member's name fits one tar header."""

_NOT_PLAIN = re.compile(r"[^A-Za-z0-9_/-]")


class FileRange(NamedTuple):
    """Bytes of a file; length -1: the whole file."""

    path: str
    offset: int
    length: int


class Sample(NamedTuple):
    """One image of the input.

    Attributes:
        key: its key in the data set.
        origin: path or address, for messages.
        label: class number; None if there is none, or if it is read with the image.
        row: number in its source; -1 for files.
        parts: files of the sample as (suffix, part), the image under "jpg" whatever its format.
    """

    key: str
    origin: str
    label: int | None
    row: int = -1
    parts: tuple[tuple[str, FileRange], ...] = ()


@dataclass(kw_only=True)
class Loaded:
    """A sample as it was read: the bytes of the image file or the image, the class, the maps' bytes by suffix."""

    image: bytes | Image
    label: int | None = None
    maps: dict[str, bytes] = field(default_factory=dict)


class UnusableError(Exception):
    """An image that has to be skipped; `reason` is a key of SKIP_REASONS, `detail` what is listed beside its place."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(reason, detail)
        self.reason = reason
        self.detail = detail


class ImageSource(Protocol):
    """Where images come from. It is sent to every process, so it holds no listing and opens nothing until it reads."""

    def read(self, sample: Sample) -> Loaded:
        """Raises UnusableError."""
        ...


@dataclass(kw_only=True)
class Listing:
    """All images of an input.

    Attributes:
        samples: every one whose parts are there, in no particular order, keys unique.
        suffixes: members that each stored sample has.
        classes: name of each class number; None if there are no classes or no names.
        fingerprint: changes when the input does.
        skipped: (reason, place) of what is not among the samples.
        maps: how the maps of each modality come from files, and what dataset.json says of them.
    """

    source: ImageSource
    samples: list[Sample]
    suffixes: tuple[str, ...]
    classes: list[str] | None
    fingerprint: str
    skipped: list[tuple[str, str]] = field(default_factory=list)
    maps: dict[str, MapFiles] = field(default_factory=dict)


def plain_key(name: str) -> str:
    """A key without dots (WebDataset's suffix begins at the first) and within LONGEST_KEY bytes, unique to the name."""
    key = _NOT_PLAIN.sub(lambda match: "".join(f"%{byte:02X}" for byte in os.fsencode(match[0])), name)
    if len(key) > LONGEST_KEY:
        key = f"{key[: LONGEST_KEY - 17].rstrip('/')}-{hashlib.blake2b(os.fsencode(name), digest_size=8).hexdigest()}"
    return key


def list_members(ignored: Mapping[str, int]) -> str:
    """List members that are not read by suffix, for a message; "": those that are hidden or have none."""
    most = Counter(ignored).most_common(20)
    return ", ".join(f"{count} {f'.{suffix}' if suffix else 'hidden or without a suffix'}" for suffix, count in most)


@dataclass(frozen=True, kw_only=True)
class ImagePortion:
    """The images of one shard."""

    number: int
    samples: list[Sample]


def cut_into_portions(samples: list[Sample], samples_per_shard: int, rows_per_block: int) -> list[ImagePortion]:
    """Order the samples by a hash of their keys, so that classes mix within a shard, and cut them into shards."""
    ordered = sorted(samples, key=lambda sample: (name_hash(sample.key), sample.key))
    if samples_per_shard == 0:
        wanted = min(2048, -(-len(ordered) // 16))
        samples_per_shard = -(-wanted // rows_per_block) * rows_per_block
    return [
        ImagePortion(number=number, samples=ordered[start : start + samples_per_shard])
        for number, start in enumerate(range(0, len(ordered), max(1, samples_per_shard)))
    ]


def without_duplicates(samples: list[Sample]) -> tuple[list[Sample], list[tuple[str, str]]]:
    """Samples of different keys: of several with one key the first stays, the others are named."""
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
