"""Small image data sets for probes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.data.images.stored import sample, write_images
from tests.unit.evaluation.small_encoder import small_config, striped_images
from trp_scale.finetuning.classification.task import LabelledImages, open_labelled


@pytest.fixture(scope="session")
def stripes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return striped_images(tmp_path_factory.mktemp("stripes") / "train", 64, 0)


@pytest.fixture(scope="session")
def others(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return striped_images(tmp_path_factory.mktemp("stripes") / "others", 43, 1)


@pytest.fixture(scope="session")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """37 images of three classes in two shards; the last batch is incomplete."""
    samples = [sample(number, 20, 16) for number in range(37)]
    return write_images(tmp_path_factory.mktemp("stored") / "data", [samples[:25], samples[25:]])


@pytest.fixture
def images(stored: Path) -> LabelledImages:
    return open_labelled(small_config(), str(stored))
