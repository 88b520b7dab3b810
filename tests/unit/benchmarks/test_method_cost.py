"""benchmarks/method_cost.py --method masks: every row of its table is printed, and fewer updates cost less."""

from __future__ import annotations

import re

import pytest

from benchmarks import method_cost
from benchmarks.method_cost import MASKS, PLAIN_MAE, Options, large_mae, main, over_plain
from benchmarks.workloads import ENCODERS
from trp_scale.pretraining.mae.settings import MaeConfig


def two_blocks(options: Options) -> MaeConfig:
    """The large model with two blocks in place of twelve, and a single decoder block."""
    settings = large_mae(options)
    settings.model.layers, settings.vision.decoder_layers = 2, 1
    return settings


@pytest.mark.exhaustive
def test_the_table_has_a_row_for_each(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(method_cost, "large_mae", two_blocks)
    monkeypatch.setitem(ENCODERS, "tiny", (1, 24))
    main(Options(method="masks", rows=2, rounds=1, decoder_layers=1, size=32, network="patchwise"))
    printed = capsys.readouterr().out
    for name in (PLAIN_MAE, *MASKS):
        assert re.search(rf"{name} +│ +[\d.]+ │ [^│]+ │ [^│]+ │( +[\d.,]+ │){{3}}", printed), (name, printed)


def test_rarer_updates_of_the_masking_network_cost_less() -> None:
    options = Options(method="masks", rows=2)
    ratios = over_plain(two_blocks(options), options)
    assert ratios[PLAIN_MAE] == 1.0
    assert ratios["unroll 2, every 5"] < ratios["unroll 2, every 1"] < ratios["unroll 1, every 1"]
