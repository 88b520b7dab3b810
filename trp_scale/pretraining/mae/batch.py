"""Batches of images: decode each image once, cut the crops, draw the masks.

The visible patches of a crop are sampled without replacement (He et al. 2022, section 3), or by filtered noise
(multilevel.kind color). Every draw is a hash of the crop's word, so a mask depends on (seed, row key, masking, crop)
only.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from trp_scale.config.images import split_patches
from trp_scale.core.batch import Batch
from trp_scale.data.images.crops import Cropper, crop_words, cut_images
from trp_scale.data.images.dataset import ImageDataset, ImageMeta, RowReader, agree_images, open_image_dataset
from trp_scale.data.images.leakage import refuse_test_sets
from trp_scale.data.mixture import MemberPath
from trp_scale.data.plan import Addresses, row_states
from trp_scale.data.sources import Rows, require_kind
from trp_scale.pretraining.mae.masks import draw_masks
from trp_scale.pretraining.mae.settings import MaeConfig
from trp_scale.pretraining.tasks import source_field


class ImageBatchBuilder:
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

    @property
    def limit(self) -> int:
        """Masked patches per crop."""
        return self.split.masked

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
    """Open image data sets (see `Upstream.open_rows`)."""
    require_kind(paths, config.reads)
    datasets = [open_image_dataset(path.path, path.name) for path in paths]
    if config.multilevel.learns:
        refuse_test_sets(datasets, config.multilevel.kind)
    meta = agree_images(datasets)
    return Rows.from_datasets(
        datasets, meta, ImageBatchBuilder(config, datasets, meta), [dataset.samples.labels for dataset in datasets]
    )
