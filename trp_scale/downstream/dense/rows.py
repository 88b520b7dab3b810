"""Opening images with the map that a fine-tuning run learns, and statistics of depth that a head starts from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from trp_scale.config import RefusedError
from trp_scale.data.images.dataset import ImageDataset, ImageMeta, agree_images, open_image_dataset
from trp_scale.data.images.maps import map_formats, stored_maps
from trp_scale.data.images.rows import RowReader
from trp_scale.data.index import DataError, read_json
from trp_scale.data.mixture import MemberPath
from trp_scale.data.plan import Addresses
from trp_scale.data.rows import Rows
from trp_scale.downstream.dense.batch import JitteredBatchBuilder, WholeBatchBuilder
from trp_scale.downstream.dense.maps import DepthMaps, SegmentationMaps
from trp_scale.downstream.dense.settings import DenseTaskConfig

DenseMaps = SegmentationMaps | DepthMaps


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
    maps: DenseMaps

    def rows(self, config: DenseTaskConfig, *, whole: bool) -> Rows:
        """Their rows, as jittered crops or as whole images."""
        kind = WholeBatchBuilder if whole else JitteredBatchBuilder
        return Rows(
            blocks=[dataset.blocks for dataset in self.datasets],
            meta=self.meta,
            limit=0,
            builder=kind(config, self.datasets, self.meta, self.maps),
            digests=[dataset.digest() for dataset in self.datasets],
        )


def open_dense(config: DenseTaskConfig, paths: Sequence[MemberPath], kind: type[DenseMaps]) -> DenseData:
    """Open data sets that trp-scale shard-images wrote with maps.

    Raises:
        DataError: the data is missing, damaged or of another format, or the members of a mixture differ.
        RefusedError: images without such maps, a folder that is not sharded yet, or settings that do not fit them.
    """
    for path in paths:
        _check(path, kind)
    datasets = [open_image_dataset(path.path, path.name, (kind.name,)) for path in paths]
    return DenseData(datasets=datasets, meta=agree_images(datasets), maps=kind.of(datasets, config.dense))


def _check(path: MemberPath, kind: type[DenseMaps]) -> None:
    """Refuse what is no data set with such maps, with the command that makes one."""
    name = kind.name
    command = (
        f"trp-scale shard-images --inputs IMAGES --modality {name}=MAPS {kind.sharded_with} --output DATA, then "
        "--data.path DATA"
    )
    document = path.path / "dataset.json"
    if path.path.is_dir() and not document.is_file():
        raise RefusedError(f"{path.path}: no dataset.json, so these are not shards yet; make them: {command}")
    try:
        found = stored_maps(document, read_json(document))
    except DataError as error:
        raise DataError(f"{error}; images with maps are made with {command}") from error
    if name not in found:
        there = ", ".join(["images", *found])
        raise RefusedError(f"{path.path} has {there} only, --downstream.kind needs {name} maps; make them: {command}")
    map_formats()[name].require(document, found[name])


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
