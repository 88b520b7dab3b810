"""Sections of modalities in the commands that prepare data."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.extending import forgetting
from trp_scale import api
from trp_scale.config import RefusedError
from trp_scale.config.registry import Section, component, preparation_sections, setting
from trp_scale.pretraining.modalities.base import Modality
from trp_scale.sharding.images.settings import ShardImagesConfig
from trp_scale.sharding.pseudo_labels.directory import PseudoLabelConfig


@dataclass(kw_only=True)
class Gain(Section):
    """What the numbers mean."""

    gain: float = setting(1.0, above=0)
    """Of the sensor."""


def test_each_modality_has_the_sections_that_it_registers() -> None:
    assert list(preparation_sections("files")) == list(preparation_sections("labels")) == ["depth", "semseg"]
    with forgetting():
        component("modality", "radar")(type("Radar", (Modality,), {"FileSettings": Gain}))
        assert list(preparation_sections("files")) == ["depth", "semseg", "radar"]
        assert "radar" not in preparation_sections("labels")
        config = ShardImagesConfig.with_modality_sections()(output=Path("out"))
        assert config.section("radar") == Gain() and config.section("normals") is None
    assert ShardImagesConfig(output=Path("out")).section("depth") is not None, "made without, it is at its defaults"


def test_what_cannot_be_a_section_is_refused() -> None:
    bare = type("Bare", (Section,), {"__annotations__": {"gain": float}})
    with pytest.raises(RefusedError, match="Radar: FileSettings"):
        component("modality", "radar")(type("Radar", (Modality,), {"FileSettings": bare}))
    with (
        forgetting(),
        pytest.raises(RefusedError, match="--inputs"),
    ):
        component("modality", "inputs")(type("Inputs", (Modality,), {"FileSettings": Gain}))
        ShardImagesConfig.with_modality_sections()
    with (
        forgetting(),
        pytest.raises(RefusedError, match=r"radar.*LabelSettings"),
    ):
        component("modality", "radar")(type("Radar", (Modality,), {"LabelSettings": Gain}))
        PseudoLabelConfig.with_modality_sections()(data=Path("data")).check()


def test_from_python_a_section_is_a_mapping_and_unknown_names_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match="depth_scale"):
        api.shard_images(tmp_path / "out", tmp_path, depth_scale=0.001)
    with pytest.raises(RefusedError, match=r"depth\.scal\b.*depth\.scale"):
        api.shard_images(tmp_path / "out", tmp_path, depth={"scal": 0.001})
    with pytest.raises(RefusedError, match=r"--depth\.scale is -1\.0"):
        api.shard_images(tmp_path / "out", tmp_path, depth={"scale": -1.0})
