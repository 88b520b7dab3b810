"""Small data set for labelling, saved models that label it, and readers of its files."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from PIL import Image

from tests.unit.data.images.source_images import stored
from tests.unit.data.images.stored import sample, write_images
from tests.unit.sharding.pseudo_labels.tiny_models import depth_anything, mask2former
from trp_scale.config.loader import read_section
from trp_scale.sharding.pseudo_labels.label import PseudoLabelConfig, pseudo_label

SIZES = [(40, 60), (64, 48), (33, 33), (48, 64), (40, 60), (60, 40), (36, 48), (1, 1), (40, 60)]


class Models(NamedTuple):
    """Saved models that tests share."""

    depth: Path
    semseg: Path


def nine_images(directory: Path, **changes: bytes) -> Path:
    """Nine images of eight shapes in shards of 5, 3 and 1; `changes` are contents of the fourth (jpg)."""
    samples = [sample(number, *size, **(changes if number == 3 else {})) for number, size in enumerate(SIZES)]
    return write_images(directory, [samples[:5], samples[5:8], samples[8:]])


def config_of(data: Path, models: Models, **settings: object) -> PseudoLabelConfig:
    """Return settings with both models and batches of 2; `settings` may override fields of a modality."""
    given: dict[str, Any] = {"data": str(data), "device": "cpu", "progress": False, "batch": 2, **settings}
    for name, model in models._asdict().items():
        given[name] = {"model": str(model), **given.get(name, {})}
    return read_section(PseudoLabelConfig.with_modality_sections(), given, "the test")


def label(data: Path, models: Models, **settings: object) -> bool:
    """Label a data set."""
    return pseudo_label(config_of(data, models, **settings))


def maps(data: Path, directory: str, suffix: str) -> dict[str, np.ndarray]:
    """The maps of a labels' directory by key, int64, read from the tars' bytes by their indexes."""
    found = {}
    for key, members in stored(data, *(f"{directory}/{tar.name}" for tar in (data / directory).glob("*.tar"))).items():
        image = Image.open(io.BytesIO(members.pop(suffix)), formats=("PNG",))
        assert not members and image.mode == ("I;16" if suffix == "depth.png" else "L")
        found[key] = np.asarray(image).astype(np.int64)
    return found


def images(data: Path) -> dict[str, Image.Image]:
    """The images by key."""
    return {key: Image.open(io.BytesIO(members["jpg"])) for key, members in stored(data).items()}


def files(data: Path) -> dict[str, bytes]:
    """Every file of a data set."""
    return {str(path.relative_to(data)): path.read_bytes() for path in data.rglob("*") if path.is_file()}


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
