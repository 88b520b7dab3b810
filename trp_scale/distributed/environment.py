"""The processes of a run: how they find each other, their process group and device, and what happens when one fails.

A rank that is missing at the start is named after seconds, and two launches that meet at one port are refused.
"""

from __future__ import annotations

import math
import os
import socket
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from fractions import Fraction
from pathlib import Path
from types import TracebackType
from typing import NoReturn

import torch
import torch.distributed as dist
from torch.distributed import DistNetworkError, DistStoreError, TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore, Store

from trp_scale.config import RefusedError
from trp_scale.distributed.groups import ALONE, Group
from trp_scale.distributed.launchers import FIRST_WORD_SECONDS, RankInfo, discover, exit_process, list_ranks
from trp_scale.distributed.stop import asked_early
from trp_scale.errors import exit_status_and_message

__all__ = ["Environment", "RankInfo", "discover"]

FIRST_REPORT_SECONDS = 10.0
"""How long ranks are awaited before those that are missing are named; then after twice the time, and so on."""

AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"
"""Variable that says "True" where torchrun's agent has opened the store."""

_SLICE = timedelta(seconds=2)  # a call into the store hears no signal until it ends
_PAUSE_SECONDS = 0.1
_ALL_HERE = "all here"


PORT_OF = {"deepspeed": "deepspeed --master_port PORT ...", "torchrun": "torchrun --master_port PORT ..."}
"""How a launcher is told its port; it does not read MASTER_PORT."""


def gather(info: RankInfo, *, timeout: timedelta, first_report: float = FIRST_REPORT_SECONDS) -> Store:
    """The store that the ranks of this run share, once all of them are there. Collective.

    Says on standard error which ranks are missing, after `first_report` seconds and then ever more rarely. Under
    torchrun the agents of all nodes await each other before any rank starts: a node that is missing is not seen here.

    Args:
        timeout: how long missing ranks are awaited, and of every later wait in the store.

    Raises:
        RefusedError: ranks are missing after `timeout`; the port of the rendezvous is taken; or another process is
            there with the same rank or with another number of ranks.
    """
    wait = _Wait(info, timeout.total_seconds(), first_report)
    store = PrefixStore(f"{prefix()}/{info.attempt or 0}", _open(info, timeout, wait))
    try:
        _register(store, info)
        store.set_timeout(min(_SLICE, timeout))
        while True:
            with suppress(DistStoreError):  # not within this slice
                store.wait([_ALL_HERE])
                break
            _leave_if_asked()
            if wait.is_long:
                here = [rank for rank in range(info.world) if store.check([f"rank {rank}"])]
                missing = [rank for rank in range(info.world) if rank not in here]
                wait.report(missing, speaks=info.rank == here[0])  # one speaks for all
        store.set_timeout(timeout)
    except DistNetworkError as error:
        raise RefusedError(
            f"the process that holds {info.master_addr}:{info.master_port} left while ranks came there (rank 0, or "
            f"torchrun's agent); what it printed says why ({str(error).splitlines()[0]})"
        ) from None
    return store


class _Wait:
    """How long this rank has waited, and what it has said of it."""

    def __init__(self, info: RankInfo, seconds: float, first_report: float) -> None:
        self._info, self._seconds, self._next = info, seconds, first_report
        self._began = time.monotonic()

    @property
    def waited(self) -> float:
        """Seconds."""
        return time.monotonic() - self._began

    @property
    def is_long(self) -> bool:
        """Whether it is time to say what is missing."""
        return self.waited >= min(self._next, self._seconds)

    def report(self, missing: list[int], *, speaks: bool, reason: str = "") -> None:
        """Name the missing ranks when it is time, or refuse when it is over; `reason`: what connecting failed by."""
        if not missing or not self.is_long:
            return
        info = self._info
        message = (
            f"{list_ranks(missing)} of {info.world} {'has' if len(missing) == 1 else 'have'} not come to "
            f"{info.master_addr}:{info.master_port} after {self.waited:.0f} s{reason and f' ({reason})'}"
        )
        if self.waited >= self._seconds:
            raise RefusedError(
                f"{message}; start WORLD_SIZE or SLURM_NTASKS processes, on hosts that reach that address"
            )
        self._next = 2 * self.waited
        if speaks:
            print(f"[rank {info.rank} on {socket.gethostname()}] {message}: waiting", file=sys.stderr, flush=True)


def _open(info: RankInfo, timeout: timedelta, wait: _Wait) -> Store:
    """Connected; rank 0 opens it, unless torchrun's agent has, or the supervisor of rank 0 (restarts.py)."""
    if info.rank == 0 and not has_agent_store():
        return open_store(info, timeout)
    while reason := no_answer(info):
        _leave_if_asked()
        wait.report([0], speaks=info.local_rank == 0, reason=reason)
    return tcp_store(info, timeout, opens=False)


def prefix() -> str:
    """Return the key prefix of this start in the store, which outlives it under torchrun."""
    return f"trp_scale/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"


def has_agent_store() -> bool:
    """Whether a process that is no rank has opened the store."""
    return os.environ.get(AGENT_STORE) == "True"


def open_store(info: RankInfo, timeout: timedelta) -> Store:
    """Open the store at the rendezvous; it is there as long as this process.

    Raises:
        RefusedError: the port is taken.
    """
    try:
        return tcp_store(info, timeout, opens=True)
    except DistNetworkError as error:
        if "EADDRINUSE" not in str(error):
            raise
        raise RefusedError(
            f"port {info.master_port} of {socket.gethostname()} is taken, by another run or by what is left of "
            f"one; give this one a free port ({PORT_OF.get(info.launcher, 'set MASTER_PORT')})"
        ) from None


def no_answer(info: RankInfo) -> str:
    """Return why the port does not answer, or "". (torch's own attempts print a stack for each.)"""
    try:
        with socket.create_connection((info.master_addr, info.master_port), _SLICE.total_seconds()):
            return ""
    except OSError as error:
        time.sleep(_PAUSE_SECONDS)
        return error.strerror or str(error)


def _leave_if_asked() -> None:
    """A request to stop that comes before the ranks have met: there is nothing to save."""
    if asked := asked_early():
        print(f"{asked} while ranks were awaited: nothing was begun", file=sys.stderr, flush=True)
        exit_process(0)


def tcp_store(info: RankInfo, timeout: timedelta, *, opens: bool) -> Store:
    """The store at the rendezvous, opened or connected to."""
    store: Store = TCPStore(
        info.master_addr, info.master_port, info.world, is_master=opens, timeout=timeout, wait_for_workers=False
    )
    return store


def _register(store: Store, info: RankInfo) -> None:
    """Tell the others that this rank is there; the last one tells that all are."""
    world = store.compare_set("world", "", str(info.world)).decode()  # the value that the first process has written
    if world != str(info.world):
        raise RefusedError(
            f"{socket.gethostname()} started rank {info.rank} of {info.world}, and others at "
            f"{info.master_addr}:{info.master_port} are of {world}: two launches share the port, or WORLD_SIZE differs "
            "between hosts"
        )
    process = f"{socket.gethostname()}, process {os.getpid()}"
    holder = store.compare_set(f"rank {info.rank}", "", process).decode()
    if holder != process:
        raise RefusedError(
            f"rank {info.rank} of {info.world} at {info.master_addr}:{info.master_port} is there twice: {holder}, and "
            f"{process}; two launches share the port, or two hosts were started with the same node rank"
        )
    if all(store.check([f"rank {rank}"]) for rank in range(info.world)):
        store.set(_ALL_HERE, "yes")


class Environment:
    """Context of a run: makes the process group and picks the device on entry, destroys the group on exit.

    When the body raises on one rank of several, that rank prints its error with its number and leaves the process at
    once with its status (a refusal is printed without a traceback): the others sit in a collective that will
    never complete, so waiting for them would hang; the launcher ends them when it sees the status, and over gloo they
    see a closed connection.

    Attributes:
        info: place in the world, and the launcher.
        device: cuda:N with a GPU, else cpu.
        data: ranks that split the batch (all of them).
        cpus: CPUs for this rank, at least 1; where ranks may use the same ones, its share of them.
    """

    def __init__(self, info: RankInfo | None = None, *, timeout_minutes: float = 30.0, use_gpu: bool = True) -> None:
        self.info = discover(os.environ) if info is None else info
        self.timeout = timedelta(minutes=timeout_minutes)
        self.device = _device(self.info) if use_gpu and torch.cuda.is_available() else torch.device("cpu")
        self.world = Group("world", self.info.rank, self.info.world)
        self.data = Group("data", self.info.rank, self.info.world)
        self.cpus = cpus_of_rank(ALONE)  # until the other ranks are known
        self._owns_process_group = False
        self._local_rank_before: str | None = None

    def __enter__(self) -> Environment:
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        if self.info.launcher != "single":
            self.ensure_process_group()
        self.cpus = cpus_of_rank(self.world)
        if self.device.type == "cpu" and "OMP_NUM_THREADS" not in os.environ:
            # Every rank would otherwise take all cores; two ranks on two cores then run at less than half speed.
            torch.set_num_threads(self.cpus)
        return self

    def ensure_process_group(self) -> None:
        """Make torch's default process group if there is none; DeepSpeed and FSDP2 need one even for one rank."""
        if dist.is_initialized():
            return
        # Each rank remembers its last collectives, for the watchdog; torch reads this when a group is made.
        os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")
        store = gather(self.info, timeout=self.timeout)
        # DeepSpeed takes its device's number from LOCAL_RANK, which srun and a single process do not have.
        self._local_rank_before = os.environ.get("LOCAL_RANK")
        os.environ["LOCAL_RANK"] = str(self.info.local_rank if self.device.index is None else self.device.index)
        info, on_gpu = self.info, self.device.type == "cuda"
        options = {"device_id": self.device} if on_gpu else {}
        dist.init_process_group(
            # Small vectors that the host reads are reduced by gloo on a GPU machine too: no wait for the GPU.
            "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
            store=store,
            rank=info.rank,
            world_size=info.world,
            timeout=self.timeout,
            **options,  # type: ignore[arg-type]
        )
        self._owns_process_group = True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        clean_exit = isinstance(error, SystemExit) and error.code in (None, 0)
        if error is not None and not clean_exit and self.info.world > 1 and self._owns_process_group:
            self._leave_at_once(error)
        if not self._owns_process_group:
            return
        self._owns_process_group = False
        if self._local_rank_before is None:
            os.environ.pop("LOCAL_RANK", None)
        else:
            os.environ["LOCAL_RANK"] = self._local_rank_before
        if dist.is_initialized():
            dist.destroy_process_group()

    def _leave_at_once(self, error: BaseException) -> NoReturn:
        ends, line = exit_status_and_message(error)
        status = error.code if isinstance(error, SystemExit) and isinstance(error.code, int) else int(ends)
        try:
            rank = f"[rank {self.info.rank} on {socket.gethostname()}] "  # several ranks write to one terminal
            if line and self.info.rank == 0:
                print(f"error: {line}", file=sys.stderr, flush=True)
            elif line:  # printed once, unless this rank outlives rank 0
                time.sleep(FIRST_WORD_SECONDS)
                print(f"{rank}error: {line}", file=sys.stderr, flush=True)
            elif not isinstance(error, SystemExit):
                lines = "".join(traceback.format_exception(error)).rstrip().splitlines()
                print("\n".join(rank + line for line in lines), file=sys.stderr, flush=True)
        finally:  # also when nobody reads what is printed
            # Not sys.exit: the interpreter's shutdown would wait for threads and groups that wait for the other ranks.
            exit_process(status)


def cpus_of_rank(world: Group) -> int:
    """CPUs for this rank, at least 1: of each that it may use, its share. A launcher may bind every rank to CPUs of its
    own, or leave all CPUs of a node to all its ranks. Collective."""
    host, affinity = socket.gethostname(), os.sched_getaffinity(0)
    on_host = [cpus for name, cpus in world.gather_objects((host, affinity)) if name == host]
    share = sum(Fraction(1, sum(cpu in cpus for cpus in on_host)) for cpu in affinity)
    return max(1, math.floor(min(share, (cpu_quota() or math.inf) / len(on_host))))


def cpu_quota(membership: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> float | None:
    """CPUs that the time of this process's control group (version 2), or of one above it, is worth; None: no limit."""
    limits = [line.split() for folder in control_groups(membership, root) for line in read_lines(folder / "cpu.max")]
    return min((int(time) / int(period) for time, period in limits if time != "max"), default=None)


def control_groups(membership: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> Iterator[Path]:
    """Folders of this process's control group (version 2) and of those above it, whose limits hold too."""
    for line in read_lines(membership):
        if line.startswith("0::/"):
            group = Path(line.removeprefix("0::/"))
            yield from (root / folder for folder in (group, *group.parents))


def read_lines(path: Path) -> list[str]:
    """Return the lines of a system file; empty if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []


def _device(info: RankInfo) -> torch.device:
    """GPU number local_rank; a task that SLURM bound to one GPU sees only that one, as number 0."""
    visible = torch.cuda.device_count()
    if info.local_world <= visible:
        return torch.device("cuda", info.local_rank)
    if visible == 1 and info.launcher == "slurm":
        return torch.device("cuda", 0)
    raise RefusedError(
        f"{info.local_world} processes on {socket.gethostname()} but {visible} GPU(s) visible "
        f"(CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES', 'not set')}); allowed: one process per GPU"
    )
