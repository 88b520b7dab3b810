"""Masks of crops: random (He et al. 2022, section 3), or from filtered noise (ColorMAE, Hinojosa et al., ECCV 2024,
section 3), which has no parameters and does not depend on the image.

ColorMAE's noise, with white noise W, a Gaussian blur G and a finer one F: red G W (low-pass), blue W - G W (high-pass),
green F W - G W (band-pass), purple W - green (band-stop). The patches with the largest noise are masked. All sums are
of integers, so masks do not depend on the batch or on the machine.
"""

from __future__ import annotations

import math

import numpy as np

from trp_scale.config.images import MOST_PATCHES, PatchSplit
from trp_scale.data.hashing import Integers, Words, mix, name_hash
from trp_scale.methods.learned_masks.settings import ColorSettings, MultilevelSettings

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
