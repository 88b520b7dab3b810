"""Every kind of input gives its images, classes and maps."""

from __future__ import annotations

import gzip
import io
import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.unit.data.images.source_images import (
    HEIGHT,
    WIDTH,
    class_folder,
    class_map,
    decoded,
    depth_map,
    jpeg,
    maps_folder,
    pixels,
    png,
    shard,
    stored,
)
from trp_scale.cli.main import main
from trp_scale.data.index import read_json
from trp_scale.errors import DataError
from trp_scale.sharding.images.files import MAX_KEY_BYTES, make_key


def write_tar(path: Path, members: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w") as tar:
        for name, content in members.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    return path


def test_class_folders_are_numbered_by_sorted_name(tmp_path: Path) -> None:
    folder = class_folder(tmp_path / "images")
    (folder / "c1" / "deep").mkdir()
    (folder / "c1" / "deep" / "a b.v2.JPEG").write_bytes(jpeg(50))
    found = shard(tmp_path / "out", folder)
    dataset = read_json(tmp_path / "out" / "dataset.json")
    assert dataset["classes"] == ["c0", "c1", "c2"] and dataset["suffixes"] == ["jpg", "cls"]
    assert dataset["synthetic"] is False
    assert len(found) == 19
    for key, members in found.items():
        assert members["cls"].decode() == key[1]
        if "deep" not in key:
            assert members["jpg"] == (folder / f"{key}.jpg").read_bytes()
    assert found["c1/deep/a%20b%2Ev2"]["jpg"] == jpeg(50)


def test_a_flat_folder_has_no_classes_and_a_mixed_one_is_refused(tmp_path: Path) -> None:
    flat = tmp_path / "flat"
    flat.mkdir()
    for number in range(3):
        (flat / f"{number}.jpg").write_bytes(jpeg(number))
    found = shard(tmp_path / "out", flat)
    assert found == {str(number): {"jpg": jpeg(number)} for number in range(3)}
    assert read_json(tmp_path / "out" / "dataset.json")["classes"] is None
    (flat / "class").mkdir()
    (flat / "class" / "a.jpg").write_bytes(jpeg())
    with pytest.raises(DataError, match=r"0\.jpg"):
        shard(tmp_path / "mixed", flat)
    (tmp_path / "none").mkdir()
    with pytest.raises(DataError, match="none"):
        shard(tmp_path / "nothing", tmp_path / "none")


def test_keys_fit_a_tar_header_and_stay_apart() -> None:
    long = "class/" + "ünbelievably long name " * 10
    keys = [make_key(name) for name in (long, long + "2", "a.b/c", "a%2Eb/c", "a_b", "ü")]
    assert len(set(keys)) == 6
    assert keys[2] == "a%2Eb/c" and keys[3] == "a%252Eb/c" and keys[5] == "%C3%BC"
    assert all(len(key.encode()) <= MAX_KEY_BYTES and "." not in key for key in keys)
    assert MAX_KEY_BYTES + len(".semseg.png") <= 100
    assert "" not in keys[0].split("/")


def class_names(folder: Path, count: int = 20) -> str:
    """Write a file of names for the classes of `class_map`."""
    path = folder / "classes.txt"
    path.write_text("".join(f"kind {number}\n" for number in range(count)))
    return str(path)


def test_maps_are_found_by_relative_path_and_stored_as_they_are(tmp_path: Path) -> None:
    images = class_folder(tmp_path / "images", each=10)
    depth = maps_folder(tmp_path / "depth", images, lambda number: png(depth_map(number)))
    semseg = maps_folder(tmp_path / "semseg", images, lambda number: png(class_map(number)))
    modality = [f"semseg={semseg}", f"depth={depth}"]
    names = class_names(tmp_path)
    (depth / "c0" / "image3.png").unlink()
    (semseg / "c2" / "image1.png").write_bytes(png(class_map(width=5)))
    with pytest.raises(DataError, match="2 of 30"):
        shard(tmp_path / "out", images, modality=modality, semseg={"classes": names})
    found = shard(tmp_path / "out", images, modality=modality, semseg={"classes": names}, max_skipped=0.1)
    dataset = read_json(tmp_path / "out" / "dataset.json")
    assert dataset["suffixes"] == ["jpg", "cls", "depth.png", "semseg.png"]
    assert dataset["skipped"] == {"no_map": 1, "map_size": 1}
    assert {entry["place"].partition(" (")[0] for entry in dataset["skipped_places"]} == {
        f"{images}/c0/image3.jpg",
        f"{images}/c2/image1.jpg",
    }
    assert len(found) == 28
    for key, members in found.items():
        assert members["depth.png"] == (depth / f"{key}.png").read_bytes()
        assert members["semseg.png"] == (semseg / f"{key}.png").read_bytes()
    with pytest.raises(DataError, match=r"modality \['depth', 'semseg'\]"):
        shard(tmp_path / "out", images)


def test_tars_give_images_classes_and_maps(tmp_path: Path) -> None:
    members = {}
    for number in range(8):
        key = f"./set/{number:03d}"
        members[f"{key}.{('jpg', 'jpeg', 'png', 'JPG')[number % 4]}"] = (
            png(pixels(number)) if number % 4 == 2 else jpeg(number)
        )
        members[f"{key}.cls"] = f"{number % 3}\n".encode()
        members[f"{key}.depth.png"] = png(depth_map(number))
        members[f"{key}.json"] = b"{}"
    tars = [
        write_tar(tmp_path / "a-0.tar", dict(list(members.items())[:16])),
        write_tar(tmp_path / "a-1.tar", dict(list(members.items())[16:])),
    ]
    names = tmp_path / "names.txt"
    names.write_text("ant\nbee\ncat\n")
    found = shard(tmp_path / "out", *tars, class_names=str(names))
    assert read_json(tmp_path / "out" / "dataset.json")["classes"] == ["ant", "bee", "cat"]
    assert set(found) == {f"set/{number:03d}" for number in range(8)}
    for number in range(8):
        sample = found[f"set/{number:03d}"]
        assert set(sample) == {"jpg", "cls", "depth.png"}
        assert sample["cls"] == str(number % 3).encode()
        assert sample["depth.png"] == png(depth_map(number))
        assert np.abs(decoded(sample["jpg"]) - pixels(number)).mean() < 6
        if number % 4 != 2:
            assert sample["jpg"] == jpeg(number)
    for place, inputs in enumerate(([tmp_path / "a-*.tar"], [tmp_path])):
        assert shard(tmp_path / f"again{place}", *inputs, class_names=str(names)) == found


def test_what_a_sample_of_a_tar_lacks_is_named(tmp_path: Path) -> None:
    members = {f"{number}.{suffix}": data for number in range(4) for suffix, data in (("jpg", jpeg()), ("cls", b"1"))}
    del members["0.cls"]
    del members["1.jpg"]
    members["2.cls"] = b"-1"
    members |= {"4.jpg": jpeg(), "4.cls": b"9", "5.jpg": b"", "5.cls": b"0"}
    tar = write_tar(tmp_path / "a.tar", members)
    names = tmp_path / "names.txt"
    names.write_text("ant\nbee\n")
    found = shard(tmp_path / "out", tar, max_skipped=0.9, class_names=str(names))
    assert set(found) == {"3"}
    listed = read_json(tmp_path / "out" / "dataset.json")["skipped_places"]
    assert {(entry["place"].partition(" (")[0], entry["reason"]) for entry in listed} == {
        (f"{tar}:0", "no_class"),
        (f"{tar}:1", "no_image"),
        (f"{tar}:2", "bad_class"),
        (f"{tar}:4", "bad_class"),
        (f"{tar}:5", "empty"),
    }


def test_tars_that_each_count_from_zero_keep_all_their_samples(tmp_path: Path) -> None:
    for number in range(2):
        write_tar(tmp_path / f"part{number}.tar", {f"{key}.jpg": jpeg(10 * number + key) for key in range(3)})
    found = shard(tmp_path / "out", tmp_path)
    assert found == {f"part{n}/{key}": {"jpg": jpeg(10 * n + key)} for n in range(2) for key in range(3)}


def test_tars_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    tar = write_tar(tmp_path / "a.tar", {f"{key}.jpg": jpeg(key) for key in range(9)})
    whole = tar.read_bytes()
    for length in (100, 512, 5000, whole.index(b"3.jpg"), len(whole.rstrip(b"\0"))):
        tar.write_bytes(whole[:length])
        with pytest.raises(DataError, match=r"a\.tar"):
            shard(tmp_path / "out", tar)
    (tmp_path / "b.tar.gz").write_bytes(gzip.compress(b""))
    with pytest.raises(DataError, match=r"b\.tar\.gz"):
        shard(tmp_path / "out", tmp_path / "b.tar.gz")
    with pytest.raises(DataError, match="nowhere"):
        shard(tmp_path / "out", tmp_path / "nowhere")
    with pytest.raises(DataError, match=r"c\.tar"):
        shard(tmp_path / "out", write_tar(tmp_path / "c.tar", {"1.cls": b"0"}))


def test_settings_of_another_kind_of_input_are_refused(tmp_path: Path) -> None:
    folder = class_folder(tmp_path / "images", classes=1, each=2)
    names = tmp_path / "names.txt"
    names.write_text("ant\n")
    with pytest.raises(DataError, match="--class_names"):
        shard(tmp_path / "out", folder, class_names=str(names))
    with pytest.raises(DataError, match=r"1\.JPG"):
        shard(tmp_path / "out", tmp_path / "photos" / "1.JPG", tmp_path / "photos" / "2.JPG")
    with pytest.raises(DataError, match="--inputs"):
        shard(tmp_path / "out", folder, folder)
    tar = write_tar(tmp_path / "a.tar", {"1.jpg": jpeg()})
    with pytest.raises(DataError, match="--modality depth"):
        shard(tmp_path / "out", tar, modality=[f"depth={folder}"])
    with pytest.raises(DataError, match=r"nowhere\.txt"):
        shard(tmp_path / "out", tar, class_names="nowhere.txt")


def test_the_command_takes_a_modality_twice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    images = class_folder(tmp_path / "images", classes=1, each=3)
    depth = maps_folder(tmp_path / "depth", images, lambda number: png(depth_map(number)))
    semseg = maps_folder(tmp_path / "semseg", images, lambda number: png(class_map(number)))
    maps = ["--modality", f"depth={depth}", "--modality", f"semseg={semseg}", "--semseg.classes", class_names(tmp_path)]
    command = ["shard-images", "--processes", "1", "--no-progress", "--inputs"]
    assert main([*command, str(images), "--output", str(tmp_path / "out"), *maps]) == 0
    assert set(stored(tmp_path / "out")["c0/image0"]) == {"jpg", "cls", "depth.png", "semseg.png"}
    assert Image.open(io.BytesIO(stored(tmp_path / "out")["c0/image0"]["depth.png"])).size == (WIDTH, HEIGHT)
    assert main([*command, "nowhere", "--output", str(tmp_path / "none")]) == 2
    assert "--inputs nowhere" in capsys.readouterr().err


def digits(root: Path, count: int = 12) -> np.ndarray:
    """Write files for torchvision's MNIST; return the images."""
    folder = root / "MNIST" / "raw"
    folder.mkdir(parents=True)
    images = np.stack([np.asarray(Image.fromarray(pixels(number, 28, 28)).convert("L")) for number in range(count)])
    labels = (np.arange(count) % 10).astype(np.uint8)
    for prefix in ("train", "t10k"):
        sizes = b"".join(size.to_bytes(4, "big") for size in images.shape)
        (folder / f"{prefix}-images-idx3-ubyte").write_bytes(b"\0\0\x08\x03" + sizes + images.tobytes())
        (folder / f"{prefix}-labels-idx1-ubyte").write_bytes(
            b"\0\0\x08\x01" + count.to_bytes(4, "big") + labels.tobytes()
        )
    return images


def test_a_torchvision_dataset_is_read_and_never_downloaded(tmp_path: Path) -> None:
    images = digits(tmp_path / "root")
    found = shard(tmp_path / "out", f"torchvision:MNIST={tmp_path / 'root'}")
    assert read_json(tmp_path / "out" / "dataset.json")["classes"][3] == "3 - three"
    for number, wanted in enumerate(images):
        sample = found[f"train-{number:08d}"]
        assert sample["cls"] == str(number % 10).encode()
        assert np.abs(decoded(sample["jpg"]).mean(axis=2) - wanted).mean() < 4
        assert Image.open(io.BytesIO(sample["jpg"])).mode == "RGB"
    assert set(shard(tmp_path / "test", f"torchvision:MNIST={tmp_path / 'root'}", split="test")) == {
        f"test-{number:08d}" for number in range(len(images))
    }
    for item, split, message in (
        (f"torchvision:MNIST={tmp_path / 'none'}", "train", "torchvision says: Dataset not found"),
        (f"torchvision:CIFAR10={tmp_path / 'none'}", "train", "torchvision says: Dataset not found"),
        ("torchvision:Nothing=x", "train", "no such dataset in torchvision"),
        ("torchvision:FakeData=x", "train", "reads no files"),
        ("torchvision:MNIST", "train", "NAME=ROOT expected"),
        (f"torchvision:MNIST={tmp_path / 'root'}", "val", "--split val: MNIST has train and test"),
    ):
        with pytest.raises(DataError, match=message):
            shard(tmp_path / "wrong", item, split=split)
    assert not (tmp_path / "none").exists()


def test_a_dataset_directory_gives_the_bytes_of_its_images(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets", reason="the extra `datasets` is not installed")
    contents = [jpeg(number) if number != 3 else b"broken" for number in range(6)]
    features = datasets.Features(
        {
            "picture": datasets.Image(),
            "kind": datasets.ClassLabel(names=["ant", "bee"]),
            "other": datasets.Value("string"),
        }
    )
    rows = {
        "picture": [{"bytes": content, "path": None} for content in contents],
        "kind": [number % 2 for number in range(6)],
        "other": ["x"] * 6,
    }
    made = datasets.Dataset.from_dict(rows, features=features)
    datasets.DatasetDict({"train": made, "test": made.select([0])}).save_to_disk(str(tmp_path / "saved"))
    settings = {"image_column": "picture", "label_column": "kind", "max_skipped": 0.2}
    found = shard(tmp_path / "out", tmp_path / "saved", **settings)
    assert found == {
        f"row-{number:08d}": {"jpg": contents[number], "cls": str(number % 2).encode()}
        for number in range(6)
        if number != 3
    }
    dataset = read_json(tmp_path / "out" / "dataset.json")
    assert dataset["classes"] == ["ant", "bee"] and dataset["skipped"] == {"not_an_image": 1}
    assert len(shard(tmp_path / "test", tmp_path / "saved", split="test", **settings)) == 1
    unlabelled = shard(tmp_path / "unlabelled", tmp_path / "saved", **{**settings, "label_column": ""})
    assert unlabelled["row-00000000"] == {"jpg": contents[0]}
    for wrong, message in (
        ({"image_column": "image"}, "--image_column image: the columns of .* are picture, kind, other"),
        ({"label_column": "label"}, "--label_column label: .*--label_column ''"),
        ({"label_column": "other"}, "whole numbers expected"),
        ({"split": "val"}, "split 'val' not found"),
    ):
        with pytest.raises(DataError, match=message):
            shard(tmp_path / "wrong", tmp_path / "saved", **{**settings, **wrong})
