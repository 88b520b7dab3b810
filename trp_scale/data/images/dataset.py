"""A stored image data set: what dataset.json says, its images, and the blocks that order and split see.

DATASET/
  dataset.json                  what was made, from what, and the counts
  shards/image-000000.tar       WebDataset tar; one sample = one image: KEY.jpg, KEY.cls, aligned KEY.depth.png ...
  shards/image-000000.index.json
  DIRECTORY/image-000000.tar    maps that were made later: tars of the same names, keys and order (stored_modalities.py)
  DIRECTORY/image-000000.index.json
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from trp_scale.data.hashing import Integers, Words, name_hash
from trp_scale.data.images.aligned import read_aligned
from trp_scale.data.images.members import SUFFIXES
from trp_scale.data.images.reader import SampleTable, read_samples
from trp_scale.data.images.stored_modalities import OWN_TAR, StoredModality, class_names, required, stored_modalities
from trp_scale.data.index import DataError, read_json

FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class ImageMeta:
    """What the images of a source have in common.

    Attributes:
        classes: names of the classes, by label; None when labels have no names or images no labels.
        suffixes: members that every image has in its own sample.
        rows: images, of a mixture: of all its members.
        modalities: names of those that the objective reads beside the image, in the order of members.MODALITIES.
        semseg_classes: names of the classes of segmentation maps, by number; None if the objective reads none.
    """

    classes: tuple[str, ...] | None
    suffixes: tuple[str, ...]
    rows: int
    modalities: tuple[str, ...] = ()
    semseg_classes: tuple[str, ...] | None = None


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
    """One opened data set.

    Attributes:
        name: "" unless it is a member of a mixture.
        directory: where it lies.
        split: what the images were said to be for when they were sharded; "train" if nothing was said.
        meta: what its images have in common.
        modalities: those that the objective reads.
        rows_per_block: images of an order-block.
        samples: members in the images' own tars.
        aligned: members in other directories, the same images in the same order.
        blocks: what order and split see.
    """

    name: str
    directory: Path
    split: str
    meta: ImageMeta
    modalities: tuple[StoredModality, ...]
    rows_per_block: int
    samples: SampleTable
    aligned: tuple[SampleTable, ...]
    blocks: ImageBlocks

    def digest(self) -> str:
        """Equal on two ranks if they see the same dataset.json, indexes and tar sizes, as far as they are read.

        Checkpoints hold it and are resumed only with the same: what it says of images alone must stay as it is.
        """
        seen = ["classes", "suffixes", "rows", *(["modalities", "semseg_classes"] if self.modalities else [])]
        meta = ", ".join(f"{name}={getattr(self.meta, name)!r}" for name in seen)
        tables = " ".join(table.digest for table in (self.samples, *self.aligned))
        parts = (self.name, f"ImageMeta({meta})", *self.modalities, self.rows_per_block, tables)
        return " ".join(str(part) for part in parts)


def open_image_dataset(directory: Path, name: str = "", used: Sequence[str] = ()) -> ImageDataset:
    """Read dataset.json and all indexes.

    Args:
        directory: of the data set.
        name: its name in a mixture.
        used: modalities that the objective reads beside the image (`used_modalities`).

    Raises:
        DataError: something is missing or of another format, or the tars differ from their indexes.
        RefusedError: the data set has not all modalities that are used.
    """
    path = directory / "dataset.json"
    document = read_json(path)
    meta, rows_per_block = _read_meta(path, document)
    modalities = required(directory, stored_modalities(path, document), used)
    own = [modality.suffix for modality in modalities if modality.directory == OWN_TAR]
    samples = read_samples(directory / OWN_TAR, list(document["shards"]), meta.suffixes, ("jpg", *own))
    if samples.rows != meta.rows:
        raise DataError(f"{path}: {meta.rows} rows written there, {samples.rows} images found; copy the data again")
    highest = int(samples.labels.max())
    if meta.classes is not None and highest >= len(meta.classes):
        image = samples.key(int(samples.labels.argmax()))
        raise DataError(
            f"{directory}: image {image} has class {highest}, dataset.json names {len(meta.classes)} classes; shard "
            "the images again"
        )
    return ImageDataset(
        name=name,
        directory=directory,
        split=str((document.get("settings") or {}).get("split", "train")),
        meta=replace(
            meta,
            modalities=tuple(used),
            semseg_classes=next((each.classes for each in modalities if each.classes is not None), None),
        ),
        modalities=modalities,
        rows_per_block=rows_per_block,
        samples=samples,
        aligned=tuple(read_aligned(directory, each, samples) for each in modalities if each.directory != OWN_TAR),
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
        DataError: two members have different classes, or depth of different directions; both are named.
    """
    named = [(each.name, each.meta.classes) for each in datasets if each.meta.classes is not None]
    _require_same("classes", named)
    _require_same("classes in segmentation maps", [(each.name, each.meta.semseg_classes) for each in datasets])
    _require_one_direction(datasets)
    first = datasets[0].meta
    return replace(
        first,
        classes=named[0][1] if named else None,
        suffixes=tuple(s for s in first.suffixes if all(s in dataset.meta.suffixes for dataset in datasets)),
        rows=sum(dataset.meta.rows for dataset in datasets),
    )


def _require_same(what: str, named: Sequence[tuple[str, tuple[str, ...] | None]]) -> None:
    """Raise DataError if one of (member, classes) differs from the first."""
    for name, classes in named[1:]:
        if classes != named[0][1]:
            raise DataError(
                f"data.path: members of a mixture must have the same {what}: {named[0][0]} has "
                f"{_listed(named[0][1])}, {name} has {_listed(classes)}"
            )


def _require_one_direction(datasets: Sequence[ImageDataset]) -> None:
    """Raise DataError if larger depth is nearer in one member and farther in another: the model could learn neither."""
    directions = [(each.name, maps.larger_is) for each in datasets for maps in each.modalities if maps.name == "depth"]
    for name, larger_is in directions[1:]:
        if larger_is != directions[0][1]:
            raise DataError(
                f"data.path: members of a mixture must have depth of the same direction: larger is {directions[0][1]} "
                f"in {directions[0][0]}, {larger_is} in {name}. Label one of them anew with a depth model of the "
                f"other's direction (trp-scale pseudo-label; --larger_is says what a model means by a larger "
                f"output, if that was wrong), or train on one data set at a time"
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
    suffixes, rows_per_block = document["suffixes"], document["rows_per_block"]
    unknown = [suffix for suffix in suffixes if suffix not in SUFFIXES]
    if unknown or "jpg" not in suffixes:
        found = f"suffix {unknown[0]!r} found" if unknown else "no suffix 'jpg' found"
        raise DataError(f"{path}: {found}; allowed are {', '.join(SUFFIXES)}, and jpg is needed")
    if not isinstance(rows_per_block, int) or rows_per_block < 1:
        raise DataError(f"{path}: rows_per_block {rows_per_block!r} found, at least 1 allowed; shard the images again")
    classes = class_names(path, "classes", document.get("classes"))
    return ImageMeta(classes=classes, suffixes=tuple(suffixes), rows=document["rows"]), rows_per_block
