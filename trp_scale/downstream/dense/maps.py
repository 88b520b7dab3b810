"""From stored maps to what a model of pixels learns: class numbers without ignored ones, depth in metres."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from trp_scale.config import RefusedError
from trp_scale.config.dense import DenseConfig
from trp_scale.data.images.dataset import ImageDataset
from trp_scale.data.images.depth import RELATIVE_SCALE
from trp_scale.data.images.members import VOID
from trp_scale.data.images.rows import DecodedSample

UNMEASURED = 0.0
"""In maps of depth: nothing was measured there, or it is out of dense.min_depth to dense.max_depth."""


class SegmentationMaps:
    """Class numbers [H, W] uint8 of those classes that are not ignored, numbered anew from 0; 255 void.

    Args:
        classes: names of all classes of the stored maps.
        ignored: numbers of those that are void.

    Attributes:
        name: of the batch's field.
        classes: names of the classes that are left.
    """

    name = "semseg"

    def __init__(self, classes: Sequence[str], ignored: Sequence[int]) -> None:
        kept = [number for number in range(len(classes)) if number not in ignored]
        self.classes = tuple(classes[number] for number in kept)
        self._numbers = np.full(256, VOID, dtype=np.uint8)  # the new number of each stored one
        self._numbers[kept] = np.arange(len(kept))

    def empty(self, shape: tuple[int, ...]) -> npt.NDArray[np.uint8]:
        """Void maps."""
        return np.full(shape, VOID, dtype=np.uint8)

    def read(self, sample: DecodedSample, member: int) -> npt.NDArray[Any]:
        """The map of a sample."""
        return self._numbers[sample.maps["semseg.png"]]


class DepthMaps:
    """Depth [H, W] float32 in metres, 0 where it is unknown; in shares of the map's range if it has no metres.

    Args:
        datasets: members of the mixture.
        dense: nearest and farthest depth.

    Attributes:
        name: of the batch's field.
        metric: whether the maps are in metres.
        nearer: whether larger numbers are nearer (inverse depth).

    Raises:
        RefusedError: some members' maps are in metres, others not.
    """

    name = "depth"

    def __init__(self, datasets: Sequence[ImageDataset], dense: DenseConfig) -> None:
        maps = [next(each for each in dataset.modalities if each.name == "depth") for dataset in datasets]
        in_metres = [each.scale is not None for each in maps]
        self.metric = all(in_metres)
        if any(in_metres) and not self.metric:
            raise RefusedError(
                f"{datasets[in_metres.index(False)].directory}: its depth maps have no metres (scale null in "
                f"dataset.json), those of {datasets[in_metres.index(True)].directory} have; allowed: one or the other"
            )
        self.nearer = maps[0].larger_is == "nearer"
        self._units = [RELATIVE_SCALE if each.scale is None else each.scale for each in maps]
        self._low, self._high = dense.min_depth, dense.max_depth or np.inf

    def empty(self, shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
        """Maps without measurements."""
        return np.full(shape, UNMEASURED, dtype=np.float32)

    def read(self, sample: DecodedSample, member: int) -> npt.NDArray[np.float32]:
        """The map of a sample of this member of the mixture."""
        depth = sample.maps["depth.png"].astype(np.float32) * np.float32(self._units[member])
        depth[(depth < self._low) | (depth > self._high)] = UNMEASURED
        metres: npt.NDArray[np.float32] = depth
        return metres
