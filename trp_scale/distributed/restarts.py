"""In-place restarts: the launched process is a supervisor that forks the rank, and forks it again after a fault.

After a fault of any rank all ranks are ended and forked again; they continue from the newest checkpoint. Supervisors
agree through a store that outlives the ranks. They never touch a GPU, which cannot be used after a fork.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from types import FrameType

from torch.distributed import DistNetworkError, DistStoreError  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore, Store

from trp_scale.distributed import stop
from trp_scale.distributed.environment import (
    AGENT_STORE,
    connection_error,
    has_agent_store,
    open_store,
    prefix,
    tcp_store,
)
from trp_scale.distributed.launchers import ATTEMPT, BEGAN, RankInfo, exit_process
from trp_scale.errors import ExitStatus

POLL_S, GRACE_S, STORE_TIMEOUT = 1.0, 5.0, timedelta(seconds=10)
"""Interval of checks for faults of other ranks; time before a rank that outlives a fault is killed; limit of the
store's answers."""

NOT_FAULTS = tuple(status for status in ExitStatus if not status.is_fault)
SIGNALS = {128 + number: number.name for number in signal.Signals}


def run_with_restarts(run: Callable[[int], int], *, info: RankInfo, restarts: int, imports: Callable[[], None]) -> int:
    """Call `run` in a forked process, again after each fault of any rank; return the last exit status (128 + n after
    signal n). All ranks call it before they use a GPU or start a thread.

    Args:
        run: takes the number of restarts so far, returns the exit status.
        imports: imports the modules of `run`, once, before the first fork.

    Raises:
        RefusedError: the port of the rendezvous is in use.
    """
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # torch counts GPUs without using them
    imports()
    supervisors, supervisor = _Supervisors(info), _Supervisor()
    with stop.signal_handlers(stop.STOP_SIGNALS, supervisor.forward_signal):
        for attempt in range(restarts + 1):
            supervisor.fork(run, attempt)
            while not supervisor.has_ended(POLL_S):
                if supervisors.first_report(attempt).startswith("restart") and not supervisor.has_ended(GRACE_S):
                    os.kill(supervisor.pid, signal.SIGKILL)
            is_fault = supervisor.status not in NOT_FAULTS and not supervisor.stop_requested
            report = f"{'restart' if is_fault and attempt < restarts else 'end'} {info.rank}"
            first = supervisors.first_report(attempt, report)
            if not first.startswith("restart"):
                break
            if first == report:
                cause = SIGNALS.get(supervisor.status, f"status {supervisor.status}")
                message = f"[rank {info.rank} on {socket.gethostname()}] ended with {cause}: restarting all ranks"
                print(f"{message}, {attempt + 1} of {restarts} (--reliability.restarts)", file=sys.stderr, flush=True)
    return supervisor.status


class _Supervisor:
    def __init__(self) -> None:
        self.pid, self.status, self.stop_requested = 0, 0, stop.early_signal() is not None  # status of the last rank
        self._began = time.monotonic()

    def fork(self, run: Callable[[int], int], attempt: int) -> None:
        if (pid := os.fork()) == 0:
            stop.handle_signals([signal.SIGINT], signal.default_int_handler)
            stop.listen_early()
            os.environ |= {ATTEMPT: str(attempt), BEGAN: str(self._began)}
            status: int = ExitStatus.FAILED
            try:
                status = run(attempt)
            except SystemExit as error:
                status = error.code if isinstance(error.code, int) else status
            except BaseException:
                traceback.print_exc()
            exit_process(status)
        self.pid, self._pidfd, self._poll = pid, os.pidfd_open(pid), select.poll()
        self._poll.register(self._pidfd, select.POLLIN)
        if self.stop_requested:  # the signal may have arrived between two ranks
            os.kill(pid, signal.SIGTERM)

    def has_ended(self, timeout_s: float) -> bool:
        if self.pid and self._poll.poll(1000 * timeout_s):
            pid, self.pid = self.pid, 0  # from here on no signal is forwarded to it
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            os.close(self._pidfd)
            self.status = code if code >= 0 else 128 - code
        return not self.pid

    def forward_signal(self, number: int, frame: FrameType | None) -> None:
        self.stop_requested = True
        if self.pid:
            os.kill(self.pid, number)
        else:
            stop.record_early_signal(signal.Signals(number))  # this process is a rank that was just forked


class _Supervisors:
    """Agreement of all supervisors: in each attempt they follow the first report."""

    def __init__(self, info: RankInfo) -> None:
        self._info = info
        self._store: Store | None = None
        if info.world > 1 and not has_agent_store():
            if info.rank == 0:
                _fork_store(info)
            os.environ[AGENT_STORE] = "True"  # ranks only connect

    def first_report(self, attempt: int, report: str = "") -> str:
        """Write `report` unless one exists, and return the first report: "" if none exists, or if the store has ended
        with the launcher or the host of rank 0."""
        try:
            if self._info.world == 1 or (self._store is None and connection_error(self._info)):
                return report if self._info.world == 1 else ""
            if self._store is None:
                self._store = PrefixStore(f"{prefix()}/restarts", tcp_store(self._info, STORE_TIMEOUT, is_server=False))
            return self._store.compare_set(str(attempt), "", report).decode()
        except (DistNetworkError, DistStoreError):
            self._store = None
            return ""


def _fork_store(info: RankInfo) -> None:
    """Open the store in a child that lives as long as this process; raise RefusedError if the port is in use."""
    (read, write), parent = os.pipe(), os.getpid()
    if os.fork() == 0:
        try:
            for number in stop.STOP_SIGNALS:  # Ctrl-C reaches the whole group
                signal.signal(number, signal.SIG_IGN)
            store = open_store(info, STORE_TIMEOUT)
            os.write(write, b"open")
            while store and os.getppid() == parent:
                time.sleep(POLL_S)
        finally:
            os._exit(0)
    os.close(write)
    if not os.read(read, 1):
        open_store(info, STORE_TIMEOUT)  # raises the child's error
    os.close(read)
