"""Read and decode the images at given addresses, and name those that cannot be used."""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torchvision.io import ImageReadMode, decode_jpeg

from trp_scale.core.batch import Batch
from trp_scale.data.hashing import Integers
from trp_scale.data.images.dataset import ImageDataset, ImageMeta
from trp_scale.data.images.formats import (
    Map,
    decode_other_format,
    is_other_format,
    jpeg_frame_size,
    refuse_too_many_pixels,
    refuse_too_many_scans,
)
from trp_scale.data.images.maps import IMAGE, map_formats
from trp_scale.data.index import failure_reason
from trp_scale.data.plan import Addresses
from trp_scale.data.tar_reader import SampleReader
from trp_scale.errors import DataError, error_text

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
