"""Image data sets: deterministic bytes, no incomplete data set, counts of skipped images."""

from __future__ import annotations

import io
import tarfile
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.fixtures import small_image_config
from tests.unit.data.images.source_images import class_folder, jpeg, png, png_of_size, rotated_jpeg, stored
from tests.unit.sharding.test_parts import content
from trp_scale.data.hashing import name_hash
from trp_scale.data.images.maps import known_suffixes
from trp_scale.data.index import read_index, read_json
from trp_scale.errors import DataError
from trp_scale.sharding.images.files import Sample, cut_into_portions
from trp_scale.sharding.images.shard import ShardImagesConfig, shard_images

ROOT = Path(__file__).resolve().parents[4]


def folder_config(folder: Path, output: Path, **changes: object) -> ShardImagesConfig:
    config = ShardImagesConfig(
        inputs=[str(folder)], output=output, rows_per_block=4, processes=1, progress=False, samples_per_shard=8
    )
    return replace(config, **changes)  # type: ignore[arg-type]


def test_the_classes_are_told_and_parts_of_a_data_set_are_no_classes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    for names in (("cat", "dog"), ("train", "val")):
        for name in names:
            (tmp_path / names[0] / name).mkdir(parents=True)
            (tmp_path / names[0] / name / "a.png").write_bytes(png(np.full((16, 16, 3), 9, np.uint8)))
        shard_images(folder_config(tmp_path / names[0], tmp_path / f"out_{names[0]}"))
    told = [line for line in caplog.messages if "shards, " in line]
    assert [line.rpartition("shards, ")[2] for line in told] == ["2 classes: cat, dog", "2 classes: train, val"]
    warned = [line for line in caplog.messages if "splits of a data set" in line]
    assert len(warned) == 1 and warned[0].startswith("the classes are train, val") and "/train" in warned[0]


@pytest.mark.parametrize(
    ("height", "width", "odd"), [(7, 9, True), (8, 8, False), (8, 128, False), (8, 129, True), (1, 1, True)]
)
def test_images_of_no_use_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, height: int, width: int, odd: bool
) -> None:
    (tmp_path / "in").mkdir()
    for name, shape in (("a", (16, 16, 3)), ("b", (height, width, 3))):
        (tmp_path / f"in/{name}.png").write_bytes(png(np.full(shape, 9, np.uint8)))
    shard_images(folder_config(tmp_path / "in", tmp_path / "out", samples_per_shard=1, rows_per_block=1))
    warned = [line for line in caplog.messages if "little can be learned" in line]
    assert len(warned) == odd
    assert all(line.startswith("1 of 2 images ") and line.endswith(f"b.png ({width} x {height})") for line in warned)


def test_an_input_that_has_changed_is_refused(tmp_path: Path) -> None:
    folder = class_folder(tmp_path / "images")
    shard_images(folder_config(folder, tmp_path / "out"))
    before = content(tmp_path / "out")
    (folder / "c0" / "image0.jpg").write_bytes(jpeg(77) + b"\0")
    with pytest.raises(DataError, match="input"):
        shard_images(folder_config(folder, tmp_path / "out"))
    assert content(tmp_path / "out") == before


def test_the_index_gives_every_member_as_tarfile_does(image_dataset: Path) -> None:
    dataset = read_json(image_dataset / "dataset.json")
    assert dataset["format"] == 1 and dataset["kind"] == "image"
    assert dataset["suffixes"] == list(known_suffixes())
    found = stored(image_dataset)
    samples = 0
    for name in dataset["shards"]:
        with tarfile.open(image_dataset / "shards" / name) as tar:
            for entry in tar:
                key, _, suffix = entry.name.partition(".")
                stream = tar.extractfile(entry)
                assert stream is not None and stream.read() == found[key][suffix]
                assert (entry.uname, entry.mtime, entry.mode) == ("trp", 0, 0o444)
        blocks = read_index(image_dataset / "shards" / name).blocks
        assert all(block.rows == 1 and set(block.members) == set(dataset["suffixes"]) for block in blocks)
        samples += len(blocks)
    assert samples == dataset["rows"] == len(found) == 96


def test_samples_lie_in_the_order_of_their_keys_hashes(image_dataset: Path) -> None:
    dataset = read_json(image_dataset / "dataset.json")
    keys = [block.key for name in dataset["shards"] for block in read_index(image_dataset / "shards" / name).blocks]
    assert keys == sorted(keys, key=name_hash)
    labels = [int(members["cls"]) for members in stored(image_dataset).values()]
    for start in range(0, 96, 32):
        assert len(set(labels[start : start + 32])) == 8, "every shard has every class"


def test_scenes_are_stored_with_their_labels(image_dataset: Path) -> None:
    from trp_scale.sharding.images.scenes import render_scene

    dataset = read_json(image_dataset / "dataset.json")
    assert dataset["synthetic"] is True
    assert dataset["counts"]["per_class"] == {str(label): 12 for label in range(8)}
    assert "1/1000 metre" in dataset["modalities"]["depth"]["unit"]
    for number in (0, 13, 95):
        scene, members = render_scene(0, number, 32), stored(image_dataset)[f"scene-{number:08d}"]
        assert np.array_equal(np.asarray(Image.open(io.BytesIO(members["depth.png"]))), scene.depth)
        assert np.array_equal(np.asarray(Image.open(io.BytesIO(members["semseg.png"]))), scene.segmentation)
        assert int(members["cls"]) == scene.label
        shown = np.asarray(Image.open(io.BytesIO(members["jpg"]))).astype(int)
        assert np.abs(shown - scene.image).mean() < 3
        assert dataset["modalities"]["semseg"]["classes"][int(scene.segmentation.max())] in dataset["classes"]


def test_bad_images_of_every_kind_are_counted_and_listed(tmp_path: Path) -> None:
    folder = class_folder(tmp_path / "images", each=10)
    bad = {
        "c0/empty.jpg": (b"", "empty"),
        "c0/text.jpg": (b"no image at all", "not_an_image"),
        "c1/truncated.jpg": (jpeg()[:-200], "damaged"),
        "c1/truncated.png": (png(np.asarray(Image.open(io.BytesIO(jpeg()))))[:-200], "duplicate_key"),
        "c2/bomb.png": (png_of_size(100_000, 100_000), "too_many_pixels"),
        "c2/floats.tif": (b"", "unsupported_mode"),
        "c2/link.jpg": (b"", "unreadable"),
    }
    for name, (data, _) in bad.items():
        (folder / name).write_bytes(data)
    Image.fromarray(np.ones((9, 9), np.float32)).save(folder / "c2" / "floats.tif")
    (folder / "c2" / "link.jpg").unlink()
    (folder / "c2" / "link.jpg").symlink_to("nowhere.jpg")
    (folder / "c2" / "notes.txt").write_text("not looked at")
    (folder / "c2" / "turned.jpg").write_bytes(rotated_jpeg(6))
    (folder / "c2" / ".hidden.jpg").write_bytes(b"")
    output = tmp_path / "out"
    with pytest.raises(DataError) as raised:
        shard_images(folder_config(folder, output))
    assert "7 of 38 images were skipped, more than --max_skipped 0.01 allows" in str(raised.value)
    for name, (_, reason) in bad.items():
        assert f"1 {reason} (" in str(raised.value)
        assert f"{folder}/{name}" in str(raised.value)
    assert list((output / "shards").glob("*.tar")) and not (output / "dataset.json").exists()
    shard_images(folder_config(folder, output, max_skipped=0.2))
    dataset = read_json(output / "dataset.json")
    assert dataset["skipped"] == dict(Counter(reason for _, reason in bad.values()))
    listed = {(entry["place"].partition(" (")[0], entry["reason"]) for entry in dataset["skipped_places"]}
    assert listed == {(f"{folder}/{name}", reason) for name, (_, reason) in bad.items()}
    assert dataset["rows"] == dataset["counts"]["images"] == 31
    assert dataset["counts"]["unchanged"] == 30
    assert dataset["counts"]["per_class"] == {"0": 10, "1": 10, "2": 11}
    keys = set(stored(output))
    assert "c2/turned" in keys and not keys & {name.rpartition(".")[0] for name in bad}


def test_an_input_of_nothing_but_bad_images_is_refused(tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "a.jpg").write_bytes(b"")
    with pytest.raises(DataError, match=r"out.*images"):
        shard_images(folder_config(tmp_path / "images", tmp_path / "out", max_skipped=1.0))


@pytest.mark.parametrize(
    ("count", "samples_per_shard", "rows_per_block", "sizes"),
    [(100, 0, 8, [8] * 12 + [4]), (10, 0, 64, [10]), (40_000, 0, 64, [2048] * 19 + [1088]), (10, 4, 64, [4, 4, 2])],
)
def test_shards_are_cut_in_whole_blocks(
    count: int, samples_per_shard: int, rows_per_block: int, sizes: list[int]
) -> None:
    samples = [Sample(f"image-{number}", "", None) for number in range(count)]
    portions = cut_into_portions(samples, samples_per_shard, rows_per_block)
    assert [len(portion.items) for portion in portions] == sizes
    assert {sample for portion in portions for sample in portion.items} == set(samples)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"inputs": ["here"]}, "one of the two"),
        ({"size": 4}, "--size is 4"),
        ({"modality": ["depth=."]}, "not --embedded"),
        ({"class_names": "names.txt"}, "not --embedded"),
        ({"modality": ["edges=."]}, "depth=FOLDER or semseg=FOLDER or"),
        ({"modality": ["depth=nowhere"]}, "nowhere is not a folder"),
    ],
)
def test_settings_that_cannot_work_are_refused(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    with pytest.raises(DataError, match=message):
        shard_images(small_image_config(tmp_path / "out", **changes))
    assert not (tmp_path / "out").exists()
