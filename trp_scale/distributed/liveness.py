"""Liveness of a run: a lease keeps a second run out of its directory, a watchdog ends a run that hangs.

RUN_DIR/lease.json names the holder, which updates the file's modification time. Another start compares two of these
times with each other, never with its clock. It takes over a lease that is not renewed, or that a process of this host
held that has ended.

RUN_DIR/hangs/20260101-120000/   start time of the run
  rank-00000.txt           Python's stack of every thread (faulthandler)
  rank-00000.json          step, activity and its seconds, collectives started in each group
  rank-00000.trace.json    last collectives (flight recorder of torch)
  summary.txt              the late rank

The late rank is a rank without a report (it is stopped, or its host has failed), else the rank that has started the
fewest collectives. Reports go through the run directory, because a rank that hangs in a collective cannot take part in
another.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import secrets
import socket
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from trp_scale.config.files import read_optional_object
from trp_scale.distributed.launchers import list_ranks
from trp_scale.distributed.stop import process_status
from trp_scale.errors import ExitStatus, RefusedError

LEASE = "lease.json"

RENEWAL_INTERVAL_S = 5.0
"""Seconds between renewals."""

GONE_AFTER = 30.0
"""Seconds without a renewal after which another start takes the lease over."""


class Lease:
    """Context that holds the lease of a run directory; a thread renews it.

    Args:
        gone_after, renewed_each: seconds.
        lost: called if another process has taken the lease, for example because this process was suspended.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        gone_after: float = GONE_AFTER,
        renewed_each: float = RENEWAL_INTERVAL_S,
        lost: Callable[[str], object] | None = None,
    ) -> None:
        self._path, self._gone_after, self._renewed_each = run_dir / LEASE, gone_after, renewed_each
        self._lost = _end_process if lost is None else lost
        self._token = secrets.token_hex(8)
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="trp_scale lease", daemon=True)

    def __enter__(self) -> Lease:
        """
        Raises:
            RefusedError: another run holds the lease.
        """
        while True:
            try:
                write_exclusively(self._path, json.dumps({"token": self._token, **_this_process()}))
                break
            except FileExistsError:
                self._await_sign_of_life()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()
        if read_optional_object(self._path).get("token") == self._token:
            self._path.unlink(missing_ok=True)

    def _await_sign_of_life(self) -> None:
        """Wait for a renewal of the lease, and remove the lease if none comes.

        Raises:
            RefusedError: the holder has renewed it.
        """
        holder = read_optional_object(self._path)
        changed, until = _modified_ns(self._path), time.monotonic() + self._gone_after
        while not _is_gone_from_here(holder):
            now = _modified_ns(self._path)
            if now is None:
                return
            if now != changed:
                holder = read_optional_object(self._path)  # the first read may have seen an incomplete file
                raise RefusedError(
                    f"{self._path.parent}: another run uses this directory: process {holder.get('process')} on "
                    f"{holder.get('host')}, started {holder.get('started')}; stop it (touch "
                    f"{self._path.parent / 'STOP'}) or use another --run_dir"
                )
            if time.monotonic() > until:
                break
            time.sleep(min(0.2, self._renewed_each / 5))
        if read_optional_object(self._path).get("token") != holder.get("token"):  # another start has taken it over
            return
        aside = self._path.with_name(f".{LEASE}.{self._token}.old")
        with contextlib.suppress(FileNotFoundError):  # another start was faster
            self._path.rename(aside)
            # Another start may have replaced the lease before the rename: put its lease back.
            if read_optional_object(aside).get("token") != holder.get("token"):
                with contextlib.suppress(FileExistsError):
                    write_exclusively(self._path, aside.read_text(encoding="utf-8"))
            aside.unlink(missing_ok=True)

    def _renew(self) -> None:
        while not self._done.wait(self._renewed_each):
            with contextlib.suppress(OSError):  # the storage may recover
                if not self._path.parent.is_dir():
                    self._lost(f"{self._path.parent}: the run directory was removed during the run")
                    return
                holder = read_optional_object(self._path)
                if holder and holder.get("token") != self._token:
                    self._lost(
                        f"{self._path.parent}: process {holder.get('process')} on {holder.get('host')} has taken over "
                        "this directory"
                    )
                    return
                os.utime(self._path)


def write_exclusively(path: Path, text: str) -> None:
    """Create a file in one write. A hard link would be atomic, but some shared file systems have none (gcsfuse, CIFS,
    exFAT).

    Raises:
        FileExistsError: the file exists; it stays unchanged.
    """
    with path.open("x", encoding="utf-8") as file:
        try:
            file.write(text)
            file.flush()
        except OSError:
            path.unlink(missing_ok=True)
            raise


def lease_holder(run_dir: Path) -> dict[str, Any]:
    """Return the holder of the lease; `gone` tells if it is an ended process of this host. Empty without a holder."""
    holder = read_optional_object(run_dir / LEASE)
    return {**holder, "gone": _is_gone_from_here(holder)} if holder else {}


def _end_process(message: str) -> None:
    print(f"error: {message}; this process exits without a checkpoint", file=sys.stderr, flush=True)
    os._exit(1)


def _this_process() -> dict[str, Any]:
    return {
        "host": socket.gethostname(),
        "boot": boot_id(),
        "pid_namespace": _pid_namespace(),
        "process": os.getpid(),
        "began": _began(os.getpid()),
        "started": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
    }


def _is_gone_from_here(holder: dict[str, Any]) -> bool:
    """Whether the holder was a process of this host that has ended."""
    if holder.get("host") != socket.gethostname():
        return False
    if holder.get("boot") != boot_id():
        return True
    namespace = _pid_namespace()
    if holder.get("pid_namespace", namespace) != namespace:  # another container: its processes are not visible here
        return False
    number = holder.get("process")
    return not isinstance(number, int) or _began(number) != holder.get("began")


def boot_id() -> str:
    """Return the id of this boot of the host; empty if it cannot be read."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


def _pid_namespace() -> str:
    """Return the pid namespace, which tells containers of a host apart."""
    with contextlib.suppress(OSError):
        return str(Path("/proc/self/ns/pid").readlink())
    return ""


def _began(process: int) -> str:
    """Return the start time of a process in ticks since boot, which tells processes with the same id apart; "" if the
    process has ended or is a zombie."""
    status = process_status(process)
    return "" if not status or status[0] in ("Z", "X") else status[19]


def _modified_ns(path: Path) -> int | None:
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return None


HANGS = "hangs"
TIMES_THE_MEDIAN = 20.0
"""Limit of a step, in medians of the last steps."""

SLOW_START = 3.0
"""Factor of the limit for the first steps, which compile and allocate, and for work between steps."""

AFTER_A_REQUEST = 60.0
"""Seconds after a stop request within which a step must end; or three times the median step if that is longer."""

REPORTS_TIMEOUT_S = 15.0
"""Seconds to wait for the reports of the other ranks."""

_STEPS = 64
_FIRST_STEPS = 5


class _Beat(NamedTuple):
    """Last sign of life of the main thread. `patience`: factor of the limit."""

    at: float
    step: int
    what: str
    patience: float


class Watchdog:
    """Context that ends a hung run. `step` and `beat` record signs of life; a thread checks them about once a second.

    Args:
        directory: directory of the reports, the same on all ranks, new at each start; created at the first report.
        limit: seconds without a sign of life after which the run counts as hung, or 20 times the median step if that is
            longer; 0 = never.
        stop_request_time: returns the time of a stop request, by time.monotonic(), or None. The limit is then a minute.
        end: called with the exit status if the run hangs; ends the process.
        on_hang: called with step and summary by the rank that writes the summary, before it ends.
    """

    def __init__(
        self,
        directory: Path,
        *,
        rank: int = 0,
        world: int = 1,
        limit: float,
        stop_request_time: Callable[[], float | None] = lambda: None,
        end: Callable[[int], object] = os._exit,
        on_hang: Callable[[int, str], object] = lambda step, why: None,
    ) -> None:
        self._directory, self._rank, self._world = directory, rank, world
        self._limit, self._stop_request_time, self._end, self._on_hang = limit, stop_request_time, end, on_hang
        self._seconds: deque[float] = deque(maxlen=_STEPS)
        self._beat = _Beat(time.monotonic(), 0, "the start", SLOW_START)
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="trp_scale watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        self._beat = self._beat._replace(at=time.monotonic())
        if self._limit:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        if self._limit:
            self._thread.join()
            faulthandler.cancel_dump_traceback_later()

    def step(self, step: int) -> None:
        """Record that step `step` (from 1) starts on this rank."""
        now, before = time.monotonic(), self._beat
        if before.what == "a step":
            self._seconds.append(now - before.at)
        known = len(self._seconds) >= _FIRST_STEPS
        self._beat = _Beat(now, step, "a step", 1.0 if known else SLOW_START)

    def beat(self, what: str) -> None:
        """Record that `what` starts or makes progress between steps."""
        self._beat = _Beat(time.monotonic(), self._beat.step, what, SLOW_START)

    @property
    def steps_done(self) -> int | None:
        """Steps that this rank has finished; `None` before the first one starts."""
        beat = self._beat
        return None if not beat.step else beat.step - (beat.what == "a step")

    def limit(self) -> float:
        """Return the present limit in seconds without a sign of life."""
        usual = statistics.median(self._seconds) if self._seconds else 0.0
        return max(self._limit, TIMES_THE_MEDIAN * usual) * self._beat.patience

    def _watch(self) -> None:
        pause = min(1.0, self._limit / 10)
        # If a library holds the GIL, this thread stops too; the timer of faulthandler does not.
        while not self._done.wait(pause):
            if why := self._hangs():
                self._report(why)
                return
            with contextlib.suppress(Exception):  # standard error has no file descriptor
                faulthandler.dump_traceback_later(self.limit() + REPORTS_TIMEOUT_S + pause, exit=True)

    def _hangs(self) -> str:
        """Return why this rank considers the run hung, or ""."""
        beat, now, limit = self._beat, time.monotonic(), self.limit()
        if now - beat.at > limit:
            return f"{beat.what} has made no progress for {now - beat.at:.0f} s (limit {limit:.0f} s)"
        asked = self._stop_request_time()
        if asked is not None and beat.what == "a step":
            usual = statistics.median(self._seconds) if self._seconds else 0.0
            allowed = max(AFTER_A_REQUEST, 3 * usual)
            if now - max(asked, beat.at) > allowed:
                return f"no step has ended within {allowed:.0f} s after the stop request"
        return ""

    def _report(self, why: str) -> None:
        try:
            beat, directory = self._beat, self._directory
            directory.mkdir(parents=True, exist_ok=True)
            write_rank_report(
                directory, self._rank, step=beat.step, what=beat.what, why=why, since=time.monotonic() - beat.at
            )
            until = time.monotonic() + REPORTS_TIMEOUT_S
            while len(written := _read_reports(directory)) < self._world and time.monotonic() < until:
                time.sleep(0.2)
            text = summary(written, self._world)
            if self._rank == min(written, default=self._rank):
                (directory / "summary.txt").write_text(text + "\n", encoding="utf-8")
                print(f"error: {text}\nstacks and collectives of each rank: {directory}", file=sys.stderr, flush=True)
                self._on_hang(beat.step, text)
        finally:
            self._end(ExitStatus.HUNG)


def write_rank_report(directory: Path, rank: int, *, step: int, what: str, why: str, since: float) -> None:
    """Write this process's stacks, activity and collectives."""
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
    """Return the collectives of torch's flight recorder; empty if it is off or absent."""
    try:
        from torch._C import _distributed_c10d as c10d

        dumps = (getattr(c10d, name, None) for name in ("_dump_nccl_trace_json", "_dump_fr_trace_json"))
        traces: list[dict[str, Any]] = [json.loads(dump(True, False)) for dump in dumps if dump is not None]
        return max(traces, key=lambda trace: len(trace.get("entries", ())))
    except Exception:  # name and arguments differ between versions of torch; the report is written without it
        return {}


def _last(trace: Mapping[str, Any]) -> str:
    entries = trace.get("entries") or []
    if not entries:
        return ""
    last = max(entries, key=lambda entry: entry.get("record_id", 0))
    group = "/".join(part for part in last.get("process_group", []) if part != "undefined")
    return f"{last.get('profiling_name')} number {last.get('collective_seq_id')} of group {group}"


def _read_reports(directory: Path) -> dict[int, dict[str, Any]]:
    reports = {}
    for path in sorted(directory.glob("rank-*.json")):
        if path.name.endswith(".trace.json"):
            continue
        if report := read_optional_object(path):
            reports[int(path.stem.removeprefix("rank-"))] = report
    return reports


def summary(written: Mapping[int, Mapping[str, Any]], world: int) -> str:
    """Return a line that names the late rank, and a line for each rank with a report."""
    silent = [rank for rank in range(world) if rank not in written]
    lines = [
        f"  rank {rank} on {report['host']}: step {report['step']}, {report['at']}; {report['why']}"
        + (f"; last collective {report['last']}" if report["last"] else "")
        for rank, report in sorted(written.items())
    ]
    gone = f"{list_ranks(silent)} did not report: stopped, ended, or on a failed host"
    late = gone if silent else _fewest(written)
    return "\n".join([f"the run hangs: {late}", *lines[:64]])


def _fewest(written: Mapping[int, Mapping[str, Any]]) -> str:
    """Describe the ranks that are behind, by steps, then by collectives started."""
    steps = {rank: int(report["step"]) for rank, report in written.items()}
    behind = [rank for rank, step in steps.items() if step < max(steps.values())]
    if behind:
        return f"{list_ranks(behind)} is at step {min(steps.values())}, others at {max(steps.values())}"
    begun = {rank: dict(report["begun"]) for rank, report in written.items()}
    for group in dict.fromkeys(name for counters in begun.values() for name in counters):
        counts = {rank: counters.get(group, 0) for rank, counters in begun.items() if group in counters}
        behind = [rank for rank, count in counts.items() if count < max(counts.values())]
        if behind:
            most, least = max(counts.values()), min(counts.values())
            return f"{list_ranks(behind)} has started {least} collectives of group {group}, others {most}"
    return "no rank is behind: all wait, for example for network or storage"
