"""How images with aligned maps become a Batch: one crop and one flip for all of a sample."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from trp_scale.core.batch import Batch
from trp_scale.data.images.crops import Cropper, crop_words
from trp_scale.data.images.dataset import ImageDataset, ImageMeta, agree_images, open_image_dataset
from trp_scale.data.images.rows import RowReader
from trp_scale.data.mixture import MemberPath
from trp_scale.data.plan import Addresses, row_states
from trp_scale.data.rows import Rows, require_kind
from trp_scale.upstreams.mm_mae.masks import ModalityMasks
from trp_scale.upstreams.mm_mae.settings import MmMaeConfig
from trp_scale.upstreams.mm_mae.tokens import RunModalities


class MultimodalBatchBuilder:
    """Makes batches of R images, one crop of S x S pixels each, N patches of P x P in I input modalities, V visible.

    Fields of the batch, first dimension rows:
        visible [R, V] int64, ascending: patch p of input modality i is token i N + p.
        labels [R] int64: the class of the image, or -1.
        row_weights [R] float32: 1, or 0 for a row that is not there or cannot be decoded; nothing is known of it then,
            and its image is grey.
        what each modality among the inputs or outputs brings (Modality.fields), for example images [R, 3, S, S] uint8,
        depth [R, S, S] float32 with depth_counts [R, N] int32.

    All draws come from (training.seed, row key, epoch modulo masking.maskings), as ImageBatchBuilder's.
    """

    def __init__(self, config: MmMaeConfig, datasets: list[ImageDataset], meta: ImageMeta) -> None:
        crops = config.crops
        if crops.count != 1 or crops.from_ != "image":
            raise ValueError(f"{crops.count} crops from {crops.from_}: one crop of the image expected")
        self._seed, self._maskings = config.training.seed, config.masking.maskings
        self._rows = RowReader(datasets, meta, verify=config.data.verify)
        self._cropper = Cropper(crops)
        self._modalities = RunModalities(config).used
        self._stored = [{maps.name: maps for maps in dataset.maps} for dataset in datasets]
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
        fields = {"visible": torch.from_numpy(self._masks.draw(crop_words(states, 1)[:, 0]))}
        of_rows = [self._stored[member] for member in addresses.member.tolist()]
        for name, modality in self._modalities.items():
            stored = [] if modality.format is None else [maps[name] for maps in of_rows]
            fields |= modality.fields(rows, crops, self._cropper, stored)
        return rows.batch(fields, addresses, start=start, began=began)


def open_rows(config: MmMaeConfig, paths: Sequence[MemberPath]) -> Rows:
    """Open data sets of images.

    Raises:
        DataError: the data is missing, damaged or of another format, or the members of a mixture differ.
        RefusedError: settings that do not fit the data or each other, or data of another kind.
    """
    require_kind(paths, config.reads)
    stored = RunModalities(config).stored
    datasets = [open_image_dataset(path.path, path.name, stored) for path in paths]
    meta = agree_images(datasets)
    return Rows.of(
        datasets, meta, MultimodalBatchBuilder(config, datasets, meta), [dataset.samples.labels for dataset in datasets]
    )
