"""Batches of images with one map, and what data is refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.fixtures import copy_dataset
from tests.unit.data.images.stored import photograph
from trp_scale.config import RefusedError
from trp_scale.core.batch import Batch
from trp_scale.data.images.crops import GREY
from trp_scale.data.images.dataset import DecodedSample
from trp_scale.data.mixture import parse_paths
from trp_scale.data.plan import Addresses, HeldOutPlan
from trp_scale.finetuning.dense.batch import (
    DenseData,
    DenseMaps,
    DepthMaps,
    JitteredBatchBuilder,
    SegmentationMaps,
    WholeBatchBuilder,
    WindowCutter,
    join_rows,
)
from trp_scale.finetuning.dense.settings import DenseTaskConfig, DepthTaskConfig, SegmentationTaskConfig
from trp_scale.finetuning.dense.task import join_windows, open_dense, predict_whole
from trp_scale.pretraining.modalities.semseg import VOID

SIZE = 24


def settings(kind: type[DenseMaps] = SegmentationMaps, **changes: object) -> DenseTaskConfig:
    config = SegmentationTaskConfig() if kind is SegmentationMaps else DepthTaskConfig()
    config.crops.size = SIZE
    for name, value in changes.items():
        setattr(config.dense, name, value)
    return config


def addresses(data: DenseData, config: DenseTaskConfig, path: Path, count: int) -> Addresses:
    rows = data.rows(config, whole=True)
    everything = [np.ones(len(blocks.rows), dtype=np.bool_) for blocks in rows.blocks]
    return HeldOutPlan(members=rows.members(parse_paths(str(path)), everything)).locate(np.arange(count))


def open_data(path: Path, kind: type[DenseMaps], **changes: object) -> tuple[DenseTaskConfig, DenseData]:
    config = settings(kind, **changes)
    return config, open_dense(config, parse_paths(str(path)), kind)


def test_ignored_classes_are_void_and_the_others_are_numbered_anew(image_dataset: Path) -> None:
    config, data = open_data(image_dataset, SegmentationMaps, ignored=[1, 4])
    assert isinstance(data.maps, SegmentationMaps)
    all_config, all_data = open_data(image_dataset, SegmentationMaps)
    names = all_data.maps.all_classes
    assert names is not None and data.maps.classes == tuple(n for i, n in enumerate(names) if i not in (1, 4))
    where = addresses(data, config, image_dataset, 6)
    new = WholeBatchBuilder(config, data).build(where, 0)["whole_semseg"]
    old = WholeBatchBuilder(all_config, all_data).build(where, 0)["whole_semseg"]
    ignored = (old == 1) | (old == 4)
    assert ignored.any() and ((new == VOID) == ignored).all()
    assert [data.maps.classes[i] for i in new[~ignored].tolist()] == [names[i] for i in old[~ignored].tolist()]


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("kind", [SegmentationMaps, DepthMaps])
def test_padding_rows_have_empty_maps(image_dataset: Path, kind: type[DenseMaps], whole: bool) -> None:
    config, data = open_data(image_dataset, kind)
    count = data.meta.rows
    batch = data.rows(config, whole=whole).builder.build(addresses(data, config, image_dataset, count + 2), 0)
    assert batch["row_weights"][count:].tolist() == [0.0, 0.0] and batch["row_weights"][:count].all()
    empty = VOID if kind is SegmentationMaps else 0
    fields = [kind.name, f"whole_{kind.name}"] if whole else [kind.name]
    for field in fields:
        assert (batch[field][count:] == empty).all() and (batch[field][:count] != empty).any()
    if whole:
        assert batch["window_counts"][count:].tolist() == [1, 1], "every row has a window: passes are never empty"


def test_depth_is_in_metres_and_within_the_limits(image_dataset: Path) -> None:
    config, data = open_data(image_dataset, DepthMaps)
    where = addresses(data, config, image_dataset, 8)
    builder = WholeBatchBuilder(config, data)
    whole = builder.build(where, 0)["whole_depth"]
    stored = builder._rows.read(where).samples[3]
    assert stored is not None and torch.equal(
        whole[3], torch.from_numpy(stored.maps["depth"].astype(np.float32) * np.float32(0.001))
    )
    middle = float(whole.median())
    near, far = (
        open_data(image_dataset, DepthMaps, max_depth=middle),
        open_data(image_dataset, DepthMaps, min_depth=middle),
    )
    parts = [WholeBatchBuilder(config, data).build(where, 0)["whole_depth"] for config, data in (near, far)]
    assert float(parts[0].max()) <= middle and float(parts[1][parts[1] > 0].min()) >= middle
    assert (parts[0] > 0).sum() + (parts[1] > 0).sum() >= (whole > 0).sum()
    assert isinstance(data.maps, DepthMaps) and data.maps.metric and not data.maps.nearer


def test_depth_of_each_member_is_in_its_own_units(image_dataset: Path, tmp_path: Path) -> None:
    copy = copy_dataset(image_dataset, tmp_path / "copy", modalities={"depth": {"scale": 0.002}})
    config = settings(DepthMaps)
    maps = open_dense(config, parse_paths(f"a:1={image_dataset},b:1={copy}"), DepthMaps).maps
    stored = DecodedSample(
        image=torch.zeros(3, 2, 2), size=(2, 2), maps={"depth": np.array([[0, 1000], [2000, 500]], np.uint16)}, label=-1
    )
    assert maps.read(stored, 0).tolist() == [[0, 1], [2, 0.5]]
    assert maps.read(stored, 1).tolist() == [[0, 2], [4, 1]]


def test_a_training_row_is_the_same_in_every_batch(image_dataset: Path) -> None:
    config, data = open_data(image_dataset, SegmentationMaps)
    builder = JitteredBatchBuilder(config, data)
    where = addresses(data, config, image_dataset, 6)
    one = Addresses(**{name: getattr(where, name)[4:5] for name in vars(where)})
    together, alone = builder.build(where, 0), builder.build(one, 4)
    for name in ("images", "semseg"):
        assert torch.equal(together[name][4], alone[name][0])
    assert len(together["semseg"].unique()) > 2


def test_distortion_changes_images_alone_and_neither_padding_nor_place(image_dataset: Path) -> None:
    config, data = open_data(image_dataset, SegmentationMaps, min_scale=0.5, max_scale=0.9)
    where = addresses(data, config, image_dataset, 12)
    plain = JitteredBatchBuilder(config, data).build(where, 0)
    config.dense.distortion = True
    distorted = JitteredBatchBuilder(config, data).build(where, 0)
    assert torch.equal(plain["semseg"], distorted["semseg"])
    changed = (plain["images"] != distorted["images"]).any(1)  # [R, S, S]
    padding = (plain["images"] == GREY).all(1) & (plain["semseg"] == VOID)
    assert padding.flatten(1).any(1).all() and not (changed & padding).any()
    assert 6 <= changed.flatten(1).any(1).sum() <= 12, "some rows draw no change"


@pytest.mark.parametrize(("height", "width"), [(24, 24), (30, 71), (200, 40), (13, 17)])
def test_windows_cover_the_scaled_image(height: int, width: int) -> None:
    image = torch.from_numpy(np.asarray(photograph(height, width)).copy()).permute(2, 0, 1)
    cutter = WindowCutter(settings().crops, settings().dense)
    windows = cutter.cut(image)
    images, corners, scaled = windows["windows"].double(), windows["window_corners"], windows["scaled_sizes"].tolist()
    assert min(scaled) == SIZE
    assert abs(scaled[0] * width - scaled[1] * height) <= max(height, width), "the shape is kept"
    whole = join_windows(images, corners.tolist(), tuple(scaled))
    assert not whole.isnan().any(), "a pixel that no window shows"
    again = torch.stack([whole[:, t : t + SIZE, x : x + SIZE] for t, x in corners.tolist()])
    assert torch.equal(again, images), "each window lies where it was cut"
    steps = np.diff(np.unique(corners.amax(1)))
    assert (steps <= SIZE * 2 / 3).all(), "neighbours overlap by a third or more"
    squashed = WindowCutter(settings().crops, settings(measured="squashed").dense).cut(image)
    assert squashed["scaled_sizes"].tolist() == [SIZE, SIZE] and squashed["windows"].shape == (1, 3, SIZE, SIZE)


@pytest.mark.parametrize("measured", ["windows", "squashed"])
def test_images_of_any_shape_are_joined_at_their_own_size(measured: str) -> None:
    """Three in one batch, wide, tall and square, by a model that gives back what it sees."""
    cutter = WindowCutter(settings().crops, settings(measured=measured).dense)
    images = [torch.from_numpy(np.array(photograph(*size))).permute(2, 0, 1) for size in ((30, 71), (90, 40), (24, 24))]
    fields = join_rows([cutter.cut(image) for image in images])
    fields["sizes"] = torch.tensor([image.shape[1:] for image in images])
    batch = Batch(fields=fields, keys=torch.arange(3), start=0)
    forward_sizes = []

    def forward(pixels: torch.Tensor) -> list[torch.Tensor]:
        forward_sizes.append(len(pixels))
        return [pixels]

    found = list(predict_whole(forward, lambda pixels: pixels.float(), batch))  # type: ignore[arg-type]
    assert forward_sizes == [int(batch["window_counts"].sum())], "sharded engines need one pass for all windows"
    for image, prediction in zip(images, found, strict=True):
        assert prediction.shape == image.shape
        coarse = [F.avg_pool2d(each[None].float(), 10, ceil_mode=True) for each in (image, prediction)]
        assert (coarse[0] - coarse[1]).abs().max() < 12, "resized twice, and otherwise in place"


def test_the_loss_of_a_measured_image_is_of_all_of_it(image_dataset: Path) -> None:
    """Whatever its shape, and also where its windows are measured."""
    image = torch.from_numpy(np.array(photograph(30, 71))).permute(2, 0, 1)
    numbers = (np.arange(71) * 2 // 71).astype(np.uint8)[None].repeat(30, axis=0)
    sample = DecodedSample(image=image, size=(image.shape[1], image.shape[2]), maps={"semseg": numbers}, label=-1)
    config, data = open_data(image_dataset, SegmentationMaps)
    squashed, windows, prepared = WholeBatchBuilder(config, data).prepare(sample, 0)
    assert len(windows["windows"]) > 1
    expected = F.interpolate(image[None].float(), size=(SIZE, SIZE), mode="bicubic", antialias=True)[0]
    assert (squashed.float() - expected).abs().max() < 2
    assert prepared.shape == (30, 71)


def test_other_data_is_refused_with_the_command_that_creates_it(image_dataset: Path, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    with pytest.raises(RefusedError, match=r"trp-scale shard-images.*semseg=MAPS"):
        open_data(folder, SegmentationMaps)
    with pytest.raises(RefusedError, match=r"--dense.ignored 10: .* classes 0 to 9"):
        open_data(image_dataset, SegmentationMaps, ignored=[10])
    with pytest.raises(RefusedError, match=r"--dense.ignored"):
        open_data(image_dataset, SegmentationMaps, ignored=list(range(1, 10)))
    unnamed = copy_dataset(image_dataset, tmp_path / "unnamed", modalities={"semseg": {"classes": None}})
    with pytest.raises(RefusedError, match=r"unnamed/dataset\.json .* --semseg\.classes"):
        open_data(unnamed, SegmentationMaps)
    document = json.loads((unnamed / "dataset.json").read_text())
    del document["modalities"]["depth"]
    document["suffixes"].remove("depth.png")
    (unnamed / "dataset.json").write_text(json.dumps(document))
    with pytest.raises(RefusedError, match=r"depth=MAPS"):
        open_data(unnamed, DepthMaps)
