"""Detect the launcher of this process and its rank: the one place that reads their variables."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NoReturn

from trp_scale.config import RefusedError

Launcher = Literal["single", "torchrun", "deepspeed", "slurm", "variables"]

FIRST_WORD_SECONDS = 3.0
"""Wait of the other ranks before they print a refusal, which rank 0 prints first; the launcher usually ends them."""

ATTEMPT = "TRP_SCALE_ATTEMPT"
"""Variable with the number of restarts, set by the supervisor that forked this rank (restarts.py)."""

BEGAN = "TRP_SCALE_BEGAN"
"""Variable with the start time of that supervisor, by time.monotonic()."""

_SPECIAL_STEPS = 0xFFFFFFF0  # SLURM numbers the batch script and interactive shells from here on: no parallel steps


@dataclass(frozen=True, kw_only=True)
class RankInfo:
    """Rank of this process, and its launcher.

    Attributes:
        rank: 0 ... world - 1.
        local_rank: rank on this node.
        local_world: processes on this node.
        master_addr: host of rank 0.
        master_port: port of the rendezvous; 0: any free port (a world of one).
        launcher: single, torchrun, deepspeed, slurm (srun), or variables (RANK and WORLD_SIZE set by hand).
        attempt: in-place restarts so far; None: no supervisor (restarts.py).
        began: start time of the first attempt, by time.monotonic(); None: no supervisor.
    """

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    local_world: int = 1
    master_addr: str = "127.0.0.1"
    master_port: int = 0
    launcher: Launcher = "single"
    attempt: int | None = None
    began: float | None = None


def discover(environ: Mapping[str, str]) -> RankInfo:
    """Read rank and world from the variables that torchrun, deepspeed or srun sets.

    Raises:
        RefusedError: variables are missing or not numbers, or two launchers are active.
    """
    rank = _read_rank(environ)
    if ATTEMPT not in environ:
        return rank
    return replace(rank, attempt=_number(environ, ATTEMPT), began=float(environ[BEGAN]))


def _read_rank(environ: Mapping[str, str]) -> RankInfo:
    started = _launched_by_variables(environ)
    step = _slurm_step(environ)
    if started is None and step is None:
        if (processes := environ.get("OMPI_COMM_WORLD_SIZE", "1")) != "1":
            raise RefusedError(
                f"mpirun started {processes} processes, and each would train alone; use torchrun, deepspeed or srun, "
                "or set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT for each process"
            )
        return RankInfo()
    if started is None:
        assert step is not None
        return step
    if step is not None:
        _refuse_two_launchers(environ, started, step)
        if step.local_world > 1:  # a wrapper under srun copied SLURM's numbers into RANK and WORLD_SIZE
            return RankInfo(**{**vars(step), "master_addr": started.master_addr, "master_port": started.master_port})
    return started


@dataclass(frozen=True, kw_only=True)
class NodeRanks:
    """Ranks of this node: `count` of `world` ranks, from rank `first` on."""

    first: int = 0
    count: int = 1
    world: int = 1

    @property
    def several(self) -> bool:
        """Whether the run has several nodes; equal on all ranks, also if nodes have different numbers of ranks."""
        return self.count < self.world


def ranks_of_node(environ: Mapping[str, str]) -> NodeRanks:
    """Return the ranks of this node: all ranks if RANK and WORLD_SIZE were set by hand without LOCAL_WORLD_SIZE."""
    info = discover(environ)
    if info.launcher == "variables" and "LOCAL_WORLD_SIZE" not in environ and "LOCAL_SIZE" not in environ:
        return NodeRanks(count=info.world, world=info.world)
    return NodeRanks(first=info.rank - info.local_rank, count=info.local_world, world=info.world)


def _launched_by_variables(environ: Mapping[str, str]) -> RankInfo | None:
    """Read the variables of torchrun or deepspeed, or those set by hand; `None` without RANK and WORLD_SIZE."""
    if "RANK" not in environ and "WORLD_SIZE" not in environ:
        return None
    by_torchrun, by_deepspeed = "TORCHELASTIC_RUN_ID" in environ, "CROSS_SIZE" in environ
    if by_torchrun and by_deepspeed:
        raise RefusedError(
            "two launchers: the variables of torchrun (TORCHELASTIC_RUN_ID) and of deepspeed (CROSS_SIZE) are both "
            "set; start the run with one of them"
        )
    missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in environ]
    if missing:
        raise RefusedError(
            f"environment variables are missing: {', '.join(missing)}; allowed: all of RANK, WORLD_SIZE, MASTER_ADDR "
            "and MASTER_PORT (torchrun and deepspeed set them), or none for a single process (unset RANK WORLD_SIZE)"
        )
    rank, world = _number(environ, "RANK"), _number(environ, "WORLD_SIZE")
    local_rank = _number(environ, "LOCAL_RANK") if "LOCAL_RANK" in environ else 0
    local_world = next((name for name in ("LOCAL_WORLD_SIZE", "LOCAL_SIZE") if name in environ), None)
    info = RankInfo(
        rank=rank,
        world=world,
        local_rank=local_rank,
        local_world=_number(environ, local_world) if local_world else local_rank + 1,  # set by hand: a lower bound
        master_addr=environ["MASTER_ADDR"],
        master_port=_number(environ, "MASTER_PORT"),
        launcher="torchrun" if by_torchrun else "deepspeed" if by_deepspeed else "variables",
    )
    return _check_rank(info)


def _slurm_step(environ: Mapping[str, str]) -> RankInfo | None:
    """Read the variables of srun; `None` outside srun (in a batch script or without a job)."""
    if "SLURM_STEP_ID" not in environ or "SLURM_PROCID" not in environ:
        return None
    step = _number(environ, "SLURM_STEP_ID")
    if step >= _SPECIAL_STEPS:
        return None
    world = _number(environ, "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else "SLURM_NTASKS")
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST") or environ.get("SLURM_NODELIST", "")
    if world > 1 and not nodes and "MASTER_ADDR" not in environ:
        raise RefusedError("srun set no SLURM_STEP_NODELIST; set MASTER_ADDR to the host of rank 0")
    # Steps of a job and jobs on a node get different ports, below the range of ephemeral ports.
    port = 12000 + (_number(environ, "SLURM_JOB_ID") + step) % 20000 if "SLURM_JOB_ID" in environ else 12000
    info = RankInfo(
        rank=_number(environ, "SLURM_PROCID"),
        world=world,
        local_rank=_number(environ, "SLURM_LOCALID"),
        local_world=_tasks_on_this_node(environ, world),
        # A single rank needs no rendezvous: the name of its node may be no host name.
        master_addr=environ.get("MASTER_ADDR") or (first_host(nodes) if nodes and world > 1 else "127.0.0.1"),
        master_port=_number(environ, "MASTER_PORT") if environ.get("MASTER_PORT") else port,
        launcher="slurm",
    )
    return _check_rank(info)


def first_host(nodelist: str) -> str:
    """Return the first host of a SLURM node list: `node[007-012,020],login1` -> `node007`; needs no scontrol."""
    first = re.match(r"(?:\[[^\]]*\]|[^,\[\]])+", nodelist)
    if first is None:
        raise RefusedError(f"cannot read the node list {nodelist!r} that SLURM set; set MASTER_ADDR to rank 0's host")
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", first.group())


def _tasks_on_this_node(environ: Mapping[str, str], world: int) -> int:
    """Parse SLURM's run-length list: `4(x2),1` is 4 tasks on each of two nodes, then 1."""
    listed = environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE")
    if not listed:
        return world if environ.get("SLURM_NNODES", "1") == "1" else 1
    counts: list[int] = []
    for part in listed.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            raise RefusedError(f"SLURM_STEP_TASKS_PER_NODE is {listed!r}; expected the form 4(x2),1")
        counts += [int(match[1])] * int(match[2] or 1)
    node = _number(environ, "SLURM_NODEID") if "SLURM_NODEID" in environ else 0
    return counts[node] if node < len(counts) else counts[0]


def _refuse_two_launchers(environ: Mapping[str, str], started: RankInfo, step: RankInfo) -> None:
    """Refuse torchrun or deepspeed under srun, except with one srun task per node."""
    if step.world == 1:
        return
    position = (started.rank, started.world)
    if started.launcher == "variables" and position == (step.rank, step.world):
        return
    nodes = environ.get("GROUP_WORLD_SIZE" if started.launcher == "torchrun" else "CROSS_SIZE", "?")
    if step.local_world == 1 and nodes == str(step.world):
        return
    by_launcher = f"{started.launcher} with one srun task per node (and --nnodes $SLURM_NNODES)"
    raise RefusedError(
        f"two launchers: srun started {step.world} tasks ({step.local_world} on this node) and this process is task "
        f"{step.rank}, but RANK {started.rank} and WORLD_SIZE {started.world} are set by {started.launcher}; use srun "
        "alone, with one task per GPU and RANK and WORLD_SIZE not set"
        + ("" if started.launcher == "variables" else f", or {by_launcher}")
    )


def _number(environ: Mapping[str, str], name: str) -> int:
    value = environ.get(name)
    if value is None or not value.isdecimal():
        description = "not set" if value is None else repr(value)
        raise RefusedError(f"the environment variable {name} is {description}; allowed: a whole number, 0 or more")
    return int(value)


def _check_rank(info: RankInfo) -> RankInfo:
    for name, number, size in (("rank", info.rank, info.world), ("local rank", info.local_rank, info.local_world)):
        if not 0 <= number < size:
            raise RefusedError(f"{name} {number} of {size} processes ({info.launcher}); allowed: 0 to {size - 1}")
    return info


def list_ranks(ranks: Sequence[int]) -> str:
    """Format ranks as text: "rank 3"; "ranks 0, 4-7"."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and runs[-1][-1] == rank - 1:
            runs[-1][1:] = [rank]
        else:
            runs.append([rank])
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join('-'.join(map(str, run)) for run in runs)}"


def exit_process(status: int) -> NoReturn:
    """End this process without the interpreter's shutdown. During shutdown a thread of gloo that frees a tensor can end
    a successful run with SIGABRT (seen with FSDP2 on two ranks of a loaded machine)."""
    util: Any = sys.modules.get("multiprocessing.util")
    for finalizer in list(util._finalizer_registry.values()) if util else ():
        if finalizer._callback is util._remove_temp_dir:
            finalizer()  # removes the directory of the sockets, in the process that created it
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # the reader of the pipe has ended
            stream.flush()
    os._exit(status)
