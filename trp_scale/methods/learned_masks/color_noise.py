"""Masks from filtered noise (ColorMAE, Hinojosa et al., ECCV 2024, section 3): no parameters, blind to the image.

With white noise W, a Gaussian blur G and a finer one F: red G W (low-pass), blue W - G W (high-pass), green F W - G W
(band-pass), purple W - green (band-stop). The patches with the largest noise are masked. All sums are of integers, so
masks do not depend on the batch or on the machine.
"""

from __future__ import annotations

import math

import numpy as np

from trp_scale.data.hashing import Integers, Words, mix
from trp_scale.methods.learned_masks.settings import ColorSettings

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
