"""Opening an image data set: what is read, and what is refused."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn.functional import avg_pool2d

from tests.unit.data.images.multimodal import DESCRIBED, SECOND, multimodal_config, nine_beside, rewrite_maps
from tests.unit.data.images.source_images import class_map, png
from tests.unit.data.images.stored import CLASSES, config_for, jpeg, photograph, sample, small_images, write_images
from tests.unit.data.loaded import assert_same, steps
from tests.unit.data.stored import config_for as text_config_for
from tests.unit.data.stored import write_dataset
from trp_scale.config import Config, RefusedError
from trp_scale.config.images import CropsConfig
from trp_scale.config.loader import load_recipe
from trp_scale.data.hashing import name_hash
from trp_scale.data.images.crops import Cropper, on_scaled_pixels
from trp_scale.data.images.dataset import ImageDataset, decode_image, decode_scaled, jpeg_size, open_image_dataset
from trp_scale.data.index import index_path, read_index, read_json, write_json
from trp_scale.errors import DataError
from trp_scale.pretraining.base import open_sources
from trp_scale.sharding.verify import verify_dataset


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_images(tmp_path_factory.mktemp("images") / "data")


def test_blocks_are_consecutive_images_of_one_shard(images: Path) -> None:
    dataset = open_image_dataset(images)
    assert dataset.meta.rows == dataset.samples.rows == 34
    assert dataset.meta.classes == tuple(CLASSES) and dataset.meta.suffixes == ("jpg", "cls")
    blocks = dataset.blocks
    assert blocks.keys[:5] == [
        "image-000000/0",
        "image-000000/4",
        "image-000000/8",
        "image-000000/12",
        "image-000001/0",
    ]
    assert blocks.rows.tolist() == [4, 4, 4, 2, 4, 3, 4, 4, 4, 1]
    assert blocks.first.tolist() == [0, 4, 8, 12, 14, 18, 21, 25, 29, 33]
    assert blocks.identities.tolist() == [name_hash(key) for key in blocks.keys]


@pytest.mark.parametrize("suffix", ["pyd", "pkl", "png", "npy"])
def test_other_members_refuse_the_shard(tmp_path: Path, suffix: str) -> None:
    write_images(tmp_path / "data", [[sample(0, 8, 8), sample(1, 8, 8, **{suffix: b"x"})]])
    with pytest.raises(DataError, match=rf"image-000000\.tar: block n00001 .*\.{suffix}; .*\.jpg, \.cls"):
        open_image_dataset(tmp_path / "data")
    document = read_json(tmp_path / "data" / "dataset.json")
    write_json(tmp_path / "data" / "dataset.json", {**document, "suffixes": ["jpg", "cls", suffix]})
    with pytest.raises(DataError, match=rf"'{suffix}' .*jpg, cls, depth\.png, semseg\.png"):
        open_image_dataset(tmp_path / "data")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": 2}, "format 2 "),
        ({"kind": "sound"}, "kind 'sound' .*'image'"),
        ({"rows_per_block": 0}, "rows_per_block is 0"),
        ({"rows": 33}, " 33 .* 34 "),
        ({"suffixes": ["cls"]}, "'jpg'"),
        ({"suffixes": ["jpg", "cls", "depth.png"]}, r"\.depth\.png"),
        ({"shards": ["image-000000.tar", "image-000000.tar"]}, "twice"),
        ({"shards": []}, " 0 shards"),
        ({"classes": 5}, r"dataset\.json: classes .* 5"),
        ({"classes": "wall"}, r"dataset\.json: classes .* 'wall'"),
        ({"modalities": ["depth"]}, r"dataset\.json: modalities: list"),
    ],
)
def test_descriptions_that_do_not_fit_are_refused(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    with pytest.raises(DataError, match=message):
        open_image_dataset(small_images(tmp_path / "data", **changes))


def test_the_digest_sees_names_contents_and_blocks(tmp_path: Path) -> None:
    digests = {open_image_dataset(small_images(tmp_path / "a")).digest()}
    digests.add(open_image_dataset(small_images(tmp_path / "b")).digest())
    assert len(digests) == 1
    digests.add(open_image_dataset(small_images(tmp_path / "c", rows_per_block=5)).digest())
    digests.add(open_image_dataset(small_images(tmp_path / "d", classes=["ant", "bee", "cow"])).digest())
    samples = [sample(number, 8, 8) for number in range(3)]
    digests.add(open_image_dataset(write_images(tmp_path / "e", [samples])).digest())
    digests.add(open_image_dataset(write_images(tmp_path / "f", [[*samples[:2], sample(5, 8, 8)]])).digest())
    digests.add(open_image_dataset(write_images(tmp_path / "g", [[*samples[:2], sample(2, 8, 8, cls=b"1")]])).digest())
    renamed = {**samples[2], "__key__": "n00009"}
    digests.add(open_image_dataset(write_images(tmp_path / "h", [[*samples[:2], renamed]])).digest())
    assert len(digests) == 7


def test_the_digest_of_images_alone_stays_what_checkpoints_hold(tmp_path: Path) -> None:
    """As it was before there were modalities: another one, and runs of that time could not be resumed."""
    known = open_image_dataset(small_images(tmp_path / "known"))
    fields = "classes=('ant', 'bee', 'cat'), suffixes=('jpg', 'cls'), rows=34"
    assert known.digest() == f" ImageMeta({fields}) 4 {known.samples.digest}"
    wild = open_image_dataset(small_images(tmp_path / "wild", classes=None), "wild")
    fields = "classes=None, suffixes=('jpg', 'cls'), rows=34"
    assert wild.digest() == f"wild ImageMeta({fields}) 4 {wild.samples.digest}"


def test_recipe_and_data_of_different_kinds_are_refused(tmp_path: Path, images: Path) -> None:
    text = write_dataset(tmp_path / "text", block_rows=[[5, 7]])
    with pytest.raises(RefusedError, match=r"'text' .*'image'"):
        open_sources(config_for(text), rank=0, world=1)
    with pytest.raises(RefusedError, match=r"'image' .*'text'"):
        open_sources(text_config_for(images), rank=0, world=1)


def test_mixtures(tmp_path: Path, images: Path) -> None:
    unlabelled = {"classes": None, "suffixes": ["jpg"]}
    nameless = [{k: v for k, v in sample(number, 9, 9).items() if k != "cls"} for number in range(6)]
    write_images(tmp_path / "wild", [nameless], changes=unlabelled)
    sources = open_sources(config_for(f"wild:1={tmp_path / 'wild'},known:1={images}"), rank=0, world=1)
    assert sources.meta.classes == tuple(CLASSES) and sources.meta.suffixes == ("jpg",) and sources.meta.rows == 40
    labels = np.concatenate([batch["labels"].numpy() for batch in sources.train.next_window()])
    assert (labels == -1).sum() == 6 and set(labels[labels != -1]) <= {0, 1, 2}
    write_images(tmp_path / "other", [[sample(0, 8, 8)]], changes={"classes": ["x", "y"]})
    with pytest.raises(DataError, match=r"classes: known .*3 \(ant, bee, cat\), other .*2 \(x, y\)"):
        open_sources(config_for(f"known:1={images},other:1={tmp_path / 'other'}"), rank=0, world=1)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return nine_beside(tmp_path / "data")


def opened(data: Path) -> ImageDataset:
    return open_image_dataset(data, used=("depth", "semseg"))


def test_tables_have_the_same_images_and_the_members_that_are_read(data: Path) -> None:
    dataset = opened(data)
    assert dataset.samples.suffixes == ("jpg", "depth.png")
    (maps,) = dataset.aligned
    assert maps.suffixes == ("semseg.png",) and maps.key_digests == dataset.samples.key_digests
    assert maps.starts.tolist() == dataset.samples.starts.tolist() == [0, 5, 9]
    assert open_image_dataset(data).aligned == () and open_image_dataset(data, used=("depth",)).aligned == ()


def test_the_digest_sees_them_only_when_they_are_read(data: Path) -> None:
    both, neither = opened(data).digest(), open_image_dataset(data).digest()
    rewrite_maps(data, members={2: {"semseg.png": png(class_map())}})
    assert opened(data).digest() != both and open_image_dataset(data).digest() == neither


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"order": [0, 2, 1, 3]}, r"position 1: .*n00007 .*shards/image-000001\.tar .*n00006"),
        ({"order": [0, 1, 2]}, "position 3: .*n00008"),
        ({"members": {3: {"__key__": "n00009"}}}, "position 3: .*n00009 .*n00008"),
        ({"members": {1: {"depth.png": b"x"}}}, r"block n00006 .*\.depth\.png; .*\.semseg\.png"),
    ],
)
def test_tars_that_are_not_aligned_are_refused(data: Path, changes: dict[str, Any], message: str) -> None:
    rewrite_maps(data, **changes)
    with pytest.raises(DataError, match=message) as raised:
        opened(data)
    assert f"{SECOND}/image-000001.tar" in str(raised.value)
    assert "trp-scale pseudo-label" in str(raised.value)
    assert open_image_dataset(data).meta.rows == 9  # without them the images are as good as before


def test_missing_tars_members_and_bytes_are_refused(data: Path) -> None:
    tar = data / SECOND / "image-000001.tar"
    document = read_json(index_path(tar))
    del document["blocks"][2]["members"]["semseg.png"]
    write_json(index_path(tar), document)
    with pytest.raises(DataError, match=r"image-000001\.tar: block n00007 .*\.semseg\.png"):
        opened(data)
    rewrite_maps(data)
    tar.write_bytes(tar.read_bytes()[:-512])
    with pytest.raises(DataError, match=r"image-000001\.tar: \d+ bytes"):
        opened(data)
    for path in (tar, index_path(tar)):
        path.unlink()
        with pytest.raises(DataError, match=rf"{path.name}.*semseg"):
            opened(data)


def test_a_map_beside_that_goes_bad_leaves_its_row_out(data: Path) -> None:
    sources = open_sources(multimodal_config(data), rank=0, world=1)
    (data / SECOND / "image-000001.tar").unlink()
    window = sources.train.next_window()
    names = {name for batch in window for name in batch.corrupt}
    assert names == {f"image-000001/n{number:05d}" for number in range(5, 9)}
    assert sum(float(batch["row_weights"].sum()) for batch in window) >= 5


def test_they_are_verified(data: Path) -> None:
    found = verify_dataset(data)
    tars = [*(data / "shards").glob("*.tar"), *(data / SECOND).glob("*.tar")]
    assert (found.rows, found.shards, found.bytes) == (9, 2, sum(tar.stat().st_size for tar in tars))
    for members, message in (
        ({"semseg.png": png(class_map(width=7, height=9) % 3)}, "n00006.* 7 x 9 "),
        ({"semseg.png": b"none"}, "n00006.* PNG "),
        ({"semseg.png": png(class_map() + 3)}, r"n00006.* class \d+ "),
        ({"cls": b"0"}, r"n00006.* \.cls\b"),
    ):
        rewrite_maps(data, members={1: members})
        with pytest.raises(DataError, match=message) as raised:
            verify_dataset(data)
        assert SECOND in str(raised.value)
    rewrite_maps(data)
    tar = data / SECOND / "image-000001.tar"
    content = bytearray(tar.read_bytes())
    content[read_index(tar).blocks[2].members["semseg.png"].offset + 60] ^= 1
    tar.write_bytes(content)
    with pytest.raises(DataError, match=rf"{SECOND}/image-000001\.tar: .*n00007.* semseg\.png"):
        verify_dataset(data)
    rewrite_maps(data)
    (data / SECOND / "image-000007.tar").write_bytes(b"")
    with pytest.raises(DataError, match=r"image-000007\.tar"):
        verify_dataset(data)


def test_a_direction_does_not_part_a_checkpoint_from_its_data(data: Path) -> None:
    before, document = opened(data).digest(), read_json(data / "dataset.json")
    depth = {**DESCRIBED["depth"], "larger_is": "nearer"}
    write_json(data / "dataset.json", {**document, "modalities": {**document["modalities"], "depth": depth}})
    assert opened(data).maps[0].larger_is == "nearer" and opened(data).digest() == before


ON = {"scaled_decoding": True}


def psnr(one: torch.Tensor, other: torch.Tensor) -> float:
    return float(10 * torch.log10(255**2 / (one.double() - other.double()).square().mean()))


def stored(image: Image.Image, **options: object) -> bytearray:
    stream = io.BytesIO()
    image.save(stream, "JPEG", quality=95, **options)
    return bytearray(stream.getvalue())


@pytest.mark.parametrize("scale", [2, 4, 8])
@pytest.mark.parametrize("options", [{}, {"progressive": True}, {"subsampling": 0}])
def test_a_scaled_pixel_is_the_mean_of_those_that_it_stands_for(scale: int, options: dict[str, object]) -> None:
    content = stored(photograph(161, 243), **options)
    found, whole = decode_scaled(content, scale), decode_image(content)
    assert found.dtype == torch.uint8 and tuple(found.shape) == (3, -(-161 // scale), -(-243 // scale))
    means = avg_pool2d(whole.float(), scale)  # of whole squares alone
    assert psnr(found[:, : means.shape[1], : means.shape[2]], means) > 40


def test_grey_images_have_three_equal_channels() -> None:
    found = decode_scaled(stored(photograph(64, 96).convert("L")), 2)
    assert tuple(found.shape) == (3, 32, 48) and torch.equal(found[0], found[2])


def test_what_has_no_smaller_size_is_decoded_whole() -> None:
    assert jpeg_size(stored(photograph(33, 70))) == (33, 70)
    for content in (
        stored(photograph(64, 64).convert("CMYK")),
        bytearray(),
        bytearray(b"no JPEG"),
        stored(photograph(64, 64))[:9],
    ):
        assert jpeg_size(content) == (1, 1)
    with pytest.raises(DataError, match="JPEG"):
        decode_scaled(stored(photograph(64, 64))[:-300], 2)


def test_the_scale_is_the_largest_that_leaves_every_crop_its_size() -> None:
    random = np.random.default_rng(0)
    boxes = random.integers(1, 1200, (500, 3, 4))
    boxes[:, :, 2:] = random.integers(100, 1500, (500, 3, 2))
    snapped, scales = on_scaled_pixels(boxes, 112)
    assert set(scales.tolist()) == {1, 2, 4, 8}
    for box, new, scale in zip(boxes, snapped, scales.tolist(), strict=True):
        smallest = int(box[:, 2:].min())
        assert scale == max(each for each in (1, 2, 4, 8) if each == 1 or smallest // each >= 112)
        assert (new % scale == 0).all() and (new[:, 2:] // scale >= min(112, smallest)).all()
        assert (box - new >= 0).all() and (box - new < scale).all()
        assert (new[:, :2] + new[:, 2:] <= box[:, :2] + box[:, 2:]).all(), "no box leaves its image"


@pytest.mark.parametrize("view", [False, True])
def test_crops_are_those_of_the_whole_image(view: bool) -> None:
    """The same boxes, cut out of all pixels."""
    content = stored(photograph(700, 900))
    settings = CropsConfig(size=64, min_scale=0.5, from_="view" if view else "image", view_size=96, **ON)
    cropper = Cropper(settings)
    for row in range(5):
        words, sizes = np.array([row], dtype=np.uint64), np.array([[700, 900]])
        crops = cropper.draw(words, sizes)
        assert crops.scales[0] >= 4
        found, exact = (torch.empty(1, 3, 64, 64, dtype=torch.uint8) for _ in range(2))
        cropper.cut(decode_scaled(content, int(crops.scales[0])), crops, 0, found)
        crops.scales[0] = 1
        cropper.cut(decode_image(content), crops, 0, exact)
        assert psnr(found, exact) > 40


def mixed_images(directory: Path) -> Path:
    sizes = [(300, 420), (40, 90), (600, 130), (31, 31), (420, 300), (2, 500)]
    samples = [sample(number, *sizes[number % 6]) for number in range(24)]
    samples[7] = sample(7, 1, 1, jpg=jpeg(photograph(300, 300))[:4000])
    samples[8] = sample(8, 1, 1, jpg=jpeg(photograph(300, 300))[:9])
    return write_images(directory / "data", [samples[:10], samples[10:]])


@pytest.mark.parametrize(("world", "workers"), [(1, 0), (2, 0), (1, 1)])
def test_ranks_and_workers_change_nothing_and_damage_is_named(tmp_path: Path, world: int, workers: int) -> None:
    data = mixed_images(tmp_path)
    reference = steps(config_for(data, crops=ON), 1, 3)
    assert_same(
        steps(config_for(data, crops=ON, data={"workers": workers}, batch={"micro_size": 2}), world, 3), reference
    )
    whole = steps(config_for(data), 1, 3)
    differing = 0
    for one, other in zip(reference, whole, strict=True):
        for name in ("keys", "labels", "row_weights", "visible", "masked"):
            assert torch.equal(one[name], other[name]), name
        differing += int((one["images"] != other["images"]).flatten(1).any(1).sum())
        assert (one["row_weights"] == 0).sum() == sum((row == 128).all() for row in one["images"])
    assert 6 < differing < 30, "large images alone"


def test_small_images_are_the_same_to_the_bit(tmp_path: Path) -> None:
    data = write_images(tmp_path / "data", [[sample(number, 60, 63) for number in range(12)]])
    assert_same(steps(config_for(data, crops=ON), 1, 2), steps(config_for(data), 1, 2))


def test_a_task_that_reads_whole_images_refuses_it() -> None:
    for recipe in ("segmentation_tiny", "depth_tiny", "detection_tiny"):
        config: Config = load_recipe(recipe)
        config.crops.scaled_decoding = True  # type: ignore[attr-defined]
        assert any("--crops.scaled_decoding" in problem for problem in config.problems())
    config = load_recipe("classification_tiny")
    config.crops.scaled_decoding = True  # type: ignore[attr-defined]
    assert not any("scaled_decoding" in problem for problem in config.problems())
