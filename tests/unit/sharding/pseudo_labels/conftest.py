"""Saved models and a labelled data set, shared by the tests of pseudo-labels."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.sharding.pseudo_labels.labelled import Models, label, nine_images
from tests.unit.sharding.pseudo_labels.tiny_models import depth_anything, mask2former


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """A depth estimator and a segmentation model."""
    directory = tmp_path_factory.mktemp("models")
    return Models(depth=depth_anything(directory / "depth"), semseg=mask2former(directory / "semseg"))


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory, models: Models) -> Path:
    """Nine images, labelled by both models in one run."""
    data = nine_images(tmp_path_factory.mktemp("whole") / "data")
    assert label(data, models)
    return data
