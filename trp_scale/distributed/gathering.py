"""The ranks of a run find each other at its start: one that is missing is named after seconds, and two launches that
meet at one port are refused."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

from torch.distributed import DistNetworkError, DistStoreError, TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore, Store

from trp_scale.config import RefusedError
from trp_scale.distributed.launchers import RankInfo, exit_process
from trp_scale.distributed.stop import asked_early

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
        info: this process's place.
        timeout: how long missing ranks are awaited, and of every later wait in the store.

    Raises:
        RefusedError: ranks are missing after `timeout`; the port of the rendezvous is taken; or another process is
            there with the same rank or with another number of ranks.
    """
    wait = _Wait(info, timeout.total_seconds(), first_report)
    store = PrefixStore(f"{prefix()}/{info.attempt or 0}", _open(info, timeout, wait))
    try:
        _register(store, info)
        with _patience(store, _SLICE, afterwards=timeout):
            while not _is_there(store, _ALL_HERE):
                _leave_if_asked()
                if wait.is_long:
                    here = [rank for rank in range(info.world) if store.check([_describe_rank(rank)])]
                    missing = [rank for rank in range(info.world) if rank not in here]
                    wait.report(missing, speaks=info.rank == here[0])  # one speaks for all
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
            f"{_numbers(missing)} of {info.world} {'has' if len(missing) == 1 else 'have'} not come to "
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
    world = _agree(store, "world", str(info.world))
    if world != str(info.world):
        raise RefusedError(
            f"{socket.gethostname()} started rank {info.rank} of {info.world}, and others at "
            f"{info.master_addr}:{info.master_port} are of {world}: two launches share the port, or WORLD_SIZE differs "
            "between hosts"
        )
    process = f"{socket.gethostname()}, process {os.getpid()}"
    holder = _agree(store, _describe_rank(info.rank), process)
    if holder != process:
        raise RefusedError(
            f"rank {info.rank} of {info.world} at {info.master_addr}:{info.master_port} is there twice: {holder}, and "
            f"{process}; two launches share the port, or two hosts were started with the same node rank"
        )
    if all(store.check([_describe_rank(rank)]) for rank in range(info.world)):
        store.set(_ALL_HERE, "yes")


def _agree(store: Store, key: str, value: str) -> str:
    """Return the value that the first process has written."""
    return store.compare_set(key, "", value).decode()


def _is_there(store: Store, key: str) -> bool:
    """Whether it has come within the store's timeout."""
    try:
        store.wait([key])
    except DistStoreError:
        return False
    return True


@contextmanager
def _patience(store: Store, timeout: timedelta, *, afterwards: timedelta) -> Iterator[None]:
    """Wait so long only."""
    store.set_timeout(min(timeout, afterwards))
    try:
        yield
    finally:
        store.set_timeout(afterwards)


def _describe_rank(rank: int) -> str:
    return f"rank {rank}"


def _numbers(ranks: list[int]) -> str:
    """rank 3; ranks 0, 4-7."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and runs[-1][-1] == rank - 1:
            runs[-1][1:] = [rank]
        else:
            runs.append([rank])
    written = ", ".join("-".join(map(str, run)) for run in runs)
    return f"rank{'s' if len(ranks) > 1 else ''} {written}"
