"""Batches of images with a segmentation or depth map: jittered crops for training, whole images for evaluation."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2 import functional

from trp_scale.config import RefusedError
from trp_scale.config.images import CropConfig
from trp_scale.core.batch import Batch
from trp_scale.data.fetch import BatchBuilder
from trp_scale.data.images.crops import GREY, Jitter, distort, draw_distortions, pick_centres
from trp_scale.data.images.dataset import DecodedSample, ImageDataset, ImageMeta, RowReader
from trp_scale.data.plan import Addresses, row_states
from trp_scale.data.sources import Rows
from trp_scale.finetuning.dense.settings import DenseConfig, DenseTaskConfig, DepthConfig, SegmentationConfig
from trp_scale.pretraining.modalities.depth import RELATIVE_SCALE, Depth, StoredDepth
from trp_scale.pretraining.modalities.semseg import VOID, Semseg, StoredClasses


class WindowCutter:
    """Scales images and cuts them into windows of crops.size, or squashes each into a single window."""

    def __init__(self, crops: CropConfig, dense: DenseConfig) -> None:
        self.size = crops.size
        self._squashed = dense.measured == "squashed"
        self._stride = max(1, int(crops.size * (1 - dense.overlap) + 1e-9))
        self._mode = InterpolationMode[crops.interpolation.upper()]

    def cut(self, image: Tensor) -> dict[str, Tensor]:
        """Return the windows of an image [3, H, W] uint8, as fields of `WholeBatchBuilder` for one row."""
        size, (height, width) = self.size, image.shape[1:]
        shorter = min(height, width)
        scaled = (size, size) if self._squashed else (round(height * size / shorter), round(width * size / shorter))
        whole = functional.resize(image, list(scaled), interpolation=self._mode, antialias=True)
        corners = [(top, left) for top in self._offsets(scaled[0]) for left in self._offsets(scaled[1])]
        cut = [whole[:, top : top + size, left : left + size] for top, left in corners]
        return {
            "windows": torch.stack(cut),
            "window_corners": torch.tensor(corners),
            "scaled_sizes": torch.tensor(scaled),
        }

    def _offsets(self, length: int) -> list[int]:
        """Return the windows' offsets along a side: a stride apart, the last window flush with the end."""
        last = length - self.size
        return [*range(0, last, self._stride), last]


class JitteredBatchBuilder(BatchBuilder):
    """Builds training batches of R crops of S x S pixels.

    Fields of the batch:
        images [R, 3, S, S] uint8: RGB, padded with grey.
        semseg [R, S, S] uint8: class numbers, 255 = void; or depth [R, S, S] float32: 0 = not measured.
        labels [R] int64: class of the image, or -1.
        row_weights [R] float32: 1; 0 for a padding row or an undecodable row, which has an empty map.

    Random numbers depend on (training.seed, row key, epoch).
    """

    def __init__(self, config: DenseTaskConfig, data: DenseData) -> None:
        self._seed = config.training.seed
        self._rows = RowReader(data.datasets, data.meta, verify=config.data.verify)
        dense, self._maps, self._distorts = config.dense, data.maps, config.dense.distortion
        scales = (dense.min_scale, dense.max_scale)
        self._jitter = Jitter(config.crops, scales, longer=dense.scaled_side == "longer")

    def build(self, addresses: Addresses, start: int) -> Batch:
        began = time.perf_counter()
        rows = self._rows.read(addresses)
        states = row_states(addresses, seed=self._seed, maskings=0)  # the state changes in each epoch
        jitters = self._jitter.draw(states, rows.sizes)
        distortions = draw_distortions(states) if self._distorts else None
        size = self._jitter.size
        images = torch.full((len(rows.samples), 3, size, size), GREY, dtype=torch.uint8)
        maps = self._maps.empty((len(rows.samples), size, size))
        for row, sample in enumerate(rows.samples):
            if sample is not None:
                self._jitter.cut(sample.image, jitters, row, images[row])
                if distortions is not None:
                    shown = self._jitter.visible(jitters, row, images[row])
                    shown.copy_(distort(shown, distortions[row]))
                self._jitter.pick(self._maps.read(sample, int(addresses.member[row])), jitters, row, maps[row])
        fields = {"images": images, self._maps.name: torch.from_numpy(maps)}
        return rows.batch(fields, addresses, start=start, began=began)


class WholeBatchBuilder(BatchBuilder):
    """Builds batches of whole images for evaluation.

    Fields of `JitteredBatchBuilder` for the image squashed into the crop, for the loss; and:
        windows [R, K, 3, S, S] uint8: sliding windows, padded to the largest number of windows.
        window_corners [R, K, 2] int64: top and left in the scaled image.
        window_counts [R] int64: windows of the image; 1 for a padding row.
        scaled_sizes, sizes [R, 2] int64: height and width of the scaled image and of the stored image.
        whole_semseg or whole_depth [R, H, W]: stored map, padded at right and bottom.
    """

    def __init__(self, config: DenseTaskConfig, data: DenseData) -> None:
        self._rows = RowReader(data.datasets, data.meta, verify=config.data.verify)
        self._squash = WindowCutter(config.crops, replace(config.dense, measured="squashed"))
        squashed = config.dense.measured == "squashed"
        self._cutter = self._squash if squashed else WindowCutter(config.crops, config.dense)
        self._size, self._maps = config.crops.size, data.maps

    def build(self, addresses: Addresses, start: int) -> Batch:
        began = time.perf_counter()
        rows = self._rows.read(addresses)
        prepared = [self.prepare(sample, int(addresses.member[row])) for row, sample in enumerate(rows.samples)]
        squashed, windows, maps = zip(*prepared, strict=True)
        whole = self._maps.empty((len(prepared), *rows.sizes.max(axis=0).tolist()))
        for row, stored in enumerate(maps):
            whole[row, : stored.shape[0], : stored.shape[1]] = stored
        picked = np.stack([pick_centres(stored, self._size, self._size) for stored in maps])
        fields = {
            "images": torch.stack(squashed),
            self._maps.name: torch.from_numpy(picked),
            **join_rows(windows),
            "sizes": torch.from_numpy(rows.sizes),
            f"whole_{self._maps.name}": torch.from_numpy(whole),
        }
        return rows.batch(fields, addresses, start=start, began=began)

    def prepare(self, sample: DecodedSample | None, member: int) -> tuple[Tensor, dict[str, Tensor], npt.NDArray[Any]]:
        """Return a sample squashed into the crop [3, S, S], its windows, and its map [H, W]; `None` gives grey."""
        if sample is None:
            grey = torch.full((3, self._size, self._size), GREY, dtype=torch.uint8)
            return grey, self._squash.cut(grey), self._maps.empty((1, 1))
        squashed = self._squash.cut(sample.image)
        windows = squashed if self._cutter is self._squash else self._cutter.cut(sample.image)
        return squashed["windows"][0], windows, self._maps.read(sample, member)


def join_rows(windows: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Stack the windows of all rows, padded with zeros to the largest number of windows."""
    counts = torch.tensor([len(cut["windows"]) for cut in windows])
    fields = {name: pad_sequence([cut[name] for cut in windows], batch_first=True) for name in windows[0]}
    return {**fields, "window_counts": counts}


UNMEASURED = 0.0
"""Depth value of pixels that were not measured, or are outside dense.min_depth to dense.max_depth."""


class SegmentationMaps:
    """Reads segmentation maps [H, W] uint8, with classes renumbered from 0 without ignored ones; 255 = void.

    Attributes:
        name: of the modality and of the batch's field.
        all_classes: names of the classes of the stored maps.
        classes: names without ignored classes.
        stored_numbers: [classes] uint8, number of each class in the stored maps.

    Raises:
        RefusedError: an ignored class does not exist, or fewer than two classes remain.
    """

    name = Semseg.name
    sharded_with = "--semseg.classes NAMES.txt"
    """Flags of trp-scale shard-images for these maps, for messages."""

    def __init__(self, datasets: Sequence[ImageDataset], dense: DenseConfig) -> None:
        assert isinstance(dense, SegmentationConfig)
        directory, stored = datasets[0].directory, datasets[0].meta.maps[self.name]
        assert isinstance(stored, StoredClasses)
        self.all_classes = tuple(stored.classes or ())
        count = len(self.all_classes)
        if wrong := [number for number in dense.ignored if not 0 <= number < count]:
            raise RefusedError(
                f"--dense.ignored {wrong[0]}: {directory} has classes 0 to {count - 1}; 255 is always void"
            )
        kept = [number for number in range(count) if number not in dense.ignored]
        if len(kept) < 2:
            raise RefusedError(f"{directory}: {len(kept)} class remains after --dense.ignored, allowed: 2 or more")
        self.classes = tuple(self.all_classes[number] for number in kept)
        self.stored_numbers = np.array(kept, dtype=np.uint8)
        self._numbers = np.full(256, VOID, dtype=np.uint8)  # the new number of each stored one
        self._numbers[kept] = np.arange(len(kept))

    def empty(self, shape: tuple[int, ...]) -> npt.NDArray[np.uint8]:
        """Return void maps."""
        return np.full(shape, VOID, dtype=np.uint8)

    def read(self, sample: DecodedSample, member: int) -> npt.NDArray[Any]:
        """Return the map of a sample."""
        return self._numbers[sample.maps[self.name]]


class DepthMaps:
    """Reads depth maps [H, W] float32 in metres, or in shares of the map's range for relative depth; 0 = unknown.

    Attributes:
        name: of the modality and of the batch's field.
        metric: whether the maps are in metres.
        nearer: whether larger values are nearer (inverse depth).
        units: depth per stored number, for each member.

    Raises:
        RefusedError: the mixture has both metric and relative maps.
    """

    name = Depth.name
    sharded_with = "--depth.scale 0.001"

    def __init__(self, datasets: Sequence[ImageDataset], dense: DenseConfig) -> None:
        assert isinstance(dense, DepthConfig)
        maps = [stored for dataset in datasets for stored in dataset.maps if isinstance(stored, StoredDepth)]
        in_metres = [stored.scale is not None for stored in maps]
        self.metric = all(in_metres)
        if any(in_metres) and not self.metric:
            raise RefusedError(
                f"{datasets[in_metres.index(False)].directory} has relative depth maps (scale null in dataset.json), "
                f"{datasets[in_metres.index(True)].directory} has maps in metres; allowed: one kind"
            )
        self.nearer = maps[0].larger_is == "nearer"
        self.units = [RELATIVE_SCALE if stored.scale is None else stored.scale for stored in maps]
        self._low, self._high = dense.min_depth, dense.max_depth or np.inf

    def empty(self, shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
        """Return maps without measurements."""
        return np.full(shape, UNMEASURED, dtype=np.float32)

    def read(self, sample: DecodedSample, member: int) -> npt.NDArray[np.float32]:
        """Return the map of a sample of this member of the mixture."""
        depth = sample.maps[self.name].astype(np.float32) * np.float32(self.units[member])
        depth[(depth < self._low) | (depth > self._high)] = UNMEASURED
        metres: npt.NDArray[np.float32] = depth
        return metres


DenseMaps = SegmentationMaps | DepthMaps


@dataclass(frozen=True, kw_only=True)
class DenseData:
    """Data sets of a mixture, with the metadata that they share and the reader of their maps."""

    datasets: list[ImageDataset]
    meta: ImageMeta
    maps: DenseMaps

    def rows(self, config: DenseTaskConfig, *, whole: bool) -> Rows:
        """Return the rows as jittered crops or whole images."""
        kind = WholeBatchBuilder if whole else JitteredBatchBuilder
        return Rows.from_datasets(self.datasets, self.meta, kind(config, self))
