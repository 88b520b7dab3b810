"""How images with objects become a Batch: decode, place in a square, and take boxes and masks along."""

from __future__ import annotations

import io
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms import InterpolationMode

from trp_scale.core.batch import Batch
from trp_scale.data.images.png import png_format
from trp_scale.data.images.rows import decode_image
from trp_scale.data.index import DataError
from trp_scale.data.plan import Addresses, row_states
from trp_scale.downstream.detection.annotations import Annotations
from trp_scale.downstream.detection.masks import decode
from trp_scale.downstream.detection.placement import GREY, SMALLEST, Placement, draw_placements, letterbox
from trp_scale.downstream.detection.settings import DetectionTaskConfig


class DetectionBatchBuilder:
    """Makes batches of R images in squares of S pixels, with at most K objects each.

    Fields of the batch, first dimension rows:
        images [R, 3, S, S] uint8.
        boxes [R, K, 4] float32: left, top, right, bottom in pixels of the square; classes [R, K] int64, from 1.
        masks [R, K, m, m] uint8: share of each cell of the box that the object covers, times 255; if masks are learned.
        counts [R] int64: objects; the places behind them are zero.
        sizes [R, 2], resized [R, 2] int64: height and width of the stored image, and what they were resized to.
        image [R, 2] int64: number of the data set in a mixture, and of the image in it.
        row_weights [R] float32: 1, or 0 for a row that is not there or cannot be read; it then is grey.

    Args:
        config: the run; detection.masks is on or off.
        datasets: members of the mixture, of the same classes.
        augment: draw placements; else each image is shown whole.
    """

    def __init__(self, config: DetectionTaskConfig, datasets: Sequence[Annotations], *, augment: bool) -> None:
        detection = config.detection
        self._datasets = list(datasets)
        self._side, self._objects, self._grid = config.crops.size, detection.max_objects, detection.mask_size
        self._scales, self._flip = (detection.min_scale, detection.max_scale), config.crops.flip
        self._mode = InterpolationMode[config.crops.interpolation.upper()]
        self._masks, self._augment, self._seed = detection.masks == "on", augment, config.training.seed

    def build(self, addresses: Addresses, start: int) -> Batch:
        """The batch of the rows at `addresses`, whose first is at position `start` of its source."""
        began = time.perf_counter()
        images, corrupt = self._read(addresses)
        sizes = np.array([(1, 1) if one is None else one.shape[1:] for one in images], dtype=np.int64)  # [R, 2]
        placements = self._place(addresses, sizes)
        fields = self._empty(len(images))
        for row, image in enumerate(images):
            if image is not None:
                self._fill(fields, row, image, placements[row], *_address(addresses, row))
        fields["sizes"] = torch.from_numpy(sizes)
        fields["resized"] = torch.tensor([one.resized for one in placements])
        fields["image"] = torch.from_numpy(np.stack([addresses.member, addresses.block], axis=1))
        fields["row_weights"] = torch.tensor([float(one is not None) for one in images])
        return Batch(
            fields=fields,
            keys=torch.from_numpy(addresses.keys),
            start=start,
            epoch=int(addresses.epoch[0]),
            corrupt=sorted(corrupt),
            fetch_seconds=time.perf_counter() - began,
        )

    def _read(self, addresses: Addresses) -> tuple[list[Tensor | None], set[str]]:
        """The decoded images, and the names of those that cannot be."""
        images: list[Tensor | None] = []
        corrupt: set[str] = set()
        for row, present in enumerate(addresses.present.tolist()):
            images.append(None)
            if not present:
                continue
            member, number = _address(addresses, row)
            dataset = self._datasets[member]
            path = dataset.folder / dataset.keys[number]
            try:
                images[-1] = read_image(path, tuple(dataset.sizes[number].tolist()))
            except DataError:  # the batch names it, the training loop limits how many
                corrupt.add(str(path))
        return images, corrupt

    def _place(self, addresses: Addresses, sizes: np.ndarray) -> list[Placement]:
        if not self._augment:
            return letterbox(sizes, self._side)
        states = row_states(addresses, seed=self._seed, maskings=0)
        return draw_placements(states, sizes, self._side, scales=self._scales, flip=self._flip)

    def _empty(self, rows: int) -> dict[str, Tensor]:
        fields = {
            "images": torch.full((rows, 3, self._side, self._side), GREY, dtype=torch.uint8),
            "boxes": torch.zeros(rows, self._objects, 4),
            "classes": torch.zeros(rows, self._objects, dtype=torch.int64),
            "counts": torch.zeros(rows, dtype=torch.int64),
        }
        if self._masks:
            fields["masks"] = torch.zeros(rows, self._objects, self._grid, self._grid, dtype=torch.uint8)
        return fields

    def _fill(
        self, fields: dict[str, Tensor], row: int, image: Tensor, placement: Placement, member: int, number: int
    ) -> None:
        """One image with its objects."""
        placement.image(image, self._mode, out=fields["images"][row])
        dataset = self._datasets[member]
        objects = dataset.counted(number)
        boxes = placement.boxes(dataset.boxes[objects])  # [n, 4]
        place = 0
        for of_dataset, box in zip(objects, boxes, strict=True):
            if place == self._objects:
                break
            if (box[2:] - box[:2]).min() < SMALLEST:
                continue
            if self._masks:
                assert dataset.masks is not None, "detection.masks is on only where all data sets have them"
                mask = placement.mask(decode(dataset.masks[of_dataset], *placement.size), box, self._grid)
                if int(mask.max()) < 128:  # only an empty corner of the box is left
                    continue
                fields["masks"][row, place] = mask
            fields["boxes"][row, place] = torch.from_numpy(box).float()
            fields["classes"][row, place] = int(dataset.labels[of_dataset])
            place += 1
        fields["counts"][row] = place


def read_image(path: Path, size: tuple[int, ...]) -> Tensor:
    """[3, H, W] uint8 of a JPEG, PNG, GIF or WebP; transparency is dropped.

    All but JPEG by Pillow: torchvision's PNG decoder ends the process by SIGSEGV on most damaged files.

    Args:
        size: H, W as the annotations say; 0 where they say nothing.

    Raises:
        DataError: it cannot be read or decoded, has 16 bits a channel, or has another size.
    """
    try:
        content = path.read_bytes()
        if content.startswith(b"\xff\xd8"):  # a JPEG
            pixels = decode_image(bytearray(content))
        elif png_format(content)[0] == 16:
            raise DataError("16 bits a channel found, images of 8 bits are allowed; convert it")
        else:
            image = Image.open(io.BytesIO(content), formats=("PNG", "GIF", "WEBP"))
            pixels = torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1)
    except Exception as error:  # decoders raise whatever a broken file leads them to
        raise DataError(f"{path}: cannot be read ({error})") from error
    if any(wanted and wanted != found for wanted, found in zip(size, pixels.shape[1:], strict=True)):
        raise DataError(f"{path}: {tuple(pixels.shape[1:])} pixels found, the annotations say {size}")
    return pixels


def _address(addresses: Addresses, row: int) -> tuple[int, int]:
    """Number of the data set, and of the image in it."""
    return int(addresses.member[row]), int(addresses.block[row])
