"""From addresses to decoded images: reading their members, decoding JPEGs, and naming those that cannot be used."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torchvision.io import ImageReadMode, decode_jpeg

from trp_scale.core.batch import Batch
from trp_scale.data.hashing import Integers
from trp_scale.data.images.dataset import ImageDataset, ImageMeta
from trp_scale.data.images.maps import map_formats
from trp_scale.data.images.png import Map
from trp_scale.data.images.reader import IMAGE, SampleReader
from trp_scale.data.index import DataError
from trp_scale.data.plan import Addresses


def decode_image(content: bytearray) -> Tensor:
    """The pixels of a JPEG, [3, H, W] uint8, channels last in memory; a grey one has three equal channels.

    libjpeg makes pixels of most damage within the file: only a checksum finds it (data.verify).

    Raises:
        DataError: not a JPEG, cut short, or in colours that torchvision does not turn into RGB.
    """
    if not content:
        raise DataError("an empty file, a JPEG expected")
    try:
        pixels: Tensor = decode_jpeg(torch.frombuffer(content, dtype=torch.uint8), mode=ImageReadMode.RGB)
    except RuntimeError as error:
        raise DataError(f"not a JPEG that can be decoded ({error})") from error
    return pixels


@dataclass(frozen=True, kw_only=True)
class DecodedSample:
    """An image [3, H, W] uint8, its maps [H, W] or [H, W, C] by modality, its class or -1."""

    image: Tensor
    maps: Mapping[str, Map]
    label: int


@dataclass(frozen=True, kw_only=True)
class DecodedRows:
    """The samples of a batch.

    Attributes:
        samples: of each row; None where there is none, or it cannot be decoded.
        corrupt: names of those that cannot be decoded, "SHARD/KEY".
    """

    samples: list[DecodedSample | None]
    corrupt: list[str]

    @property
    def sizes(self) -> Integers:
        """Height and width of each image, [R, 2]; 1 where there is none."""
        return np.array([(1, 1) if one is None else one.image.shape[1:] for one in self.samples], dtype=np.int64)

    def batch(self, fields: dict[str, Tensor], addresses: Addresses, *, start: int, began: float) -> Batch:
        """A Batch of `fields`, and of what every row has: labels and row_weights.

        Args:
            fields: first dimension rows.
            addresses: of the rows.
            start: position of the first row.
            began: time.perf_counter() when the work on the batch began.
        """
        labels = [-1 if one is None else one.label for one in self.samples]
        weights = [0.0 if one is None else 1.0 for one in self.samples]
        common = {
            "labels": torch.tensor(labels, dtype=torch.int64),
            "row_weights": torch.tensor(weights, dtype=torch.float32),
        }
        return Batch(
            fields={**fields, **common},
            keys=torch.from_numpy(addresses.keys),
            start=start,
            epoch=int(addresses.epoch[0]),
            corrupt=self.corrupt,
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
        self._firsts = [dataset.blocks.first for dataset in datasets]
        self._names = [dataset.name for dataset in datasets]
        formats = map_formats()
        self._maps = [[(formats[maps.name], maps) for maps in dataset.maps] for dataset in datasets]
        self._readers = [
            [SampleReader(table, verify=verify) for table in (dataset.samples, *dataset.aligned)]
            for dataset in datasets
        ]

    def read(self, addresses: Addresses) -> DecodedRows:
        """The samples at `addresses`."""
        samples: list[DecodedSample | None] = []
        corrupt: set[str] = set()
        for row, present in enumerate(addresses.present.tolist()):
            if not present:
                samples.append(None)
                continue
            member = int(addresses.member[row])
            number = int(self._firsts[member][addresses.block[row]] + addresses.row[row])
            try:
                samples.append(self._decode(member, number))
            except DataError:  # the batch names it, the training loop limits how many
                name, key = self._names[member], self._readers[member][0].table.key(number)
                corrupt.add(f"{name}/{key}" if name else key)
                samples.append(None)
        return DecodedRows(samples=samples, corrupt=sorted(corrupt))

    def _decode(self, member: int, number: int) -> DecodedSample:
        contents: dict[str, bytearray] = {}
        for reader in self._readers[member]:
            contents.update(zip(reader.table.suffixes, reader.members(number), strict=True))
        image = decode_image(contents[IMAGE])
        maps: dict[str, Map] = {}
        for form, stored in self._maps[member]:
            maps[stored.name] = form.decode(contents[stored.suffix], tuple(image.shape[1:]))
            form.check(maps[stored.name], stored)
        return DecodedSample(image=image, maps=maps, label=int(self._readers[member][0].table.labels[number]))
