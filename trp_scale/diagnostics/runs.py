"""`trp-scale runs`: a table of the runs below a directory. Only small files and the end of metrics.jsonl are read."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

from trp_scale.checkpoint.run_directory import METRICS_FILE, SUMMARY_FILE, find_recipe, read_start
from trp_scale.config.files import read_yaml
from trp_scale.config.schema import Fields
from trp_scale.console import Cell, Table, number_cell
from trp_scale.diagnostics.run_directory import read_last_line
from trp_scale.errors import RefusedError
from trp_scale.reporting.record import read_state
from trp_scale.training.metrics import worst_task
from trp_scale.training.report import read_summary
from trp_scale.training.rundir import CONFIG_FILE, STOP_RECORD

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
