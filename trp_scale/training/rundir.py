"""The run directory: everything one run leaves behind.

runs/pos_bert_tiny-20260101-120000/
  config.yaml        every setting, resolved
  environment.json   versions, git commit, machines, engine, launcher, command line; of each start
  tokenizer/         copy of the data set's tokenizer
  metrics.jsonl summary.json report.txt    written by trp_scale.training
  checkpoints/step_00000123/               written by trp_scale.checkpoint
"""

from __future__ import annotations

import json
import os
import platform
import shlex
import socket
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol

import torch

import trp_scale
from trp_scale.checkpoint.agreement import on_rank_zero
from trp_scale.config import Config, RefusedError
from trp_scale.config.json_files import read_object
from trp_scale.config.loader import dump
from trp_scale.config.schema import Fields, clean_text
from trp_scale.distributed.environment import RankInfo
from trp_scale.distributed.groups import Group
from trp_scale.storage.files import write_text

CONFIG_FILE = "config.yaml"
ENVIRONMENT_FILE = "environment.json"
_PACKAGES = (
    "torch",
    "deepspeed",
    "transformers",
    "tokenizers",
    "safetensors",
    "numpy",
    "trp-scale",
)


class NamesDirectory(Protocol):
    """A command line that says where its results go."""

    run_dir: Path | None

    def recipe_name(self) -> str:
        """Start of the directory's name where run_dir is None."""
        ...


def create_run_directory(arguments: NamesDirectory, world: Group) -> Path:
    """Decide the run directory on rank 0 (--run_dir, or a new one under runs/), make it, and tell all ranks.

    Raises:
        RefusedError: on every rank, when rank 0 cannot make it, or it holds a data set.
    """
    problem, path = None, Path()
    if world.rank == 0:
        path = arguments.run_dir or _unused_name(Path("runs"), arguments.recipe_name(), datetime.now())
        path = path.absolute()
        try:
            path.mkdir(parents=True, exist_ok=True)
            if (path / "dataset.json").is_file():
                problem = f"--run_dir {path} holds a data set; give another directory"
        except OSError as error:
            problem = f"--run_dir {path} cannot be made: {error.strerror}"
    problem, path = world.broadcast_object((problem, path))
    if problem is not None:
        raise RefusedError(problem)
    return path


def refuse_runs(run_dir: Path, pattern: str, what: str, world: Group) -> None:
    """Refuse a directory that another command has trained into.

    Args:
        pattern: files that tell so.
        what: whose runs these are.

    Raises:
        RefusedError: on every rank.
    """
    if on_rank_zero(world, f"looking into {run_dir}", lambda: any(run_dir.glob(pattern))):
        raise RefusedError(f"--run_dir {run_dir} holds {what}; give another one")


def continue_command(words: Sequence[str], run_dir: Path) -> str:
    """Return the command that continues a run: the words of its start, which may have left its directory to chance."""
    named = any(word.partition("=")[0] == "--run_dir" for word in words)
    directory = run_dir.parents[1] if run_dir.name.startswith("seed_") else run_dir  # finetune: RUN/TASK/seed_N
    return shlex.join([*words, *([] if named else ["--run_dir", str(directory)])])


def write_config(run_dir: Path, config: Config, world: Group) -> None:
    """Write config.yaml on rank 0. After the checks of a resume: it replaces the last start's."""
    if world.rank == 0:
        write_text(run_dir / CONFIG_FILE, dump(config))


def write_environment(
    run_dir: Path,
    info: RankInfo,
    world: Group,
    *,
    device: torch.device,
    engine: str,
    zero_stage: int | None,
    micro_size: int,
    cpus: int,
) -> dict[str, Any]:
    """Write environment.json: how this start was made, and under `earlier` the starts before it.

    All ranks call it: hosts and devices are gathered.

    Returns:
        what was written, the same on every rank.
    """
    machines = world.gather_objects((socket.gethostname(), _device_name(device)))
    start: dict[str, Any] = {}
    if world.rank == 0:
        start = {
            "started": datetime.now(UTC).isoformat(timespec="seconds"),
            "command": [clean_text(word) for word in sys.orig_argv],
            "directory": str(Path.cwd()),
            "engine": engine,
            "zero_stage": zero_stage,
            "micro_size": micro_size,
            "world_size": info.world,
            "launcher": info.launcher,
            "hosts": list(dict.fromkeys(host for host, _ in machines)),
            "devices": [name for _, name in machines],
            "python": platform.python_version(),
            "platform": platform.platform(),
            "cuda": torch.version.cuda if device.type == "cuda" else None,
            "cpus_per_rank": cpus,
            "threads_per_rank": torch.get_num_threads(),
            "versions": {package: _version(package) for package in _PACKAGES},
            "git": git_state(Path(trp_scale.__file__).resolve().parent),
        }
        start["earlier"] = _earlier(run_dir / ENVIRONMENT_FILE)
        write_text(run_dir / ENVIRONMENT_FILE, json.dumps(start, indent=2) + "\n")
    return world.broadcast_object(start)


def git_state(directory: Path) -> dict[str, Any] | None:
    """Commit of the checkout that holds `directory`, and whether it has changes; None when it is in no checkout."""

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(
                ["git", "-C", str(directory), *arguments], capture_output=True, text=True, timeout=20, check=True
            )
        except (OSError, subprocess.SubprocessError):  # no git, or no checkout: the same answer
            return None
        return done.stdout.strip()

    # An installed package may lie in a virtual environment inside somebody's checkout: only tracked files count.
    if not git("ls-files", "--", "__init__.py"):
        return None
    return {"commit": git("rev-parse", "HEAD"), "dirty": bool(git("status", "--porcelain", "--untracked-files=no"))}


def _unused_name(parent: Path, recipe: str, now: datetime) -> Path:
    """runs/<recipe>-<date>-<time>; two runs of one second get a number, so that neither continues the other."""
    name = f"{recipe}-{now:%Y%m%d-%H%M%S}"
    candidates = [parent / name, *(parent / f"{name}-{number}" for number in range(2, 1000))]
    return next(path for path in candidates if not path.exists())


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:  # an optional one, or the checkout is not installed
        return None


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"cpu ({platform.machine()}, {os.cpu_count()} cores)"


def _earlier(path: Path) -> list[dict[str, Any]]:
    """The starts before this one, oldest first."""
    if not path.exists():
        return []
    advice = "move it away to go on without the record of the starts before"
    try:
        last = read_object(path)
    except RefusedError as error:
        raise RefusedError(f"{error}; {advice}") from error
    earlier = Fields(last, str(path), RefusedError, advice).take("earlier", list[dict[str, Any]], [])
    last.pop("earlier", None)
    return [*earlier, last]
