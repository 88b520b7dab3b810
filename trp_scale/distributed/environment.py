"""Rendezvous of the ranks, their process group and device, and the exit of a rank that fails.

Ranks that are missing at the start are logged after 10 seconds. Two launches at one port are refused.
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
from trp_scale.distributed.stop import early_signal
from trp_scale.errors import exit_status_and_message

__all__ = ["Environment", "RankInfo", "discover"]

FIRST_REPORT_SECONDS = 10.0
"""Wait before missing ranks are logged; it doubles after each report."""

AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"
"""Variable that is "True" if torchrun's agent has opened the store."""

SHARED_GPUS = "NCCL_MULTI_RANK_GPU_ENABLE"
"""Variable that is "1" if several ranks share a GPU, for tests of NCCL (from version 2.30) on one card."""

_SLICE = timedelta(seconds=2)  # Python runs no signal handler during a call into the store
_PAUSE_SECONDS = 0.1
_ALL_HERE = "all here"


PORT_OF = {"deepspeed": "deepspeed --master_port PORT ...", "torchrun": "torchrun --master_port PORT ..."}
"""Flags that set the port of launchers that do not read MASTER_PORT."""


def gather(info: RankInfo, *, timeout: timedelta, first_report: float = FIRST_REPORT_SECONDS) -> Store:
    """Wait for all ranks and return the store that they share. Collective.

    Logs missing ranks to standard error after `first_report` seconds and then less often. Under torchrun the agents of
    all nodes wait for each other before any rank starts, so a missing node is not detected here.

    Args:
        timeout: limit of this wait and of every later wait in the store.

    Raises:
        RefusedError: ranks are missing after `timeout`; the port is in use; or another process at this port has the
            same rank or another world size.
    """
    wait = _Wait(info, timeout.total_seconds(), first_report)
    store = PrefixStore(f"{prefix()}/{info.attempt or 0}", _open(info, timeout, wait))
    try:
        _register(store, info)
        store.set_timeout(min(_SLICE, timeout))
        while True:
            with suppress(DistStoreError):  # timeout of this slice
                store.wait([_ALL_HERE])
                break
            _exit_if_stop_requested()
            if wait.is_long:
                here = [rank for rank in range(info.world) if store.check([f"rank {rank}"])]
                missing = [rank for rank in range(info.world) if rank not in here]
                wait.report(missing, prints=info.rank == here[0])  # only one rank logs
        store.set_timeout(timeout)
    except DistNetworkError as error:
        raise RefusedError(
            f"the process that serves {info.master_addr}:{info.master_port} ended during the rendezvous (rank 0, or "
            f"torchrun's agent); its output has the reason ({str(error).splitlines()[0]})"
        ) from None
    return store


class _Wait:
    """Wait of this rank for the others, with its reports."""

    def __init__(self, info: RankInfo, seconds: float, first_report: float) -> None:
        self._info, self._seconds, self._next = info, seconds, first_report
        self._began = time.monotonic()

    @property
    def waited(self) -> float:
        """Seconds since the start of the wait."""
        return time.monotonic() - self._began

    @property
    def is_long(self) -> bool:
        """Whether the next report is due."""
        return self.waited >= min(self._next, self._seconds)

    def report(self, missing: list[int], *, prints: bool, reason: str = "") -> None:
        """Log missing ranks if a report is due; raise RefusedError after the timeout. `reason`: connection error."""
        if not missing or not self.is_long:
            return
        info = self._info
        message = (
            f"{list_ranks(missing)} of {info.world} {'has' if len(missing) == 1 else 'have'} not connected to "
            f"{info.master_addr}:{info.master_port} after {self.waited:.0f} s{reason and f' ({reason})'}"
        )
        if self.waited >= self._seconds:
            raise RefusedError(
                f"{message}; start WORLD_SIZE or SLURM_NTASKS processes on hosts that can reach this address"
            )
        self._next = 2 * self.waited
        if prints:
            print(f"[rank {info.rank} on {socket.gethostname()}] {message}: waiting", file=sys.stderr, flush=True)


def _open(info: RankInfo, timeout: timedelta, wait: _Wait) -> Store:
    """Connect to the store. Rank 0 opens it unless torchrun's agent or rank 0's supervisor (restarts.py) has."""
    if info.rank == 0 and not has_agent_store():
        return open_store(info, timeout)
    while reason := connection_error(info):
        _exit_if_stop_requested()
        wait.report([0], prints=info.local_rank == 0, reason=reason)
    return tcp_store(info, timeout, is_server=False)


def prefix() -> str:
    """Return the key prefix of this start; under torchrun the store outlives a start."""
    return f"trp_scale/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"


def has_agent_store() -> bool:
    """Whether torchrun's agent or a supervisor has opened the store."""
    return os.environ.get(AGENT_STORE) == "True"


def open_store(info: RankInfo, timeout: timedelta) -> Store:
    """Open the store at the rendezvous; it lives as long as this process.

    Raises:
        RefusedError: the port is in use.
    """
    try:
        return tcp_store(info, timeout, is_server=True)
    except DistNetworkError as error:
        if "EADDRINUSE" not in str(error):
            raise
        raise RefusedError(
            f"port {info.master_port} of {socket.gethostname()} is in use, by another run or by a process of an "
            f"earlier run; set a free port ({PORT_OF.get(info.launcher, 'set MASTER_PORT')})"
        ) from None


def connection_error(info: RankInfo) -> str:
    """Return why the port does not answer, or "". (torch prints a stack for each failed attempt.)"""
    try:
        with socket.create_connection((info.master_addr, info.master_port), _SLICE.total_seconds()):
            return ""
    except OSError as error:
        time.sleep(_PAUSE_SECONDS)
        return error.strerror or str(error)


def _exit_if_stop_requested() -> None:
    """Exit if a stop signal arrived during the rendezvous: nothing has to be saved."""
    if asked := early_signal():
        print(f"{asked} during the rendezvous: stopped before training", file=sys.stderr, flush=True)
        exit_process(0)


def tcp_store(info: RankInfo, timeout: timedelta, *, is_server: bool) -> Store:
    """Open the store at the rendezvous, or connect to it."""
    store: Store = TCPStore(
        info.master_addr, info.master_port, info.world, is_master=is_server, timeout=timeout, wait_for_workers=False
    )
    return store


def _register(store: Store, info: RankInfo) -> None:
    """Register this rank in the store; the last rank also sets the key that all wait for."""
    world = store.compare_set("world", "", str(info.world)).decode()  # value of the first process
    if world != str(info.world):
        raise RefusedError(
            f"{socket.gethostname()} started rank {info.rank} of {info.world}, but other ranks at "
            f"{info.master_addr}:{info.master_port} are of {world}: two launches share the port, or WORLD_SIZE differs "
            "between hosts"
        )
    process = f"{socket.gethostname()}, process {os.getpid()}"
    holder = store.compare_set(f"rank {info.rank}", "", process).decode()
    if holder != process:
        raise RefusedError(
            f"two processes have rank {info.rank} of {info.world} at {info.master_addr}:{info.master_port}: {holder}, "
            f"and {process}; two launches share the port, or two hosts have the same node rank"
        )
    if all(store.check([f"rank {rank}"]) for rank in range(info.world)):
        store.set(_ALL_HERE, "yes")


class Environment:
    """Context of a run: creates the process group on entry and destroys it on exit.

    A rank that raises prints its error with its rank and exits at once with its status (no traceback for a refusal).
    The other ranks wait in a collective that never completes. The launcher ends them when it sees the status; over gloo
    their connection is closed.

    Attributes:
        info: rank, world and launcher.
        device: cuda:N with a GPU, else cpu.
        data: ranks that split the batch (all of them).
        cpus: CPUs for this rank, at least 1; its share if ranks share CPUs.
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
            # By default each rank uses all cores; two ranks on two cores then run at less than half speed.
            torch.set_num_threads(self.cpus)
        return self

    def ensure_process_group(self) -> None:
        """Create torch's default process group if none exists; DeepSpeed and FSDP2 need it even for one rank."""
        if dist.is_initialized():
            return
        # Keep the last collectives for the watchdog; torch reads this when it creates a group.
        os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")
        store = gather(self.info, timeout=self.timeout)
        # DeepSpeed reads its device from LOCAL_RANK, which srun and a single process do not set.
        self._local_rank_before = os.environ.get("LOCAL_RANK")
        os.environ["LOCAL_RANK"] = str(self.info.local_rank if self.device.index is None else self.device.index)
        info, on_gpu = self.info, self.device.type == "cuda"
        options = {"device_id": self.device} if on_gpu else {}
        dist.init_process_group(
            # gloo reduces small vectors that the host reads, also with GPUs: no wait for the GPU.
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
            elif line:  # only if this rank outlives rank 0, which prints it too
                time.sleep(FIRST_WORD_SECONDS)
                print(f"{rank}error: {line}", file=sys.stderr, flush=True)
            elif not isinstance(error, SystemExit):
                lines = "".join(traceback.format_exception(error)).rstrip().splitlines()
                print("\n".join(rank + line for line in lines), file=sys.stderr, flush=True)
        finally:  # also if standard error is closed
            # Not sys.exit: the interpreter's shutdown waits for threads and groups that wait for the other ranks.
            exit_process(status)


def cpus_of_rank(world: Group) -> int:
    """Return the number of CPUs for this rank, at least 1. A CPU that several ranks may use is split between them: some
    launchers bind each rank to its CPUs, others do not. Collective."""
    host, affinity = socket.gethostname(), os.sched_getaffinity(0)
    on_host = [cpus for name, cpus in world.gather_objects((host, affinity)) if name == host]
    share = sum(Fraction(1, sum(cpu in cpus for cpus in on_host)) for cpu in affinity)
    return max(1, math.floor(min(share, (cpu_quota() or math.inf) / len(on_host))))


def cpu_quota(membership: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> float | None:
    """Return the CPU limit of this process's cgroup (v2) and its parents, in CPUs; `None` without a limit."""
    limits = [line.split() for folder in control_groups(membership, root) for line in read_lines(folder / "cpu.max")]
    return min((int(time) / int(period) for time, period in limits if time != "max"), default=None)


def control_groups(membership: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> Iterator[Path]:
    """Yield the folders of this process's cgroup (v2) and of its parents; the limits of all of them apply."""
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
    """Return GPU local_rank; a task that SLURM bound to one GPU sees only that GPU, as number 0. With SHARED_GPUS,
    ranks share the GPUs in turn."""
    visible = torch.cuda.device_count()
    if os.environ.get(SHARED_GPUS) == "1":
        return torch.device("cuda", info.local_rank % visible)
    if info.local_world <= visible:
        return torch.device("cuda", info.local_rank)
    if visible == 1 and info.launcher == "slurm":
        return torch.device("cuda", 0)
    raise RefusedError(
        f"{info.local_world} processes on {socket.gethostname()} but {visible} GPU(s) visible "
        f"(CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES', 'not set')}); allowed: one process per GPU, or "
        f"{SHARED_GPUS}=1 for a test"
    )
