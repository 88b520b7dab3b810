"""A stored image data set: dataset.json, the blocks that order and split see, and the images, decoded.

DATASET/
  dataset.json                  what was made, from what, and the counts
  shards/image-000000.tar       WebDataset tar; one sample = one image: KEY.jpg, KEY.cls, aligned KEY.depth.png ...
  shards/image-000000.index.json
  shards/index.bin              all of those in one (binary_index.py)
  DIRECTORY/image-000000.tar    maps that were made later: tars of the same names, keys and order (maps.py)
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
from trp_scale.data.stores.tars import StoredPart, TarStore
from trp_scale.data.tar_reader import SampleReader
from trp_scale.errors import DataError, error_text, quote, shorten


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
    blocks: OrderBlocks

    def digest(self) -> str:
        """Equal on two ranks if they see the same dataset.json, indexes and tar sizes, as far as they are read.

        Checkpoints hold it and are resumed only with the same: what it says of images alone must stay as it is.
        """
        meta = ", ".join(f"{name}={getattr(self.meta, name)!r}" for name in ("classes", "suffixes", "rows"))
        tables = " ".join(table.digest for table in (self.samples, *self.aligned))
        parts = (self.name, f"ImageMeta({meta})", *self.maps, self.rows_per_block, tables)
        return " ".join(str(part) for part in parts)

    def tars(self, block: int) -> list[tuple[TarStore, StoredPart]]:
        """The tars of a block's images and maps, or the parts of them that the cache holds, with their stores."""
        first = int(self.blocks.first[block])
        samples = range(first, first + int(self.blocks.rows[block]))
        return [(table.store, table.stored_part(samples)) for table in (self.samples, *self.aligned)]


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
    fields = read_dataset(directory, "image", "shard the images again")
    meta, rows_per_block = _read_meta(path, fields)
    maps = require_maps(directory, stored_maps(path, fields.document), used)
    shards = fields.file_names("shards")
    stored_suffixes = [map_.suffix for map_ in maps if map_.directory == OWN_TAR]
    samples, blocks = read_samples(
        directory / OWN_TAR, shards, meta.suffixes, rows_per_block, opened=(IMAGE, *stored_suffixes)
    )
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
            _read_aligned(directory, map_, samples, rows_per_block) for map_ in maps if map_.directory != OWN_TAR
        ),
        blocks=blocks,
    )


def _read_aligned(directory: Path, maps: StoredMaps, images: SampleTable, rows_per_block: int) -> SampleTable:
    """Read the indexes of the tars in a modality's own directory.

    Args:
        directory: of the data set.
        maps: they lie in `directory / maps.directory`.
        images: the data set's images.
        rows_per_block: that a binary index must be of.

    Raises:
        DataError: a tar, a member or a key is missing or another than beside the image.
    """
    advice = f"make the {maps.name} maps again (trp-scale pseudo-label), or copy {maps.directory} again"
    suffixes = (maps.suffix,)
    try:
        shards = [path.name for path in images.shards]
        table, _ = read_samples(directory / maps.directory, shards, suffixes, rows_per_block)
    except DataError as error:
        raise DataError(f"{maps.name} maps beside the images: {error}; {advice}") from error
    for images_tar, maps_tar, ours, theirs in zip(
        images.shards, table.shards, images.key_digests, table.key_digests, strict=True
    ):
        if ours != theirs:
            raise DataError(f"{first_difference(images_tar, maps_tar)}; {advice}")
    return table


def first_difference(images: Path, maps: Path) -> str:
    """The first place at which two tars have different keys, by their indexes; "" if there is none."""
    keys = ([block.key for block in read_index(path).blocks] for path in (images, maps))
    for position, (ours, theirs) in enumerate(zip_longest(*keys)):
        if ours != theirs:
            difference = "no more maps" if theirs is None else f"a map of {shorten(theirs)}"
            expected = "no more images" if ours is None else f"image {shorten(ours)}"
            return f"{maps}: place {position}: {difference} found, {images} has {expected} there"
    return ""


def agree_images(datasets: list[ImageDataset]) -> ImageMeta:
    """The meta data of a mixture: images without class names mix with any, and have label -1 if they have no label.

    Raises:
        DataError: two members have different classes, or maps that do not fit each other; both are named.
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


def _read_meta(path: Path, fields: Fields) -> tuple[ImageMeta, int]:
    """Read the metadata of dataset.json, and the images per block."""
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


Made = TypeVar("Made")


def decode_image(content: bytearray) -> Tensor:
    """The pixels of a JPEG, PNG or WebP, [3, H, W] uint8, channels last in memory; a grey one has three equal channels.

    libjpeg makes pixels of most damage within the file: only a checksum finds it (data.verify).

    Raises:
        DataError: none of these, of more than MOST_PIXELS or MOST_SCANS, cut short, or in colours that torchvision does
            not turn into RGB.
    """
    if not content:
        raise DataError("an empty file, a JPEG expected")
    if is_other_format(content):
        try:
            return torch.from_numpy(decode_other_format(content)).permute(2, 0, 1)
        except DataError:
            raise
        except Exception as error:  # decoders raise whatever a broken file leads them to
            raise DataError(f"a PNG or WebP that cannot be decoded ({error_text(error)})") from error
    from torchvision.io import ImageReadMode, decode_jpeg  # an extra: text goes without it

    refuse_too_many_pixels(*(jpeg_frame_size(content) or (0, 0)))
    refuse_too_many_scans(content)
    try:
        pixels: Tensor = decode_jpeg(torch.frombuffer(content, dtype=torch.uint8), mode=ImageReadMode.RGB)
    except RuntimeError as error:
        raise DataError(f"not a JPEG that can be decoded ({error_text(error)})") from error
    return pixels


def jpeg_size(content: bytearray) -> tuple[int, int]:
    """(H, W) in the header of a JPEG in grey or three colours; (1, 1) of anything else, which has no smaller size."""
    try:
        with Image.open(io.BytesIO(content), formats=("JPEG",)) as image:
            return (image.height, image.width) if image.mode in ("RGB", "L") else (1, 1)
    except Exception:  # Pillow raises what a broken header leads it to; decode_image says what is wrong
        return 1, 1


def decode_scaled(content: bytearray, scale: int) -> Tensor:
    """Decode at 1/scale of the size: libjpeg makes one pixel of scale x scale from their frequencies (torchvision
    cannot ask it to).

    Args:
        content: of a JPEG whose `jpeg_size` is at least `scale` each way.
        scale: 2, 4 or 8.

    Raises:
        DataError: of more than MOST_PIXELS or MOST_SCANS, cut short, or damaged.
    """
    refuse_too_many_pixels(*(jpeg_frame_size(content) or (0, 0)))
    refuse_too_many_scans(content)
    try:
        with Image.open(io.BytesIO(content), formats=("JPEG",)) as image:
            image.draft("RGB", (image.width // scale, image.height // scale))
            pixels = np.array(image.convert("RGB"))  # [H / scale, W / scale, 3], rounded up
    except Exception as error:  # decoders raise whatever a broken file leads them to
        raise DataError(f"not a JPEG that can be decoded ({error_text(error)})") from error
    return torch.from_numpy(pixels).permute(2, 0, 1)


@dataclass(frozen=True, kw_only=True)
class DecodedSample:
    """An image [3, h, w] uint8, whole or at a scale; its size (H, W) as stored; its maps [H, W] or [H, W, C] by
    modality, its class or -1."""

    image: Tensor
    size: tuple[int, int]
    maps: Mapping[str, Map]
    label: int


@dataclass(frozen=True, kw_only=True)
class DecodedRows:
    """The samples of a batch.

    Attributes:
        samples: of each row; None where there is none, or it cannot be decoded.
        reasons: why some cannot be decoded, by their names, "SHARD/KEY".
    """

    samples: list[DecodedSample | None]
    reasons: Mapping[str, str]

    @property
    def sizes(self) -> Integers:
        """Height and width of each image as stored, [R, 2]; 1 where there is none."""
        return np.array([(1, 1) if sample is None else sample.size for sample in self.samples], dtype=np.int64)

    def batch(self, fields: dict[str, Tensor], addresses: Addresses, *, start: int, began: float) -> Batch:
        """A Batch of `fields`, and of what every row has: labels and row_weights.

        Args:
            fields: first dimension rows.
            addresses: of the rows.
            start: position of the first row.
            began: time.perf_counter() when the work on the batch began.
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
    """Reads and decodes the members that the data sets were opened for.

    Args:
        datasets: members of the mixture.
        meta: what they have in common.
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
        """The samples at `addresses`.

        Args:
            scales: from the images' sizes [R, 2], at 1/scale of which each is decoded, [R]; None: all are decoded
                whole.
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
        """Return the prepared image of a row; `None` if it is missing or damaged, which is noted in `corrupt`."""
        if not addresses.present[row]:
            return None
        member = int(addresses.member[row])
        number = int(self._blocks[member].first[addresses.block[row]] + addresses.row[row])
        try:
            return prepare(member, number)
        except Exception as error:  # whatever a damaged file leads to; the batch names it, the loop limits how many
            name, key = self._names[member], self._readers[member][0].table.key(number)
            corrupt[f"{name}/{key}" if name else key] = failure_reason(error)
            return None

    def _contents(self, member: int, number: int) -> dict[str, bytearray]:
        """The members of an image by suffix."""
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
