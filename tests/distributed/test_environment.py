"""The process group under the real launchers, and what the others see when one rank fails."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.ranks import free_port
from trp_scale.config import RefusedError
from trp_scale.distributed.environment import Environment
from trp_scale.distributed.launchers import RankInfo

PROGRAM = Path(__file__).with_name("environment_program.py")
LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS")


def environ(**variables: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in LAUNCHER_VARIABLES}
    scripts = Path(sys.executable).parent  # deepspeed looks for its parts on PATH
    return kept | {"PATH": f"{scripts}:{os.environ['PATH']}", "CUDA_VISIBLE_DEVICES": ""} | variables


def launched(launcher: list[str], directory: Path, behaviour: str = "ends") -> list[dict[str, Any]]:
    command = [sys.executable, "-m", *launcher, str(PROGRAM), str(directory), behaviour]
    done = subprocess.run(command, env=environ(), capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads((directory / f"{rank}.json").read_text(encoding="utf-8")) for rank in (0, 1)]


@pytest.mark.exhaustive  # tests/distributed/test_readme_commands.py starts two ranks under torchrun
@pytest.mark.parametrize(
    ("launcher", "argv"),
    [
        ("torchrun", ["torch.distributed.run", "--standalone", "--nproc_per_node", "2"]),
        ("deepspeed", ["deepspeed.launcher.runner", "--num_gpus", "2", "--master_port", "PORT"]),
    ],
)
def test_two_ranks_find_each_other(launcher: str, argv: list[str], tmp_path: Path) -> None:
    ranks = launched([str(free_port()) if word == "PORT" else word for word in argv], tmp_path)
    for rank, seen in enumerate(ranks):
        assert (seen["rank"], seen["world"], seen["local_rank"], seen["local_world"]) == (rank, 2, rank, 2)
        assert seen["launcher"] == launcher
        assert (seen["sum"], seen["path"], seen["LOCAL_RANK"], seen["device"]) == (3, "rank 0", str(rank), "cpu")
        # The ranks of a node share its cores; torchrun sets OMP_NUM_THREADS to 1.
        assert seen["cpus"] <= max(1, len(os.sched_getaffinity(0)) // 2)
        assert seen["threads"] == (1 if launcher == "torchrun" else seen["cpus"])


def two_by_hand(directory: Path, behaviour: str, variables: list[dict[str, str]]) -> list[tuple[int, str]]:
    """Exit status and stderr of two processes that are started without a launcher that would end them."""
    processes = [
        subprocess.Popen(
            [sys.executable, str(PROGRAM), str(directory), behaviour],
            env=environ(**extra),
            stderr=subprocess.PIPE,
            text=True,
        )
        for extra in variables
    ]
    ended = [process.communicate(timeout=400)[1] for process in processes]
    return [(process.returncode, text) for process, text in zip(processes, ended, strict=True)]


def by_hand() -> list[dict[str, str]]:
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    return [{**place, "RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2"} for rank in (0, 1)]


def by_srun() -> list[dict[str, str]]:
    step = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_NODEID": "0"}
    step |= {"SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_STEP_NODELIST": "localhost"}
    return [{**step, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)} for rank in (0, 1)]


def test_a_rank_that_fails_under_srun_says_so_and_nobody_hangs(tmp_path: Path) -> None:
    start = time.monotonic()
    (other_status, other), (status, error) = two_by_hand(tmp_path, "one_fails", by_srun())
    assert time.monotonic() - start < 300  # not the group's eight minutes, and not the sleep of twenty
    seen = json.loads((tmp_path / "1.json").read_text(encoding="utf-8"))
    assert (seen["launcher"], seen["sum"], seen["LOCAL_RANK"]) == ("slurm", 3, "1")
    assert (other_status, status) == (1, 1)
    assert "ValueError: broken" in error
    assert all(line.startswith("[rank 1 on ") for line in error.splitlines() if "Error" in line or "File" in line)
    assert "[rank 0 on " in other  # its collective ended because the connection closed


@pytest.mark.exhaustive
def test_a_refusal_on_one_rank_is_a_message_with_its_rank(tmp_path: Path) -> None:
    _, (status, error) = two_by_hand(tmp_path, "one_is_refused", by_hand())
    assert status == 2
    assert "] error: no such thing" in error
    assert "Traceback" not in error


def test_a_single_process_makes_a_group_only_when_asked() -> None:
    before = os.environ.get("LOCAL_RANK")
    with Environment(RankInfo(), use_gpu=False) as environment:
        assert not dist.is_initialized()
        assert (environment.world.size, environment.data.size, environment.device.type) == (1, 1, "cpu")
        environment.ensure_process_group()
        environment.ensure_process_group()
        assert dist.get_world_size() == 1
        assert os.environ["LOCAL_RANK"] == "0"
    assert not dist.is_initialized()
    assert os.environ.get("LOCAL_RANK") == before


def test_ranks_that_never_come_are_a_refusal() -> None:
    alone = RankInfo(rank=0, world=2, master_port=free_port(), launcher="variables")
    with (
        pytest.raises(RefusedError, match="rank 1 of 2"),
        Environment(alone, timeout_minutes=0.01, use_gpu=False),
    ):
        pass
    assert not dist.is_initialized()


def test_the_group_is_destroyed_when_a_single_process_fails() -> None:
    with pytest.raises(ValueError, match="broken"), Environment(RankInfo(), use_gpu=False) as environment:
        environment.ensure_process_group()
        raise ValueError("broken")
    assert not dist.is_initialized()


def test_a_group_that_somebody_else_made_is_left_alone() -> None:
    with Environment(RankInfo(), use_gpu=False) as outer:
        outer.ensure_process_group()
        with Environment(RankInfo(), use_gpu=False) as inner:
            inner.ensure_process_group()
        assert dist.is_initialized()
    assert not dist.is_initialized()
