"""Depth and segmentation maps that cannot be used, and data sets that lack them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from PIL import Image

from tests.unit.data.images.multimodal import (
    SUFFIXES,
    first_window,
    maps,
    multimodal_config,
    sample,
    samples,
    write_multimodal,
)
from tests.unit.data.images.source_images import encoded, png
from tests.unit.data.images.stored import jpeg, write_images
from trp_scale.config import RefusedError
from trp_scale.errors import DataError
from trp_scale.pretraining.base import open_sources


def bad_maps() -> dict[str, dict[str, bytes]]:
    """Members that make a sample of 40 x 50 pixels unusable."""
    depth, semseg = maps(40, 50, seed=0)
    unlisted = semseg.copy()
    unlisted[39, 49] = 3
    coloured = Image.fromarray(semseg).convert("P")
    return {
        "depth of 8 bits": {"depth.png": png(semseg)},
        "depth as a JPEG": {"depth.png": jpeg(Image.fromarray(semseg))},
        "depth of another size": {"depth.png": png(depth[:, :-1])},
        "depth cut short": {"depth.png": png(depth)[:-400]},
        "no depth": {"depth.png": b""},
        "classes of 16 bits": {"semseg.png": png(depth)},
        "classes as colours": {"semseg.png": encoded(Image.fromarray(semseg).convert("RGB"), "PNG")},
        "classes of a palette": {"semseg.png": encoded(coloured, "PNG")},
        "an unlisted class": {"semseg.png": png(unlisted)},
        "classes on their side": {"semseg.png": png(semseg.T)},
    }


def test_samples_with_a_bad_map_are_named_and_left_out(tmp_path: Path) -> None:
    good = [sample(number, 40, 50) for number in range(24)]
    bad = list(bad_maps().values())
    mixed = [{**one, **bad[number // 2]} if number in range(0, 20, 2) else one for number, one in enumerate(good)]
    names = {f"image-000000/{one['__key__']}" for one in mixed[:20:2]}
    config = multimodal_config(write_multimodal(tmp_path / "data", [mixed]))
    config.batch.global_size = config.batch.micro_size = 24
    (batch,) = first_window(config)
    assert set(batch.corrupt) == names
    expected_config = multimodal_config(write_multimodal(tmp_path / "good", [good]))
    expected_config.batch.global_size = expected_config.batch.micro_size = 24
    (expected,) = first_window(expected_config)
    there = batch["row_weights"] == 1
    assert int(there.sum()) == 14 and torch.equal(batch.keys, expected.keys)
    assert torch.equal(batch["visible"], expected["visible"])
    for name in ("images", "semseg", "semseg_counts", "depth_counts", "labels"):
        assert torch.equal(batch[name][there], expected[name][there])
    assert (batch["depth"][~there] == 0).all() and (batch["semseg"][~there] == 255).all()
    assert (batch["depth_counts"][~there] == 0).all() and (batch["semseg_counts"][~there] == 0).all()
    assert (batch["images"][~there] == 128).all() and (batch["labels"][~there] == -1).all()


def test_what_the_data_lacks_is_refused_at_opening(tmp_path: Path) -> None:
    contents = [{name: one[name] for name in ("__key__", "jpg", "cls", "depth.png")} for one in samples(3)]
    plain = write_images(tmp_path / "plain", [contents], changes={"suffixes": SUFFIXES[:3]})
    message = r"--modalities.inputs .*--modalities.outputs .*semseg.*plain .*rgb, depth .*trp-scale pseudo-label"
    with pytest.raises(RefusedError, match=message):
        open_sources(multimodal_config(plain), rank=0, world=1)
    config = multimodal_config(plain, modalities={"inputs": ["rgb"], "outputs": ["depth"]})
    assert open_sources(config, rank=0, world=1).meta.maps.keys() == {"depth"}
    nameless = write_multimodal(tmp_path / "nameless", [samples(3)], modalities={"depth": {}})
    with pytest.raises(RefusedError, match=r"nameless/dataset\.json .* --semseg\.classes"):
        open_sources(multimodal_config(nameless), rank=0, world=1)


@pytest.mark.parametrize(
    ("modalities", "message"),
    [
        ({"depth": {"scale": -1}}, "depth: scale .* -1"),
        ({"depth": {"directory": "../elsewhere"}}, r"depth: directory .*'\.\./elsewhere'"),
        ({"semseg": {"classes": [str(n) for n in range(256)]}}, "semseg: 256 classes"),
        ({"semseg": {"classes": 5}}, r"dataset\.json: modalities: semseg: classes .* 5"),
        ({"semseg": {"classes": ["wall", 1]}}, r"modalities: semseg: classes\[1\] .* 1"),
        ({"depth": []}, r"dataset\.json: modalities: depth: list"),
        ({"depth": {"larger_is": "further"}}, "depth: larger_is .*'further'"),
    ],
)
def test_descriptions_that_cannot_be_are_refused(
    tmp_path: Path, modalities: dict[str, dict[str, object]], message: str
) -> None:
    data = write_multimodal(tmp_path / "data", [samples(2)], modalities=modalities)
    with pytest.raises(DataError, match=message):
        open_sources(multimodal_config(data), rank=0, world=1)


def test_a_described_modality_must_lie_somewhere(tmp_path: Path) -> None:
    bare = [{name: one[name] for name in ("__key__", "jpg", "cls")} for one in samples(2)]
    data = write_images(tmp_path / "bare", [bare], changes={"modalities": {"depth": {"scale": None}}})
    with pytest.raises(DataError, match=r"modality depth .*\.depth\.png"):
        open_sources(multimodal_config(data), rank=0, world=1)
