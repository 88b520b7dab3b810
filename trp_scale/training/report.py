"""The table at the end of a run, made from its run directory alone."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from trp_scale.config.json_files import read_object
from trp_scale.config.schema import Fields, PartOf, Whole, record
from trp_scale.config.yaml_files import read_yaml
from trp_scale.errors import RefusedError
from trp_scale.training.metrics import FEWEST, LastLesson, RunHistory, TaskHistory, end_begins, read_history

SUMMARY_FILE = "summary.json"
REPORT_FILE = "report.txt"
REPORT_WIDTH = 100


RANDOM_MASKS = "random masks, no weights"
"""Of the held-out loss where masks are learned: it is not what the training loss measures."""


def number(value: float | None, digits: int = 4, sign: bool = False) -> str:
    """A number for the table, "-" where there is none."""
    if value is None:
        return "-"
    return f"{value:+.{digits}f}" if sign else f"{value:.{digits}f}"


def read_summary(run_dir: Path) -> Mapping[str, Any]:
    """summary.json of a run that ended, empty for one that is running or was killed."""
    path = Path(run_dir) / SUMMARY_FILE
    if not path.exists():
        return {}
    summary = read_object(path)
    record(_Summary, summary, str(path), RefusedError)
    return summary


@dataclass(frozen=True, kw_only=True)
class _Graphs(PartOf):
    """Graph counts in summary.json."""

    made: Whole
    found: Whole
    seconds: float
    surplus: Whole


@dataclass(frozen=True, kw_only=True)
class _Best(PartOf):
    """Best checkpoint in summary.json."""

    figure: str
    value: float | None
    step: Whole


@dataclass(frozen=True, kw_only=True)
class _Summary(PartOf):
    """Fields of summary.json."""

    exit_reason: str = ""
    steps_asked: Whole = 0
    goes_on: str = ""
    description: str = ""
    rows: dict[str, Whole] | None = None
    loader_workers: Whole = 0
    loader_workers_asked: Whole = 0
    start_seconds: float | None = None
    start_compile_seconds: float | None = None
    graphs: _Graphs | None = None
    best: _Best | None = None


def task_table(history: RunHistory) -> Table:
    """One row a task, the worst marked."""
    first, last = end_begins(history.last_step), history.last_step
    steps = f"step {last}" if first == last else f"steps {first} to {last}, of which {history.end_lines} are logged"
    caption = (
        f"start: first logged step with the task; end and weight: mean over the run's last tenth, {steps}, where the "
        "task was there (losses weighted by counts); elements: in those steps"
    )
    validation = (history.validation or {}).get("tasks", {})
    held_out = {"held\nout": "loss"} if validation else {}
    held_out |= {"right": "accuracy"} if any("accuracy" in task for task in validation.values()) else {}
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True, caption=caption, caption_justify="left")
    table.add_column("task", no_wrap=True)
    for name in ("start", "end", "change", "weight", "elements", *held_out):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True, min_width=5)
    for name, task in history.tasks.items():
        is_worst = name == history.worst_task and len(history.tasks) > 1
        cells = [name, _loss(task.start), _loss(task.end), number(task.change, sign=True)]
        # Within 80 columns, whatever was counted.
        cells += [number(task.weight), f"{task.count:,}" if task.count < 10**6 else f"{task.count / 1e6:,.1f}M"]
        measured = validation.get(name, {})
        shares = measured.get("accuracy")
        percent = {"accuracy": "-" if shares is None else f"{shares:.1%}"}
        cells += [percent.get(figure) or _loss(measured.get(figure)) for figure in held_out.values()]
        table.add_row(*cells, "worst" if is_worst else "", style="bold red" if is_worst else None)
    return table


def _loss(value: float | None) -> str:
    return number(value, 4 if value is None or abs(value) < 10 else 3)


def report_lines(run_dir: Path, history: RunHistory, summary: Mapping[str, Any]) -> list[str]:
    """The sentences under the table."""
    ended = summary.get("exit_reason", "no summary.json: still running, or killed")
    asked = summary.get("steps_asked", history.last_step)
    lines = [f"steps {history.last_step}{f' of {asked}' if asked > history.last_step else ''} ({ended})"]
    if goes_on := summary.get("goes_on"):
        lines.append(f"newest checkpoint: {goes_on}")
    if rows := summary.get("rows"):
        lines.append(f"rows: {', '.join(f'{name} {count:,}' for name, count in rows.items())}")
    lines.append(f"loss {number(history.loss_start)} -> {number(history.loss_end)}{_in_per_cent(history)}")
    if history.validation is not None:
        loss = number(history.validation.get("loss"))
        lines.append(f"{held_out_name(history)}: {loss} at step {history.validation_step}")
    if (best := summary.get("best")) and best["step"]:
        place = run_dir / "checkpoints" / f"step_{best['step']:08d}"
        lines.append(f"best {best['figure']} {number(best['value'])} at step {best['step']}: {place}")
    if history.worst_task is not None and len(history.tasks) > 1:
        task = history.tasks[history.worst_task]
        first = history.first_worst_task
        before = f"; at the start {first}: {number(history.tasks[first].start)}" if first is not None else ""
        lines.append(f"worst task {history.worst_task}: loss {number(task.end)}, weight {number(task.weight)}{before}")
    lines += changes_in_words(history)
    if history.tokens_per_second is not None:
        speed = f"{history.tokens_per_second:,.0f} tokens/s over all ranks (median; padding included)"
        if history.images_per_second is not None:
            speed = f"{history.images_per_second:,.0f} images/s over all ranks (median)"
        if history.model_flops_utilisation is not None:
            speed += f", {history.model_flops_utilisation:.1%} of the devices' bf16 peak"
        lines.append(speed)
    if history.data_wait_share is not None:
        lines.append(f"waited for data: {history.data_wait_share:.1%} of the steps' time (rank 0{_workers(summary)})")
    if history.cache:
        lines.append(cache_line(history.cache))
    lines += start_lines(summary)
    lines.append(f"peak memory of rank 0: {history.peak_memory_bytes / 2**20:,.0f} MiB")
    if history.skipped_steps:
        lines.append(f"skipped steps (loss or gradient not finite): {history.skipped_steps}")
    if (lesson := history.lesson) is not None:
        lines.append(lesson_line(lesson))
    lines += [str(line) for line in summary.get("hooks", [])]
    lines += [f"note: {notice}" for notice in history.notices.values()]
    lines.append(f"run directory: {run_dir}")
    return lines


def changes_in_words(history: RunHistory) -> list[str]:
    """Describe which balanced tasks improved from start to end, and which did not; empty for a single task."""
    known = {
        name: task
        for name, task in history.tasks.items()
        if task.change is not None and task.count >= FEWEST and name not in history.outside_tasks
    }
    if len(known) < 2:
        return []
    better = {name: task for name, task in known.items() if task.change < 0}  # type: ignore[operator]
    worse = {name: task for name, task in known.items() if name not in better}
    inside = [name for name, task in history.tasks.items() if task.change is not None]
    all_of = sum(name not in history.outside_tasks for name in inside)
    enough = f" with {FEWEST} elements or more" if all_of > len(known) else ""
    lines = [f"better: {len(better)} of {len(known)} tasks{enough}{_named(better, 3)}"]
    if worse:
        weights = [task.weight or 0.0 for name, task in history.tasks.items() if name not in history.outside_tasks]
        even = sum(weights) / len(weights) * (1 - 1e-6)  # equal weights differ by rounding
        light = sum((task.weight or 0.0) < even for task in worse.values())
        which = "they have" if light == len(worse) > 1 else "it has" if light == len(worse) else f"{light} of them have"
        why = f"; {which} less than an even share of the weight" if light else ""
        lines.append(f"worse: {len(worse)}{_named(worse, 3)}{why}")
    return lines


def held_out_name(history: RunHistory) -> str:
    """Return what a run's held-out loss is, where it is not what the run minimises."""
    parts = ["mean of the balanced tasks"] * (len(history.tasks) > 1) + [RANDOM_MASKS] * (history.lesson is not None)
    return f"held-out loss ({'; '.join(parts)})" if parts else "held-out loss"


def _in_per_cent(history: RunHistory) -> str:
    """Describe the change of the loss of a single task; "" with several tasks or learned masks, whose loss at the end
    is that of other patches."""
    start, end = history.loss_start, history.loss_end
    if len(history.tasks) != 1 or history.lesson is not None or not start or end is None or end == start:
        return ""
    return f": {'better' if end < start else 'worse'} by {abs(end - start) / abs(start):.0%}"


def _named(tasks: Mapping[str, TaskHistory], most: int) -> str:
    """Name the tasks that changed most, with their change."""
    order = sorted(tasks, key=lambda name: -abs(tasks[name].change or 0.0))
    named = ", ".join(f"{name} {number(tasks[name].change, sign=True)}" for name in order[:most])
    return f": {named}{', ...' if len(order) > most else ''}" if order else ""


def cache_line(cache: Mapping[str, int]) -> str:
    """Describe the use of the cache of remote tars by rank 0's loader."""
    opened, fetched = cache["found"] + cache["fetched"], cache["fetched"] + cache["ahead"]
    there = f"{cache['found'] / opened:.1%}" if opened else "none"
    size = (cache["fetched_bytes"] + cache["ahead_bytes"]) / 1e9
    return (
        f"cache: {there} of {opened:,} tars or blocks opened were there; {fetched:,} fetched, "
        f"{cache['ahead']:,} of them ahead, {size:,.3f} GB (rank 0)"
    )


def lesson_line(lesson: LastLesson) -> str:
    """Describe the overlap with the untrained network's masks and with those before the last update."""
    if lesson.overlap_untrained is None or lesson.overlap_last is None:
        return f"learned masks: {lesson.lessons:,} lessons; whose masks they are is compared at the next one"
    return (
        f"learned masks: {lesson.overlap_untrained:.1%} of the patches are those of the untrained network, "
        f"{lesson.overlap_last:.1%} those before the last of {lesson.lessons:,} lessons"
    )


def _workers(summary: Mapping[str, Any]) -> str:
    """Return the number of loader workers in words; "" for an unfinished run."""
    if "loader_workers" not in summary:
        return ""
    found = summary["loader_workers"]
    asked = summary.get("loader_workers_asked", found)
    return f", loader workers: {found}" + (f" of {asked}, capped by its CPUs" if found < asked else "")


def start_lines(summary: Mapping[str, Any]) -> list[str]:
    """Return the lines on the last start: its duration, and the graphs of torch.compile."""
    lines = []
    graphs = summary.get("graphs")
    if (seconds := summary.get("start_seconds")) is not None:
        compiling = f", {summary.get('start_compile_seconds') or 0.0:.1f} s of them for compiling" if graphs else ""
        lines.append(f"start: the first step was made after {seconds:.1f} s{compiling}")
    if graphs:
        surplus = f"; {graphs['surplus']} that no mode of the run needed" if graphs["surplus"] else ""
        made, found, took = graphs["made"], graphs["found"], graphs["seconds"]
        lines.append(f"graphs compiled: {made} in {took:.1f} s, {found} found in the cache{surplus}")
    return lines


def is_fine_tuning(run_dir: Path) -> bool:
    """Whether the run's settings have a section of fine-tuning."""
    path = Path(run_dir) / "config.yaml"
    return path.is_file() and "downstream" in Fields(read_yaml(path) or {}, str(path))


def report_table(run_dir: Path, history: RunHistory | None = None) -> RenderableType:
    """The report as something rich prints. Raises what `read_metrics` raises.

    Args:
        history: of the run, where it has been read.
    """
    history, summary = history or read_history(run_dir), read_summary(run_dir)
    title = "Fine-tuning report" if is_fine_tuning(run_dir) else "Pre-training report"
    head = ": ".join(part for part in (title, str(summary.get("description", ""))) if part)
    # Text, not markup: a path or a task name may hold square brackets.
    lines = [Text(line) for line in report_lines(Path(run_dir), history, summary)]
    return Group(Text(head, style="bold"), task_table(history), *lines)


def report(run_dir: Path, history: RunHistory | None = None) -> str:
    """The report as plain text, from metrics.jsonl and, when the run has ended, summary.json.

    Args:
        history: of the run, where it has been read.

    Raises:
        RefusedError: no metrics.jsonl there, or a file that is damaged.
    """
    console = Console(file=io.StringIO(), width=REPORT_WIDTH, color_system=None, force_terminal=False)
    with console.capture() as capture:
        console.print(report_table(run_dir, history))
    return "\n".join(line.rstrip() for line in capture.get().splitlines()) + "\n"
