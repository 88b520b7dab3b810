"""A data set of text that the tests of this folder share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fixtures import small_text_dataset


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_text_dataset(tmp_path_factory.mktemp("made") / "data")
