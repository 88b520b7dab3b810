"""Accuracy on a test set: all of its images, none of the run's, the same classes."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.fixtures import small_image_dataset
from tests.unit.data.images.stored import config_for, sample, write_images
from tests.unit.data.stored import write_dataset
from trp_scale.config import RefusedError
from trp_scale.data.images.leakage import check_test
from trp_scale.data.index import read_json, write_json
from trp_scale.distributed.groups import ALONE
from trp_scale.evaluation.encoders import FrozenEncoder
from trp_scale.evaluation.probe.features import extract
from trp_scale.evaluation.probe.images import ProbedImages, open_probed
from trp_scale.finetuning.classification.settings import ClassificationTaskConfig


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_image_dataset(tmp_path_factory.mktemp("scenes") / "data", count=64, size=32)


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """40 other scenes of the same eight classes, marked as a test set."""
    path = small_image_dataset(tmp_path_factory.mktemp("others") / "data", count=40, size=32, seed=1)
    document = read_json(path / "dataset.json")
    write_json(path / "dataset.json", {**document, "settings": {**document["settings"], "split": "test"}})
    return path


def opened(path: Path, micro_size: int = 64) -> ProbedImages:
    config = ClassificationTaskConfig()
    config.crops.size, config.data.workers, config.batch.micro_size = 16, 0, micro_size
    return open_probed(config, str(path))


def test_all_images_of_the_test_set_in_stored_order(others: Path) -> None:
    batches = list(opened(others).batches(ALONE))
    there = [batch["row_weights"] > 0 for batch in batches]
    labels = torch.cat([batch["labels"][mask] for batch, mask in zip(batches, there, strict=True)])
    keys = torch.cat([batch.keys[mask] for batch, mask in zip(batches, there, strict=True)])
    assert len(keys) == len(set(keys.tolist())) == 40
    assert np.bincount(labels).tolist() == [5] * 8


def test_an_unreadable_test_image_is_refused(tmp_path: Path) -> None:
    samples = [sample(number, 16, 16) for number in range(9)]
    samples[4]["jpg"] = b"no image"
    path = write_images(tmp_path / "data", [samples])
    images = opened(path)
    with pytest.raises(RefusedError, match=r"image-000000/n00004"):
        extract(FrozenEncoder(small_encoder(), pooling="mean"), images.batches(ALONE))


def small_encoder() -> ClassificationTaskConfig:
    config = ClassificationTaskConfig()
    config.model.layers, config.model.hidden_size, config.model.heads, config.model.intermediate_size = 1, 16, 2, 16
    config.crops.size, config.vision.patch_size = 16, 8
    return config


def images(path: Path, numbers: range, **changes: object) -> Path:
    return write_images(path, [[sample(number, 16, 16) for number in numbers]], changes=changes)


def test_what_says_nothing_of_a_run_is_refused(tmp_path: Path) -> None:
    train = images(tmp_path / "train", range(30))
    config = config_for(train)
    check_test(config, images(tmp_path / "test", range(30, 40), settings={"split": "test"}))
    for path, message in (
        (train, "30 of its 30 images are in the run's data"),
        (images(tmp_path / "overlap", range(29, 39)), "1 of its 10 images are in the run's data .*image-000000/n00029"),
        (images(tmp_path / "renamed", range(30, 40), classes=["ant", "cat", "bee"]), "classes 3 .ant, cat, bee. found"),
        (images(tmp_path / "unnamed", range(30, 40), classes=None), r"classes without names found, .* 3 \(ant, bee"),
        (write_dataset(tmp_path / "text", block_rows=[[5]]), "kind 'text' found, 'image' allowed"),
        (tmp_path / "nowhere", "--test .*nowhere: no such file"),
    ):
        with pytest.raises(RefusedError, match=message):
            check_test(config, path)
    bare = [{name: value for name, value in sample(number, 8, 8).items() if name != "cls"} for number in range(50, 60)]
    with pytest.raises(RefusedError, match=r"--test .*bare"):
        check_test(config, write_images(tmp_path / "bare", [bare], changes={"suffixes": ["jpg"]}))
    mixture = config_for(f"a:0.5={images(tmp_path / 'more', range(60, 70))},b:0.5={train}")
    with pytest.raises(RefusedError, match="10 of its 10"):
        check_test(mixture, images(tmp_path / "again", range(5, 15)))


def test_classes_without_names_are_compared_by_number(tmp_path: Path) -> None:
    config = config_for(images(tmp_path / "train", range(30), classes=None))
    check_test(config, images(tmp_path / "test", range(30, 40), classes=None))
    samples = [sample(number, 16, 16, cls=b"3") for number in range(50, 60)]
    with pytest.raises(RefusedError, match=r"class 3 .*--data\.path is 2"):
        check_test(config, write_images(tmp_path / "more", [samples], changes={"classes": None}))


def test_a_few_images_in_common_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = config_for(images(tmp_path / "train", range(30)))
    with caplog.at_level(logging.WARNING):
        check_test(config, images(tmp_path / "test", range(29, 129)))
    assert "test: 1 of its 100 images are in the run's data too" in caplog.text
