"""How images with aligned depth and segmentation maps become a Batch: one crop and one flip for all of a sample."""

from __future__ import annotations

import time

import numpy as np
import numpy.typing as npt
import torch

from trp_scale.config import Config
from trp_scale.core.batch import Batch
from trp_scale.data.images.crops import Cropper, Crops, crop_words
from trp_scale.data.images.dataset import ImageDataset, ImageMeta
from trp_scale.data.images.depth import standardise
from trp_scale.data.images.members import VOID, Map
from trp_scale.data.images.rows import DecodedRows, RowReader
from trp_scale.data.plan import Addresses, row_states
from trp_scale.upstreams.mae.batch import cut_images
from trp_scale.upstreams.mm_mae.masks import ModalityMasks


class MultimodalBatchBuilder:
    """Makes batches of R images, one crop of S x S pixels each, N patches of P x P in I input modalities, V visible.

    Fields of the batch, first dimension rows:
        images [R, 3, S, S] uint8: red, green, blue.
        depth [R, S, S] float32, standardised (depth.py); NaN where nothing was measured.
        semseg [R, S / s, S / s] uint8: class numbers at 1/s of the resolution; 255 where there is none.
        visible [R, V] int64, ascending: patch p of input modality i is token i N + p.
        depth_counts, semseg_counts [R, N] int32: pixels of each patch with a measurement, labels with a class.
        labels [R] int64: the class of the image, or -1.
        row_weights [R] float32: 1, or 0 for a row that is not there or cannot be decoded; it then is grey, without
            measurements and classes.
    depth and semseg, and their counts, are there if they are among the inputs or outputs.

    All draws come from (training.seed, row key, epoch modulo masking.maskings), as ImageBatchBuilder's.
    """

    def __init__(self, config: Config, datasets: list[ImageDataset], meta: ImageMeta) -> None:
        crops, stride = config.crops, config.modalities.segmentation_stride
        if crops.count != 1 or crops.from_ != "image":
            raise ValueError(f"{crops.count} crops from {crops.from_}: one crop of the image expected")
        self._seed, self._maskings = config.training.seed, config.masking.maskings
        self._rows = RowReader(datasets, meta, verify=config.data.verify)
        self._cropper = Cropper(crops)
        self._scales = [
            next((each.scale for each in dataset.modalities if each.name == "depth"), None) for dataset in datasets
        ]
        self._used = meta.modalities
        self._patch_size, self._stride = config.vision.patch_size, stride
        patches = (crops.size // config.vision.patch_size) ** 2
        inputs, visible = len(config.modalities.inputs), config.modalities.visible_tokens
        self._masks = ModalityMasks(
            modalities=inputs, patches=patches, visible=visible, concentration=config.modalities.concentration
        )
        self.limit = inputs * patches - visible
        """Patches of all inputs that are not visible."""

    def build(self, addresses: Addresses, start: int) -> Batch:
        """The batch of the rows at `addresses`, whose first is at position `start` of its source."""
        began = time.perf_counter()
        states = row_states(addresses, seed=self._seed, maskings=self._maskings)
        rows = self._rows.read(addresses)
        crops = self._cropper.draw(states, rows.sizes)
        fields = {
            "images": cut_images(self._cropper, crops, rows).squeeze(1),  # [R, 3, S, S]
            "visible": torch.from_numpy(self._masks.draw(crop_words(states, 1)[:, 0])),
        }
        if "depth" in self._used:
            depth = self._depth(rows, crops, addresses)
            fields["depth"] = torch.from_numpy(depth)
            fields["depth_counts"] = torch.from_numpy(count_patches(~np.isnan(depth), self._patch_size))
        if "semseg" in self._used:
            semseg = self._semseg(rows, crops)
            fields["semseg"] = torch.from_numpy(semseg)
            side = self._patch_size // self._stride
            fields["semseg_counts"] = torch.from_numpy(count_patches(semseg != VOID, side))
        return rows.batch(fields, addresses, start=start, began=began)

    def _depth(self, rows: DecodedRows, crops: Crops, addresses: Addresses) -> npt.NDArray[np.float32]:
        """[R, S, S], whole rows NaN where there is no sample."""
        size = self._cropper.size
        depth = np.full((len(rows.samples), size, size), np.nan, dtype=np.float32)
        for row, sample in enumerate(rows.samples):
            if sample is not None:
                crop = self._cropper.pick(sample.maps["depth.png"], crops, row, size)
                depth[row] = standardise(crop, self._scales[int(addresses.member[row])])
        return depth

    def _semseg(self, rows: DecodedRows, crops: Crops) -> Map:
        """[R, S / s, S / s], whole rows void where there is no sample."""
        size = self._cropper.size // self._stride
        semseg = np.full((len(rows.samples), size, size), VOID, dtype=np.uint8)
        for row, sample in enumerate(rows.samples):
            if sample is not None:
                semseg[row] = self._cropper.pick(sample.maps["semseg.png"], crops, row, size)
        return semseg


def count_patches(valid: npt.NDArray[np.bool_], side: int) -> npt.NDArray[np.int32]:
    """How many of each patch's pixels are valid, [R, N] for maps [R, N^(1/2) side, N^(1/2) side]."""
    rows, size, _ = valid.shape
    across = size // side
    # Lines first, in 16 bits: five times as fast as both at once.
    lines = valid.view(np.uint8).reshape(rows, across, side, size).sum(axis=2, dtype=np.uint16)
    counts: npt.NDArray[np.int32] = lines.reshape(rows, across * across, side).sum(axis=2, dtype=np.int32)
    return counts
