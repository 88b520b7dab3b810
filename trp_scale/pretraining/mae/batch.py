"""Batches of images: decode each image once, cut the crops, draw the masks.

The visible patches of a crop are sampled without replacement (He et al. 2022, section 3), or by filtered noise
(ColorMAE, Hinojosa et al., ECCV 2024, section 3), which has no parameters and does not depend on the image. Every draw
is a hash of the crop's word, so a mask depends on (seed, row key, masking, crop) only.

ColorMAE's noise, with white noise W, a Gaussian blur G and a finer one F: red G W (low-pass), blue W - G W (high-pass),
green F W - G W (band-pass), purple W - green (band-stop). The patches with the largest noise are masked. All sums are
of integers, so masks do not depend on the batch or on the machine.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

import numpy as np
import torch

from trp_scale.config.images import MOST_PATCHES, PatchSplit, split_patches
from trp_scale.core.batch import Batch
from trp_scale.data.fetch import BatchBuilder
from trp_scale.data.hashing import Integers, Words, mix, name_hash
from trp_scale.data.images.crops import Cropper, crop_words, cut_images
from trp_scale.data.images.dataset import ImageDataset, ImageMeta, RowReader, agree_images, open_image_dataset
from trp_scale.data.images.leakage import refuse_test_sets
from trp_scale.data.mixture import MemberPath
from trp_scale.data.plan import Addresses, row_states
from trp_scale.data.sources import Rows, require_kind
from trp_scale.methods.learned_masks.settings import ColorSettings, MultilevelSettings
from trp_scale.pretraining.mae.settings import MaeConfig
from trp_scale.pretraining.tasks import source_field

_MASK = np.uint64(name_hash("mask: patches"))
_PLACE = np.uint64(MOST_PATCHES - 1)


def draw_masks(words: Words, split: PatchSplit, kind: MultilevelSettings | None = None) -> tuple[Integers, Integers]:
    """Draw the visible and masked patches of each crop. Each set of V patches is equally likely, but by `color`.

    Args:
        words: [R, k] one word per crop (`crops.crop_words`).
        split: N and V; N is at most MOST_PATCHES (checked in config/images.py).
        kind: settings of the masks, of which only those of `color` change the draw.

    Returns:
        visible [R, k, V] and masked [R, k, N - V], patch numbers row by row, ascending.
    """
    words = mix(words ^ _MASK)
    if isinstance(kind, ColorSettings):
        order = order_by_noise(kind, words, split.patches)  # [R, k, N]
    else:
        order = random_order(words, split.patches)
    visible, masked = np.sort(order[:, :, : split.visible], axis=2), np.sort(order[:, :, split.visible :], axis=2)
    return visible, masked


def random_order(words: Words, patches: int) -> Integers:
    """Return patch numbers 0 .. patches - 1 in the order of their hashes: words [...] -> [..., patches]."""
    column = np.arange(patches, dtype=np.uint64)
    order = (mix(words[..., None] ^ column) & ~_PLACE) | column
    order.sort(axis=-1)  # the low bits hold the patch number, so equal hashes keep their order
    numbers: Integers = (order & _PLACE).astype(np.int64)
    return numbers


BITS = 20
"""Bits of the noise and of the filters; a product of noise and two filters is below 2^60."""


def gaussian(side: int, sigma: float, radius: int) -> Integers:
    """Return the blur of side + 2 radius values to side values, [side, side + 2 radius], with rows of sum 2^BITS."""
    weights = np.exp(-0.5 * (np.arange(-radius, radius + 1) / sigma) ** 2)
    kernel: Integers = np.rint(weights / weights.sum() * (1 << BITS)).astype(np.int64)
    kernel[radius] += (1 << BITS) - kernel.sum()
    matrix = np.zeros((side, side + 2 * radius), dtype=np.int64)
    for row in range(side):
        matrix[row, row : row + 2 * radius + 1] = kernel
    return matrix


def color_noise(settings: ColorSettings, words: Words, side: int) -> Integers:
    """Return the noise of each word, [..., side, side], from words [...]; white noise extends beyond the grid."""
    radius = math.ceil(3 * settings.sigma)
    extended = side + 2 * radius
    counters = np.arange(extended**2, dtype=np.uint64).reshape(extended, extended)
    white = (mix(words[..., None, None] ^ counters) >> np.uint64(64 - BITS)).astype(np.int64)
    coarse, fine = (gaussian(side, sigma, radius) for sigma in (settings.sigma, settings.fine_sigma))
    plain = white[..., radius : radius + side, radius : radius + side] << (2 * BITS)
    blurred: Integers = coarse @ white @ coarse.T
    match settings.noise:
        case "red":
            return blurred
        case "blue":
            return plain - blurred
        case _:
            band = fine @ white @ fine.T - blurred
            return band if settings.noise == "green" else plain - band


def order_by_noise(settings: ColorSettings, words: Words, patches: int) -> Integers:
    """Return patch numbers in the order of their noise, the largest last: words [...] -> [..., patches]."""
    noise = color_noise(settings, words, math.isqrt(patches))
    return np.argsort(noise.reshape(*words.shape, patches), axis=-1, kind="stable")


class ImageBatchBuilder(BatchBuilder):
    """Builds batches of R images with k crops of S x S pixels. Each crop has N patches: V visible, M masked.

    Fields of the batch:
        images [R, k, 3, S, S] uint8: red, green, blue.
        visible [R, k, V] int64, masked [R, k, M] int64: patch numbers row by row, ascending.
        labels [R] int64: the class, or -1.
        row_weights [R] float32: 1, or 0 for a row that is absent or cannot be decoded; its image is grey.

    All draws come from (training.seed, row key, epoch modulo masking.maskings, crop). A held-out image always has the
    crops and masks of epoch 0.
    """

    def __init__(self, config: MaeConfig, datasets: list[ImageDataset], meta: ImageMeta) -> None:
        self._config = config
        self._crops = config.crops.count
        self._seed, self._maskings = config.training.seed, config.masking.maskings
        self._rows = RowReader(datasets, meta, verify=config.data.verify)
        self._cropper = Cropper(config.crops)
        self.split = split_patches(config.crops.size, config.vision.patch_size, config.masking.ratio)
        self.limit = self.split.masked
        """Masked patches per crop."""

    def build(self, addresses: Addresses, start: int) -> Batch:
        """Build the batch of the rows at `addresses`; the first is at position `start` of its source."""
        began = time.perf_counter()
        states = row_states(addresses, seed=self._seed, maskings=self._maskings)
        rows = self._rows.read(addresses, self._cropper.scales(states))
        visible, masked = draw_masks(crop_words(states, self._crops), self.split, self._config.multilevel)
        fields = {
            "images": cut_images(self._cropper, self._cropper.draw(states, rows.sizes), rows),
            "visible": torch.from_numpy(visible),
            "masked": torch.from_numpy(masked),
            **source_field(self._config, addresses),
        }
        return rows.batch(fields, addresses, start=start, began=began)


def open_rows(config: MaeConfig, paths: Sequence[MemberPath]) -> Rows:
    require_kind(paths, config.reads)
    datasets = [open_image_dataset(path.path, path.name) for path in paths]
    if config.multilevel.learns:
        refuse_test_sets(datasets, config.multilevel.kind)
    meta = agree_images(datasets)
    return Rows.from_datasets(
        datasets, meta, ImageBatchBuilder(config, datasets, meta), [dataset.samples.labels for dataset in datasets]
    )
