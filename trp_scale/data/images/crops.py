"""Draw the box and the flip of each crop, and cut the crop.

Every draw hashes the row's state and the crop's number. A crop thus depends on (seed, row key, masking, crop) and on
the image's size, not on the batch.

Large-scale jitter (Ghiasi et al. 2021) resizes the whole image at random, then crops or pads it to a square.

Photometric distortion (SSD, Liu et al. 2016; order and ranges of MMSegmentation) changes brightness, contrast,
saturation and hue, each with probability 1/2. MMSegmentation rounds down to bytes after each change, and its hues are
bytes in steps of two degrees. Here only the result is rounded, to the nearest byte; the angles are the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2 import functional

from trp_scale.config.images import CropConfig, CropsConfig
from trp_scale.data.hashing import Integers, Words, below, mix, name_hash
from trp_scale.data.images.dataset import DecodedRows
from trp_scale.data.images.formats import Map

_CROP = np.uint64(name_hash("crop"))
_VIEW = np.uint64(name_hash("crop: view"))
_BOX = np.uint64(name_hash("crop: box"))
_WINDOW = np.uint64(name_hash("crop: window"))
_FLIP = np.uint64(name_hash("crop: flip"))
_DISTORTION = np.uint64(name_hash("distortion"))

GREY = 128
"""Pixel value of rows without a decoded image."""

TRIES = 10
SHORTEST, LONGEST = 3.0 / 4.0, 4.0 / 3.0
"""Allowed ratios of a box's width to its height."""


@dataclass(frozen=True, kw_only=True)
class Crops:
    """Positions of the crops of a batch.

    Attributes:
        boxes: [R, k, 4] top, left, height, width in pixels of the image; for crops.from = view [R, 1, 4], of the view.
        windows: [R, k, 2] top, left in the view; `None` for crops.from = image.
        flips: [R, k] mask of the mirrored crops.
        scales: [R] 1, 2, 4 or 8: the image is decoded at 1/scale of its size; boxes are multiples of it.
    """

    boxes: Integers
    windows: Integers | None
    flips: npt.NDArray[np.bool_]
    scales: Integers


class Cropper:
    """Draws crops and cuts them out.

    Args:
        settings: checked section `crops` (config/images.py); without a number of crops, one crop of the image.

    Attributes:
        size: side of a crop in pixels.
    """

    def __init__(self, settings: CropConfig) -> None:
        self._settings = settings
        several = settings if isinstance(settings, CropsConfig) else CropsConfig()
        self._count, self._from, self._view_size = several.count, several.from_, several.view_size
        self.size = settings.size
        self._mode = InterpolationMode[settings.interpolation.upper()]

    def draw(self, states: Words, sizes: Integers) -> Crops:
        """Draw the crops of each row.

        Args:
            states: [R] a word per row (`plan.row_states`).
            sizes: [R, 2] height and width of the image.
        """
        settings = self._settings
        words = crop_words(states, self._count)  # [R, k]
        flips = uniform(mix(words ^ _FLIP)) < settings.flip
        if self._from == "image":
            boxes, scales = self._boxes(words, sizes, settings.size)
            return Crops(boxes=boxes, windows=None, flips=flips, scales=scales)
        places = mix(words ^ _WINDOW)[:, :, None] ^ np.arange(2, dtype=np.uint64)  # [R, k, 2]
        windows = below(mix(places), self._view_size - settings.size + 1)
        boxes, scales = self._boxes(mix(states ^ _VIEW)[:, None], sizes, self._view_size)
        return Crops(boxes=boxes, windows=windows, flips=flips, scales=scales)

    def scales(self, states: Words) -> Callable[[Integers], Integers] | None:
        """Return a function from image sizes [R, 2] to decoding scales [R]; `None` to decode whole images."""
        if not self._settings.scaled_decoding:
            return None
        return lambda sizes: self.draw(states, sizes).scales

    def cut(self, image: Tensor, crops: Crops, row: int, out: Tensor) -> None:
        """Cut the crops of one row out of its image.

        Args:
            image: [3, H, W] uint8, decoded at the row's scale.
            crops: crops of the batch.
            row: number of the row in the batch.
            out: [k, 3, S, S] uint8, output.
        """
        size = self.size
        flips = crops.flips[row].tolist()
        boxes = (crops.boxes[row] // crops.scales[row]).tolist()  # in decoded pixels
        if crops.windows is None:
            for number, box in enumerate(boxes):
                _place(self._resize(image, box, size), flips[number], out[number])
            return
        view = self._resize(image, boxes[0], self._view_size)  # [3, view, view]
        for number, (top, left) in enumerate(crops.windows[row].tolist()):
            _place(view[:, top : top + size, left : left + size], flips[number], out[number])

    def pick(self, map_: Map, crops: Crops, row: int, size: int) -> Map:
        """Cut a row's map at its first crop without interpolation: [size, size] or [size, size, C].

        Mirroring moves pixels only; it does not change directions that their numbers may represent.

        Output pixel i of n takes the input pixel at its centre, floor((i + 1/2) height / n), so that maps stay aligned
        with the image at any size. Integer arithmetic: floating point is off by one pixel at some sizes.

        Args:
            map_: [H, W] or [H, W, C].
            crops: crops of the batch, with crops.from = image.
            row: number of the row in the batch.
            size: side of the result.
        """
        top, left, height, width = crops.boxes[row, 0].tolist()
        picked = pick_centres(map_[top : top + height, left : left + width], size, size)
        return np.ascontiguousarray(picked[:, ::-1]) if crops.flips[row, 0] else picked

    def _resize(self, image: Tensor, box: list[int], size: int) -> Tensor:
        """Resize a box of the image to [3, size, size]; pixels outside the box have no influence."""
        top, left, height, width = box
        part = image[:, top : top + height, left : left + width]
        resized: Tensor = functional.resize(part, [size, size], interpolation=self._mode, antialias=True)
        return resized

    def _boxes(self, words: Words, sizes: Integers, side: int) -> tuple[Integers, Integers]:
        """Draw boxes for squares of `side` pixels, and return them with each image's scale."""
        boxes = draw_boxes(words, sizes, self._settings.min_scale, self._settings.max_scale)
        if self._settings.scaled_decoding:
            return on_scaled_pixels(boxes, side)
        return boxes, np.ones(len(boxes), dtype=np.int64)


def cut_images(cropper: Cropper, crops: Crops, rows: DecodedRows) -> Tensor:
    """Cut the crops of all rows, [R, k, 3, S, S] uint8; rows without an image are grey."""
    count, size = crops.flips.shape[1], cropper.size
    images = torch.empty(len(rows.samples), count, 3, size, size, dtype=torch.uint8)
    for row, sample in enumerate(rows.samples):
        if sample is None:
            images[row] = GREY
        else:
            cropper.cut(sample.image, crops, row, out=images[row])
    return images


def crop_words(states: Words, count: int) -> Words:
    """Hash to a word for each crop of each row, [R, k], from which its box, flip and mask are drawn."""
    return mix(mix(states ^ _CROP)[:, None] ^ np.arange(count, dtype=np.uint64))


def uniform(words: Words) -> npt.NDArray[np.float64]:
    """Map words to [0, 1) by their upper 53 bits."""
    numbers: npt.NDArray[np.float64] = (words >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return numbers


def draw_boxes(words: Words, sizes: Integers, min_scale: float, max_scale: float) -> Integers:
    """Draw random resized crops (Szegedy et al. 2015, like torchvision's RandomResizedCrop).

    A try draws a share of the area, uniform from min_scale to max_scale, and a ratio of the sides, log-uniform from 3/4
    to 4/3. The first of ten boxes that fits into the image gets a random position; if none fits, the largest central
    box with an allowed ratio is used.

    Args:
        words: [R, k] a word per crop.
        sizes: [R, 2] height and width of each image, at least 1.
        min_scale, max_scale: shares of the image's area.

    Returns:
        [R, k, 4] top, left, height, width.
    """
    height, width = (sizes[:, None, None, side] for side in (0, 1))  # [R, 1, 1]
    draws = mix(mix(words ^ _BOX)[:, :, None] ^ np.arange(4 * TRIES, dtype=np.uint64))
    draws = draws.reshape(*words.shape, TRIES, 4)  # [R, k, tries, (area, ratio, top, left)]
    area = (min_scale + (max_scale - min_scale) * uniform(draws[..., 0])) * (height * width)  # [R, k, tries]
    low, high = np.log(SHORTEST), np.log(LONGEST)
    ratio = np.exp(low + (high - low) * uniform(draws[..., 1]))
    wide, tall = np.rint(np.sqrt(area * ratio)), np.rint(np.sqrt(area / ratio))
    fits = (wide >= 1) & (wide <= width) & (tall >= 1) & (tall <= height)
    first = np.argmax(fits, axis=2)[:, :, None]  # [R, k, 1] the first try that fits
    wide, tall = (np.take_along_axis(sides, first, axis=2).astype(np.int64) for sides in (wide, tall))
    top = below(np.take_along_axis(draws[..., 2], first, axis=2), height - tall + 1)
    left = below(np.take_along_axis(draws[..., 3], first, axis=2), width - wide + 1)
    boxes: Integers = np.concatenate([top, left, tall, wide], axis=2)  # [R, k, 4]
    return np.where(fits.any(axis=2)[:, :, None], boxes, _central_boxes(sizes)[:, None, :])


SCALES = (2, 4, 8)
"""Factors by which libjpeg can reduce an image during decoding."""


def on_scaled_pixels(boxes: Integers, side: int) -> tuple[Integers, Integers]:
    """Return boxes [R, k, 4] on whole pixels of the scaled images, and the scales [R].

    The scale of an image is the largest at which each of its boxes has at least the crop's size. A map that is cut by
    these boxes stays aligned with the scaled image.

    Args:
        boxes: [R, k, 4] top, left, height, width.
        side: size of a crop.
    """
    shortest = boxes[:, :, 2:].min(axis=(1, 2))  # [R]
    scales = np.ones(len(boxes), dtype=np.int64)
    for scale in SCALES:
        scales[shortest // scale >= side] = scale
    steps = scales[:, None, None]  # [R, 1, 1]
    return boxes // steps * steps, scales


def _central_boxes(sizes: Integers) -> Integers:
    """Return the largest central box of each image with an allowed ratio, [R, 4]."""
    height, width = sizes[:, 0], sizes[:, 1]
    tall = np.minimum(height, np.rint(width / SHORTEST).astype(np.int64))
    wide = np.minimum(width, np.rint(height * LONGEST).astype(np.int64))
    boxes: Integers = np.stack([(height - tall) // 2, (width - wide) // 2, tall, wide], axis=1)
    return boxes


def _place(crop: Tensor, flip: bool, out: Tensor) -> None:
    out.copy_(functional.horizontal_flip(crop) if flip else crop)


_JITTER = np.uint64(name_hash("jitter"))


@dataclass(frozen=True, kw_only=True)
class Jitters:
    """Augmentations of the images of a batch.

    Attributes:
        boxes: [R, 4] top, left, height, width of the visible part, in pixels of the image.
        shown: [R, 2] height and width of that part in the crop, from its upper left corner.
        flips: [R] mask of the mirrored crops; the padding is mirrored too.
    """

    boxes: Integers
    shown: Integers
    flips: npt.NDArray[np.bool_]


class Jitter:
    """Draws jitters and applies them.

    Args:
        crops: size, flip and interpolation.
        scales: smallest and largest size of an image, in units of crops.size.
        longer: apply `scales` to the longer side of the image, otherwise to the shorter one.
    """

    def __init__(self, crops: CropConfig, scales: tuple[float, float], *, longer: bool) -> None:
        self.size, self._flip = crops.size, crops.flip
        self._low, self._high = scales
        self._longer = longer
        self._mode = InterpolationMode[crops.interpolation.upper()]

    def draw(self, states: Words, sizes: Integers) -> Jitters:
        """Draw the jitter of each row.

        Args:
            states: [R] a word per row (`plan.row_states`).
            sizes: [R, 2] height and width of the image.
        """
        words = mix(mix(states ^ _JITTER)[:, None] ^ np.arange(4, dtype=np.uint64))  # [R, 4]
        scale = self._low + (self._high - self._low) * uniform(words[:, 0])
        side = sizes.max(axis=1) if self._longer else sizes.min(axis=1)
        ratio = (scale * self.size / side)[:, None]  # [R, 1]
        scaled = np.maximum(1, np.rint(sizes * ratio)).astype(np.int64)  # [R, 2]
        shown = np.minimum(scaled, self.size)
        # Visible part in pixels of the image: image and map are cut by the same box, so they stay aligned.
        extent = np.clip(np.rint(shown * sizes / scaled).astype(np.int64), 1, sizes)
        corner = below(words[:, 1:3], sizes - extent + 1)
        return Jitters(
            boxes=np.concatenate([corner, extent], axis=1), shown=shown, flips=uniform(words[:, 3]) < self._flip
        )

    def cut(self, image: Tensor, jitters: Jitters, row: int, out: Tensor) -> None:
        """Write the jittered image of one row into `out`, which holds the padding's colour.

        Args:
            image: [3, H, W] uint8.
            jitters: jitters of the batch.
            row: number of the row in the batch.
            out: [3, S, S] uint8, output.
        """
        top, left, height, width = jitters.boxes[row].tolist()
        part = image[:, top : top + height, left : left + width]
        part = functional.resize(part, jitters.shown[row].tolist(), interpolation=self._mode, antialias=True)
        self.visible(jitters, row, out)[:] = functional.horizontal_flip(part) if jitters.flips[row] else part

    def visible(self, jitters: Jitters, row: int, out: Any) -> Any:
        """Return the view of the crop `out` [..., S, S] of one row that shows the image, without the padding."""
        tall, wide = jitters.shown[row].tolist()
        return out[..., :tall, self.size - wide :] if jitters.flips[row] else out[..., :tall, :wide]

    def pick(self, map_: Map, jitters: Jitters, row: int, out: Map) -> None:
        """Cut a map [H, W] like `cut`, with the number at the centre of each pixel; `out` [S, S]."""
        top, left, height, width = jitters.boxes[row].tolist()
        tall, wide = jitters.shown[row].tolist()
        picked = pick_centres(map_[top : top + height, left : left + width], tall, wide)
        self.visible(jitters, row, out)[:] = picked[:, ::-1] if jitters.flips[row] else picked


def pick_centres(map_: Map, tall: int, wide: int) -> Map:
    """Resample [H, W] or [H, W, C] to [tall, wide] or [tall, wide, C] without interpolation: each pixel takes the
    number at its centre."""
    height, width = map_.shape[:2]
    lines = (2 * np.arange(tall) + 1) * height // (2 * tall)
    columns = (2 * np.arange(wide) + 1) * width // (2 * wide)
    picked: Map = map_.take(lines, axis=0).take(columns, axis=1)
    return picked


UNDISTORTED = (0.0, 1.0, 1.0, 0.0)
"""Brightness, added to bytes; factors of contrast and of saturation; hue in steps of two degrees."""
LOWEST_DISTORTION, HIGHEST_DISTORTION = (-32.0, 0.5, 0.5, -18.0), (32.0, 1.5, 1.5, 18.0)
"""Limits of these four. The hue is rounded down, so that 18 steps do not occur."""


def draw_distortions(states: Words) -> npt.NDArray[np.float64]:
    """Draw from the states [R] of rows (`plan.row_states`) their distortions [R, 5]: the four values of UNDISTORTED,
    and 1 if contrast comes last, else 0."""
    shares = uniform(mix(mix(states ^ _DISTORTION)[:, None] ^ np.arange(9, dtype=np.uint64)))  # [R, 9]
    values = np.add(LOWEST_DISTORTION, np.subtract(HIGHEST_DISTORTION, LOWEST_DISTORTION) * shares[:, :4])
    values[:, 3] = np.floor(values[:, 3])
    values = np.where(shares[:, 4:8] < 0.5, values, UNDISTORTED)
    return np.concatenate([values, shares[:, 8:] < 0.5], axis=1)


def distort(image: Tensor, distortion: npt.NDArray[np.float64]) -> Tensor:
    """Return an image [3, H, W] uint8 after a distortion [5] of `draw_distortions`."""
    brightness, contrast, saturation, hue, contrast_last = distortion.tolist()
    pixels: Tensor = (image.float() + brightness).clamp(0, 255)
    if not contrast_last:
        pixels = (pixels * contrast).clamp(0, 255)
    if saturation != 1:
        # At a fixed hue and value, distances from the largest channel are proportional to the saturation, at most 1.
        largest = pixels.amax(0)
        extent = largest - pixels.amin(0)
        factor = torch.where(extent > 0, largest / extent.clamp(min=1e-6), 1.0).clamp(max=saturation)
        pixels = largest - (largest - pixels) * factor
    if hue:
        pixels = 255 * functional.adjust_hue(pixels / 255, hue / 180)
    if contrast_last:
        pixels = (pixels * contrast).clamp(0, 255)
    return pixels.round().to(torch.uint8)
