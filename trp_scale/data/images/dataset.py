"""A stored image data set: what dataset.json says, its images, and the blocks that order and split see.

DATASET/
  dataset.json                  what was made, from what, and the counts
  shards/image-000000.tar       WebDataset tar; one sample = one image: KEY.jpg, KEY.cls, aligned KEY.depth.png ...
  shards/image-000000.index.json
  shards/index.bin              all of those in one (binary_index.py)
  DIRECTORY/image-000000.tar    maps that were made later: tars of the same names, keys and order (maps.py)
  DIRECTORY/image-000000.index.json
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from trp_scale.config.schema import Fields, Positive
from trp_scale.data.binary_index import NAME, BlockNames, OrderBlocks, new_index
from trp_scale.data.hashing import Integers, Words, name_hash
from trp_scale.data.images.maps import (
    OWN_TAR,
    StoredMaps,
    class_names,
    map_formats,
    refuse_other_classes,
    required,
    stored_maps,
)
from trp_scale.data.images.reader import (
    IMAGE,
    OWN_MODALITY,
    SampleTable,
    known_suffixes,
    read_aligned,
    read_samples,
    stored_part,
    write_samples,
)
from trp_scale.data.index import read_fields
from trp_scale.data.raw_files import require_dataset
from trp_scale.data.stores.tars import StoredPart
from trp_scale.errors import DataError, quote

FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class ImageMeta:
    """Properties that the images of a source share.

    Attributes:
        classes: names of the classes, by label; None when labels have no names or images no labels.
        suffixes: members that every image has in its own sample.
        rows: images, of a mixture: of all its members.
        maps: what the objective reads beside the image, by modality; of a mixture: as its first member has them.
    """

    classes: tuple[str, ...] | None
    suffixes: tuple[str, ...]
    rows: int
    maps: Mapping[str, StoredMaps] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class ImageBlocks:
    """Blocks of `rows_per_block` consecutive images of a shard (the last of a shard may be shorter), in stored order.

    Single images would do for a shuffle; blocks keep reads within few shards at a time (data/plan.py).

    Attributes:
        keys: [n] "SHARD/FIRST": the tar's name without its suffix, and the place of the block's first image in it.
        identities: [n] uint64, `hashing.name_hash` of the key.
        rows: [n] images of each block.
        first: [n] number of the block's first image in the data set.
        samples: the table that they are cut from, if the arrays are of its binary index; else None.
    """

    keys: Sequence[str]
    identities: Words
    rows: Integers
    first: Integers
    samples: SampleTable | None = None

    def __reduce__(self) -> str | tuple[Any, ...]:
        if self.samples is None:
            return super().__reduce__()
        return _mapped_blocks, (self.samples,)


@dataclass(frozen=True, kw_only=True)
class ImageDataset:
    """One opened data set.

    Attributes:
        name: "" unless it is a member of a mixture.
        directory: where it lies.
        split: what the images were said to be for when they were sharded; "train" if nothing was said.
        meta: what its images have in common.
        maps: those that the objective reads.
        rows_per_block: images of an order-block.
        samples: members in the images' own tars.
        aligned: members in other directories, the same images in the same order.
        blocks: what order and split see.
    """

    name: str
    directory: Path
    split: str
    meta: ImageMeta
    maps: tuple[StoredMaps, ...]
    rows_per_block: int
    samples: SampleTable
    aligned: tuple[SampleTable, ...]
    blocks: ImageBlocks

    def digest(self) -> str:
        """Equal on two ranks if they see the same dataset.json, indexes and tar sizes, as far as they are read.

        Checkpoints hold it and are resumed only with the same: what it says of images alone must stay as it is.
        """
        meta = ", ".join(f"{name}={getattr(self.meta, name)!r}" for name in ("classes", "suffixes", "rows"))
        tables = " ".join(table.digest for table in (self.samples, *self.aligned))
        parts = (self.name, f"ImageMeta({meta})", *self.maps, self.rows_per_block, tables)
        return " ".join(str(part) for part in parts)

    def tars(self, block: int) -> list[StoredPart]:
        """The tars that hold a block's images and maps, or the parts of them that the cache holds."""
        first = int(self.blocks.first[block])
        samples = range(first, first + int(self.blocks.rows[block]))
        return [stored_part(table, samples) for table in (self.samples, *self.aligned)]


def open_image_dataset(directory: Path, name: str = "", used: Sequence[str] = ()) -> ImageDataset:
    """Read dataset.json and all indexes.

    Args:
        directory: of the data set.
        name: its name in a mixture.
        used: modalities that the objective reads beside the image, in the order of `map_formats`.

    Raises:
        DataError: something is missing or of another format, or the tars differ from their indexes.
        RefusedError: the data set has not all modalities that are used.
    """
    path = directory / "dataset.json"
    require_dataset(directory)
    fields = read_fields(path, "shard the images again")
    meta, rows_per_block = _read_meta(path, fields)
    maps = required(directory, stored_maps(path, fields.document), used)
    shards = fields.file_names("shards")
    stored_suffixes = [map_.suffix for map_ in maps if map_.directory == OWN_TAR]
    samples = read_samples(directory / OWN_TAR, shards, meta.suffixes, (IMAGE, *stored_suffixes), rows_per_block)
    if samples.rows != meta.rows:
        raise DataError(f"{path}: {meta.rows} rows written there, {samples.rows} images found; copy the data again")
    highest = samples.highest_label
    if meta.classes is not None and highest >= len(meta.classes):
        image = samples.key(int(samples.labels.argmax()))
        raise DataError(
            f"{directory}: image {image} has class {highest}, dataset.json names {len(meta.classes)} classes; shard "
            "the images again"
        )
    return ImageDataset(
        name=name,
        directory=directory,
        split=fields.section("settings").text("split", "train"),
        meta=replace(meta, maps={map_.name: map_ for map_ in maps}),
        maps=maps,
        rows_per_block=rows_per_block,
        samples=samples,
        aligned=tuple(
            read_aligned(directory, map_, samples, rows_per_block) for map_ in maps if map_.directory != OWN_TAR
        ),
        blocks=cut_blocks(samples, rows_per_block),
    )


def cut_blocks(samples: SampleTable, rows_per_block: int) -> ImageBlocks:
    """The blocks of a data set; those of a shard do not depend on the other shards."""
    if samples.index is not None:
        return _mapped_blocks(samples)
    cut, keys = _cut([path.stem for path in samples.shards], np.diff(samples.starts), rows_per_block)
    return ImageBlocks(keys=keys, identities=cut.identities, rows=cut.rows, first=cut.first)


def _mapped_blocks(samples: SampleTable) -> ImageBlocks:
    assert samples.index is not None
    blocks = samples.index.blocks()
    keys = BlockNames(samples.shards, samples.starts, blocks.first)
    return ImageBlocks(keys=keys, identities=blocks.identities, rows=blocks.rows, first=blocks.first, samples=samples)


def _cut(stems: Sequence[str], counts: Integers, rows_per_block: int) -> tuple[OrderBlocks, list[str]]:
    """The blocks of tars with these names and numbers of images, and their names."""
    firsts, rows = [np.empty(0, dtype=np.int64)], [np.empty(0, dtype=np.int64)]
    keys: list[str] = []
    start = 0
    for stem, count in zip(stems, counts.tolist(), strict=True):
        first = np.arange(0, count, rows_per_block)  # [blocks of the shard]
        keys += [f"{stem}/{number}" for number in first.tolist()]
        firsts.append(start + first)
        rows.append(np.minimum(rows_per_block, count - first))
        start += count
    identities = np.array([name_hash(key) for key in keys], dtype=np.uint64)
    return OrderBlocks(identities=identities, rows=np.concatenate(rows), first=np.concatenate(firsts)), keys


def write_image_index(directory: Path, shards: list[str], suffixes: tuple[str, ...], rows_per_block: int) -> Path:
    """Write the binary index of the tars in `directory` from their JSON ones; returns where.

    Raises:
        DataError: as `read_samples`.
    """
    with new_index(directory, suffixes) as writer:
        digest = write_samples(writer, directory, shards, suffixes)
        blocks, _ = _cut([Path(name).stem for name in shards], writer.counts, rows_per_block)
        writer.finish(blocks, digest=digest, rows_per_block=rows_per_block)
    return directory / NAME


def agree_images(datasets: list[ImageDataset]) -> ImageMeta:
    """The meta data of a mixture: images without class names mix with any, and have label -1 if they have no label.

    Raises:
        DataError: two members have different classes, or maps that do not fit each other; both are named.
    """
    named = [(each.name, each.meta.classes) for each in datasets if each.meta.classes is not None]
    refuse_other_classes("classes", named)
    for name in datasets[0].meta.maps:
        map_formats()[name].agree([(each.name, each.meta.maps[name]) for each in datasets])
    first = datasets[0].meta
    return replace(
        first,
        classes=named[0][1] if named else None,
        suffixes=tuple(s for s in first.suffixes if all(s in dataset.meta.suffixes for dataset in datasets)),
        rows=sum(dataset.meta.rows for dataset in datasets),
    )


def _read_meta(path: Path, fields: Fields) -> tuple[ImageMeta, int]:
    """Read the metadata of dataset.json, and the images per block."""
    for name, expected in (("format", FORMAT), ("kind", "image")):
        if (stored := fields.document.get(name)) != expected:
            raise fields.refusal(f"{name} {quote(stored)} found, {expected!r} expected")
    suffixes = fields.texts("suffixes")
    unknown = [suffix for suffix in suffixes if suffix not in known_suffixes()]
    if unknown or IMAGE not in suffixes:
        words = f"suffix {quote(unknown[0])} found" if unknown else f"no suffix {IMAGE!r} found"
        raise DataError(
            f"{path}: {words}; allowed are {', '.join(known_suffixes())}, and {IMAGE} is needed{OWN_MODALITY}"
        )
    if len(set(suffixes)) < len(suffixes):
        raise fields.refusal(f"suffixes {quote(suffixes)} found, each is allowed once")
    classes = class_names(path, "classes", fields.document.get("classes"))
    meta = ImageMeta(classes=classes, suffixes=tuple(suffixes), rows=fields.whole("rows"))
    return meta, fields.take("rows_per_block", Positive)
