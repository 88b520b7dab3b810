"""benchmarks/loader.py: what it makes, the package reads, and each stage of it is seen."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import loader
from trp_scale.config import PretrainConfig
from trp_scale.pretraining.mm_mae.settings import MmMaeConfig
from trp_scale.pretraining.pos_bert.settings import PosBertConfig


@pytest.mark.parametrize("kind", ["text", "images"])
def test_every_stage_is_seen(kind: str, text_dataset: Path, tmp_path: Path) -> None:
    data, stages, config = text_dataset, loader.TEXT_STAGES, PretrainConfig()
    if kind == "text":
        config = PosBertConfig()
        config.model.max_positions = 1 << 16
    else:
        config, stages = loader.mae(1, 32), loader.IMAGE_STAGES
        data = loader.make_dataset(tmp_path / "noise", 4)
    train = loader.open_train(config, data, 4, 2)
    assert [micro.rows for micro in train.next_window()] == [2, 2]
    shares = loader.breakdown(train, stages, "the rest")
    assert sum(shares.values()) == pytest.approx(1) and all(share > 0 for share in shares.values())


def test_noise_with_maps_is_read(tmp_path: Path) -> None:
    noise = loader.make_dataset(tmp_path / "noise", 2, maps=True)
    (batch,) = loader.open_train(MmMaeConfig(), noise, 2, 2).next_window()
    assert (batch["depth_counts"] == 16**2).all() and (batch["semseg"] < loader.CLASSES).all()


def test_sides_are_compared(text_dataset: Path, capsys: pytest.CaptureFixture[str]) -> None:
    loader.main(loader.Options(of="text", data=text_dataset, rows=32, micro_sizes=(8, 16), rounds=1))
    shown = capsys.readouterr().out
    assert "micro-batch 8" in shown and "lay out the" in shown
