"""Images of two classes that probes learn from and are measured on."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.evaluation.small_encoder import striped_images


@pytest.fixture(scope="session")
def stripes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return striped_images(tmp_path_factory.mktemp("stripes") / "train", 64, 0)


@pytest.fixture(scope="session")
def others(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return striped_images(tmp_path_factory.mktemp("stripes") / "others", 43, 1)
