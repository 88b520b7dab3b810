"""Depth as the model sees it: standardised over its own crop, so that metres and relative depth are alike."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from trp_scale.data.images.members import NOT_MEASURED, Map

RELATIVE_SCALE = 1.0 / 65535
"""Scale of a map without metres: its 16 bits are a share of its range."""

VARIANCE_FLOOR = 1e-6
"""Added to the variance, in metres^2 (or shares^2): a flat crop stays near 0, its steps of a unit are not blown up."""


def standardise(depth: Map, scale: float | None) -> npt.NDArray[np.float32]:
    """Depth over its measured pixels: without the lowest and highest tenth, subtract the mean of the rest and divide by
    sqrt(var + 1e-6) (TRP 4.2; Bachmann et al.).

    Of K measured pixels the K // 10 lowest and as many of the highest are left out, so that mean and variance do not
    depend on which of equal pixels these are. Both are sums of integers: exact, in any order.

    Args:
        depth: [S, S] uint16, 0 where nothing was measured.
        scale: metres per unit; None: relative.

    Returns:
        [S, S] float32, NaN where nothing was measured.
    """
    counts = np.bincount(depth.ravel())  # pixels of each value; partitioning takes half as long again
    counts[NOT_MEASURED : NOT_MEASURED + 1] = 0
    measured = int(counts.sum())
    if measured == 0:
        return np.full(depth.shape, np.nan, dtype=np.float32)
    left_out = measured // 10
    up_to = np.clip(
        counts.cumsum(), left_out, measured - left_out
    )  # kept pixels and the lowest tenth, up to each value
    kept = np.diff(up_to, prepend=left_out)
    values = np.arange(len(kept))
    weighted = kept * values
    count, total, squares = measured - 2 * left_out, int(weighted.sum()), int(weighted @ values)
    unit = RELATIVE_SCALE if scale is None else scale
    variance = (count * squares - total * total) / (count * count) * unit**2
    middle, rest = divmod(total, count)
    result: npt.NDArray[np.float32] = depth.astype(np.float32) - np.float32(
        middle
    )  # exact: differences of 16-bit integers
    result -= np.float32(rest / count)
    result *= np.float32(unit / np.sqrt(variance + VARIANCE_FLOOR))
    result[depth == NOT_MEASURED] = np.nan
    return result
