"""Images out of Hugging Face dataset directories and torchvision datasets."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.unit.data.images.source_images import decoded, jpeg, pixels, shard, stored
from trp_scale.data.index import read_json
from trp_scale.errors import DataError
from trp_scale.sharding.images.shard import ShardImagesConfig, shard_images


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


def digits(root: Path, count: int = 12) -> np.ndarray:
    """Files as torchvision's MNIST looks for them; returns the images."""
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


@pytest.mark.exhaustive
def test_two_processes_read_a_torchvision_dataset(tmp_path: Path) -> None:
    digits(tmp_path / "root")
    one = shard(tmp_path / "one", f"torchvision:MNIST={tmp_path / 'root'}", samples_per_shard=4)
    config = ShardImagesConfig(
        inputs=[f"torchvision:MNIST={tmp_path / 'root'}"],
        output=tmp_path / "two",
        samples_per_shard=4,
        processes=2,
        progress=False,
    )
    shard_images(config)
    assert stored(tmp_path / "two") == one
