"""Data sets that the tests of this folder share or damage."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest


@pytest.fixture
def copy(whole: Path, tmp_path: Path) -> Path:
    """Copy of the data set `whole`."""
    return Path(shutil.copytree(whole, tmp_path / "data"))
