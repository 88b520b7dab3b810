"""The run directory: all files of a run.

runs/pos_bert_tiny-20260101-120000/
  config.yaml        all settings, resolved
  environment.json   versions, git commit, machines, engine, launcher, command line; of each start
  stop.json          end of the last start
  incidents.jsonl    faults that did not end the run
  tokenizer/         copy of the data set's tokenizer
  metrics.jsonl summary.json report.txt    written by metrics.py and observer.py
  checkpoints/step_00000123/               written by trp_scale.checkpoint
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import shlex
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import torch

import trp_scale
from trp_scale.checkpoint.run_directory import ENVIRONMENT_FILE, newest_step
from trp_scale.config import Config
from trp_scale.config.files import json_lines, parse_json, read_object, read_optional_object
from trp_scale.config.loader import dump
from trp_scale.config.schema import Fields, clean_text
from trp_scale.core.engine import Engine
from trp_scale.distributed.environment import Environment
from trp_scale.distributed.groups import Group, on_rank_zero
from trp_scale.distributed.liveness import HANGS, Lease, Watchdog, write_exclusively
from trp_scale.distributed.stop import PERSON_REASONS, StopRequests, launcher_processes
from trp_scale.errors import ExitStatus, RefusedError, exit_status_and_message
from trp_scale.storage.files import write_text
from trp_scale.storage.transfer import RemoteError
from trp_scale.training.metrics import FINISHED, drop_torn_line, nothing_left

CONFIG_FILE = "config.yaml"
_PACKAGES = (
    "torch",
    "deepspeed",
    "transformers",
    "tokenizers",
    "safetensors",
    "numpy",
    "trp-scale",
)


def create_run_directory(run_dir: Path | None, recipe: str, world: Group) -> Path:
    """Create the run directory on rank 0 (--run_dir, or a new one under runs/) and return it on all ranks.

    Raises:
        RefusedError: on every rank, if rank 0 cannot create it, or it contains a data set.
    """
    problem, path = None, Path()
    if world.rank == 0:
        name = f"{recipe}-{datetime.now():%Y%m%d-%H%M%S}"
        names = [name, *(f"{name}-{number}" for number in range(2, 1000))]  # two runs of the same second stay separate
        unused = (path for path in (Path("runs") / name for name in names) if not path.exists())
        path = (run_dir or next(unused)).absolute()
        try:
            path.mkdir(parents=True, exist_ok=True)
            if (path / "dataset.json").is_file():
                problem = f"--run_dir {path} contains a data set; use another directory"
        except OSError as error:
            problem = f"--run_dir {path} cannot be created: {error.strerror}"
    problem, path = world.broadcast_object((problem, path))
    if problem is not None:
        raise RefusedError(problem)
    return path


def refuse_runs(run_dir: Path, pattern: str, what: str, world: Group) -> None:
    """Raise RefusedError on every rank if the directory contains runs of another command.

    Args:
        pattern: files of such runs.
        what: description of such runs.
    """
    if on_rank_zero(world, f"looking into {run_dir}", lambda: any(run_dir.glob(pattern))):
        raise RefusedError(f"--run_dir {run_dir} contains {what}; use another directory")


def continue_command(words: Sequence[str], run_dir: Path) -> str:
    """Return the command that continues a run: that of its start, with --run_dir."""
    named = any(word.partition("=")[0] == "--run_dir" for word in words)
    directory = run_dir.parents[1] if run_dir.name.startswith("seed_") else run_dir  # finetune: RUN/TASK/seed_N
    return shlex.join([*words, *([] if named else ["--run_dir", str(directory)])])


def write_start(run_dir: Path, config: Config, environment: Environment, engine: Engine) -> None:
    """Write config.yaml, after the checks of a resume: it replaces that of the last start. Write environment.json: this
    start, and earlier starts under `earlier`. Collective: gathers hosts and devices."""
    device, name = environment.device, f"cpu ({platform.machine()}, {os.cpu_count()} cores)"
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    machines = environment.world.gather_objects((socket.gethostname(), name))
    if environment.world.rank == 0:
        write_text(run_dir / CONFIG_FILE, dump(config))
        start: dict[str, Any] = {
            "started": datetime.now(UTC).isoformat(timespec="seconds"),
            "command": [clean_text(word) for word in sys.orig_argv],
            "directory": str(Path.cwd()),
            "engine": engine.name,
            "zero_stage": engine.zero_stage,
            "micro_size": config.batch.micro_rows,
            "world_size": environment.info.world,
            "launcher": environment.info.launcher,
            "hosts": list(dict.fromkeys(host for host, _ in machines)),
            "devices": [name for _, name in machines],
            "python": platform.python_version(),
            "platform": platform.platform(),
            "cuda": torch.version.cuda if device.type == "cuda" else None,
            "cpus_per_rank": environment.cpus,
            "threads_per_rank": torch.get_num_threads(),
            "versions": {package: _version(package) for package in _PACKAGES},
            "git": git_state(Path(trp_scale.__file__).resolve().parent),
        }
        start["earlier"] = _earlier(run_dir / ENVIRONMENT_FILE)
        write_text(run_dir / ENVIRONMENT_FILE, json.dumps(start, indent=2) + "\n")


def git_state(directory: Path) -> dict[str, Any] | None:
    """Return the commit of the checkout of `directory` and whether it has changes; `None` outside a checkout."""

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(
                ["git", "-C", str(directory), *arguments], capture_output=True, text=True, timeout=20, check=True
            )
        except (OSError, subprocess.SubprocessError):  # no git, or no checkout
            return None
        return done.stdout.strip()

    # An installed package may be in a virtual environment inside another checkout: only tracked files count.
    if not git("ls-files", "--", "__init__.py"):
        return None
    return {"commit": git("rev-parse", "HEAD"), "dirty": bool(git("status", "--porcelain", "--untracked-files=no"))}


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:  # an optional package, or a checkout that is not installed
        return None


def _earlier(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    advice = "move it away to continue without the record of earlier starts"
    try:
        last = read_object(path)
    except RefusedError as error:
        raise RefusedError(f"{error}; {advice}") from error
    earlier = Fields(last, str(path), RefusedError, advice).take("earlier", list[dict[str, Any]], [])
    last.pop("earlier", None)
    return [*earlier, last]


STOP_RECORD = "stop.json"


@dataclass(kw_only=True)
class Ending:
    """Writer of RUN_DIR/stop.json: why a start ended, for people and batch scripts.

    {"why": "SIGTERM (rank 0)", "status": 0, "step": 120, "again": true, "advice": "...", "rank": 0, "at": "..."}

    `again` is true if the same command should be started again: a scheduler stopped the run, or it failed after it had
    written a new checkpoint, so that a repeating fault does not restart it forever. After a network failure it is also
    true for any run with a checkpoint.

    Attributes:
        began_with: step of the newest checkpoint at the start, -1 without one.
        finished_before: rank 0's record of a start that made all steps; a refused command does not change it.
    """

    run_dir: Path
    rank: int
    began_with: int = -1
    finished_before: bytes = b""

    def begin(self, attempt: int = 0) -> None:
        """Remove the record of the previous start on rank 0.

        Args:
            attempt: in-place restarts so far; a restart is recorded in incidents.jsonl with its reason.
        """
        self.began_with = newest_step(self.run_dir)
        if self.rank != 0:
            return
        record = self.run_dir / STOP_RECORD
        why = read_optional_object(record).get("why")
        if attempt:
            why_text = str(why or "its rank was killed")
            Incidents(self.run_dir).add("restart", self.began_with, attempt=attempt, why=why_text)
        if why == FINISHED:
            self.finished_before = record.read_bytes()
        record.unlink(missing_ok=True)

    def note_stop(self, why: str, step: int, status: ExitStatus) -> None:
        """Record an end of the run on all ranks."""
        if self.rank != 0:
            return
        finished = status is ExitStatus.DONE and nothing_left(why)
        asked = status is ExitStatus.DONE and not finished
        again = (asked and not why.startswith(PERSON_REASONS)) or (
            status is ExitStatus.STORAGE and self._has_progressed()
        )
        advice = "all steps are done" if why == FINISHED else "nothing is left to do" if finished else ""
        self._write(why, step, status, again=again, advice=advice)

    def broke(self, error: BaseException, step: int | None = None) -> None:
        """Record an error of this rank that ends the run. The record of the first rank stays."""
        status, _ = exit_status_and_message(error)
        if status is ExitStatus.REFUSED and self.finished_before and not self._has_progressed():
            with contextlib.suppress(OSError):
                (self.run_dir / STOP_RECORD).write_bytes(self.finished_before)
            return
        why = "".join(traceback.format_exception_only(error)).strip()
        may_go_on = self._has_progressed() or (isinstance(error, RemoteError) and self.began_with >= 0)
        self._write(why, step, status, again=status is not ExitStatus.REFUSED and may_go_on)

    def hung(self, step: int, why: str) -> None:
        """Record that the watchdog ends the run."""
        self._write(why, step, ExitStatus.HUNG, again=self._has_progressed())

    def _has_progressed(self) -> bool:
        return newest_step(self.run_dir) > self.began_with

    def _write(self, why: str, step: int | None, status: ExitStatus, *, again: bool, advice: str = "") -> None:
        """Write the record unless another rank has written one."""
        document = {"why": why[:2000], "status": status, "step": step, "again": again}
        document |= {"advice": advice or status.advice, "rank": self.rank, "host": socket.gethostname()}
        document["at"] = datetime.now(UTC).isoformat(timespec="seconds")
        with contextlib.suppress(OSError):  # a full disk must not hide the original error
            write_exclusively(self.run_dir / STOP_RECORD, json.dumps(document, indent=1) + "\n")


INCIDENTS_FILE = "incidents.jsonl"


class Incidents:
    """Writer of RUN_DIR/incidents.jsonl: a line for each fault that did not end the run, over all starts.

    {"at": "...", "step": 120, "kind": "unreadable", "key": "image-000001/scene-00000148", "reason": "..."}

    If storage fails the run continues, and the lines are written with the next one.

    Args:
        enabled: False on ranks other than 0: nothing is written.
    """

    def __init__(self, run_dir: Path, *, enabled: bool = True) -> None:
        self._path, self._enabled = run_dir / INCIDENTS_FILE, enabled
        self._waiting: list[str] = []

    def add(self, kind: str, step: int, **fields: Any) -> None:
        """Add an incident at `step`; the fields are JSON values."""
        if not self._enabled:
            return
        now = datetime.now(UTC).isoformat(timespec="seconds")
        self._waiting = [*self._waiting, json.dumps({"at": now, "step": step, "kind": kind, **fields})][-_MOST_WAITING:]
        with contextlib.suppress(OSError):
            drop_torn_line(self._path)
            with self._path.open("a", encoding="utf-8") as file:
                file.write("".join(f"{line}\n" for line in self._waiting))
            self._waiting = []


_MOST_WAITING = 1000


def read_incidents(run_dir: Path) -> list[dict[str, Any]]:
    """Return the readable incidents, oldest first; empty without the file."""
    incidents = []
    with contextlib.suppress(RefusedError):
        for number, line in json_lines(run_dir / INCIDENTS_FILE):
            with contextlib.suppress(RefusedError):
                document = parse_json(line, f"line {number}")
                if isinstance(document, dict):
                    incidents.append(document)
    return incidents


class Guard(NamedTuple):
    """Watchers of a run.

    Attributes:
        stop_requested: returns why this rank was asked to stop, or None.
        watchdog: ends a hung run.
        ending: records why the run ended.
    """

    stop_requested: Callable[[], str | None]
    watchdog: Watchdog
    ending: Ending


@contextmanager
def guard_run(
    run_dir: Path, config: Config, environment: Environment, *, stop_directory: Path | None = None
) -> Iterator[Guard]:
    """Context that holds the lease of a directory, listens for stop requests and ends hangs. All ranks enter it.

    Args:
        run_dir: existing directory, shared by all ranks.
        stop_directory: directory of the file STOP; None: run_dir.

    Raises:
        RefusedError: on every rank: another run uses the directory.
    """
    info, world = environment.info, environment.world
    with ExitStack() as stack:
        lease = Lease(run_dir)
        on_rank_zero(world, f"taking {run_dir}", lambda: stack.enter_context(lease) and None)
        ending = Ending(run_dir=run_dir, rank=info.rank)
        started = world.broadcast_object(f"{datetime.now(UTC):%Y%m%d-%H%M%S}")
        ending.begin(info.attempt or 0)
        requests = StopRequests(
            stop_directory or run_dir,
            rank=info.rank,
            max_hours=config.training.max_hours,
            launchers=launcher_processes(info.launcher, forked=info.attempt is not None),
            began=info.began,
        )
        stop = stack.enter_context(requests)
        watchdog = Watchdog(
            run_dir / HANGS / started,
            rank=info.rank,
            world=info.world,
            limit=60.0 * config.reliability.hang_minutes,
            stop_request_time=stop.request_time,
            on_hang=ending.hung,
        )
        stack.enter_context(watchdog)
        try:
            yield Guard(stop.reason_to_stop, watchdog, ending)
        except BaseException as error:
            if not isinstance(error, SystemExit) or error.code:
                ending.broke(error, watchdog.steps_done)
            raise
