"""Runs on two ranks under the real launchers, as processes of their own, and what can be done to them."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from tests.ranks import free_port
from tests.runs import lines, start

OPTIONS = {"torchrun": "--nproc_per_node", "deepspeed": "--num_gpus"}


def launch(launcher: str, arguments: list[str]) -> subprocess.Popen[str]:
    """Start launch/pretrain.py on two ranks under torchrun or deepspeed."""
    executable = str(Path(sys.executable).parent / launcher)
    return start(arguments, [executable, OPTIONS[launcher], "2", "--master_port", str(free_port())])


def wait_for_steps(process: subprocess.Popen[str], run_dir: Path, count: int) -> None:
    """Return once metrics.jsonl has `count` lines."""
    metrics = run_dir / "metrics.jsonl"
    deadline = time.monotonic() + 600
    while not metrics.exists() or metrics.read_bytes().count(b"\n") < count:
        if process.poll() is not None:
            raise AssertionError(f"ended with {process.returncode}: {process.communicate()[0]}")
        assert time.monotonic() < deadline, "no steps within 600 s"
        time.sleep(0.01)


def finetune_until_killed(arguments: list[str], seed_directory: Path, steps: int) -> None:
    """Fine-tune in a process of its own and end it by kill -9 at a random step, long before the last of `steps`."""
    process = start(arguments, script="finetune.py")
    wait_for_steps(process, seed_directory, random.SystemRandom().randint(4, steps // 2))
    process.kill()
    process.communicate(timeout=300)
    assert len(lines(seed_directory)) < steps, "it was over before it was killed"
    assert not (seed_directory / "result.json").exists()


def descendants(pid: int) -> list[int]:
    """Process ids started by `pid` and by what it started, from /proc, parents first."""
    parents = {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # gone since it was listed
            parents[int(status.parent.name)] = int(status.read_text().rpartition(")")[2].split()[1])
    found = [pid]
    for each in found:  # grows while it is read
        found += [child for child, parent in parents.items() if parent == each]
    return found[1:]


def environment_of(pid: int | str) -> dict[str, str]:
    """Variables that a process was started with; empty for one that is gone or is another user's."""
    try:
        content = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return {}
    pairs = (variable.partition(b"=") for variable in content.split(b"\0") if variable)
    return {name.decode(): os.fsdecode(value) for name, _, value in pairs}


def rank_of_two(process: subprocess.Popen[str], rank: int) -> int:
    """Process id of a rank; its loader workers, which inherit its variables, come after it."""
    return next(pid for pid in descendants(process.pid) if environment_of(pid).get("RANK") == str(rank))


def kill_all(process: subprocess.Popen[str]) -> None:
    """kill -9 of a launcher and of all below it, launchers first: none of them may put the ranks to rest."""
    for pid in [process.pid, *descendants(process.pid)]:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.communicate(timeout=300)


def started_with(name: str, value: str) -> list[int]:
    """Process ids that live on with this variable in their environment."""
    pids = [int(entry.name) for entry in Path("/proc").glob("[0-9]*")]
    return [pid for pid in pids if environment_of(pid).get(name) == value]
