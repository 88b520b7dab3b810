"""A request to stop, heard by any one rank, ends all ranks after the same step with one whole checkpoint."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.ranks import free_port
from tests.runs import flags, lines, pretrain_here, start
from trp_scale.checkpoint.run_directory import checkpoints, incompleteness

LONG = {"training__steps": 100_000, "logging__every": 1}


def children(pid: int) -> list[int]:
    """Process ids started by `pid`, from /proc."""
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = status.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == pid:
            found.append(int(status.parent.name))
    return found


def wait_for_steps(process: subprocess.Popen[str], run_dir: Path, count: int) -> None:
    metrics = run_dir / "metrics.jsonl"
    deadline = time.monotonic() + 180
    while not metrics.exists() or metrics.read_bytes().count(b"\n") < count:
        if process.poll() is not None:
            raise AssertionError(f"ended with {process.returncode}: {process.communicate()[0]}")
        assert time.monotonic() < deadline, "no steps within 180 s"
        time.sleep(0.02)


def one_whole_checkpoint_at_the_last_step(run_dir: Path) -> int:
    last = lines(run_dir)[-1]["step"]
    assert [step for step, _ in checkpoints(run_dir)] == [last]
    assert incompleteness(checkpoints(run_dir)[0][1]) is None
    assert not list((run_dir / "checkpoints").glob(".*")), "something half-written was left"
    return int(last)


@pytest.mark.parametrize("launcher", ["torchrun", "deepspeed"])
def test_sigterm_to_one_of_two_ranks(text_dataset: Path, tmp_path: Path, launcher: str) -> None:
    port = str(free_port())
    commands = {
        "torchrun": (["torchrun", "--nproc_per_node", "2", "--master_port", port], {}),
        "deepspeed": (
            ["deepspeed", "--num_gpus", "2", "--master_port", port],
            {"ds_config": "ds_configs/zero2.json"},
        ),
    }
    command, extra = commands[launcher]
    executable = str(Path(sys.executable).parent / command[0])
    process = start(flags(text_dataset, tmp_path, **LONG, **extra), [executable, *command[1:]])
    wait_for_steps(process, tmp_path, 3)
    # deepspeed starts its ranks from a process of its own below the command.
    launchers = [process.pid, *children(process.pid)]
    victim = next(pid for parent in launchers for pid in children(parent) if _rank(pid) == 1)
    os.kill(victim, signal.SIGTERM)
    output = process.communicate(timeout=120)[0]
    assert process.returncode == 0, output
    last = one_whole_checkpoint_at_the_last_step(tmp_path)
    assert 3 <= last < LONG["training__steps"]
    assert (
        "SIGTERM" in (tmp_path / "summary.json").read_text()
        or "another rank" in (tmp_path / "summary.json").read_text()
    )


def _rank(pid: int) -> int | None:
    try:
        variables = (b"\0" + Path(f"/proc/{pid}/environ").read_bytes()).split(b"\0")
    except OSError:
        return None
    found = [int(value.removeprefix(b"RANK=")) for value in variables if value.startswith(b"RANK=")]
    return found[0] if found else None


def test_a_stop_file_and_max_hours(text_dataset: Path, tmp_path: Path) -> None:
    (tmp_path / "file").mkdir()
    (tmp_path / "file" / "STOP").touch()
    assert pretrain_here(flags(text_dataset, tmp_path / "file", **LONG)) == 0
    assert one_whole_checkpoint_at_the_last_step(tmp_path / "file") == 1
    assert not (tmp_path / "file" / "STOP").exists()
    hours = 1.0 / 3600
    assert pretrain_here(flags(text_dataset, tmp_path / "hours", training__max_hours=hours, **LONG)) == 0
    assert one_whole_checkpoint_at_the_last_step(tmp_path / "hours") >= 1
