"""Two ranks of `trp-scale pretrain` that get a signal at a named place of their own code.

A launcher costs each start seconds of imports. Here the ranks are forked from a process that has imported what a run
needs (`tests.ranks.fork`). RANK, MASTER_ADDR and so on are set as by hand; a rank whose other has ended gets SIGTERM,
then SIGKILL, as from a launcher.

    signal = Signal(place="backward", rank=1, number=signal.SIGKILL, times=3, after=0.001)
    statuses = run_ranks(arguments, log, signal)
"""

from __future__ import annotations

import functools
import importlib
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from tests.ranks import fork, free_port
from tests.runs import environment
from trp_scale.distributed import liveness

WORLD = 2
LONGEST = 400.0
"""Seconds that a start may take: then it hangs."""

PATIENCE = 3.0
"""Seconds from the failure of one rank to SIGTERM for the other, and from there to SIGKILL."""

PLACES = {
    "before the group": "trp_scale.distributed.environment:Environment.__enter__",
    "start-up": "trp_scale.training.pretrain:build_with_initialisers",
    "rows": "trp_scale.data.sources:TrainSource.next_window",
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


def run_ranks(arguments: list[str], log: Path, given: Signal | None = None) -> list[int]:
    """Start a run once.

    Args:
        arguments: of `trp-scale pretrain`.
        log: takes what the ranks print.
        given: None: no rank gets a signal.

    Returns:
        each rank's exit status, the negative number of a signal that ended it.
    Raises:
        AssertionError: the ranks had to be killed after LONGEST.
    """
    port = free_port()
    ranks = [fork(_be_a_rank, rank, port, arguments, log, given, environment()) for rank in range(WORLD)]
    hangs = not wait([rank.sentinel for rank in ranks], LONGEST)
    for number in (signal.SIGTERM, signal.SIGKILL):
        for rank in ranks:
            rank.join(PATIENCE if hangs or any(each.exitcode for each in ranks) else LONGEST)
        for rank in ranks:
            if rank.is_alive():
                os.kill(rank.pid, number)
    for rank in ranks:
        rank.join()
    assert not hangs, f"it hangs, {given}: {log.read_text(errors='replace')[-5000:]}"
    return [rank.exitcode for rank in ranks]


def _be_a_rank(
    rank: int, port: int, arguments: list[str], log: Path, given: Signal | None, variables: dict[str, str]
) -> None:
    """A forked process from here to its end."""
    status = 1
    try:
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        nothing = os.open(os.devnull, os.O_RDONLY)
        for descriptor, target in ((nothing, 0), (output, 1), (output, 2)):
            os.dup2(descriptor, target)
        places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": WORLD, "LOCAL_WORLD_SIZE": WORLD}
        os.environ.clear()
        os.environ |= variables | {name: str(value) for name, value in places.items()}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        liveness.REPORTS_TIMEOUT_S = 3.0  # for the report of a stopped rank; 15 in the package
        if given is not None and given.rank == rank:
            _await_call(given)
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
