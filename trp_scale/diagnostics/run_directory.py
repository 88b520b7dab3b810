"""Run directories: checks of one (`trp-scale doctor RUN_DIR`), and a table of several (`trp-scale runs`).

The checks change nothing and take no lease, so the run may continue meanwhile. States of findings (machine.py): ok;
warning (the run continues, but something was lost or needs attention); wrong (a person must act, or the last start
ended by a fault). The table reads only small files and the end of metrics.jsonl.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from trp_scale.checkpoint.document import check_sound, read_document
from trp_scale.checkpoint.run_directory import (
    CHECKPOINTS,
    ENVIRONMENT_FILE,
    METRICS_FILE,
    SUMMARY_FILE,
    checkpoints,
    find_recipe,
    incompleteness,
    read_start,
)
from trp_scale.config.files import parse_json, read_content, read_optional_object, read_yaml
from trp_scale.config.schema import Fields
from trp_scale.console import Cell, Table, number_cell
from trp_scale.diagnostics.machine import Finding, judge
from trp_scale.distributed.liveness import (
    GONE_AFTER,
    HANGS,
    LEASE,
    RENEWAL_INTERVAL_S,
    TIMES_THE_MEDIAN,
    boot_id,
    lease_holder,
)
from trp_scale.errors import CheckpointError, RefusedError
from trp_scale.reporting.record import read_state
from trp_scale.training.metrics import worst_task
from trp_scale.training.report import read_summary
from trp_scale.training.rundir import CONFIG_FILE, INCIDENTS_FILE, STOP_RECORD, read_incidents

RUN_FILES = (CONFIG_FILE, ENVIRONMENT_FILE, METRICS_FILE, STOP_RECORD, LEASE, CHECKPOINTS, HANGS)
"""A directory with one of these belongs to a run."""

MAX_SHOWN = 5
"""Maximum number of incidents and of hangs to show: the last ones."""

MAX_SUMMARY_BYTES, MAX_METRICS_BYTES = 1 << 20, 1 << 20
"""Of a hang's summary, and of the end of metrics.jsonl."""

STALLED_AFTER_S = 600.0
"""Time without a line of metrics after which a live run counts as stalled; at least 20 times its last step."""

_REPLACED = re.compile(r"\.step_(\d{8,})\.replaced")


def examine_run(run_dir: Path, *, quick: bool = False) -> list[Finding]:
    """Return all findings, the most important first. `quick`: verify files of checkpoints by their sizes only, not by
    checksums. Raises RefusedError: the directory belongs to no run."""
    _require_run(run_dir)
    holder = lease_holder(run_dir)
    lease, is_alive = _check_lease(run_dir, holder)
    step, metrics = _check_metrics(run_dir, is_alive=is_alive)
    record = read_optional_object(run_dir / STOP_RECORD)
    examined = [_examine_checkpoint(number, path, quick=quick) for number, path in _list_candidates(run_dir)]
    stored = [checkpoint for checkpoint in examined if checkpoint.path.exists()]  # a live run removes older ones
    sizes = [checkpoint.size for checkpoint in stored if checkpoint.problem is None]
    recorded = record["step"] if isinstance(record.get("step"), int) else 0
    reached = max([step, recorded, *(checkpoint.step for checkpoint in stored)])
    return [
        _describe_run(run_dir),
        _check_end(run_dir, record, is_alive=is_alive, was_killed=bool(holder), has_begun=bool(stored or step)),
        lease,
        metrics,
        *(checkpoint.finding for checkpoint in stored),
        _check_resume(stored, reached),
        *_check_hangs(run_dir),
        _check_incidents(run_dir),
        _check_room(run_dir, sizes[-1] if sizes else 0),
    ]


def _require_run(run_dir: Path) -> None:
    if not run_dir.is_dir():
        raise RefusedError(
            f"{run_dir}: no such directory; give the --run_dir of a run, or none to examine the machines"
        )
    if not _is_run(run_dir):
        within = [str(path) for path in sorted(run_dir.iterdir()) if path.is_dir() and _is_run(path)]
        other = f"one of: {', '.join(within[:8])}" if within else "the --run_dir of a run"
        raise RefusedError(f"{run_dir} holds none of {', '.join(RUN_FILES)}: it is no run; give {other}")


def _is_run(directory: Path) -> bool:
    return any((directory / name).exists() for name in RUN_FILES)


def _describe_run(run_dir: Path) -> Finding:
    path = run_dir / ENVIRONMENT_FILE
    document = read_optional_object(path)
    if not document:
        problem = "cannot be read" if path.exists() else "does not exist: no start has written it"
        return judge("run", True, f"{run_dir}; {ENVIRONMENT_FILE} {problem}", "")
    stage = f" ZeRO {document['zero_stage']}" if document.get("zero_stage") is not None else ""
    hosts = ", ".join(map(str, _to_list(document.get("hosts"))[:8]))
    start = f"{document.get('world_size')} rank(s) of {hosts}, started {document.get('started')}"
    starts = len(_to_list(document.get("earlier"))) + 1
    return judge("run", True, f"{run_dir}: {document.get('engine')}{stage} on {start}; starts so far: {starts}", "")


def _check_end(
    run_dir: Path, record: Mapping[str, Any], *, is_alive: bool, was_killed: bool, has_begun: bool
) -> Finding:
    """Return why the last start ended: the recorded reason, or a conclusion from missing files."""
    if record:
        again = "" if record.get("why") == "finished" else f", again: {'yes' if record.get('again') else 'no'}"
        step = "before a step" if record.get("step") is None else f"step {record['step']}"
        result = (
            f"{record.get('why')}; {step}, status {record.get('status')}{again} (rank {record.get('rank')} on "
            f"{record.get('host')}, {record.get('at')})"
        )
        advice = str(record.get("advice", ""))
        if record.get("status") == 0:
            return judge("stop", True, f"{result}; {advice}", "")
        return judge("stop", False, result, advice or "read the run's log", "wrong")
    if (run_dir / STOP_RECORD).exists():
        change = "read the run's log; the same command replaces the file"
        return judge("stop", False, f"{STOP_RECORD} cannot be read", change, "wrong")
    if is_alive or not (was_killed or has_begun):
        return judge("stop", True, "still running" if is_alive else "nothing was trained yet", "")
    if was_killed:
        result = f"no {STOP_RECORD}: the last start was killed, by kill -9, out of memory, or with its host"
        change = "check dmesg and the scheduler's log; the same command resumes from the newest checkpoint"
        return judge("stop", False, result, change, "wrong")
    result = f"no {STOP_RECORD} and no running process: unknown why the last start ended"
    return judge("stop", False, result, "read the run's log; the same command resumes from the newest checkpoint")


def _check_lease(run_dir: Path, holder: Mapping[str, Any]) -> tuple[Finding, bool]:
    """Return the process that trains into the directory, and whether it is alive. For another host only renewals show
    it: wait for one if the file looks old."""
    path = run_dir / LEASE
    changed = _mtime(path)
    age = 0.0 if changed is None else time.time() - changed
    takeover = "nothing: the next start takes over the directory"
    if not holder:
        result = "no process trains into the directory" if changed is None else f"{LEASE} cannot be read"
        return judge("lease", changed is None, result, takeover), False
    name = f"process {holder.get('process')} on {holder.get('host')}, started {holder.get('started')}"
    is_here = bool(holder.get("boot")) and holder["boot"] == boot_id()  # lease_holder has checked that it is alive
    end = time.monotonic() + 2.5 * RENEWAL_INTERVAL_S
    while not holder.get("gone") and not is_here and abs(age) > GONE_AFTER and time.monotonic() < end:
        time.sleep(0.2)
        age = 0.0 if _mtime(path) != changed else age
    if holder.get("gone") or not (is_here or abs(age) <= GONE_AFTER):
        return judge("lease", False, f"{name}, is gone", takeover), False
    if age > GONE_AFTER:
        change = "check whether it is stopped (kill -CONT), and whether the storage responds"
        result = f"{name}, is alive but has not renewed the lease for {_format_time(age)}"
        return judge("lease", False, result, change), True
    return judge("lease", True, f"{name}, trains into the directory", ""), True


def read_last_line(run_dir: Path, field: str = "step") -> dict[str, Any]:
    """Return the last complete line of metrics.jsonl with a step and a field; empty if none exists."""
    path = run_dir / METRICS_FILE
    if not path.exists():
        return {}
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - MAX_METRICS_BYTES))
        content = file.read()
    for line in reversed(content.split(b"\n")[:-1]):  # the last one may be torn
        with contextlib.suppress(RefusedError):
            document = parse_json(line, METRICS_FILE)
            if isinstance(document, dict) and isinstance(document.get("step"), int) and field in document:
                return document
    return {}


def _check_metrics(run_dir: Path, *, is_alive: bool) -> tuple[int, Finding]:
    """Return the step of the last complete line of metrics.jsonl, and whether a live run is stalled."""
    changed, last = _mtime(run_dir / METRICS_FILE), read_last_line(run_dir)
    if changed is None or not last:
        return 0, judge("metrics", True, f"{METRICS_FILE} has no step yet", "")
    loss, seconds, age = last.get("loss"), last.get("step_seconds"), time.time() - changed
    loss_text = f"{loss:.6g}" if isinstance(loss, float | int) else "not finite"
    result = f"the last line is of step {last['step']}, loss {loss_text}, {_format_time(age)} ago"
    step_seconds = seconds if isinstance(seconds, float | int) else 0.0
    is_stalled = is_alive and age > max(STALLED_AFTER_S, TIMES_THE_MEDIAN * step_seconds)
    result += ", and the run is alive" if is_stalled else ""
    change = "check its log, hangs/, and whether --logging.every is large"
    return last["step"], judge("metrics", not is_stalled, result, change)


@dataclass(frozen=True, kw_only=True)
class _Checkpoint:
    """One checkpoint. `problem` is `None` if it is intact; `size` is the bytes of its files."""

    step: int
    path: Path
    problem: str | None
    size: int
    finding: Finding


def _list_candidates(run_dir: Path) -> list[tuple[int, Path]]:
    """Return the checkpoints that the next start sees, oldest first, including one that was being replaced."""
    named = checkpoints(run_dir)
    hidden = [
        (match, path) for path in (run_dir / CHECKPOINTS).glob(".step_*") if (match := _REPLACED.fullmatch(path.name))
    ]
    steps = {step for step, _ in named}
    return sorted([*named, *((int(match[1]), path) for match, path in hidden if int(match[1]) not in steps)])


def _examine_checkpoint(step: int, path: Path, *, quick: bool) -> _Checkpoint:
    problem = None
    try:
        if quick:
            problem = incompleteness(path)
        else:
            check_sound(path, read_document(path).files)
    except CheckpointError as error:
        problem = str(error)
    except OSError as error:
        problem = f"{error.filename or path}: {error.strerror or error}"
    size = _count_bytes(path)
    how = "all files have their sizes" if quick else "all checksums match"
    result = problem or f"{CHECKPOINTS}/{path.name}: {how}, {_format_bytes(size)}"
    change = "restore it from a copy, or remove the directory: --resume auto skips it"
    finding = judge(f"step {step}", problem is None, result, change, "wrong")
    return _Checkpoint(step=step, path=path, problem=problem, size=size, finding=finding)


def _check_resume(stored: list[_Checkpoint], reached: int) -> Finding:
    """Name the checkpoint that `--resume auto` selects, and count the steps to repeat."""
    newest = next((checkpoint for checkpoint in reversed(stored) if checkpoint.problem is None), None)
    if newest is None and stored:
        result = f"--resume auto is refused: none of {len(stored)} checkpoint(s) is intact"
        return judge("resume", False, result, "restore an intact one, or start in another --run_dir", "wrong")
    lost = reached - (newest.step if newest else 0)
    again = f"{lost} step(s) are repeated" if lost else "no step is lost"
    if newest is not None:
        return judge("resume", True, f"--resume auto takes {CHECKPOINTS}/{newest.path.name}; {again}", "")
    change = "set --checkpoint.every, which may change: a killed run loses the steps since its last checkpoint"
    return judge("resume", not lost, f"there is no checkpoint: --resume auto starts from step 0; {again}", change)


def _check_hangs(run_dir: Path) -> Iterator[Finding]:
    """Show what the watchdog recorded in the last hangs."""
    starts = [path for path in sorted((run_dir / HANGS).glob("*")) if path.is_dir()]
    if len(starts) > MAX_SHOWN or not starts:
        result = f"{len(starts)} starts have hung; the last {MAX_SHOWN} are shown" if starts else "none"
        yield judge("hangs", not starts, result, f"read {run_dir / HANGS}")
    for path in starts[-MAX_SHOWN:]:
        try:
            summary = read_content(path / "summary.txt", RefusedError, largest=MAX_SUMMARY_BYTES)
            result = "; ".join(summary.decode("utf-8", "replace").splitlines()[:3])
        except RefusedError:
            ranks = sorted(int(file.stem[5:]) for file in path.glob("rank-*.txt") if file.stem[5:].isdecimal())
            result = f"no summary; ranks with stacks: {', '.join(map(str, ranks)) or 'none'}"
        change = f"check the late rank and its host; each rank's stacks are in {path}"
        yield judge(f"hang {path.name}", False, result, change)


def _check_incidents(run_dir: Path) -> Finding:
    incidents = read_incidents(run_dir)
    counts = Counter(str(incident.get("kind")) for incident in incidents)
    kinds = ", ".join(f"{count} {kind}" for kind, count in counts.most_common())
    last = "; ".join(map(_describe_incident, incidents[-MAX_SHOWN:]))
    verify = "; trp-scale verify names what is damaged in the data" if counts["unreadable"] else ""
    result = f"{kinds}; the last: {last}" if incidents else "none"
    return judge("incidents", not incidents, result, f"read {run_dir / INCIDENTS_FILE}{verify}")


def _describe_incident(incident: Mapping[str, Any]) -> str:
    rest = ", ".join(str(value) for name, value in incident.items() if name not in ("at", "step", "kind"))
    return f"step {incident.get('step')} {incident.get('kind')} {rest}"[:200].rstrip()


def _check_room(run_dir: Path, size: int) -> Finding:
    """Compare the free space with the size of a checkpoint, which is written before an older one is removed."""
    free = shutil.disk_usage(run_dir).free
    if not size:
        return judge("room", True, f"{_format_bytes(free)} free; no intact checkpoint to estimate the size from", "")
    result = f"{_format_bytes(free)} free, a checkpoint takes {_format_bytes(size)}"
    result += ": the next does not fit" if free < size else ""
    change = f"free space on the disk of {run_dir}: a checkpoint is written before an older one is removed"
    return judge("room", free >= 3 * size, result, change, "wrong" if free < size else "warning")


def _to_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _count_bytes(path: Path) -> int:
    """Return the bytes of all files below a directory; a live run may remove some meanwhile."""
    total = 0
    for entry in path.rglob("*"):
        with contextlib.suppress(OSError):
            total += entry.stat().st_size if entry.is_file() else 0
    return total


def _mtime(path: Path) -> float | None:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return None


def _format_bytes(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"


def _format_time(seconds: float) -> str:
    return str(timedelta(seconds=round(max(0.0, seconds))))


HEAD = ("run", "recipe", "state", "step", "worst task", "loss", "age")
SECONDS_OF_UNITS = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))


def find_runs(directory: Path) -> Iterator[Path]:
    """Yield the directories with a config.yaml; those inside a run are not searched."""
    for folder, folders, files in os.walk(directory):
        if CONFIG_FILE in files:
            folders.clear()
            yield Path(folder)


def read_row(run_dir: Path, name: str) -> list[str | Cell]:
    """Return the row of a run. Its worst task is that of its report, or of the last logged step before it has ended.
    Raises RefusedError, OSError, LookupError, TypeError or AttributeError for a damaged or foreign directory."""
    config, summary = run_dir / CONFIG_FILE, read_summary(run_dir)
    steps = Fields(read_yaml(config) or {}, str(config)).section("training").whole("steps", least=1)
    state = read_state(run_dir, summary).word
    if summary and state != "running":
        step, worst = summary["steps"], summary["worst_task"]
        loss = summary["tasks"][worst]["end"] if worst else None
    else:
        line = read_last_line(run_dir, "tasks")
        tasks, step = line.get("tasks", {}), line.get("step", 0)
        losses, counts = ({name: task[field] for name, task in tasks.items()} for field in ("loss", "count"))
        worst = worst_task(losses, counts, line.get("outside_tasks", ()))
        loss = losses.get(worst)
    files = [run_dir / file for file in (CONFIG_FILE, METRICS_FILE, SUMMARY_FILE, STOP_RECORD)]
    age = max(0.0, time.time() - max(path.stat().st_mtime for path in files if path.is_file()))
    size, unit = next((size, unit) for size, unit in SECONDS_OF_UNITS if age >= size or size == 1)
    recipe = Path(find_recipe(read_start(run_dir))).stem or "-"
    words = [name, recipe, state, f"{step}/{steps}", worst or "-"]
    return [*words, number_cell(loss), Cell(text=f"{age / size:.0f} {unit}", order=age)]


def list_runs(directory: Path) -> Table:
    """Return the table of the runs below a directory, newest first; damaged and foreign directories are counted. Raises
    RefusedError: no such directory."""
    if not directory.is_dir():
        raise RefusedError(f"{directory}: no such directory; give one that contains runs, such as runs")
    rows, damaged, runs = [], 0, list(find_runs(directory))
    for run in runs:
        try:
            rows.append(read_row(run, str(run.relative_to(directory))))
        except (RefusedError, OSError, LookupError, TypeError, AttributeError):
            damaged += 1
    rows.sort(key=lambda row: getattr(row[-1], "order", 0.0))
    within = {path for run in runs for path in (run, *run.parents)}
    foreign = sum(path.is_dir() and path not in within for path in directory.iterdir()) * (directory not in runs)
    counts = ((damaged, "damaged"), (foreign, "without a run"))
    skipped = ", ".join(f"{count} {what}" for count, what in counts if count)
    return Table(head=HEAD, rows=rows, words=5, notes=[f"directories skipped: {skipped}"] if skipped else ())
