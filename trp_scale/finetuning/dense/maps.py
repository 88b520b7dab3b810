"""Targets of a pixel model from stored maps: class numbers without ignored ones, or depth in metres."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from trp_scale.config import RefusedError
from trp_scale.data.images.dataset import ImageDataset
from trp_scale.data.images.rows import DecodedSample
from trp_scale.finetuning.dense.settings import DenseConfig, DepthConfig, SegmentationConfig
from trp_scale.pretraining.modalities.depth import RELATIVE_SCALE, Depth, StoredDepth
from trp_scale.pretraining.modalities.semseg import VOID, Semseg, StoredClasses

UNMEASURED = 0.0
"""In maps of depth: nothing was measured there, or it is out of dense.min_depth to dense.max_depth."""


class SegmentationMaps:
    """Class numbers [H, W] uint8 of those classes that are not ignored, numbered anew from 0; 255 void.

    Args:
        classes: names of all classes of the stored maps.
        ignored: numbers of those that are void.

    Attributes:
        name: of the modality and of the batch's field.
        all_classes: names of the classes of the stored maps.
        classes: names of those that are left.
        stored_numbers: [classes] uint8, the number in the stored maps of each that is left.
    """

    name = Semseg.name
    sharded_with = "--semseg.classes NAMES.txt"
    """What these maps are sharded with."""

    def __init__(self, classes: Sequence[str], ignored: Sequence[int]) -> None:
        kept = [number for number in range(len(classes)) if number not in ignored]
        self.all_classes, self.classes = tuple(classes), tuple(classes[number] for number in kept)
        self.stored_numbers = np.array(kept, dtype=np.uint8)
        self._numbers = np.full(256, VOID, dtype=np.uint8)  # the new number of each stored one
        self._numbers[kept] = np.arange(len(kept))

    @classmethod
    def from_datasets(cls, datasets: Sequence[ImageDataset], dense: DenseConfig) -> SegmentationMaps:
        """Open the maps of a mixture.

        Raises:
            RefusedError: there is no such class to ignore, or fewer than two are left.
        """
        assert isinstance(dense, SegmentationConfig)
        directory, stored = datasets[0].directory, datasets[0].meta.maps[cls.name]
        assert isinstance(stored, StoredClasses)
        classes = stored.classes or ()
        if wrong := [number for number in dense.ignored if not 0 <= number < len(classes)]:
            raise RefusedError(
                f"--dense.ignored {wrong[0]}: {directory} has classes 0 to {len(classes) - 1}; 255 is void by itself"
            )
        maps = cls(classes, dense.ignored)
        if len(maps.classes) < 2:
            raise RefusedError(f"{directory}: {len(maps.classes)} class is left of --dense.ignored, allowed: 2 or more")
        return maps

    def empty(self, shape: tuple[int, ...]) -> npt.NDArray[np.uint8]:
        """Void maps."""
        return np.full(shape, VOID, dtype=np.uint8)

    def read(self, sample: DecodedSample, member: int) -> npt.NDArray[Any]:
        """The map of a sample."""
        return self._numbers[sample.maps[self.name]]


class DepthMaps:
    """Depth [H, W] float32 in metres, 0 where it is unknown; in shares of the map's range if it has no metres.

    Args:
        datasets: members of the mixture.
        dense: nearest and farthest depth.

    Attributes:
        name: of the modality and of the batch's field.
        metric: whether the maps are in metres.
        nearer: whether larger numbers are nearer (inverse depth).
        units: of each member, what a number of its stored maps counts.

    Raises:
        RefusedError: some members' maps are in metres, others not.
    """

    name = Depth.name
    sharded_with = "--depth.scale 0.001"

    def __init__(self, datasets: Sequence[ImageDataset], dense: DepthConfig) -> None:
        maps = [stored for dataset in datasets for stored in dataset.maps if isinstance(stored, StoredDepth)]
        in_metres = [stored.scale is not None for stored in maps]
        self.metric = all(in_metres)
        if any(in_metres) and not self.metric:
            raise RefusedError(
                f"{datasets[in_metres.index(False)].directory}: its depth maps have no metres (scale null in "
                f"dataset.json), those of {datasets[in_metres.index(True)].directory} have; allowed: one or the other"
            )
        self.nearer = maps[0].larger_is == "nearer"
        self.units = [RELATIVE_SCALE if stored.scale is None else stored.scale for stored in maps]
        self._low, self._high = dense.min_depth, dense.max_depth or np.inf

    @classmethod
    def from_datasets(cls, datasets: Sequence[ImageDataset], dense: DenseConfig) -> DepthMaps:
        """Open the maps of a mixture."""
        assert isinstance(dense, DepthConfig)
        return cls(datasets, dense)

    def empty(self, shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
        """Maps without measurements."""
        return np.full(shape, UNMEASURED, dtype=np.float32)

    def read(self, sample: DecodedSample, member: int) -> npt.NDArray[np.float32]:
        """The map of a sample of this member of the mixture."""
        depth = sample.maps[self.name].astype(np.float32) * np.float32(self.units[member])
        depth[(depth < self._low) | (depth > self._high)] = UNMEASURED
        metres: npt.NDArray[np.float32] = depth
        return metres
