"""Batches of images with boxes and masks: images are decoded and placed in squares.

Random numbers are hashes of the row's state: a placement depends on (seed, row key, epoch) and the image's size.
"""

from __future__ import annotations

import io
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor
from torchvision.ops import roi_align
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2 import functional

from trp_scale.core.batch import Batch
from trp_scale.data.fetch import BatchBuilder
from trp_scale.data.hashing import Integers, Words, below, mix, name_hash
from trp_scale.data.images.crops import GREY, uniform
from trp_scale.data.images.dataset import decode_image
from trp_scale.data.images.formats import png_format, refuse_too_many_pixels
from trp_scale.data.index import failure_reason
from trp_scale.data.plan import Addresses, row_states
from trp_scale.errors import DataError, error_text
from trp_scale.finetuning.detection.annotations import Annotations, Floats, decode
from trp_scale.finetuning.detection.settings import DetectionTaskConfig

_SCALE = np.uint64(name_hash("detection: scale"))
_TOP = np.uint64(name_hash("detection: top"))
_LEFT = np.uint64(name_hash("detection: left"))
_FLIP = np.uint64(name_hash("detection: flip"))


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Transform of an image into a square: flip, resize, then crop, or pad at right and bottom.

    Attributes:
        size: height and width of the image.
        resized: height and width after resizing.
        top, left: corner of the crop.
        flip: horizontal flip.
        side: of the square.
    """

    size: tuple[int, int]
    resized: tuple[int, int]
    top: int
    left: int
    flip: bool
    side: int

    @property
    def visible(self) -> tuple[int, int]:
        """Height and width of the visible part of the image in the square."""
        return min(self.side, self.resized[0] - self.top), min(self.side, self.resized[1] - self.left)

    def image(self, image: Tensor, mode: InterpolationMode, out: Tensor) -> None:
        """Write an image [3, H, W] uint8 into the square `out` [3, side, side]."""
        resized = functional.resize(image, list(self.resized), interpolation=mode, antialias=True)
        if self.flip:
            resized = functional.horizontal_flip(resized)
        height, width = self.visible
        out.fill_(GREY)
        out[:, :height, :width] = resized[:, self.top : self.top + height, self.left : self.left + width]

    def boxes(self, boxes: Floats) -> Floats:
        """Transform boxes [n, 4] of the image to the square, clipped to the visible part of the image."""
        height, width = (new / old for new, old in zip(self.resized, self.size, strict=True))
        left, right = boxes[:, 0] * width, boxes[:, 2] * width
        if self.flip:
            left, right = self.resized[1] - right, self.resized[1] - left
        bottom, end = self.visible
        placed = np.stack([left - self.left, boxes[:, 1] * height - self.top, right - self.left,
                           boxes[:, 3] * height - self.top], axis=1)  # fmt: skip
        cut: Floats = np.clip(placed, 0.0, [end, bottom, end, bottom])
        return cut

    def mask(self, mask: npt.NDArray[np.uint8], box: Floats, grid: int) -> Tensor:
        """Return an object's mask on a grid over its box: covered share of each cell x 255, [grid, grid] uint8.

        Args:
            mask: [H, W] 0 or 1, of the whole image.
            box: [4] in the square.
            grid: cells along each side.
        """
        height, width = (new / old for new, old in zip(self.resized, self.size, strict=True))
        left, right = box[0] + self.left, box[2] + self.left
        if self.flip:
            left, right = self.resized[1] - right, self.resized[1] - left
        top, bottom = (box[1] + self.top) / height, (box[3] + self.top) / height
        source = torch.tensor([[left / width, top, right / width, bottom]], dtype=torch.float32)  # in the image
        whole = torch.from_numpy(mask).float()[None, None]  # [1, 1, H, W]
        # The default sampling ratio averages over all pixels of a cell.
        cells: Tensor = roi_align(whole, [source], (grid, grid), aligned=True)[0, 0]  # [grid, grid]
        return (cells.flip(-1) if self.flip else cells).mul(255.0).round().to(torch.uint8)


def letterbox(sizes: Integers, side: int) -> list[Placement]:
    """Return placements of whole images; the longer side fills the square."""
    return [_scale_placement(size, side, 1.0) for size in sizes.tolist()]


def draw_placements(
    states: Words, sizes: Integers, side: int, *, scales: tuple[float, float], flip: float
) -> list[Placement]:
    """Return placements with random flips and large-scale jitter (Ghiasi et al. 2021).

    Args:
        states: [R] of `plan.row_states`.
        sizes: [R, 2] height and width of the images.
        scales: range of the longer side after resizing, in units of `side`.
        flip: probability of a flip.
    """
    smallest, largest = scales
    ratios = smallest + (largest - smallest) * uniform(mix(states ^ _SCALE))
    flips = uniform(mix(states ^ _FLIP)) < flip
    whole = [
        _scale_placement(size, side, ratio, bool(mirrored))
        for size, ratio, mirrored in zip(sizes.tolist(), ratios.tolist(), flips.tolist(), strict=True)
    ]
    rooms = np.array([[max(length - side, 0) + 1 for length in fit.resized] for fit in whole], dtype=np.int64)
    tops, lefts = below(mix(states ^ _TOP), rooms[:, 0]), below(mix(states ^ _LEFT), rooms[:, 1])
    return [replace(fit, top=int(top), left=int(left)) for fit, top, left in zip(whole, tops, lefts, strict=True)]


def _scale_placement(size: list[int], side: int, ratio: float, flip: bool = False) -> Placement:
    height, width = size
    factor = side * ratio / max(height, width)
    resized = max(1, round(height * factor)), max(1, round(width * factor))
    return Placement(size=(height, width), resized=resized, top=0, left=0, flip=flip, side=side)


class DetectionBatchBuilder(BatchBuilder):
    """Builds batches of R images in squares of S pixels, with at most K objects each.

    Fields of the batch:
        images [R, 3, S, S] uint8.
        boxes [R, K, 4] float32: left, top, right, bottom in pixels of the square; classes [R, K] int64, from 1.
        masks [R, K, m, m] uint8: covered share of each cell of the box x 255; only with detection.masks on.
        counts [R] int64: number of objects; further slots are zero.
        sizes, resized [R, 2] int64: height and width of the stored image, and after resizing.
        image [R, 2] int64: number of the data set in the mixture, and of the image in it.
        row_weights [R] float32: 1; 0 for a padding row or an unreadable image, which is grey.

    Placements are random with `augment`; otherwise images are whole.
    """

    def __init__(self, config: DetectionTaskConfig, datasets: Sequence[Annotations], *, augment: bool) -> None:
        detection = config.detection
        self._datasets = list(datasets)
        self._side, self._objects, self._grid = config.crops.size, detection.max_objects, detection.mask_size
        self._scales, self._flip = (detection.min_scale, detection.max_scale), config.crops.flip
        self._mode = InterpolationMode[config.crops.interpolation.upper()]
        self._masks, self._augment, self._seed = detection.masks == "on", augment, config.training.seed

    def build(self, addresses: Addresses, start: int) -> Batch:
        began = time.perf_counter()
        images, corrupt = self._read(addresses)
        sizes = np.array([(1, 1) if image is None else image.shape[1:] for image in images], dtype=np.int64)  # [R, 2]
        placements = letterbox(sizes, self._side)
        if self._augment:
            states = row_states(addresses, seed=self._seed, maskings=0)
            placements = draw_placements(states, sizes, self._side, scales=self._scales, flip=self._flip)
        fields = self._empty(len(images))
        for row, image in enumerate(images):
            if image is not None:
                self._fill(fields, row, image, placements[row], *_address(addresses, row))
        fields["sizes"] = torch.from_numpy(sizes)
        fields["resized"] = torch.tensor([image.resized for image in placements])
        fields["image"] = torch.from_numpy(np.stack([addresses.member, addresses.block], axis=1))
        fields["row_weights"] = torch.tensor([float(image is not None) for image in images])
        return Batch(
            fields=fields,
            keys=torch.from_numpy(addresses.keys),
            start=start,
            epoch=int(addresses.epoch[0]),
            corrupt=sorted(corrupt),
            reasons=corrupt,
            fetch_seconds=time.perf_counter() - began,
        )

    def _read(self, addresses: Addresses) -> tuple[list[Tensor | None], dict[str, str]]:
        """Return the decoded images, and reasons by path for unreadable ones."""
        images: list[Tensor | None] = []
        corrupt: dict[str, str] = {}
        for row, present in enumerate(addresses.present.tolist()):
            images.append(None)
            if not present:
                continue
            member, number = _address(addresses, row)
            dataset = self._datasets[member]
            path = dataset.folder / dataset.keys[number]
            try:
                images[-1] = read_image(path, tuple(dataset.sizes[number].tolist()))
            except Exception as error:  # damaged files raise many types; the loop limits their number
                corrupt[str(path)] = failure_reason(error)
        return images, corrupt

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
        """Write one image and its objects into a row."""
        placement.image(image, self._mode, out=fields["images"][row])
        dataset = self._datasets[member]
        objects = dataset.learned_objects(number)
        boxes = placement.boxes(dataset.boxes[objects])  # [n, 4]
        slot = 0
        for of_dataset, box in zip(objects, boxes, strict=True):
            if slot == self._objects:
                break
            if (box[2:] - box[:2]).min() < 1.0:  # less than a pixel of the square
                continue
            if self._masks:
                assert dataset.masks is not None, "detection.masks is on only if all data sets have masks"
                mask = placement.mask(decode(dataset.masks[of_dataset], *placement.size), box, self._grid)
                if int(mask.max()) < 128:  # the visible part of the box is empty
                    continue
                fields["masks"][row, slot] = mask
            fields["boxes"][row, slot] = torch.from_numpy(box).float()
            fields["classes"][row, slot] = int(dataset.labels[of_dataset])
            slot += 1
        fields["counts"][row] = slot


def read_image(path: Path, size: tuple[int, ...]) -> Tensor:
    """Return the pixels [3, H, W] uint8 of a JPEG, PNG, GIF or WebP without transparency.

    Pillow decodes all but JPEG: torchvision's PNG decoder crashes (SIGSEGV) on most damaged files.

    Args:
        size: H, W of the annotations; 0 = unknown.

    Raises:
        DataError: the image is unreadable, has 16 bits per channel, or has another size.
    """
    try:
        content = path.read_bytes()
        if content.startswith(b"\xff\xd8"):  # a JPEG
            pixels = decode_image(bytearray(content))
        elif png_format(content)[0] == 16:
            raise DataError("16 bits per channel found; allowed: 8 bits; convert the image")
        else:
            image = Image.open(io.BytesIO(content), formats=("PNG", "GIF", "WEBP"))
            refuse_too_many_pixels(image.height, image.width)
            pixels = torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1)
    except Exception as error:  # decoders raise many types for damaged files
        raise DataError(f"{path}: cannot be read ({error_text(error)})") from error
    if any(wanted and wanted != actual for wanted, actual in zip(size, pixels.shape[1:], strict=True)):
        raise DataError(f"{path}: {tuple(pixels.shape[1:])} pixels found; size in the annotations: {size}")
    return pixels


def _address(addresses: Addresses, row: int) -> tuple[int, int]:
    """Return the number of the data set, and of the image in it."""
    return int(addresses.member[row]), int(addresses.block[row])
