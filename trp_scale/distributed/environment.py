"""The processes of a run: process group, device, and what happens when one rank fails."""

from __future__ import annotations

import math
import os
import socket
import sys
import time
import traceback
from collections.abc import Iterator
from datetime import timedelta
from fractions import Fraction
from pathlib import Path
from types import TracebackType
from typing import NoReturn

import torch
import torch.distributed as dist

from trp_scale.config import RefusedError
from trp_scale.distributed.gathering import gather
from trp_scale.distributed.groups import ALONE, Group
from trp_scale.distributed.launchers import FIRST_WORD_SECONDS, RankInfo, discover, exit_process
from trp_scale.errors import exit_status_and_message

__all__ = ["Environment", "RankInfo", "discover"]


class Environment:
    """Context of a run: makes the process group and picks the device on entry, destroys the group on exit.

    When the body raises on one rank of several, that rank prints its error with its number and leaves the process at
    once with its status (a refusal is printed without a traceback): the others sit in a collective that will
    never complete, so waiting for them would hang; the launcher ends them when it sees the status, and over gloo they
    see a closed connection.

    Attributes:
        info: place in the world, and the launcher.
        device: cuda:N with a GPU, else cpu.
        world: all ranks.
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
            if line:
                report_refusal(line, self.info)
            elif not isinstance(error, SystemExit):
                report_failure(error, self.info)
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


def report_refusal(line: str, info: RankInfo) -> None:
    """Print why the run is refused: rank 0 at once, the others only if they outlive it, so that it is printed once."""
    if info.rank == 0:
        print(f"error: {line}", file=sys.stderr, flush=True)
        return
    time.sleep(FIRST_WORD_SECONDS)
    print(f"[rank {info.rank} on {socket.gethostname()}] error: {line}", file=sys.stderr, flush=True)


def report_failure(error: BaseException, info: RankInfo) -> None:
    """Print the traceback with the rank before each line: several ranks write to one terminal."""
    lines = "".join(traceback.format_exception(error)).rstrip().splitlines()
    prefix = f"[rank {info.rank} on {socket.gethostname()}] "
    print("\n".join(prefix + line for line in lines), file=sys.stderr, flush=True)


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
