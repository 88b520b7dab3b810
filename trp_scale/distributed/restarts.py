"""Ranks that start again in their places. What a launcher has started imports what a run needs, forks the rank, and
looks after it. Where a rank ends by a fault, all are ended and forked anew, and go on from the newest checkpoint. The
launcher sees nothing of it.

    torchrun -- looks after -- rank 0        torchrun -- looks after -- rank 0, anew
             `- looks after -- rank 1                 `- looks after -- rank 1, anew

Those that look after ranks agree through the store of the rendezvous, which must outlive the ranks: torchrun's agents
have one; under other launchers a process of its own holds it. They never touch a GPU, which cannot be used after a
fork.
"""

from __future__ import annotations

import contextlib
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
from typing import Any, NoReturn

from torch.distributed import DistNetworkError, DistStoreError  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore, Store

from trp_scale.distributed.gathering import AGENT_STORE, has_agent_store, no_answer, open_store, prefix, tcp_store
from trp_scale.distributed.launchers import ATTEMPT, BEGAN, RankInfo, leave
from trp_scale.distributed.stop import STOP_SIGNALS, asked_early, handle_signals, listen_early, note_early
from trp_scale.errors import RefusedError
from trp_scale.exit_status import ExitStatus

LOOKED_EACH = 1.0
"""Seconds between looks for a fault elsewhere."""

GRACE = 5.0
"""Seconds that a rank has to end by itself, and to say why, once another one has ended by a fault."""

PATIENCE = timedelta(seconds=10)
"""That the store has to answer."""

AGAIN, OVER = "again after", "over with"

NOT_FAULTS = tuple(status for status in ExitStatus if not status.is_fault)
"""Statuses with which a run ends for a reason that a restart does not change."""


def with_restarts(run: Callable[[int], int], *, info: RankInfo, restarts: int, imports: Callable[[], None]) -> int:
    """Call `run` in a process of its own, once more after each fault of any rank. All ranks call it, before they have
    used a GPU or started a thread.

    Args:
        run: takes the number of restarts before it, and returns the exit status.
        info: this process's place.
        restarts: at most so many.
        imports: imports what `run` needs, once, before the first fork.

    Returns:
        the exit status of the last call; 128 and the number of the signal that ended it, as shells say.
    Raises:
        RefusedError: the port of the rendezvous is taken.
    """
    # Counts GPUs without touching them; torch reads it at each count.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    imports()
    others = _Others(info)
    with _ForkedRank() as rank:
        for attempt in range(restarts + 1):
            rank.fork(run, attempt)
            while not rank.ended_within(LOOKED_EACH):
                if others.first_word(attempt).startswith(AGAIN):
                    rank.end(GRACE)
            fault = rank.status not in NOT_FAULTS and not rank.asked
            own = f"{AGAIN if fault and attempt < restarts else OVER} {info.rank}"
            first = others.say(attempt, own)
            if not first.startswith(AGAIN):
                break
            if first == own:
                place = f"[rank {info.rank} on {socket.gethostname()}]"
                said = f"{place} ended with {_named(rank.status)}: all ranks start again, {attempt + 1} of {restarts}"
                print(f"{said} (--reliability.restarts)", file=sys.stderr, flush=True)
    return rank.status


class _ForkedRank:
    """Context in which this process has a rank that is forked from it, and passes requests to stop on to it.

    Attributes:
        status: of the one that has ended last.
        asked: whether it was asked to stop.
    """

    def __init__(self) -> None:
        self.status = 0
        self._began = time.monotonic()
        self.asked = asked_early() is not None
        self._process = 0
        self._ended: select.poll | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> _ForkedRank:
        self._before = handle_signals(STOP_SIGNALS, self._pass_on)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def fork(self, run: Callable[[int], int], attempt: int) -> None:
        """Start it; its process ends with what `run` returns."""
        process = os.fork()
        if process == 0:
            _be_a_rank(run, attempt, self._began)
        self._process = process
        if self.asked:  # while there was none
            os.kill(process, signal.SIGTERM)
        self._ended = select.poll()
        self._ended.register(os.pidfd_open(process), select.POLLIN)

    def ended_within(self, seconds: float) -> bool:
        """Whether it has ended, or does within so many seconds."""
        if self._process == 0:
            return True
        assert self._ended is not None
        found = self._ended.poll(1000 * seconds)
        if found:
            _, status = os.waitpid(self._process, 0)
            ended = os.waitstatus_to_exitcode(status)
            self.status, self._process = ended if ended >= 0 else 128 - ended, 0
            os.close(found[0][0])
        return bool(found)

    def end(self, grace: float) -> None:
        """Kill it, if it does not end by itself."""
        if not self.ended_within(grace):
            os.kill(self._process, signal.SIGKILL)
            self.ended_within(60.0)

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        self.asked = True
        if self._process:
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                os.kill(self._process, number)
        else:
            note_early(signal.Signals(number))  # just forked


class _Others:
    """What those that look after the ranks tell each other, in the store of the rendezvous.

    Raises:
        RefusedError: this is to open the store, and its port is taken.
    """

    def __init__(self, info: RankInfo) -> None:
        self._info = info
        self._store: Store | None = None
        if info.world > 1 and not has_agent_store():
            if info.rank == 0:
                _hold_store(info)
            os.environ[AGENT_STORE] = "True"  # no rank opens it itself

    def first_word(self, attempt: int) -> str:
        """What the first has said whose rank has ended; empty: none has yet."""
        key = str(attempt)
        return self._asked(lambda store: store.get(key) if store.check([key]) else b"")

    def say(self, attempt: int, own: str) -> str:
        """Say what follows on the end of this one's rank; what the first has said holds."""
        if self._info.world == 1:
            return own
        return self._asked(lambda store: store.compare_set(str(attempt), "", own))

    def _asked(self, question: Callable[[Store], bytes]) -> str:
        """The answer; empty where there is no store any more: the launcher is gone then, or the host of rank 0."""
        if self._info.world == 1:
            return ""
        try:
            if self._store is None:
                if no_answer(self._info):
                    return ""
                self._store = PrefixStore(f"{prefix()}/restarts", tcp_store(self._info, PATIENCE, opens=False))
            return question(self._store).decode()
        except (DistNetworkError, DistStoreError):
            self._store = None
            return ""


def _be_a_rank(run: Callable[[int], int], attempt: int, began: float) -> NoReturn:
    """A forked process from here to its end."""
    handle_signals([signal.SIGINT], signal.default_int_handler)
    listen_early()
    os.environ |= {ATTEMPT: str(attempt), BEGAN: str(began)}
    status: int = ExitStatus.FAILED
    try:
        status = run(attempt)
    except KeyboardInterrupt:
        status = ExitStatus.INTERRUPTED
    except SystemExit as left:
        status = left.code if isinstance(left.code, int) else ExitStatus.FAILED
    except BaseException:
        traceback.print_exc()
    leave(status)


def _hold_store(info: RankInfo) -> None:
    """Open the store in a process of its own, which stays as long as this one.

    Raises:
        RefusedError: its port is taken.
    """
    read, write = os.pipe()
    own = os.getpid()
    if os.fork() == 0:
        try:
            for number in STOP_SIGNALS:  # of Ctrl-C the whole group hears
                signal.signal(number, signal.SIG_IGN)
            store, problem = None, ""
            try:
                store = open_store(info, PATIENCE)
            except RefusedError as error:
                problem = str(error)
            os.write(write, problem.encode())
            os.close(write)
            while store is not None and os.getppid() == own:
                time.sleep(LOOKED_EACH)
        finally:  # nothing of what the caller would do
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as told:
        if problem := told.read():
            raise RefusedError(problem)


def _named(status: int) -> str:
    """status 1; SIGKILL."""
    with contextlib.suppress(ValueError):
        return signal.Signals(status - 128).name
    return f"status {status}"
