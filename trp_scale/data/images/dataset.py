"""A stored image data set: what dataset.json says, its images, and the blocks that order and split see.

DATASET/
  dataset.json                  what was made, from what, and the counts
  shards/image-000000.tar       WebDataset tar; one sample = one image: KEY.jpg, KEY.cls, aligned KEY.depth.png ...
  shards/image-000000.index.json
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from trp_scale.data.hashing import Integers, Words, name_hash
from trp_scale.data.images.members import SUFFIXES
from trp_scale.data.images.reader import SampleTable, read_samples
from trp_scale.data.index import DataError, read_json

FORMAT = 1

OPENED = ("jpg", "cls")
"""Members that are read; the others belong to other objectives."""


@dataclass(frozen=True, kw_only=True)
class ImageMeta:
    """What the images of a source have in common.

    Attributes:
        classes: names of the classes, by label; None when labels have no names or images no labels.
        suffixes: members that every image has.
        rows: images, of a mixture: of all its members.
    """

    classes: tuple[str, ...] | None
    suffixes: tuple[str, ...]
    rows: int


@dataclass(frozen=True, kw_only=True)
class ImageBlocks:
    """Blocks of `rows_per_block` consecutive images of a shard (the last of a shard may be shorter), in stored order.

    Single images would do for a shuffle; blocks keep reads within few shards at a time (order.py).

    Attributes:
        keys: [n] "SHARD/FIRST": the tar's name without its suffix, and the place of the block's first image in it.
        identities: [n] uint64, `hashing.name_hash` of the key.
        rows: [n] images of each block.
        first: [n] number of the block's first image in the data set.
    """

    keys: list[str]
    identities: Words
    rows: Integers
    first: Integers


@dataclass(frozen=True, kw_only=True)
class ImageDataset:
    """One opened data set; `name` is "" unless it is a member of a mixture."""

    name: str
    meta: ImageMeta
    rows_per_block: int
    samples: SampleTable
    blocks: ImageBlocks

    def digest(self) -> str:
        """Equal on two ranks if they see the same dataset.json, indexes and tar sizes."""
        return f"{self.name} {self.meta} {self.rows_per_block} {self.samples.digest}"


def open_image_dataset(directory: Path, name: str = "") -> ImageDataset:
    """Read dataset.json and all indexes.

    Raises:
        DataError: something is missing or of another format, or the tars differ from their indexes.
    """
    path = directory / "dataset.json"
    document = read_json(path)
    meta, rows_per_block = _read_meta(path, document)
    opened = tuple(suffix for suffix in OPENED if suffix in meta.suffixes)
    samples = read_samples(directory / "shards", list(document["shards"]), meta.suffixes, opened)
    if samples.rows != meta.rows:
        raise DataError(f"{path}: {meta.rows} rows written there, {samples.rows} images found; copy the data again")
    return ImageDataset(
        name=name,
        meta=meta,
        rows_per_block=rows_per_block,
        samples=samples,
        blocks=cut_blocks(samples, rows_per_block),
    )


def cut_blocks(samples: SampleTable, rows_per_block: int) -> ImageBlocks:
    """The blocks of a data set; those of a shard do not depend on the other shards."""
    keys: list[str] = []
    firsts, rows = [], []
    for path, start, end in zip(samples.shards, samples.starts[:-1].tolist(), samples.starts[1:].tolist(), strict=True):
        first = np.arange(0, end - start, rows_per_block)  # [blocks of the shard]
        keys += [f"{path.stem}/{place}" for place in first.tolist()]
        firsts.append(start + first)
        rows.append(np.minimum(rows_per_block, end - start - first))
    return ImageBlocks(
        keys=keys,
        identities=np.array([name_hash(key) for key in keys], dtype=np.uint64),
        rows=np.concatenate(rows),
        first=np.concatenate(firsts),
    )


def agree_images(datasets: list[ImageDataset]) -> ImageMeta:
    """The meta data of a mixture: images without class names mix with any, and have label -1 if they have no label.

    Raises:
        DataError: two members have different classes; both are named.
    """
    named = [dataset for dataset in datasets if dataset.meta.classes is not None]
    for other in named[1:]:
        ours, theirs = named[0].meta.classes, other.meta.classes
        if ours != theirs:
            raise DataError(
                f"data.path: members of a mixture must have the same classes: {named[0].name} has "
                f"{_listed(ours)}, {other.name} has {_listed(theirs)}"
            )
    first = datasets[0].meta
    return replace(
        first,
        classes=named[0].meta.classes if named else None,
        suffixes=tuple(s for s in first.suffixes if all(s in dataset.meta.suffixes for dataset in datasets)),
        rows=sum(dataset.meta.rows for dataset in datasets),
    )


def _listed(classes: tuple[str, ...] | None) -> str:
    names = classes or ()
    return f"{len(names)} ({', '.join(names[:3])}{', ...' if len(names) > 3 else ''})"


def _read_meta(path: Path, document: dict[str, Any]) -> tuple[ImageMeta, int]:
    """What dataset.json says, and the images per block."""
    for field, expected in (("format", FORMAT), ("kind", "image")):
        if document.get(field) != expected:
            raise DataError(
                f"{path}: {field} {document.get(field)!r} found, {expected!r} expected; shard the images again"
            )
    missing = [field for field in ("shards", "suffixes", "rows", "rows_per_block") if field not in document]
    if missing:
        raise DataError(f"{path}: no field {missing[0]!r}; shard the images again")
    suffixes, classes, rows_per_block = document["suffixes"], document.get("classes"), document["rows_per_block"]
    unknown = [suffix for suffix in suffixes if suffix not in SUFFIXES]
    if unknown or "jpg" not in suffixes:
        found = f"suffix {unknown[0]!r} found" if unknown else "no suffix 'jpg' found"
        raise DataError(f"{path}: {found}; allowed are {', '.join(SUFFIXES)}, and jpg is needed")
    if not isinstance(rows_per_block, int) or rows_per_block < 1:
        raise DataError(f"{path}: rows_per_block {rows_per_block!r} found, at least 1 allowed; shard the images again")
    meta = ImageMeta(
        classes=None if classes is None else tuple(classes), suffixes=tuple(suffixes), rows=document["rows"]
    )
    return meta, rows_per_block
