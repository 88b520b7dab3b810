"""A watchdog in each rank: a run in which nothing gets on says where each rank stands, and ends.

RUN_DIR/hangs/20260101-120000/   the time at which the run was started
  rank-00000.txt           Python's stack of every thread (faulthandler)
  rank-00000.json          step, what it was at, for how long, how many collectives it has begun of each group
  rank-00000.trace.json    the last collectives, by the flight recorder of torch
  summary.txt              which rank is late

The late rank is the one that has written nothing (it is stopped, or its host is gone), else the one that has begun the
fewest collectives. Ranks share no memory for this, only the run directory: whoever hangs in a collective cannot be
asked through one.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import socket
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from trp_scale.config.json_files import read_object
from trp_scale.errors import RefusedError
from trp_scale.exit_status import ExitStatus

HANGS = "hangs"
TIMES_THE_MEDIAN = 20.0
"""A step may take so many times the median of the last ones."""

SLOW_START = 3.0
"""The first steps compile and allocate, and what is not a step is rarer and longer: so many times the limit."""

AFTER_A_REQUEST = 60.0
"""Seconds after a request to stop, within which a step must end, or three times the median step if that is longer."""

ALL_WRITTEN = 15.0
"""Seconds within which all ranks that can have written what they know."""

_STEPS = 64
_FIRST_STEPS = 5


class _Beat(NamedTuple):
    """The last sign of life of the main thread. `patience`: times the limit."""

    at: float
    step: int
    what: str
    patience: float


class Watchdog:
    """Context of a run's steps. `beat` is told of each sign of life; a thread looks at it about once a second.

    Args:
        directory: what ranks write into, the same for all and of this start alone; made when it is needed.
        rank, world: this process's place.
        limit: seconds without a sign of life after which the run hangs, or 20 times the median step if that is longer;
            0 = never.
        stop_asked: when a request to stop came, by time.monotonic(); None: none has. Then the limit is a minute.
        end: called with the status when it hangs; leaves the process.
        leave_word: told why, by the rank that writes the summary, before it ends.
    """

    def __init__(
        self,
        directory: Path,
        *,
        rank: int = 0,
        world: int = 1,
        limit: float,
        stop_asked: Callable[[], float | None] = lambda: None,
        end: Callable[[int], object] = os._exit,
        leave_word: Callable[[int, str], object] = lambda step, why: None,
    ) -> None:
        self._directory, self._rank, self._world = directory, rank, world
        self._limit, self._stop_asked, self._end, self._leave_word = limit, stop_asked, end, leave_word
        self._seconds: deque[float] = deque(maxlen=_STEPS)
        self._beat = _Beat(time.monotonic(), 0, "the start", SLOW_START)
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="trp_scale watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        self._beat = self._beat._replace(at=time.monotonic())
        if self._limit:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._done.set()
        if self._limit:
            self._thread.join()
            faulthandler.cancel_dump_traceback_later()

    def step(self, step: int) -> None:
        """Step `step`, from 1, begins on this rank."""
        now, before = time.monotonic(), self._beat
        if before.what == "a step":
            self._seconds.append(now - before.at)
        known = len(self._seconds) >= _FIRST_STEPS
        self._beat = _Beat(now, step, "a step", 1.0 if known else SLOW_START)

    def beat(self, what: str) -> None:
        """A sign of life between steps: `what` begins, or gets on."""
        self._beat = _Beat(time.monotonic(), self._beat.step, what, SLOW_START)

    @property
    def steps_done(self) -> int | None:
        """Steps that this rank has made; None: it has begun none."""
        beat = self._beat
        return None if not beat.step else beat.step - (beat.what == "a step")

    def limit(self) -> float:
        """Seconds without a sign of life after which the run hangs now."""
        usual = statistics.median(self._seconds) if self._seconds else 0.0
        return max(self._limit, TIMES_THE_MEDIAN * usual) * self._beat.patience

    def _watch(self) -> None:
        pause = min(1.0, self._limit / 10)
        # Should a library hold Python's lock, this thread stands still too: the timer of faulthandler does not.
        while not self._done.wait(pause):
            if why := self._hangs():
                self._report(why)
                return
            with contextlib.suppress(Exception):  # no file is behind standard error
                faulthandler.dump_traceback_later(self.limit() + ALL_WRITTEN + pause, exit=True)

    def _hangs(self) -> str:
        """Return why this rank considers the run hung, or ""."""
        beat, now, limit = self._beat, time.monotonic(), self.limit()
        if now - beat.at > limit:
            return f"{beat.what} has not got on for {now - beat.at:.0f} s, {limit:.0f} s are allowed"
        asked = self._stop_asked()
        if asked is not None and beat.what == "a step":
            usual = statistics.median(self._seconds) if self._seconds else 0.0
            allowed = max(AFTER_A_REQUEST, 3 * usual)
            if now - max(asked, beat.at) > allowed:
                return f"asked to stop, and no step has ended within {allowed:.0f} s"
        return ""

    def _report(self, why: str) -> None:
        """Write what this rank does, wait for what the others write, and end."""
        try:
            beat, directory = self._beat, self._directory
            directory.mkdir(parents=True, exist_ok=True)
            write_own(directory, self._rank, step=beat.step, what=beat.what, why=why, since=time.monotonic() - beat.at)
            until = time.monotonic() + ALL_WRITTEN
            while len(written := _read_reports(directory)) < self._world and time.monotonic() < until:
                time.sleep(0.2)
            text = summary(written, self._world)
            if self._rank == min(written, default=self._rank):
                (directory / "summary.txt").write_text(text + "\n", encoding="utf-8")
                print(f"error: {text}\nstacks and collectives of each rank: {directory}", file=sys.stderr, flush=True)
                self._leave_word(beat.step, text)
        finally:
            self._end(ExitStatus.HUNG)


def write_own(directory: Path, rank: int, *, step: int, what: str, why: str, since: float) -> None:
    """Stacks, place and collectives of this process."""
    with (directory / f"rank-{rank:05d}.txt").open("w") as file:
        faulthandler.dump_traceback(file, all_threads=True)
    trace = collectives()
    (directory / f"rank-{rank:05d}.trace.json").write_text(json.dumps(trace))
    report = {
        "rank": rank,
        "host": socket.gethostname(),
        "process": os.getpid(),
        "step": step,
        "at": what,
        "why": why,
        "seconds": round(since, 1),
        "begun": {name: int(status["last_enqueued_collective"]) for name, status in trace.get("pg_status", {}).items()},
        "last": _last(trace),
    }
    temporary = directory / f".rank-{rank:05d}.json"
    temporary.write_text(json.dumps(report, indent=1))
    temporary.replace(directory / f"rank-{rank:05d}.json")


def collectives() -> dict[str, Any]:
    """Return the collectives that torch's flight recorder holds; empty if it is off or absent."""
    try:
        from torch._C import _distributed_c10d as c10d

        dumps = (getattr(c10d, name, None) for name in ("_dump_nccl_trace_json", "_dump_fr_trace_json"))
        traces: list[dict[str, Any]] = [json.loads(dump(True, False)) for dump in dumps if dump is not None]
        return max(traces, key=lambda trace: len(trace.get("entries", ())))
    except Exception:  # in what it is called and takes, versions of torch differ; a report without it is one
        return {}


def _last(trace: Mapping[str, Any]) -> str:
    """The last collective that was begun, in words."""
    entries = trace.get("entries") or []
    if not entries:
        return ""
    last = max(entries, key=lambda entry: entry.get("record_id", 0))
    group = "/".join(part for part in last.get("process_group", []) if part != "undefined")
    return f"{last.get('profiling_name')} number {last.get('collective_seq_id')} of group {group}"


def _read_reports(directory: Path) -> dict[int, dict[str, Any]]:
    """Read the reports of ranks, by rank."""
    reports = {}
    for path in sorted(directory.glob("rank-*.json")):
        if path.name.endswith(".trace.json"):
            continue
        with contextlib.suppress(RefusedError):
            reports[int(path.stem.removeprefix("rank-"))] = read_object(path)
    return reports


def summary(written: Mapping[int, Mapping[str, Any]], world: int) -> str:
    """Name the late rank, in one line and a line for each rank with a report."""
    silent = [rank for rank in range(world) if rank not in written]
    lines = [
        f"  rank {rank} on {report['host']}: step {report['step']}, {report['at']}; {report['why']}"
        + (f"; last collective {report['last']}" if report["last"] else "")
        for rank, report in sorted(written.items())
    ]
    gone = f"{_ranks(silent)} did not answer: stopped, ended, or on a host that is gone"
    late = gone if silent else _fewest(written)
    return "\n".join([f"the run hangs: {late}", *lines[:64]])


def _fewest(written: Mapping[int, Mapping[str, Any]]) -> str:
    """The ranks that are behind, by steps, then by the collectives that they have begun."""
    steps = {rank: int(report["step"]) for rank, report in written.items()}
    behind = [rank for rank, step in steps.items() if step < max(steps.values())]
    if behind:
        return f"{_ranks(behind)} is at step {min(steps.values())}, others at {max(steps.values())}"
    begun = {rank: dict(report["begun"]) for rank, report in written.items()}
    for group in dict.fromkeys(name for counters in begun.values() for name in counters):
        counts = {rank: counters.get(group, 0) for rank, counters in begun.items() if group in counters}
        behind = [rank for rank, count in counts.items() if count < max(counts.values())]
        if behind:
            most, least = max(counts.values()), min(counts.values())
            return f"{_ranks(behind)} has begun {least} collectives of group {group}, others {most}"
    return "no rank is behind another: all wait alike, as for the network or for storage"


def _ranks(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:16])) + (f" and {len(ranks) - 16} more" if len(ranks) > 16 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"
