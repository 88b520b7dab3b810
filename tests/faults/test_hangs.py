"""Ranks that stop in the middle, and real launchers that are gone."""

from __future__ import annotations

import json
import signal
from functools import partial
from pathlib import Path

import pytest

from tests.distributed.launched import launch, rank_of_two, wait_for_steps
from tests.faults.forked_ranks import Signal, run_ranks
from tests.grids import always
from tests.runs import flags, lines, wait_until
from trp_scale.checkpoint.run_directory import checkpoints, incompleteness

LONG = {"training__steps": 100_000, "checkpoint__every": 5, "reliability__hang_minutes": 0.1}


def has_ended(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def test_a_stopped_rank_is_named_and_the_others_end(text_dataset: Path, tmp_path: Path) -> None:
    stopped = Signal(place="rows", rank=1, number=signal.SIGSTOP, times=12)
    assert run_ranks(flags(text_dataset, tmp_path, **LONG), tmp_path / "log", stopped) == [4, -signal.SIGKILL]
    record = json.loads((tmp_path / "stop.json").read_text())
    assert (record["status"], record["again"]) == (4, True)
    assert "rank 1 " in record["why"] and "gloo:" in record["why"]
    (hang,) = (tmp_path / "hangs").iterdir()
    assert " in train_step\n" in (hang / "rank-00000.txt").read_text()


@pytest.mark.parametrize(
    ("launcher", "number"),
    always(
        [("torchrun", signal.SIGKILL), ("deepspeed", signal.SIGTERM), ("deepspeed", signal.SIGKILL)],
    ),
)
def test_ranks_whose_launcher_is_gone_write_a_checkpoint_and_end(
    text_dataset: Path, tmp_path: Path, launcher: str, number: signal.Signals
) -> None:
    extra = {"ds_config": "ds_configs/zero2.json"} if launcher == "deepspeed" else {}
    process = launch(launcher, flags(text_dataset, tmp_path, **LONG, **extra))
    wait_for_steps(process, tmp_path, 3)
    ranks = [rank_of_two(process, rank) for rank in (0, 1)]
    process.send_signal(number)
    for rank in ranks:
        wait_until(partial(has_ended, rank), "they train on", pause=0.05)
    process.communicate(timeout=300)
    last = lines(tmp_path)[-1]["step"]
    step, path = checkpoints(tmp_path)[-1]
    assert (step, incompleteness(path)) == (last, None)
    record = json.loads((tmp_path / "stop.json").read_text())
    assert (record["status"], record["again"]) == (0, True)
    assert "its launcher" in record["why"]
