"""Learned masks, an adversary and minimax in one run of the command line on ZeRO-2: stopped and resumed, it is the run
that was not (issue line 7)."""

from __future__ import annotations

import os
import signal
from functools import partial
from pathlib import Path

import torch

from tests.distributed.launched import launch, rank_of_two, wait_for_steps
from tests.distributed.test_learned_masks_resume import STEPS, same_lines, stored
from tests.ranks import Ranks
from tests.runs import image_flags, lines, pretrain_here
from trp_scale.checkpoint.document import read_document
from trp_scale.checkpoint.run_directory import checkpoint_path, checkpoints

LONG = 100_000

flags = partial(
    image_flags,
    "adpe_tiny",
    multilevel__kind="head",
    multilevel__network="patchwise",
    balancer__kind="minimax",
    multilevel__unroll=2,
    multilevel__every=2,
    optimizer__schedule="constant",
    checkpoint__keep=0,
    ds_config="ds_configs/zero2.json",
)


def test_all_three_stopped_by_a_signal_and_resumed(two_ranks: Ranks, image_dataset: Path, tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    process = launch("torchrun", flags(image_dataset, parts, training__steps=LONG))
    wait_for_steps(process, parts, 3)
    os.kill(rank_of_two(process, 1), signal.SIGTERM)
    output = process.communicate(timeout=240)[0]
    assert process.returncode == 0, output
    ((stopped, _),) = checkpoints(parts)
    assert 3 <= stopped < STEPS, "the signal came too late to tell"
    for run_dir in (parts, whole):
        two_ranks(pretrain_here, flags(image_dataset, run_dir, training__steps=STEPS))
    same_lines(parts, whole, stopped)
    assert all(line["adversary"] and line["balancer"] is not None for line in lines(whole))
    mine, theirs = stored(parts), stored(whole)
    assert mine.keys() == theirs.keys()
    assert [name for name, value in theirs.items() if not torch.equal(mine[name], value)] == []
    for part in ("hooks/adversary", "hooks/balancer", "hooks/multilevel", "weight//blocks", "exp_avg/masking_network"):
        assert any(name.startswith(part) for name in theirs), part
    documents = [read_document(checkpoint_path(run_dir, STEPS)) for run_dir in (parts, whole)]
    for name in ("hooks", "cursors", "engine_state", "optimizer_steps"):
        assert getattr(documents[0], name) == getattr(documents[1], name), name
    assert documents[0].hooks["multilevel"]["counters"]["outer_steps"] == STEPS // 4
    assert set(documents[0].cursors) == {"train", "downstream_train", "downstream_validation"}
