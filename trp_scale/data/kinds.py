"""The kinds of rows: what opens them and what makes batches of them. Order, split, cursors and workers are the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from trp_scale.config import Config, RefusedError
from trp_scale.data.fetch import BatchBuilder
from trp_scale.data.hashing import Integers
from trp_scale.data.index import read_json
from trp_scale.data.mixture import MemberPath
from trp_scale.data.plan import Blocks, Member
from trp_scale.data.text.dataset import TextMeta, agree, open_text_dataset
from trp_scale.upstreams.mm_mae.settings import MmMaeConfig
from trp_scale.upstreams.pos_bert.batch import TextBatchBuilder

if TYPE_CHECKING:
    from trp_scale.data.images.dataset import ImageDataset, ImageMeta
    from trp_scale.upstreams.mae.batch import ImageBatchBuilder
    from trp_scale.upstreams.mm_mae.batch import MultimodalBatchBuilder

KINDS = ("text", "image")
"""Kinds in dataset.json."""

BUILDERS = {
    "pos_bert": "trp_scale.upstreams.pos_bert.batch",
    "mae": "trp_scale.upstreams.mae.batch",
    "mm_mae": "trp_scale.upstreams.mm_mae.batch",
}
"""Module of the batch builder, by upstream."""


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Opened data sets of one kind.

    Attributes:
        blocks: of each data set.
        meta: what all rows have in common; None for labelled sentences.
        limit: predicted places of a sequence: masked slots of a text row, masked patches of a crop (of all input
            modalities together).
        builder: makes batches of their rows.
        digests: of each data set.
        labels: of images: the class of each, in stored order, for each data set; -1 where they have none.
    """

    blocks: Sequence[Blocks]
    meta: TextMeta | ImageMeta | None
    limit: int
    builder: BatchBuilder
    digests: list[str]
    labels: list[Integers] | None = None

    def members(self, paths: Sequence[MemberPath], chosen: Sequence[npt.NDArray[np.bool_]]) -> list[Member]:
        """The data sets with the blocks that one source takes of each."""
        return [
            Member(name=path.name, weight=path.weight, table=blocks, chosen=mask)
            for path, blocks, mask in zip(paths, self.blocks, chosen, strict=True)
        ]


def open_rows(config: Config, paths: Sequence[MemberPath]) -> Rows:
    """Open data sets of the kind that the objective learns from.

    Raises:
        DataError: the data is missing, damaged or of another format, or the members of a mixture differ.
        RefusedError: settings that do not fit the data or each other, or data of another kind.
    """
    wanted = config.reads
    for path in paths:
        found = read_json(path.path / "dataset.json").get("kind")
        if found != wanted and found in KINDS:
            raise RefusedError(
                f"{path.path}: kind {found!r} found, but this run's encoder reads kind "
                f"{wanted!r}; give other data (--data.path), or choose a recipe for {found} data"
            )
    return _open_images(config, paths) if wanted == "image" else _open_text(config, paths)


def _open_text(config: Config, paths: Sequence[MemberPath]) -> Rows:
    datasets = [open_text_dataset(path.path, path.name) for path in paths]
    meta = agree(datasets)
    if meta.length > config.model.max_positions:
        raise RefusedError(
            f"{paths[0].path}: sequences of {meta.length} pieces, model.max_positions is {config.model.max_positions}; "
            f"raise it (--model.max_positions {meta.length}), or shard the data with a smaller length"
        )
    builder = TextBatchBuilder(config, datasets, meta)
    return Rows(
        blocks=[dataset.blocks for dataset in datasets],
        meta=meta,
        limit=builder.limit,
        builder=builder,
        digests=[dataset.digest() for dataset in datasets],
    )


def _open_images(config: Config, paths: Sequence[MemberPath]) -> Rows:
    from trp_scale.data.images.dataset import agree_images, open_image_dataset  # torchvision: text need not wait for it
    from trp_scale.data.images.kept_for_tests import refuse_test_sets

    used: Sequence[str] = ()
    if isinstance(config, MmMaeConfig):
        from trp_scale.upstreams.mm_mae.tokens import RunModalities

        used = RunModalities(config).stored
    datasets = [open_image_dataset(path.path, path.name, used) for path in paths]
    if config.multilevel.learns:
        refuse_test_sets(datasets, config.multilevel.kind)
    meta = agree_images(datasets)
    builder = _image_builder(config, datasets, meta)
    return Rows(
        blocks=[dataset.blocks for dataset in datasets],
        meta=meta,
        limit=builder.limit,
        builder=builder,
        digests=[dataset.digest() for dataset in datasets],
        labels=[dataset.samples.labels for dataset in datasets],
    )


def _image_builder(
    config: Config, datasets: list[ImageDataset], meta: ImageMeta
) -> ImageBatchBuilder | MultimodalBatchBuilder:
    if isinstance(config, MmMaeConfig):
        from trp_scale.upstreams.mm_mae.batch import MultimodalBatchBuilder

        return MultimodalBatchBuilder(config, datasets, meta)
    from trp_scale.upstreams.mae.batch import ImageBatchBuilder

    return ImageBatchBuilder(config, datasets, meta)
