"""What of a run directory is there, whole, and in the way of going on: `trp-scale doctor RUN_DIR`.

Nothing is changed, and no lease is taken: a run may go on while it is looked at. Findings are those of the machines'
doctor: ok; warning, the run goes on and something was lost or needs a look; wrong, a person has to act, or the last
start ended by a fault.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

from trp_scale.checkpoint.document import read_document
from trp_scale.checkpoint.run_directory import CHECKPOINTS, METRICS_FILE, SET_ASIDE, checkpoints, incompleteness
from trp_scale.checkpoint.tensor_file import damage
from trp_scale.config.json_files import parse_json, read_content, read_object
from trp_scale.diagnostics.machine import Finding
from trp_scale.distributed.lease import GONE_AFTER, LEASE, RENEWED_EACH, holder_of
from trp_scale.distributed.watchdog import HANGS, TIMES_THE_MEDIAN
from trp_scale.errors import CheckpointError, RefusedError
from trp_scale.training.ending import STOP_RECORD
from trp_scale.training.incidents import INCIDENTS_FILE, read_incidents
from trp_scale.training.rundir import CONFIG_FILE, ENVIRONMENT_FILE

OF_A_RUN = (CONFIG_FILE, ENVIRONMENT_FILE, METRICS_FILE, STOP_RECORD, LEASE, CHECKPOINTS, HANGS)
"""A directory that has one of these is a run's."""

READERS = 4
"""Files of a checkpoint that are read at once."""

SHOWN = 5
"""Of incidents and of hangs so many are shown, the last ones."""

LONGEST_SUMMARY = 1 << 20
"""Bytes of what a hang says of itself."""

STANDS_AFTER = 600.0
"""Seconds without a line of metrics after which a run that is alive is said to stand still, or 20 times its last step
if that is longer."""

_LEFT_BEHIND = re.compile(r"\.(.+\.(tmp|old|replaced)|(lease|stop)\.json\..+)")
_REPLACED = re.compile(r"\.step_(\d{8,})\.replaced")


def examine_run(run_dir: Path, *, quick: bool = False) -> list[Finding]:
    """All findings, in the order in which a person asks.

    Args:
        quick: compare files of checkpoints by their sizes, not by the checksums of every byte.

    Raises:
        RefusedError: the directory is no run's.
    """
    _require_run(run_dir)
    holder = _Holder.of(run_dir)
    metrics = _Metrics.of(run_dir)
    stop = _document(run_dir / STOP_RECORD)
    examined = [_examined(step, path, quick=quick) for step, path in _candidates(run_dir)]
    stored = [each for each in examined if each.path.exists()]  # a run that is alive removes older ones meanwhile
    whole = [each for each in stored if each.problem is None]
    reached = max([metrics.step, _number(stop.get("step")), *(each.step for each in stored)])
    return [
        _described(run_dir),
        _why_it_ended(run_dir, stop, holder, began=bool(stored or metrics.step)),
        holder.finding(),
        metrics.finding(alive=holder.alive),
        *(each.finding(quick=quick) for each in stored),
        _resumed(stored, reached),
        *_set_aside(run_dir),
        *_hangs(run_dir),
        _incidents(run_dir),
        _leftovers(run_dir, alive=holder.alive),
        _room(run_dir, whole[-1].size if whole else 0),
    ]


def _require_run(run_dir: Path) -> None:
    if not run_dir.is_dir():
        raise RefusedError(
            f"{run_dir}: no such directory; give the --run_dir of a run, or none to examine the machines"
        )
    if _is_run(run_dir):
        return
    within = [str(path) for path in sorted(run_dir.iterdir()) if path.is_dir() and _is_run(path)]
    other = f"one of: {', '.join(within[:8])}" if within else "the --run_dir of a run"
    raise RefusedError(f"{run_dir} holds none of {', '.join(OF_A_RUN)}: it is no run; give {other}")


def _is_run(directory: Path) -> bool:
    return any((directory / name).exists() for name in OF_A_RUN)


def _described(run_dir: Path) -> Finding:
    """How the last start was made."""
    path = run_dir / ENVIRONMENT_FILE
    found = _document(path)
    if not found:
        said = "cannot be read" if path.exists() else "is not there: no start came so far as to write it"
        return Finding(check="run", state="ok", found=f"{run_dir}; {ENVIRONMENT_FILE} {said}")
    stage = f" ZeRO {found['zero_stage']}" if found.get("zero_stage") is not None else ""
    hosts = ", ".join(map(str, _list(found.get("hosts"))[:8]))
    starts = len(_list(found.get("earlier"))) + 1
    said = (
        f"{found.get('engine')}{stage} on {found.get('world_size')} rank(s) of {hosts}, started {found.get('started')}"
    )
    return Finding(check="run", state="ok", found=f"{run_dir}: {said}; starts so far: {starts}")


def _why_it_ended(run_dir: Path, stop: Mapping[str, Any], holder: _Holder, *, began: bool) -> Finding:
    """The record of the last start, or what its absence means."""
    if not stop:
        if (run_dir / STOP_RECORD).exists():
            change = "look at the run's log; the same command replaces the file"
            return Finding(check="stop", state="wrong", found=f"{STOP_RECORD} cannot be read", change=change)
        if holder.alive:
            return Finding(check="stop", state="ok", found="it goes on")
        if holder.found:
            found = (
                f"no {STOP_RECORD}: the last start was killed, as by kill -9, for a lack of memory, or with its host"
            )
            change = "look into dmesg and the scheduler's record; the same command goes on from the newest checkpoint"
            return Finding(check="stop", state="wrong", found=found, change=change)
        if not began:
            return Finding(check="stop", state="ok", found="nothing was trained yet")
        return Finding(
            check="stop",
            state="warning",
            found=f"no {STOP_RECORD}, and nobody trains: why the last start ended is not known",
            change="look at the run's log; the same command goes on from the newest checkpoint",
        )
    status, advice = stop.get("status"), str(stop.get("advice", ""))
    again = "" if stop.get("why") == "finished" else f", again: {'yes' if stop.get('again') else 'no'}"
    place = f"rank {stop.get('rank')} on {stop.get('host')}, {stop.get('at')}"
    step = "before a step" if stop.get("step") is None else f"step {stop['step']}"
    found = f"{stop.get('why')}; {step}, status {status}{again} ({place})"
    if status == 0:
        return Finding(check="stop", state="ok", found=f"{found}; {advice}")
    return Finding(check="stop", state="wrong", found=found, change=advice or "look at the run's log")


@dataclass(frozen=True, kw_only=True)
class _Holder:
    """Who holds the lease.

    Attributes:
        found: what lease.json says; empty: nobody holds it.
        alive: it is renewed, or its process lives on this host.
        silent: seconds since it was renewed last, by this host's clock.
        unreadable: the file is there and says nothing.
    """

    found: Mapping[str, Any]
    alive: bool
    silent: float
    unreadable: bool = False

    @classmethod
    def of(cls, run_dir: Path) -> _Holder:
        """Of another host's process only renewals tell: one is awaited, where the file looks old."""
        found, path = holder_of(run_dir), run_dir / LEASE
        silent = time.time() - changed if (changed := _changed(path)) is not None else 0.0
        if not found or found.get("gone"):
            return cls(found=found, alive=False, silent=silent, unreadable=changed is not None and not found)
        if _boot_is_ours(found):
            return cls(found=found, alive=True, silent=silent)
        until = time.monotonic() + 2.5 * RENEWED_EACH
        while abs(silent) > GONE_AFTER and time.monotonic() < until:
            if _changed(path) != changed:
                return cls(found=found, alive=True, silent=0.0)
            time.sleep(0.2)
        return cls(found=found, alive=abs(silent) <= GONE_AFTER, silent=silent)

    def finding(self) -> Finding:
        if self.unreadable:
            change = f"nothing: where it is not renewed for {GONE_AFTER:.0f} s, the next start takes the directory over"
            return Finding(check="lease", state="warning", found=f"{LEASE} cannot be read", change=change)
        if not self.found:
            return Finding(check="lease", state="ok", found="nobody trains into the directory")
        who = f"process {self.found.get('process')} on {self.found.get('host')}, started {self.found.get('started')}"
        if not self.alive:
            change = "nothing: the next start takes the directory over"
            return Finding(check="lease", state="warning", found=f"{who}, is gone", change=change)
        if self.silent > GONE_AFTER:
            change = "see whether it is stopped (kill -CONT), and whether the storage answers"
            found = f"{who}, lives and has not renewed the lease for {_period(self.silent)}"
            return Finding(check="lease", state="warning", found=found, change=change)
        return Finding(check="lease", state="ok", found=f"{who}, trains into the directory")


def _boot_is_ours(holder: Mapping[str, Any]) -> bool:
    """Whether the holder is a process of this host: `holder_of` has found that it lives."""
    with contextlib.suppress(OSError):
        return (
            bool(holder.get("boot")) and Path("/proc/sys/kernel/random/boot_id").read_text().strip() == holder["boot"]
        )
    return False


@dataclass(frozen=True, kw_only=True)
class _Metrics:
    """The end of metrics.jsonl.

    Attributes:
        last: the last whole line; empty: there is none.
        age: seconds since the file was written, by this host's clock; None: there is no file.
        torn: the file ends within a line.
    """

    last: Mapping[str, Any]
    age: float | None
    torn: bool

    @classmethod
    def of(cls, run_dir: Path) -> _Metrics:
        path = run_dir / METRICS_FILE
        changed = _changed(path)
        if changed is None:
            return cls(last={}, age=None, torn=False)
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - (1 << 20)))
            ends = file.read().split(b"\n")
        whole = (
            found for line in reversed(ends[:-1]) if (found := _parsed(line)) and isinstance(found.get("step"), int)
        )
        return cls(last=next(whole, {}), age=time.time() - changed, torn=bool(ends[-1]))

    @property
    def step(self) -> int:
        return _number(self.last.get("step"))

    def finding(self, *, alive: bool) -> Finding:
        if self.age is None or not self.last:
            return Finding(check="metrics", state="ok", found=f"{METRICS_FILE} has no step yet")
        loss = self.last.get("loss")
        shown = f"{loss:.6g}" if isinstance(loss, float | int) else "not finite"
        found = f"the last line is of step {self.step}, loss {shown}, {_period(self.age)} ago"
        seconds = self.last.get("step_seconds")
        usual = seconds if isinstance(seconds, float | int) else 0.0
        if alive and self.age > max(STANDS_AFTER, TIMES_THE_MEDIAN * usual):
            change = "see what it is at: its log, hangs/, and whether --logging.every is large"
            return Finding(check="metrics", state="warning", found=f"{found}, and the run is alive", change=change)
        if self.torn and not alive:
            change = "nothing: the next start cuts it off"
            return Finding(check="metrics", state="warning", found=f"{found}; a line behind it is torn", change=change)
        return Finding(check="metrics", state="ok", found=found)


@dataclass(frozen=True, kw_only=True)
class _Stored:
    """One checkpoint. `problem`: what is wrong with it; None: it is whole. `size`: bytes of its files."""

    step: int
    path: Path
    problem: str | None
    size: int

    @property
    def name(self) -> str:
        return f"{CHECKPOINTS}/{self.path.name}"

    def finding(self, *, quick: bool) -> Finding:
        check = f"step {self.step}"
        if self.problem is None:
            how = "all its files have their sizes" if quick else "every byte is as it was written"
            return Finding(check=check, state="ok", found=f"{self.name}: {how}, {_size(self.size)}")
        change = "put it back from a copy, or remove the directory: --resume auto passes it over"
        return Finding(check=check, state="wrong", found=self.problem, change=change)


def _candidates(run_dir: Path) -> list[tuple[int, Path]]:
    """What the next start finds, oldest first: also one that was about to be replaced, which gets its name back."""
    found = checkpoints(run_dir)
    steps = {step for step, _ in found}
    directory = run_dir / CHECKPOINTS
    hidden = [(match, path) for path in _entries(directory) if (match := _REPLACED.fullmatch(path.name))]
    return sorted([*found, *((int(match[1]), path) for match, path in hidden if int(match[1]) not in steps)])


def _examined(step: int, path: Path, *, quick: bool) -> _Stored:
    try:
        problem = incompleteness(path) if quick else _damage(path)
    except OSError as error:
        problem = f"{error.filename or path}: {error.strerror or error}"
    return _Stored(step=step, path=path, problem=problem, size=_bytes_in(path))


def _damage(path: Path) -> str | None:
    """Every problem of a checkpoint's files, by their checksums; None: there is none."""
    try:
        document = read_document(path)
    except CheckpointError as error:
        return str(error)
    with ThreadPoolExecutor(READERS) as readers:
        problems = [each for each in readers.map(partial(damage, path), document.files) if each is not None]
    return "; ".join(problems) or None


def _resumed(stored: list[_Stored], reached: int) -> Finding:
    """What `--resume auto` would take now, and the steps that would be made again."""
    taken = next((each for each in reversed(stored) if each.problem is None), None)
    if taken is None and stored:
        found = f"--resume auto is refused: none of {len(stored)} checkpoint(s) is whole"
        change = "put back a whole one, or start again in another --run_dir"
        return Finding(check="resume", state="wrong", found=found, change=change)
    lost = reached - (taken.step if taken else 0)
    again = f"{lost} step(s) are made again" if lost else "no step is lost"
    if taken is None:
        found = f"there is no checkpoint: --resume auto starts from step 0; {again}"
        change = "set --checkpoint.every, which may change: a run that is killed loses what it did since the last one"
        return Finding(check="resume", state="warning" if lost else "ok", found=found, change=change if lost else "")
    return Finding(check="resume", state="ok", found=f"--resume auto takes {taken.name}; {again}")


def _set_aside(run_dir: Path) -> Iterator[Finding]:
    paths = [path for path in _entries(run_dir / CHECKPOINTS) if path.name.startswith(SET_ASIDE)]
    if paths:
        size = _size(sum(map(_bytes_in, paths)))
        found = f"{len(paths)} checkpoint(s) of later steps, {size}: no start takes them, and none removes them"
        yield Finding(check="set aside", state="ok", found=found)


def _hangs(run_dir: Path) -> Iterator[Finding]:
    """What the watchdog has written, of each start that hung; the last ones."""
    starts = [path for path in _entries(run_dir / HANGS) if path.is_dir()]
    if not starts:
        yield Finding(check="hangs", state="ok", found="none")
    elif len(starts) > SHOWN:
        found = f"{len(starts)} starts have hung; the last {SHOWN} are shown"
        yield Finding(check="hangs", state="warning", found=found, change=f"look into {run_dir / HANGS}")
    for path in starts[-SHOWN:]:
        try:
            summary = read_content(path / "summary.txt", RefusedError, largest=LONGEST_SUMMARY)
            said = "; ".join(summary.decode("utf-8", "replace").splitlines()[:3])
        except RefusedError:
            wrote = sorted(int(each.stem[5:]) for each in path.glob("rank-*.txt") if each.stem[5:].isdecimal())
            said = f"no summary; ranks that have written: {', '.join(map(str, wrote)) or 'none'}"
        change = f"look at the late rank and its host; each rank's stacks are in {path}"
        yield Finding(check=f"hang {path.name}", state="warning", found=said, change=change)


def _incidents(run_dir: Path) -> Finding:
    found = read_incidents(run_dir)
    if not found:
        return Finding(check="incidents", state="ok", found="none")
    kinds = ", ".join(
        f"{count} {kind}" for kind, count in Counter(str(each.get("kind")) for each in found).most_common()
    )
    last = "; ".join(map(_shown_incident, found[-SHOWN:]))
    unreadable = any(each.get("kind") == "unreadable" for each in found)
    change = f"read {run_dir / INCIDENTS_FILE}" + (
        "; trp-scale verify names what is damaged in the data" if unreadable else ""
    )
    return Finding(check="incidents", state="warning", found=f"{kinds}; the last: {last}", change=change)


def _shown_incident(incident: Mapping[str, Any]) -> str:
    rest = ", ".join(str(value) for name, value in incident.items() if name not in ("at", "step", "kind"))
    return f"step {incident.get('step')} {incident.get('kind')} {rest}"[:200].rstrip()


def _leftovers(run_dir: Path, *, alive: bool) -> Finding:
    """Hidden files and directories that a process which was killed has left half-written or half-removed."""
    places = (run_dir, run_dir / CHECKPOINTS)
    paths = [path for place in places for path in _entries(place) if _LEFT_BEHIND.fullmatch(path.name)]
    if not paths:
        return Finding(check="leftovers", state="ok", found="none")
    names = ", ".join(str(path.relative_to(run_dir)) for path in paths[:8])
    names += f" and {len(paths) - 8} more" if len(paths) > 8 else ""
    found = f"{names}: {_size(sum(map(_bytes_in, paths)))}"
    if alive:
        return Finding(check="leftovers", state="ok", found=f"{found}; the run that is alive may be writing them")
    change = f"nothing: the next start removes those in {CHECKPOINTS}/; the others may be removed by hand"
    return Finding(check="leftovers", state="warning", found=found, change=change)


def _room(run_dir: Path, size: int) -> Finding:
    """A checkpoint is written beside those that are kept."""
    free = shutil.disk_usage(run_dir).free
    if not size:
        return Finding(
            check="room", state="ok", found=f"{_size(free)} free; no whole checkpoint tells how much one takes"
        )
    found = f"{_size(free)} free, a checkpoint takes {_size(size)}"
    change = f"make room on the disk of {run_dir}: one is written before an older one is removed"
    if free < size:
        return Finding(check="room", state="wrong", found=f"{found}: the next does not fit", change=change)
    if free < 3 * size:
        return Finding(check="room", state="warning", found=found, change=change)
    return Finding(check="room", state="ok", found=found)


# ----------------------------------------------------------------------------------------------------- reading


def _document(path: Path) -> dict[str, Any]:
    """A JSON object; empty where there is none that can be read."""
    with contextlib.suppress(RefusedError):
        return read_object(path)
    return {}


def _parsed(content: bytes) -> dict[str, Any]:
    with contextlib.suppress(RefusedError):
        found = parse_json(content, METRICS_FILE)
        if isinstance(found, dict):
            return found
    return {}


def _number(value: Any) -> int:
    """A count that a file gives; 0 where it gives none."""
    return value if isinstance(value, int) else 0


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _entries(directory: Path) -> list[Path]:
    """What is in it, by name; nothing where it is not there, or goes meanwhile."""
    try:
        return sorted(directory.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []


def _bytes_in(path: Path) -> int:
    """Of a file, or of all files below a directory; a run that is alive may take some away meanwhile."""
    total = 0
    for each in [path, *path.rglob("*")] if path.is_dir() else [path]:
        with contextlib.suppress(OSError):
            total += each.stat().st_size if each.is_file() else 0
    return total


def _changed(path: Path) -> float | None:
    """When it was written, in seconds since 1970; None: it is not there."""
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return None


def _size(count: int) -> str:
    for limit, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB")):
        if count >= limit:
            return f"{count / limit:.1f} {unit}"
    return f"{count / 1e3:.1f} kB"


def _period(seconds: float) -> str:
    return str(timedelta(seconds=round(max(0.0, seconds))))
