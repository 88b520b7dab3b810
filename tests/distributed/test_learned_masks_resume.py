"""Invariant 3 with learned masks, and with an adversary and minimax beside them: a run stopped in the middle of a cycle
of its levels is the run that was not."""

from __future__ import annotations

import json
import os
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from torch import Tensor

from tests.checkpoints import stored_state, unequal
from tests.distributed.engine_layouts import ENGINE_FLAGS, ROOT
from tests.distributed.launched import wait_for_steps
from tests.faults.forked_ranks import Signal, run_ranks
from tests.ranks import Ranks
from tests.runs import essence, image_flags, lines, pretrain_here, start
from trp_scale.checkpoint.document import HOOKS_NAME, CheckpointDocument, read_document
from trp_scale.checkpoint.run_directory import checkpoint_path, checkpoints, newest_complete

STEPS = 12
CYCLE = {"multilevel__unroll": 2, "multilevel__every": 2}
"""The masking network learns after steps 4, 8 and 12, the head after all even ones."""
EXACT_ENOUGH = {"optimizer__eps": 1e-2, "multilevel__eps": 1e-2, "multilevel__difference": 1.0}
"""As in parity/test_learned_masks.py: layouts round differently."""

flags = partial(image_flags, "mlo_mae_tiny", training__steps=STEPS, optimizer__schedule="constant", **CYCLE)


def of_masks(line: dict[str, Any]) -> dict[str, Any]:
    """What a line says of the masks, times left out."""
    return {name: value for name, value in line["multilevel"].items() if name != "time"}


def same_lines(ours: Path, theirs: Path, stopped: int) -> None:
    """All that metrics.jsonl says of the training, bit for bit, the last lesson's comparisons of masks included.
    Losses of the last outer step are in every line of a run that goes on, and in one that was resumed from its next
    outer step on."""
    mine, others = lines(ours), lines(theirs)
    assert [line["step"] for line in mine] == [line["step"] for line in others] == list(range(1, STEPS + 1))
    for line, other in zip(mine, others, strict=True):
        assert essence(line) == essence(other)
        found, expected = of_masks(line), of_masks(other)
        absent = expected.keys() - found.keys()
        assert not absent or stopped < line["step"] < stopped + 4, (line["step"], absent)
        assert absent.isdisjoint(("gradient_norm", "below_eps", "overlap_untrained", "overlap_last")), absent
        assert found == {name: expected[name] for name in found}, line["step"]


def stored(run_dir: Path, step: int = STEPS) -> dict[str, Tensor]:
    """All tensors of a checkpoint: weights and moments of both engines, the head, and what else hooks hold."""
    path = checkpoint_path(run_dir, step)
    found = {f"hooks/{name}": value for name, value in load_file(path / HOOKS_NAME).items()}
    for engine in ("", "masking_network"):
        found |= stored_state(path, engine)
    return found


def same_checkpoints(ours: Path, theirs: Path) -> CheckpointDocument:
    """All that checkpoints of the last step hold, bit for bit; returns the first's document."""
    assert unequal(stored(ours), stored(theirs)) == []
    mine, other = (read_document(checkpoint_path(run_dir, STEPS)) for run_dir in (ours, theirs))
    for name in ("hooks", "cursors", "engine_state", "optimizer_steps"):
        assert getattr(mine, name) == getattr(other, name), name
    return mine


@pytest.mark.exhaustive
def test_kill_9_in_the_middle_of_a_cycle_and_resume(image_dataset: Path, tmp_path: Path) -> None:
    """Gone on with from step 5: after one of two steps of the encoder, and before the first of two updates."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert pretrain_here(flags(image_dataset, whole)) == 0
    victim = start(flags(image_dataset, killed, checkpoint__every=5, training__steps=100_000))
    wait_for_steps(victim, killed, 6)
    while newest_complete(killed).path is None and victim.poll() is None:  # it is written behind the steps
        time.sleep(0.001)
    os.kill(victim.pid, signal.SIGKILL)
    victim.communicate()
    assert victim.returncode == -signal.SIGKILL
    taken = newest_complete(killed).path
    assert taken is not None
    stopped = read_document(taken).step
    assert stopped < STEPS and stopped % 4 > 0, "the kill came too late to tell"
    assert pretrain_here(flags(image_dataset, killed)) == 0
    same_lines(killed, whole, stopped)
    same_checkpoints(killed, whole)


def test_what_a_checkpoint_holds_of_three_levels(image_dataset: Path, tmp_path: Path) -> None:
    """After 7 steps: the seventh is the first of its cycle, the third update of the head the first of its own, and the
    network has learned once."""
    assert pretrain_here(flags(image_dataset, tmp_path, training__steps=7)) == 0
    document, size = read_document(checkpoint_path(tmp_path, 7)), 8
    counters = {"inner_steps": 1, "head_steps": 1, "outer_steps": 1, "unrolled": True}
    assert document.hooks["multilevel"]["counters"] == counters
    assert document.engine_state["masking_network.optimizer_steps"] == 1
    assert document.cursors == {
        "train": 7 * size,
        "downstream_train": 3 * size,
        "downstream_validation": 1 * size,
    }


OF_THE_FIRST = {
    "gradient_clipping": 0.5,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "eps": 1e-2}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-3, "warmup_num_steps": 0}},
}
"""What a DeepSpeed file may say of the run's own optimizer; the masking network's is another."""
LAYOUTS = ["plain", "zero3", "fsdp", "ddp", "zero2", "zero0", "zero3"]


@pytest.mark.exhaustive
def test_two_engines_that_change_at_every_checkpoint(two_ranks: Ranks, image_dataset: Path, tmp_path: Path) -> None:
    """Within invariant 1 of the run that stayed on one process; the steps of a cycle are on several engines."""
    whole, parts, last = tmp_path / "whole", tmp_path / "parts", 2 * len(LAYOUTS)
    first = {"optimizer__lr": 1e-3, "optimizer__warmup_steps": 0, "optimizer__clipping": 0.5, "checkpoint__keep": 0}
    changes = {**EXACT_ENOUGH, **first, "training__steps": last}
    assert pretrain_here(flags(image_dataset, whole, checkpoint__every=2, **changes)) == 0
    for number, layout in enumerate(LAYOUTS, 1):
        engine = dict(ENGINE_FLAGS[layout])
        if layout in ("zero2", "zero3"):
            path = tmp_path / f"{layout}.json"
            path.write_text(
                json.dumps({**json.loads((ROOT / f"ds_configs/{layout}.json").read_text()), **OF_THE_FIRST})
            )
            engine = {"ds_config": str(path)}
        words = flags(image_dataset, parts, **{**changes, "training__steps": 2 * number}, **engine)
        assert set([pretrain_here(words)] if layout == "plain" else two_ranks(pretrain_here, words)) == {0}
        mine, theirs, before = stored(parts, 2 * number), stored(whole, 2 * number), stored(whole, 2)
        assert mine.keys() == theirs.keys()
        for name, value in theirs.items():
            if name.endswith(("qkv.bias", "/step")):  # a third of it has no gradient but rounding's
                continue
            way = (value - before.get(name, 0.0)).norm()  # the network's figures begin with its first step
            assert (mine[name] - value).norm() <= 1e-4 * way + 1e-5 * value.norm(), (layout, name)


all_methods = partial(
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
    log, stop = tmp_path / "log", Signal(place="rows", rank=1, number=signal.SIGTERM, times=8)
    assert run_ranks(all_methods(image_dataset, parts, training__steps=STEPS), log, stop) == [0, 0], log.read_text()
    ((stopped, _),) = checkpoints(parts)
    assert stopped == 5, "the eighth rows are those of another step"
    for run_dir in (parts, whole):
        two_ranks(pretrain_here, all_methods(image_dataset, run_dir, training__steps=STEPS))
    same_lines(parts, whole, stopped)
    assert all(line["adversary"] and line["balancer"] is not None for line in lines(whole))
    document, names = same_checkpoints(parts, whole), stored(whole)
    for part in ("hooks/adversary", "hooks/balancer", "hooks/multilevel", "weight//blocks", "exp_avg/masking_network"):
        assert any(name.startswith(part) for name in names), part
    assert document.hooks["multilevel"]["counters"]["outer_steps"] == STEPS // 4
    assert set(document.cursors) == {"train", "downstream_train", "downstream_validation"}
