"""Ranks that start again in their places, under the real launchers: the launcher sees nothing of a fault, and the run
ends as the one that nothing happened to."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.launched import descendants, environment_of, launch, wait_for_steps
from tests.faults.test_kills import same_end
from tests.ranks import Ranks
from tests.runs import flags, lines, pretrain_here
from trp_scale.distributed.liveness import lease_holder
from trp_scale.training.rundir import read_incidents

STEPS = 12
SETTINGS: dict[str, Any] = {"training__steps": STEPS, "checkpoint__every": 2, "model__dropout": 0.1}


def looked_after(process: subprocess.Popen[str], rank: int) -> tuple[int, int]:
    """Process ids of what the launcher has started as this rank, and of the rank that it has forked last."""
    first, *below = [pid for pid in descendants(process.pid) if environment_of(pid).get("RANK") == str(rank)]
    return first, below[-1]


@pytest.mark.exhaustive  # tests/unit/distributed/test_restarts.py kills a rank and starts it again without a launcher
@pytest.mark.parametrize(
    ("launcher", "extra"),
    [("torchrun", {"engine": "fsdp"}), ("deepspeed", {"ds_config": "ds_configs/zero2.json"})],
    ids=["torchrun", "deepspeed"],
)
def test_killed_ranks_start_again_and_the_run_ends_as_if_nothing_had_happened(
    two_ranks: Ranks, text_dataset: Path, tmp_path: Path, launcher: str, extra: dict[str, Any]
) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert two_ranks(pretrain_here, flags(text_dataset, whole, **SETTINGS, **extra)) == [0, 0]
    two_ranks.close()
    process = launch(
        launcher, flags(text_dataset, killed, **SETTINGS, **extra, reliability__restarts=3, resume="never")
    )
    above = {}
    for after, rank in ((3, 1), (7, 0)):
        wait_for_steps(process, killed, after)
        above[rank], forked = looked_after(process, rank)
        assert rank != 0 or lease_holder(killed)["process"] == forked
        os.kill(forked, signal.SIGKILL)
    output = process.communicate(timeout=600)[0]
    assert process.returncode == 0, output
    assert output.count("SIGKILL: ") == 2 and all(f", {number} of 3" in output for number in (1, 2)), output
    assert [(each["kind"], each["attempt"]) for each in read_incidents(killed)] == [("restart", 1), ("restart", 2)]
    (killed / "incidents.jsonl").unlink()  # of which the doctor warns
    same_end(killed, whole, STEPS)


@pytest.mark.faults
def test_a_rank_that_stands_still_is_ended_and_the_run_goes_on(text_dataset: Path, tmp_path: Path) -> None:
    settings = {**SETTINGS, "reliability__hang_minutes": 0.1, "reliability__restarts": 1}
    process = launch("torchrun", flags(text_dataset, tmp_path, **settings))
    wait_for_steps(process, tmp_path, 7)
    os.kill(looked_after(process, 1)[1], signal.SIGSTOP)
    output = process.communicate(timeout=600)[0]
    assert process.returncode == 0, output
    (restart,) = read_incidents(tmp_path)
    assert "rank 1 " in restart["why"]
    assert lines(tmp_path)[-1]["step"] == STEPS


@pytest.mark.exhaustive
def test_a_refusal_is_no_fault(text_dataset: Path, tmp_path: Path) -> None:
    process = launch("torchrun", flags(text_dataset, tmp_path, data__path=tmp_path, reliability__restarts=3))
    output = process.communicate(timeout=600)[0]
    assert (process.returncode, "error: " in output, "start again" in output) == (1, True, False), output
