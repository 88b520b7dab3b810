"""Image data set: dataset.json, blocks for order and split, and decoded images.

DATASET/
  dataset.json                  settings, sources and counts
  shards/image-000000.tar       WebDataset tar; one sample = one image: KEY.jpg, KEY.cls, aligned KEY.depth.png ...
  shards/image-000000.index.json
  shards/index.bin              binary index of all tars (binary_index.py)
  DIRECTORY/image-000000.tar    maps added later: tars with the same names, keys and order (maps.py)
  DIRECTORY/image-000000.index.json
"""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from trp_scale.config.schema import Fields, Positive
from trp_scale.core.batch import Batch
from trp_scale.data.binary_index import OrderBlocks
from trp_scale.data.hashing import Integers
from trp_scale.data.images.formats import (
    Map,
    decode_other_format,
    is_other_format,
    jpeg_frame_size,
    refuse_too_many_pixels,
    refuse_too_many_scans,
)
from trp_scale.data.images.maps import (
    IMAGE,
    OWN_MODALITY,
    OWN_TAR,
    StoredMaps,
    class_names,
    known_suffixes,
    map_formats,
    refuse_other_classes,
    require_maps,
    stored_maps,
)
from trp_scale.data.index import failure_reason, read_index
from trp_scale.data.plan import Addresses
from trp_scale.data.raw_files import read_dataset
from trp_scale.data.samples import SampleTable, read_samples
from trp_scale.data.tar_reader import SampleReader
from trp_scale.data.tars import StoredPart, TarStore
from trp_scale.errors import DataError, error_text, quote, shorten


@dataclass(frozen=True, kw_only=True)
class ImageMeta:
    """Properties that the images of a source share.

    Attributes:
        classes: names of the classes, by label; `None` without labels or without names.
        suffixes: members of every image's own sample.
        rows: images of all members of a mixture.
        maps: maps that the objective reads, by modality, as described by the first member of a mixture.
    """

    classes: tuple[str, ...] | None
    suffixes: tuple[str, ...]
    rows: int
    maps: Mapping[str, StoredMaps] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class ImageDataset:
    """Opened data set.

    Attributes:
        name: name in the mixture; "" without a mixture.
        directory: directory of the data set.
        split: split that was set when the images were sharded; "train" by default.
        meta: properties that its images share.
        maps: maps that the objective reads.
        rows_per_block: images of a block.
        samples: members in the images' own tars.
        aligned: members in other directories, for the same images in the same order.
        blocks: blocks for order and split.
    """

    name: str
    directory: Path
    split: str
    meta: ImageMeta
    maps: tuple[StoredMaps, ...]
    rows_per_block: int
    samples: SampleTable
    aligned: tuple[SampleTable, ...]
    blocks: OrderBlocks

    def digest(self) -> str:
        """Digest of dataset.json, indexes and tar sizes, as far as they are read; equal on ranks that see the same.

        Checkpoints store it, and a resume requires an equal one. The part about images must stay as it is.
        """
        meta = ", ".join(f"{name}={getattr(self.meta, name)!r}" for name in ("classes", "suffixes", "rows"))
        tables = " ".join(table.digest for table in (self.samples, *self.aligned))
        parts = (self.name, f"ImageMeta({meta})", *self.maps, self.rows_per_block, tables)
        return " ".join(str(part) for part in parts)

    def tars(self, block: int) -> list[tuple[TarStore, StoredPart]]:
        """Return the tars of a block's images and maps, or the parts that the cache holds, with their stores."""
        first = int(self.blocks.first[block])
        samples = range(first, first + int(self.blocks.rows[block]))
        return [(table.store, table.stored_part(samples)) for table in (self.samples, *self.aligned)]


def open_image_dataset(directory: Path, name: str = "", used: Sequence[str] = ()) -> ImageDataset:
    """Read dataset.json and all indexes.

    Args:
        directory: directory of the data set.
        name: name in a mixture.
        used: modalities of maps that the objective reads, in the order of `map_formats`.

    Raises:
        DataError: a file is missing or has another format, or the tars differ from their indexes.
        RefusedError: a used modality is missing.
    """
    path = directory / "dataset.json"
    fields = read_dataset(directory, "image", "shard the images again")
    meta, rows_per_block = read_image_meta(path, fields)
    maps = require_maps(directory, stored_maps(path, fields.document), used)
    shards = fields.file_names("shards")
    stored_suffixes = [map_.suffix for map_ in maps if map_.directory == OWN_TAR]
    samples, blocks = read_samples(
        directory / OWN_TAR, shards, meta.suffixes, rows_per_block, opened=(IMAGE, *stored_suffixes)
    )
    if samples.rows != meta.rows:
        raise DataError(f"{path}: {meta.rows} rows in dataset.json, {samples.rows} images found; copy the data again")
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
            _read_aligned(directory, map_, samples, rows_per_block) for map_ in maps if map_.directory != OWN_TAR
        ),
        blocks=blocks,
    )


def _read_aligned(directory: Path, maps: StoredMaps, images: SampleTable, rows_per_block: int) -> SampleTable:
    """Read the indexes of the tars in a modality's own directory, `directory / maps.directory`.

    Raises:
        DataError: a tar, a member or a key is missing or differs from that of the images.
    """
    advice = f"create the {maps.name} maps again (trp-scale pseudo-label), or copy {maps.directory} again"
    suffixes = (maps.suffix,)
    try:
        shards = [path.name for path in images.shards]
        table, _ = read_samples(directory / maps.directory, shards, suffixes, rows_per_block)
    except DataError as error:
        raise DataError(f"{maps.name} maps of the images: {error}; {advice}") from error
    for images_tar, maps_tar, ours, theirs in zip(
        images.shards, table.shards, images.key_digests, table.key_digests, strict=True
    ):
        if ours != theirs:
            raise DataError(f"{first_difference(images_tar, maps_tar)}; {advice}")
    return table


def first_difference(images: Path, maps: Path) -> str:
    """Describe the first position at which the keys of two indexes differ; "" if they are equal."""
    keys = ([block.key for block in read_index(path).blocks] for path in (images, maps))
    for position, (ours, theirs) in enumerate(zip_longest(*keys)):
        if ours != theirs:
            difference = "no more maps" if theirs is None else f"a map of {shorten(theirs)}"
            expected = "no more images" if ours is None else f"image {shorten(ours)}"
            return f"{maps}: position {position}: {difference} found, {images} has {expected}"
    return ""


def agree_images(datasets: list[ImageDataset]) -> ImageMeta:
    """Return the metadata of a mixture. Images without class names mix with any; without a label they have label -1.

    Raises:
        DataError: two members have different classes or incompatible maps.
    """
    named = [(member.name, member.meta.classes) for member in datasets if member.meta.classes is not None]
    refuse_other_classes("classes", named)
    for name in datasets[0].meta.maps:
        map_formats()[name].agree([(member.name, member.meta.maps[name]) for member in datasets])
    first = datasets[0].meta
    return replace(
        first,
        classes=named[0][1] if named else None,
        suffixes=tuple(s for s in first.suffixes if all(s in dataset.meta.suffixes for dataset in datasets)),
        rows=sum(dataset.meta.rows for dataset in datasets),
    )


def read_image_meta(path: Path, fields: Fields) -> tuple[ImageMeta, int]:
    """Read the metadata and the images per block from dataset.json.

    Raises:
        DataError: a field is missing, has a wrong type or names an unknown member.
    """
    suffixes = fields.texts("suffixes")
    unknown = [suffix for suffix in suffixes if suffix not in known_suffixes()]
    if unknown or IMAGE not in suffixes:
        words = f"suffix {quote(unknown[0])} found" if unknown else f"no suffix {IMAGE!r} found"
        raise DataError(
            f"{path}: {words}; allowed are {', '.join(known_suffixes())}, and {IMAGE} is needed{OWN_MODALITY}"
        )
    if len(set(suffixes)) < len(suffixes):
        raise fields.refusal(f"suffixes {quote(suffixes)} found, each is allowed once")
    meta = ImageMeta(classes=class_names(fields), suffixes=tuple(suffixes), rows=fields.whole("rows"))
    return meta, fields.take("rows_per_block", Positive)


Made = TypeVar("Made")


def decode_image(content: bytearray) -> Tensor:
    """Decode a JPEG, PNG or WebP to RGB, [3, H, W] uint8, channels last in memory.

    libjpeg decodes most damaged files without an error: only a checksum detects the damage (data.verify).

    Raises:
        DataError: another format, more than MOST_PIXELS or MOST_SCANS, truncated, or colours that torchvision does not
            convert to RGB.
    """
    if not content:
        raise DataError("an empty file, a JPEG expected")
    if is_other_format(content):
        try:
            return torch.from_numpy(decode_other_format(content)).permute(2, 0, 1)
        except DataError:
            raise
        except Exception as error:  # decoders raise many types on a damaged file
            raise DataError(f"a PNG or WebP that cannot be decoded ({error_text(error)})") from error
    from torchvision.io import ImageReadMode, decode_jpeg  # an extra that text does not need

    refuse_too_many_pixels(*(jpeg_frame_size(content) or (0, 0)))
    refuse_too_many_scans(content)
    try:
        pixels: Tensor = decode_jpeg(torch.frombuffer(content, dtype=torch.uint8), mode=ImageReadMode.RGB)
    except RuntimeError as error:
        raise DataError(f"not a JPEG that can be decoded ({error_text(error)})") from error
    return pixels


def jpeg_size(content: bytearray) -> tuple[int, int]:
    """Read (H, W) from the header of a grey or RGB JPEG; (1, 1) for other files, which are not decoded at a scale."""
    try:
        with Image.open(io.BytesIO(content), formats=("JPEG",)) as image:
            return (image.height, image.width) if image.mode in ("RGB", "L") else (1, 1)
    except Exception:  # Pillow raises many types on a damaged header; decode_image reports the error
        return 1, 1


def decode_scaled(content: bytearray, scale: int) -> Tensor:
    """Decode at 1/scale of the size: libjpeg computes one pixel from the frequencies of scale x scale (not available in
    torchvision).

    Args:
        content: JPEG with a `jpeg_size` of at least `scale` in height and width.
        scale: 2, 4 or 8.

    Raises:
        DataError: more than MOST_PIXELS or MOST_SCANS, truncated, or damaged.
    """
    refuse_too_many_pixels(*(jpeg_frame_size(content) or (0, 0)))
    refuse_too_many_scans(content)
    try:
        with Image.open(io.BytesIO(content), formats=("JPEG",)) as image:
            image.draft("RGB", (image.width // scale, image.height // scale))
            pixels = np.array(image.convert("RGB"))  # [H / scale, W / scale, 3], rounded up
    except Exception as error:  # decoders raise many types on a damaged file
        raise DataError(f"not a JPEG that can be decoded ({error_text(error)})") from error
    return torch.from_numpy(pixels).permute(2, 0, 1)


@dataclass(frozen=True, kw_only=True)
class DecodedSample:
    """Image [3, h, w] uint8, whole or at a scale; its stored size (H, W); maps [H, W] or [H, W, C] by modality; class
    or -1."""

    image: Tensor
    size: tuple[int, int]
    maps: Mapping[str, Map]
    label: int


@dataclass(frozen=True, kw_only=True)
class DecodedRows:
    """Decoded samples of a batch.

    Attributes:
        samples: sample of each row; `None` if it is not present or cannot be decoded.
        reasons: reasons of decoding errors, by "SHARD/KEY".
    """

    samples: list[DecodedSample | None]
    reasons: Mapping[str, str]

    @property
    def sizes(self) -> Integers:
        """Stored height and width of each image, [R, 2]; 1 without an image."""
        return np.array([(1, 1) if sample is None else sample.size for sample in self.samples], dtype=np.int64)

    def batch(self, fields: dict[str, Tensor], addresses: Addresses, *, start: int, began: float) -> Batch:
        """Build a Batch of `fields`, labels and row_weights.

        Args:
            fields: tensors with first dimension rows.
            addresses: addresses of the rows.
            start: position of the first row.
            began: time.perf_counter() at the start of the work on the batch.
        """
        labels = [-1 if sample is None else sample.label for sample in self.samples]
        weights = [0.0 if sample is None else 1.0 for sample in self.samples]
        common = {
            "labels": torch.tensor(labels, dtype=torch.int64),
            "row_weights": torch.tensor(weights, dtype=torch.float32),
        }
        return Batch(
            fields={**fields, **common},
            keys=torch.from_numpy(addresses.keys),
            start=start,
            epoch=int(addresses.epoch[0]),
            corrupt=sorted(self.reasons),
            reasons=dict(self.reasons),
            fetch_seconds=time.perf_counter() - began,
        )


class RowReader:
    """Reads and decodes the opened members of images.

    Args:
        datasets: members of the mixture.
        meta: properties that they share.
        verify: check each member's checksum.
    """

    def __init__(self, datasets: list[ImageDataset], meta: ImageMeta, *, verify: bool) -> None:
        self._blocks = [dataset.blocks for dataset in datasets]
        self._names = [dataset.name for dataset in datasets]
        formats = map_formats()
        self._maps = [[(formats[maps.name], maps) for maps in dataset.maps] for dataset in datasets]
        self._readers = [
            [SampleReader(table, verify=verify, blocks=dataset.blocks) for table in (dataset.samples, *dataset.aligned)]
            for dataset in datasets
        ]

    def read(self, addresses: Addresses, scales: Callable[[Integers], Integers] | None = None) -> DecodedRows:
        """Read and decode the samples at `addresses`.

        Args:
            scales: maps image sizes [R, 2] to scales [R]; an image is decoded at 1/scale of its size. `None` decodes
                whole images.
        """
        corrupt: dict[str, str] = {}
        contents = [self._try(addresses, row, corrupt, self._contents) for row in range(len(addresses.present))]
        scale = np.ones(len(contents), dtype=np.int64)
        if scales is not None:
            scale = scales(np.array([(1, 1) if content is None else jpeg_size(content[IMAGE]) for content in contents]))
        samples = [
            None
            if content is None
            else self._try(addresses, row, corrupt, partial(self._decode, content, int(scale[row])))
            for row, content in enumerate(contents)
        ]
        return DecodedRows(samples=samples, reasons=corrupt)

    def _try(
        self, addresses: Addresses, row: int, corrupt: dict[str, str], prepare: Callable[[int, int], Made]
    ) -> Made | None:
        """Return the prepared image of a row; `None` if it is not present or damaged (noted in `corrupt`)."""
        if not addresses.present[row]:
            return None
        member = int(addresses.member[row])
        number = int(self._blocks[member].first[addresses.block[row]] + addresses.row[row])
        try:
            return prepare(member, number)
        except Exception as error:  # a damaged file raises many types; the loop limits the number of damaged blocks
            name, key = self._names[member], self._readers[member][0].table.key(number)
            corrupt[f"{name}/{key}" if name else key] = failure_reason(error)
            return None

    def _contents(self, member: int, number: int) -> dict[str, bytearray]:
        """Read the members of an image, by suffix."""
        contents: dict[str, bytearray] = {}
        for reader in self._readers[member]:
            contents.update(zip(reader.table.suffixes, reader.members(number), strict=True))
        return contents

    def _decode(self, contents: dict[str, bytearray], scale: int, member: int, number: int) -> DecodedSample:
        if scale == 1:
            image = decode_image(contents[IMAGE])
            height, width = image.shape[1:]
        else:
            image, (height, width) = decode_scaled(contents[IMAGE], scale), jpeg_size(contents[IMAGE])
        maps: dict[str, Map] = {}
        for form, stored in self._maps[member]:
            maps[stored.name] = form.decode(contents[stored.suffix], (height, width))
            form.check(maps[stored.name], stored)
        label = int(self._readers[member][0].table.labels[number])
        return DecodedSample(image=image, size=(height, width), maps=maps, label=label)
