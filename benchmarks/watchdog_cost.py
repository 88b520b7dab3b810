"""What the watchdog, the lease and the thread that hears signals take of a run: processor time a step and a second.

    python benchmarks/watchdog_cost.py [--seconds 20] [--step_seconds 0.1]

A step costs one call of `Watchdog.step`; the threads wake about once a second whatever the steps take. Both as a share
of steps of `step_seconds`.
"""

from __future__ import annotations

import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import tyro

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from trp_scale.distributed.lease import Lease
from trp_scale.distributed.stop import StopRequests
from trp_scale.distributed.watchdog import Watchdog

CALLS = 100_000


@dataclass(kw_only=True)
class Options:
    """What is measured."""

    seconds: float = 20.0
    """That the threads are watched for."""
    step_seconds: float = 0.1
    """Of a step."""


def main() -> None:
    """Print both."""
    options = tyro.cli(Options)
    with (
        tempfile.TemporaryDirectory() as place,
        Lease(Path(place)),
        StopRequests(Path(place)) as stop,
        Watchdog(Path(place) / "hangs", limit=600.0, stop_asked=stop.waiting_since) as watchdog,
    ):
        began = time.perf_counter()
        for step in range(1, CALLS + 1):
            watchdog.step(step)
        call = (time.perf_counter() - began) / CALLS
        before = time.process_time()
        time.sleep(options.seconds)
        second = (time.process_time() - before) / options.seconds
    share = call / options.step_seconds + second
    print(
        f"{call * 1e6:.2f} us a step, {second * 1e6:.0f} us of threads a second: {share:.4%} of steps of "
        f"{options.step_seconds:g} s"
    )


if __name__ == "__main__":
    main()
