"""Data sets that the tests of this folder share or damage."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.fixtures import small_text_dataset


@pytest.fixture
def copy(whole: Path, tmp_path: Path) -> Path:
    """Copy of the data set `whole`."""
    return Path(shutil.copytree(whole, tmp_path / "data"))


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data set of text."""
    return small_text_dataset(tmp_path_factory.mktemp("made") / "data")
