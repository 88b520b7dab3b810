"""Two ranks of `trp-scale pretrain` that get a signal at a named place of their own code.

A launcher costs each start seconds of imports. Here one process imports what a run needs, and forks the ranks: a start
costs a second. The ranks are told of each other by RANK, MASTER_ADDR and so on, as by hand; a rank whose other has
ended is treated as launchers do: SIGTERM, then SIGKILL.

    ranks = ForkedRanks()
    statuses = ranks(arguments, log, Signal(place="backward", rank=1, number=signal.SIGKILL, times=3, after=0.001))
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.ranks import free_port
from tests.runs import ROOT, environment

WORLD = 2
LONGEST = 120.0
"""Seconds that a start may take: then it hangs."""

PATIENCE = (5.0, 5.0)
"""Seconds from the end of one rank to SIGTERM for the other, and from there to SIGKILL."""

PLACES = {
    "before the group": "trp_scale.distributed.environment:Environment.__enter__",
    "start-up": "trp_scale.training.pretrain:build_engine",
    "rows": "trp_scale.data.train_source:TrainSource.next_window",
    "forward": "trp_scale.core.hooks:StepContext.compute_losses",
    "backward": "trp_scale.engines.fsdp:FsdpEngine.backward",
    "step": "trp_scale.engines.plain:PlainEngine.step",
    "hook": "trp_scale.methods.balancing.global_losses:GlobalLossBalancer.before_step",
    "validation": "trp_scale.training.pretrain:validate",
    "checkpoint": "trp_scale.checkpoint.document:ChecksumWriter.write",
    "rename": "pathlib:Path.rename",
}
"""What is called there."""


RAISES = 0


@dataclass(frozen=True, kw_only=True)
class Signal:
    """A signal that a rank gives itself.

    Attributes:
        place: of PLACES.
        rank: which one.
        number: of the signal; RAISES: the call raises an error in its place.
        times: at this call of the place, from 1. Of `rename` only those count that give a checkpoint its name.
        after: seconds after the call has begun.
    """

    place: str
    rank: int
    number: int
    times: int = 1
    after: float = 0.0


class ForkedRanks:
    """The process that ranks are forked from; started at the first call."""

    def __init__(self) -> None:
        self._server: subprocess.Popen[str] | None = None

    def __call__(self, arguments: list[str], log: Path, given: Signal | None = None) -> list[int]:
        """One start of a run.

        Args:
            arguments: of `trp-scale pretrain`.
            log: takes what the ranks print.
            given: None: no rank gets a signal.

        Returns:
            each rank's exit status, the negative number of a signal that ended it.
        Raises:
            AssertionError: the ranks had to be killed after LONGEST.
        """
        if self._server is None:
            command = [sys.executable, "-m", "tests.faults.forked_ranks"]
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
            self._server = subprocess.Popen(command, cwd=ROOT, env=environment(), text=True, **pipes)  # type: ignore[call-overload]
        assert self._server is not None and self._server.stdin is not None and self._server.stdout is not None
        told = {"arguments": arguments, "log": str(log), "given": asdict(given) if given else None}
        self._server.stdin.write(json.dumps(told) + "\n")
        self._server.stdin.flush()
        statuses: list[int] = json.loads(self._server.stdout.readline())
        assert len(statuses) == WORLD, f"it hangs, {given}: {log.read_text(errors='replace')[-5000:]}"
        return statuses

    def close(self) -> None:
        if self._server is not None:
            self._server.communicate(timeout=30)


def _serve() -> None:
    """Fork the ranks of each line of standard input; answer with their statuses."""

    answers = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        told = json.loads(line)
        port = free_port()
        ranks: list[int] = []
        for rank in range(WORLD):
            process = os.fork()
            if process == 0:
                _be_a_rank(rank, port, **told)
            ranks.append(process)
        answers.write(json.dumps(_statuses(ranks)) + "\n")
        answers.flush()


def _statuses(ranks: list[int]) -> list[int]:
    """Wait for all; empty where they had to be killed because nobody ended."""
    until, signals = time.monotonic() + LONGEST, [signal.SIGTERM, signal.SIGKILL]
    found: dict[int, int] = {}
    hang = False
    while len(found) < len(ranks):
        for process in ranks:
            if process not in found:
                ended, status = os.waitpid(process, os.WNOHANG)
                if ended:
                    found[process] = os.waitstatus_to_exitcode(status)
                    until = time.monotonic() + PATIENCE[0]
        if time.monotonic() > until and len(found) < len(ranks):
            hang = hang or not found
            number = signals.pop(0) if found and signals else signal.SIGKILL
            until = time.monotonic() + PATIENCE[1]
            for process in ranks:
                if process not in found:
                    os.kill(process, number)
        time.sleep(0.01)
    return [] if hang else [found[process] for process in ranks]


def _be_a_rank(rank: int, port: int, *, arguments: list[str], log: str, given: dict[str, Any] | None) -> None:
    """A forked process from here to its end."""
    status = 1
    try:
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        nothing = os.open(os.devnull, os.O_RDONLY)
        for descriptor, target in ((nothing, 0), (output, 1), (output, 2)):
            os.dup2(descriptor, target)
        places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": WORLD, "LOCAL_WORLD_SIZE": WORLD}
        os.environ |= {name: str(value) for name, value in places.items()}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        if given is not None and given["rank"] == rank:
            _await_call(Signal(**given))
        sys.argv = ["pretrain", *arguments]
        from trp_scale.cli.main import console

        console("pretrain")
    except SystemExit as left:
        status = left.code if isinstance(left.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(status)


def _await_call(given: Signal) -> None:
    """Put a function before the place that sends the signal."""
    module, _, name = PLACES[given.place].partition(":")
    owner = functools.reduce(getattr, name.split(".")[:-1], importlib.import_module(module))
    attribute = name.split(".")[-1]
    right: Callable[..., Any] = getattr(owner, attribute)
    process, calls = os.getpid(), 0

    @functools.wraps(right)
    def counted(*arguments: Any, **named: Any) -> Any:
        nonlocal calls
        calls += given.place != "rename" or Path(arguments[1]).name.startswith("step_")
        if calls == given.times:
            calls += 1
            if given.number == RAISES:
                raise RuntimeError("on purpose")
            if given.after:
                timer = threading.Timer(given.after, os.kill, (process, given.number))
                timer.daemon = True
                timer.start()
            else:
                os.kill(process, given.number)
        return right(*arguments, **named)

    setattr(owner, attribute, counted)


if __name__ == "__main__":
    _serve()
