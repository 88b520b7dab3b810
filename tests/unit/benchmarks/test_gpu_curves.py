"""Section `curves` of benchmarks/gpu.py on small models, with recorded operations in place of CUDA graphs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import gpu_curves
from benchmarks.gpu_setting import Item, Setting
from benchmarks.pictures import curves_page
from tests.recorded import recorded_on_cpu
from trp_scale.distributed.environment import Environment
from trp_scale.reporting.record import Curve
from trp_scale.storage.files import write_json

SETTING = Setting(environment=Environment(use_gpu=False), small=True)
BERT, MAE = gpu_curves.CASES


@pytest.fixture
def items(tmp_path: Path, text_dataset: Path, image_dataset: Path) -> dict[str, Item]:
    for name, path in (("books", text_dataset), ("cifar10", image_dataset)):
        (tmp_path / name).symlink_to(path)
    return {item.name: item for item in gpu_curves.curves(replace(SETTING, data=tmp_path))}


@pytest.mark.parametrize("name", [BERT, MAE])
def test_captured_steps_have_the_losses_of_plain_ones(name: str, items: dict[str, Item], tmp_path: Path) -> None:
    assert not items[name].lacking
    with recorded_on_cpu():
        figures = items[name].measure()
    assert figures["replays"] == gpu_curves.SMALL_STEPS
    assert figures["captured_largest"] < 1e-5 < 1e-3 < figures["other_order_mean"]  # type: ignore[operator]
    assert figures["as_expected"] is True
    document = {"device": "cpu", "date": "", "items": [{"section": "curves", "name": name, "figures": figures}]}
    write_json(tmp_path / "gpu.json", document)
    (section,) = curves_page(tmp_path / "gpu.json").sections
    (plot,) = section.blocks
    drawn = {trace["name"]: trace["y"] for trace in plot.figure()["data"]}  # type: ignore[union-attr]
    assert drawn["plain"] == figures["plain_loss"] and drawn["captured"] == figures["captured_loss"]


def test_transformers_has_the_same_losses(items: dict[str, Item]) -> None:
    figures = items[BERT].measure()
    assert figures["transformers_largest"] < 1e-4  # type: ignore[operator]
    assert figures["replays"] == 0 and figures["as_expected"] is True


def test_a_curve_outside_of_the_noise_is_not_as_expected() -> None:
    curves = {name: Curve() for name in ("plain", "other_order", "captured")}
    for step in range(1, 51):
        for curve, loss in zip(curves.values(), (0.0, 0.1, 0.05 if step <= 45 else 0.2), strict=True):
            curve.add(step, loss)
    figures = gpu_curves.compare_curves(curves)
    assert figures["other_order_largest"] == pytest.approx(0.1)
    assert figures["captured_mean"] == pytest.approx(0.065)
    assert figures["captured_mean_of_last_tenth"] == pytest.approx(0.2)
    assert figures["as_expected"] is False


def test_missing_data_are_named_with_their_command(tmp_path: Path) -> None:
    for item, command in zip(gpu_curves.curves(replace(SETTING, data=tmp_path)), ("text", "images"), strict=True):
        assert f"trp-scale shard-{command} " in item.lacking and str(tmp_path) in item.lacking
