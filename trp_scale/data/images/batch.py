"""How images become a Batch: decode once, cut the crops, draw the masks."""

from __future__ import annotations

import time

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trp_scale.batch import Batch
from trp_scale.config import Config, split_patches
from trp_scale.data.hashing import Integers, Words
from trp_scale.data.images.crops import Cropper, crop_words
from trp_scale.data.images.dataset import ImageDataset, ImageMeta
from trp_scale.data.images.decode import decode_image, parse_label
from trp_scale.data.images.masks import draw_masks
from trp_scale.data.images.reader import SampleReader
from trp_scale.data.index import DataError
from trp_scale.data.plan import Addresses, row_states

GREY = 128
"""Value of all pixels of a row that is not there or cannot be decoded."""


class ImageBatchBuilder:
    """Makes batches of R images with k crops of S x S pixels, N patches each: V visible, M masked.

    Fields of the batch, first dimension rows:
        images [R, k, 3, S, S] uint8: red, green, blue.
        visible [R, k, V] int64, masked [R, k, M] int64: patch numbers, row by row, ascending.
        labels [R] int64: the class, or -1.
        row_weights [R] float32: 1, or 0 for a row that is not there or cannot be decoded; it then is grey.

    All draws come from (training.seed, row key, epoch modulo masking.maskings, crop). A held-out image thus always has
    the crops and masks that training would draw for it in epoch 0.
    """

    def __init__(self, config: Config, datasets: list[ImageDataset], meta: ImageMeta) -> None:
        self._crops, self._size = config.crops.count, config.crops.size
        self._seed, self._maskings = config.training.seed, config.masking.maskings
        self._classes = None if meta.classes is None else len(meta.classes)
        self._firsts = [dataset.blocks.first for dataset in datasets]
        self._names = [dataset.name for dataset in datasets]
        self._readers = [SampleReader(dataset.samples, verify=config.data.verify) for dataset in datasets]
        self._cropper = Cropper(config.crops)
        self.split = split_patches(config.crops.size, config.vision.patch_size, config.masking.ratio)

    def build(self, addresses: Addresses, start: int) -> Batch:
        """The batch of the rows at `addresses`, whose first is at position `start` of its source."""
        began = time.perf_counter()
        states = row_states(addresses, seed=self._seed, maskings=self._maskings)
        decoded, labels, corrupt = self._read(addresses)
        visible, masked = draw_masks(crop_words(states, self._crops), self.split)
        there = np.array([image is not None for image in decoded])
        fields = {
            "images": self._cut(decoded, states),
            "visible": torch.from_numpy(visible),
            "masked": torch.from_numpy(masked),
            "labels": torch.from_numpy(labels),
            "row_weights": torch.from_numpy(there.astype(np.float32)),
        }
        return Batch(
            fields=fields,
            keys=torch.from_numpy(addresses.keys),
            start=start,
            epoch=int(addresses.epoch[0]),
            corrupt=corrupt,
            fetch_seconds=time.perf_counter() - began,
        )

    def _read(self, addresses: Addresses) -> tuple[list[Tensor | None], Integers, list[str]]:
        """Pixels [3, H, W] of each row or None, labels [R], and the names of images that cannot be decoded."""
        decoded: list[Tensor | None] = []
        labels: Integers = np.full(len(addresses.row), -1, dtype=np.int64)
        corrupt: set[str] = set()
        for row, present in enumerate(addresses.present.tolist()):
            if not present:
                decoded.append(None)
                continue
            member = int(addresses.member[row])
            sample = int(self._firsts[member][addresses.block[row]] + addresses.row[row])
            try:
                image, label = self._decode(self._readers[member], sample)
            except DataError:  # the batch names it, the training loop limits how many
                name, key = self._names[member], self._readers[member].table.key(sample)
                corrupt.add(f"{name}/{key}" if name else key)
                decoded.append(None)
                continue
            decoded.append(image)
            labels[row] = label
        return decoded, labels, sorted(corrupt)

    def _decode(self, reader: SampleReader, sample: int) -> tuple[Tensor, int]:
        contents = dict(zip(reader.table.suffixes, reader.members(sample), strict=True))
        label = parse_label(contents["cls"], self._classes) if "cls" in contents else -1
        return decode_image(contents["jpg"]), label

    def _cut(self, decoded: list[Tensor | None], states: Words) -> Tensor:
        """The crops of all rows, [R, k, 3, S, S]."""
        sizes: npt.NDArray[np.int64] = np.ones((len(decoded), 2), dtype=np.int64)
        for row, image in enumerate(decoded):
            if image is not None:
                sizes[row] = image.shape[1:]
        crops = self._cropper.draw(states, sizes)
        images = torch.empty(len(decoded), self._crops, 3, self._size, self._size, dtype=torch.uint8)
        for row, image in enumerate(decoded):
            if image is None:
                images[row] = GREY
            else:
                self._cropper.cut(image, crops, row, out=images[row])
        return images
