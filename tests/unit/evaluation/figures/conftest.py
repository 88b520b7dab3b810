"""Images that the runs of these tests learn from."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fixtures import small_image_dataset


@pytest.fixture(scope="session")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_image_dataset(tmp_path_factory.mktemp("scenes") / "data", count=64, size=32)
