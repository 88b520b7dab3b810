"""Section `ranks` of benchmarks/gpu.py over gloo: two ranks against plain, as over NCCL on one GPU."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import gpu_ranks
from benchmarks.gpu_setting import Setting, measured
from trp_scale.distributed.environment import Environment

SETTING = Setting(environment=Environment(use_gpu=False), small=True)
TRIED = "pos_bert_tiny, ddp"


@pytest.fixture
def setting(tmp_path: Path, text_dataset: Path, image_dataset: Path) -> Setting:
    for name, path in (("text", text_dataset), ("scenes", image_dataset)):
        (tmp_path / name).symlink_to(path)
    return replace(SETTING, data=tmp_path)


@pytest.mark.exhaustive  # tests/parity/test_partition.py compares the weights on shared ranks
def test_two_ranks_of_ddp_train_the_weights_of_plain(setting: Setting) -> None:
    outcome = next(measured("ranks", item, 1e9) for item in gpu_ranks.ranks(setting) if item.name == TRIED)
    assert not outcome.failed, outcome
    assert outcome.figures["steps"] == gpu_ranks.STEPS


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", [item.name for item in gpu_ranks.ranks(SETTING) if item.name != TRIED])
def test_the_other_items(setting: Setting, name: str) -> None:
    outcome = next(measured("ranks", item, 1e9) for item in gpu_ranks.ranks(setting) if item.name == name)
    assert not outcome.failed, outcome


def test_a_command_that_fails_is_an_error_with_its_message(tmp_path: Path) -> None:
    runs = gpu_ranks.Runs(SETTING, tmp_path)
    with pytest.raises(RuntimeError, match="ValueError"):
        runs.finish(runs.start([sys.executable, "-c", "raise ValueError('no data')"], "broken"))
