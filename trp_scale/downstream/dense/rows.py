"""Opening images with the map that a fine-tuning run learns, and statistics of depth that a head starts from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from trp_scale.config import RefusedError
from trp_scale.config.finetuning import FinetuneConfig
from trp_scale.data.images.dataset import ImageDataset, ImageMeta, agree_images, open_image_dataset
from trp_scale.data.images.rows import RowReader
from trp_scale.data.images.stored_modalities import stored_modalities
from trp_scale.data.index import DataError, read_json
from trp_scale.data.kinds import Rows
from trp_scale.data.mixture import MemberPath
from trp_scale.data.plan import Addresses
from trp_scale.downstream.dense.batch import JitteredBatchBuilder, WholeBatchBuilder
from trp_scale.downstream.dense.maps import DepthMaps, SegmentationMaps

MapName = Literal["semseg", "depth"]


@dataclass(frozen=True, kw_only=True)
class DenseData:
    """Opened data sets with one map for each image.

    Attributes:
        datasets: members of the mixture.
        meta: what they have in common.
        maps: how their maps are read.
    """

    datasets: list[ImageDataset]
    meta: ImageMeta
    maps: SegmentationMaps | DepthMaps

    def rows(self, config: FinetuneConfig, *, whole: bool) -> Rows:
        """Their rows, as jittered crops or as whole images."""
        kind = WholeBatchBuilder if whole else JitteredBatchBuilder
        return Rows(
            blocks=[dataset.blocks for dataset in self.datasets],
            meta=self.meta,
            limit=0,
            builder=kind(config, self.datasets, self.meta, self.maps),
            digests=[dataset.digest() for dataset in self.datasets],
        )


def open_dense(config: FinetuneConfig, paths: Sequence[MemberPath], name: MapName) -> DenseData:
    """Open data sets that trp-scale shard-images wrote with maps.

    Raises:
        DataError: the data is missing, damaged or of another format, or the members of a mixture differ.
        RefusedError: images without such maps, a folder that is not sharded yet, or settings that do not fit them.
    """
    for path in paths:
        _check(path, name)
    datasets = [open_image_dataset(path.path, path.name, (name,)) for path in paths]
    meta = agree_images(datasets)
    if name == "depth":
        return DenseData(datasets=datasets, meta=meta, maps=DepthMaps(datasets, config.dense))
    classes = meta.semseg_classes or ()
    if wrong := [number for number in config.dense.ignored if not 0 <= number < len(classes)]:
        raise RefusedError(
            f"--dense.ignored {wrong[0]}: {paths[0].path} has classes 0 to {len(classes) - 1}; 255 is void by itself"
        )
    maps = SegmentationMaps(classes, config.dense.ignored)
    if len(maps.classes) < 2:
        raise RefusedError(f"{paths[0].path}: {len(maps.classes)} class is left of --dense.ignored, allowed: 2 or more")
    return DenseData(datasets=datasets, meta=meta, maps=maps)


def _check(path: MemberPath, name: MapName) -> None:
    """Refuse what is no data set with such maps, with the command that makes one."""
    extra = " --semseg_classes NAMES.txt" if name == "semseg" else " --depth_scale 0.001"
    command = (
        f"trp-scale shard-images --inputs IMAGES --modality {name}=MAPS{extra} --output DATA, then --data.path DATA"
    )
    document = path.path / "dataset.json"
    if path.path.is_dir() and not document.is_file():
        raise RefusedError(f"{path.path}: no dataset.json, so these are not shards yet; make them: {command}")
    try:
        found = stored_modalities(document, read_json(document))
    except DataError as error:
        raise DataError(f"{error}; images with maps are made with {command}") from error
    if name not in found:
        there = ", ".join(["images", *found])
        raise RefusedError(f"{path.path} has {there} only, --downstream.kind needs {name} maps; make them: {command}")
    if name == "semseg" and found[name].classes is None:
        raise RefusedError(f"{document}: segmentation maps without a list of their classes; shard again: {command}")


def depth_statistics(data: DenseData, addresses: Addresses, *, inverse: bool) -> tuple[float, float]:
    """Mean and standard deviation of the measured pixels of some maps.

    Args:
        data: with maps of depth.
        addresses: of the rows.
        inverse: of 1 / depth in place of depth.

    Raises:
        DataError: none of these maps has a measured pixel.
    """
    assert isinstance(data.maps, DepthMaps)
    rows = RowReader(data.datasets, data.meta, verify=False).read(addresses)
    count, total, squares = 0, 0.0, 0.0
    for sample, member in zip(rows.samples, addresses.member.tolist(), strict=True):
        if sample is not None:
            depth = data.maps.read(sample, member).astype(np.float64)
            values = depth[depth > 0]
            values = 1 / values if inverse else values
            count, total, squares = count + len(values), total + float(values.sum()), squares + float(values @ values)
    if count == 0:
        raise DataError(
            f"{data.datasets[0].directory}: no depth from --dense.min_depth to --dense.max_depth in the first "
            f"{len(rows.samples)} training images"
        )
    mean = total / count
    return mean, float(np.sqrt(max(squares / count - mean**2, 0.0))) or 1.0
