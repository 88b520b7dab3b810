"""Run the commands of a study. Finished nodes are skipped; a failed node blocks only the nodes that need it.

DIR/study.json              name, scale and inputs of the study
DIR/state/NODE.json         command, status and seconds of a node
DIR/logs/NODE.log           output of its command
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from trp_scale.config.files import read_object
from trp_scale.config.schema import record
from trp_scale.distributed.stop import NOTICES, signal_handlers
from trp_scale.errors import RefusedError
from trp_scale.reporting.results import RESULTS_FILE
from trp_scale.sharding.clusters import submit_job
from trp_scale.sharding.job import MIXTURE
from trp_scale.storage.files import write_json
from trp_scale.studies.graph import Graph
from trp_scale.training.metrics import nothing_left
from trp_scale.training.report import read_summary

STUDY_FILE = "study.json"

DATA_FILES = ("dataset.json", MIXTURE, "annotations.json")
"""Last file that is written to a data set: by shard-text and shard-images, also with --source_field, or by
`shard-images --coco`."""

Status = Literal["finished", "failed", "stopped"]

LAST_LINES = 3
"""Output lines of a failed command that its record contains."""


@dataclass(frozen=True, kw_only=True)
class NodeState:
    """Result of a node.

    Attributes:
        command: arguments of `trp-scale`; empty if nothing had to run.
        reason: last output lines of a failed command.
        seconds: wall time of all starts.
        processor_seconds: CPU time of all starts on this host, child processes included.
        at: end time.
    """

    node: str
    command: list[str]
    status: Status
    reason: str = ""
    seconds: float = 0.0
    processor_seconds: float = 0.0
    at: str = ""


def has_finished(state: NodeState | None) -> bool:
    return state is not None and state.status == "finished"


def file_name(node: str) -> str:
    """Convert the name of a node to a file name."""
    return node.replace("/", "+")


def read_state(directory: Path, node: str) -> NodeState | None:
    """Return the state of a node; `None` if it never started or its process was killed."""
    path = directory / "state" / f"{file_name(node)}.json"
    return record(NodeState, read_object(path), str(path), RefusedError) if path.is_file() else None


@dataclass(frozen=True, kw_only=True)
class Claim:
    """Contents of study.json: study, scale, and the path of each input."""

    study: str
    scale: str
    inputs: dict[str, str]


def read_claim(directory: Path) -> Claim:
    """Read which study a directory belongs to. Raises RefusedError if study.json is missing."""
    path = directory / STUDY_FILE
    if not path.is_file():
        raise RefusedError(f"{path} is missing; allowed: the --run_dir of trp-scale study run")
    return record(Claim, read_object(path), str(path), RefusedError)


def claim(directory: Path, requested: Claim) -> None:
    """Create the directory of a study, or check that it belongs to this study. Raises RefusedError if it does not."""
    if (directory / STUDY_FILE).is_file():
        stored = read_claim(directory)
        for field in fields(Claim):
            if (value := getattr(stored, field.name)) != (wanted := getattr(requested, field.name)):
                raise RefusedError(
                    f"--run_dir {directory} contains a study with {field.name} {value!r}, expected {wanted!r}; "
                    "give another --run_dir"
                )
        return
    if directory.is_dir() and any(directory.iterdir()):
        raise RefusedError(f"--run_dir {directory} is not empty and contains no study; give another")
    directory.mkdir(parents=True, exist_ok=True)
    write_json(directory / STUDY_FILE, asdict(requested))


class Executor:
    """Run each node of a graph in a subprocess.

    Args:
        jobs: nodes that run at the same time; they share the cores equally.
        tell: called with one line per node that ends.
    """

    def __init__(
        self,
        graph: Graph,
        *,
        jobs: int,
        tell: Callable[[str], None] = print,
        program: Sequence[str] = (sys.executable, "-m", "trp_scale"),
    ) -> None:
        self.graph, self.jobs, self.tell, self.program = graph, jobs, tell, program
        self.stopping = threading.Event()
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def run(self, only: str | None = None) -> dict[str, NodeState | None]:
        """Run all nodes, or only one whose dependencies have finished. Return their states. Raises RefusedError if the
        command of a finished node differs from the study file."""
        for part in ("state", "logs"):
            (self.graph.directory / part).mkdir(parents=True, exist_ok=True)
        names = list(self.graph.nodes) if only is None else [only]
        states = {name: self._read_finished(name) for name in self.graph.nodes}
        ended = {name: state for name, state in states.items() if state is not None}
        waiting = [name for name in names if name not in ended]
        with signal_handlers(NOTICES, lambda *_: self.stop()), ThreadPoolExecutor(self.jobs) as pool:
            self._schedule(pool, waiting, ended)
        return {name: ended.get(name) for name in names}

    def stop(self) -> None:
        """Send SIGTERM to the running commands and start no more."""
        self.stopping.set()
        for process in list(self._running.values()):
            _ask_to_stop(process.pid)

    def _schedule(self, pool: ThreadPoolExecutor, waiting: list[str], ended: dict[str, NodeState]) -> None:
        under_way: dict[Future[NodeState], str] = {}
        try:
            while True:
                for name in list(waiting):
                    ready = all(has_finished(ended.get(need)) for need in self.graph.nodes[name])
                    if ready and len(under_way) < self.jobs and not self.stopping.is_set():
                        waiting.remove(name)
                        under_way[pool.submit(self._execute, name)] = name
                if not under_way:
                    return
                for done in wait(under_way, return_when=FIRST_COMPLETED).done:
                    state = done.result()
                    ended[under_way.pop(done)] = state
                    reason = f": {state.reason}" if state.reason else ""
                    left = len(waiting) + len(under_way)
                    self.tell(f"{state.status} {state.node} ({state.seconds:.0f} s, {left} left){reason}")
        except BaseException:
            self.stop()
            raise

    def _read_finished(self, name: str) -> NodeState | None:
        """Return the state of a finished node; refuse it if its command has changed."""
        state = read_state(self.graph.directory, name)
        if state is None or state.status != "finished":
            return None
        if state.command != (words := self.graph.command_arguments(name)):
            before, now = shlex.join(state.command), shlex.join(words)
            raise RefusedError(
                f"{self.graph.path(name)} has finished with another command than the study has now:\n"
                f"  before: {before}\n  now:    {now}\n"
                f"give another --run_dir, or remove state/{file_name(name)}.json and the directory"
            )
        return state

    def _execute(self, name: str) -> NodeState:
        directory, before = self.graph.directory, read_state(self.graph.directory, name)
        start = time.monotonic()
        used = 0.0
        try:
            words = self.graph.command_arguments(name)
            status, reason, used = self._process(name, words) if words else ("finished", "", 0.0)
        except (RefusedError, OSError) as error:
            words, status, reason = [], "failed", str(error)
        state = NodeState(
            node=name,
            command=words,
            status=status,
            reason=reason,
            seconds=round(time.monotonic() - start + (before.seconds if before else 0.0), 3),
            processor_seconds=round(used + (before.processor_seconds if before else 0.0), 3),
            at=datetime.now(UTC).isoformat(timespec="seconds"),
        )
        write_json(directory / "state" / f"{file_name(name)}.json", asdict(state))
        return state

    def _process(self, name: str, words: list[str]) -> tuple[Status, str, float]:
        """Run a command. Return status, reason and processor seconds."""
        log = self.graph.directory / "logs" / f"{file_name(name)}.log"
        launcher = [] if name.startswith("data/") else shlex.split(self.graph.scale.launcher)
        command = [*launcher, *(self.program[1:] if launcher else self.program), *words]
        environment = {
            "OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // self.jobs)),
            "TRP_SCALE_PROGRESS": "plain",
            **os.environ,
        }
        with log.open("ab") as output:
            process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                preexec_fn=_end_with_parent,
            )
            self._running[name] = process
            if self.stopping.is_set():
                _ask_to_stop(process.pid)
            _, ended, used = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(ended)
            del self._running[name]
        seconds = used.ru_utime + used.ru_stime
        if process.returncode == 0 and self._is_complete(name):
            return "finished", "", seconds
        if self.stopping.is_set():
            return "stopped", "", seconds
        return "failed", f"exit status {process.returncode}; {_last_lines(log)}", seconds

    def _is_complete(self, name: str) -> bool:
        """Return whether a command with exit status 0 is complete. A run that was stopped also exits with 0."""
        path = self.graph.path(name)
        if name.startswith("data/"):
            return any((path / name).is_file() for name in DATA_FILES)
        if name.startswith(("runs/", "tuning/")):
            return nothing_left(str(read_summary(path).get("exit_reason")))
        return (path / RESULTS_FILE).is_file()


PR_SET_PDEATHSIG = 1


def _ask_to_stop(process: int) -> None:
    """Send SIGTERM. `Popen.send_signal` may consume the exit status that another thread waits for."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, signal.SIGTERM)


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _last_lines(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return " / ".join(lines[-LAST_LINES:])[-600:]


def read_states(graph: Graph) -> dict[str, NodeState | None]:
    return {name: read_state(graph.directory, name) for name in graph.nodes}


def find_blocked(graph: Graph, states: Mapping[str, NodeState | None]) -> dict[str, str]:
    """Map each blocked node to the failed node that it needs."""
    causes: dict[str, str] = {}
    for name, needs in graph.nodes.items():  # needs come first
        for need in needs:
            state = states.get(need)
            if need in causes or (state is not None and state.status == "failed"):
                causes.setdefault(name, causes.get(need, need))
    return causes


def submit(graph: Graph, words: list[str], sbatch: str) -> list[str]:
    """Submit the unfinished nodes to SLURM: one job array per dependency level. An array starts when the previous one
    has ended, with or without failures. Return the job ids. Raises RefusedError if SLURM rejects the jobs.

    Args:
        words: command that runs the study; `--only N` is added.
        sbatch: further flags of sbatch.
    """
    indices = {name: index for index, name in enumerate(graph.nodes)}
    states, level = read_states(graph), dict[str, int]()
    for name, needs in graph.nodes.items():
        level[name] = 1 + max((level[need] for need in needs), default=-1)
    jobs: list[str] = []
    for number in sorted(set(level.values())):
        waiting = [name for name in graph.nodes if level[name] == number and not has_finished(states[name])]
        if not waiting:
            continue
        after = f"--dependency=afterany:{jobs[-1]}" if jobs else ""
        array = ",".join(str(indices[name]) for name in waiting)
        script = f'exec {shlex.join(words)} --only "$SLURM_ARRAY_TASK_ID"'
        jobs.append(submit_job(f"--requeue --array={array} {after}", sbatch, script))
    return jobs
