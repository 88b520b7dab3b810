"""Report at the end of a run, from its run directory alone; reporting/ uses the same table and sentences in its
page."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.text import Text

from trp_scale.checkpoint.run_directory import SUMMARY_FILE
from trp_scale.config.files import read_object, read_yaml
from trp_scale.config.schema import Fields, PartOf, Whole, record
from trp_scale.console import Cell, Colour, Table, figure_text, number_cell
from trp_scale.errors import RefusedError, shorten
from trp_scale.training.metrics import FEWEST, LastLesson, RunHistory, TaskHistory, end_begins, read_history

REPORT_FILE = "report.txt"
REPORT_WIDTH = 100

DIGITS = 5
"""Digits of losses."""

RANDOM_MASKS = "random masks, no weights"
"""Label of the held-out loss of learned masks, which differs from the training loss."""


def to_words(name: str) -> str:
    """Convert a metric's name to words."""
    return name.replace("_", " ")


def read_summary(run_dir: Path) -> Mapping[str, Any]:
    """Return summary.json; empty for a run that is running or was killed."""
    path = Path(run_dir) / SUMMARY_FILE
    if not path.exists():
        return {}
    summary = read_object(path)
    record(_Summary, summary, str(path), RefusedError)
    return summary


@dataclass(frozen=True, kw_only=True)
class _Graphs(PartOf):
    made: Whole
    found: Whole
    seconds: float
    surplus: Whole


@dataclass(frozen=True, kw_only=True)
class _Best(PartOf):
    figure: str
    value: float | None
    step: Whole


@dataclass(frozen=True, kw_only=True)
class _Summary(PartOf):
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


def marked_task(history: RunHistory) -> str | None:
    """Return the worst of several tasks; `None` for a single task."""
    return history.worst_task if len(history.tasks) > 1 else None


def task_table(history: RunHistory, colour_of: Mapping[str, Colour] | None = None) -> Table:
    """Return a table of the tasks that the run has seen: start, end, change, weight, elements, held-out figures.

    Args:
        colour_of: colours of the tasks on a page, which also has changes in percent; None: the text report.
    """
    worst, is_page = marked_task(history), colour_of is not None
    measured: Mapping[str, Any] = (history.validation or {}).get("tasks", {})
    figures = [name for name in dict.fromkeys(name for task in measured.values() for name in task) if name != "count"]
    loss = "held\nout"  # all columns within 80 characters
    if is_page:
        loss = f"held out ({RANDOM_MASKS})" if history.lesson is not None else "held out"
    head = ["task", "start", "end", "change", *["in %"] * is_page, "weight", "elements"]
    rows = []
    seen = {name: task for name, task in history.tasks.items() if task.start is not None}
    for name, task in seen.items():
        mark = " · not balanced" if is_page and name in history.outside_tasks else ""
        if name == worst:
            mark = " · worst" if is_page else " worst"
        cells = [Cell(text=f"{name}{mark}", colour=(colour_of or {}).get(name))]
        cells += [number_cell(value, DIGITS) for value in (task.start, task.end)]
        cells.append(number_cell(task.change, DIGITS, sign=True))
        if is_page:
            share = task.change / task.start if task.change is not None and task.start else None
            cells.append(number_cell(share, sign=True, unit="share"))
        cells += [number_cell(task.weight)]
        count = f"{task.count:,}" if task.count < 10**6 else f"{task.count / 1e6:,.1f}M"
        cells.append(Cell(text=count, order=task.count))
        for figure in figures:
            unit = "share" if figure == "accuracy" else ""
            cells.append(number_cell(measured.get(name, {}).get(figure), DIGITS, unit=unit))
        rows.append(cells)
    return Table(
        head=[*head, *(loss if name == "loss" else to_words(name) for name in figures)],
        rows=rows,
        marked=tuple(number for number, name in enumerate(seen) if name == worst),
        notes=[_describe_columns(history)],
    )


def _describe_columns(history: RunHistory) -> str:
    first, last = end_begins(history.last_step), history.last_step
    steps = f"step {last:,}" if first == last else f"steps {first:,} to {last:,}"
    note = (
        "Start: the first logged step that had the task. End and weight: means over the logged ones of the run's last "
        f"tenth, {steps}, losses weighted by their elements, which are counted there."
    )
    if history.validation_step is not None:
        note += f" On held-out rows: after step {history.validation_step:,}."
    if history.outside_tasks:
        note += f" Not balanced: {', '.join(sorted(history.outside_tasks))}; their weights are fixed."
    return note


def describe_outcome(history: RunHistory) -> list[str]:
    """Return sentences about the run's losses, and the notices of its hooks."""
    sentences = []
    if history.loss_start is not None and history.loss_end is not None:
        change = _describe_change(history.loss_start, history.loss_end)
        sentences.append(f"The loss {change} in {history.last_step:,} steps.")
    if (worst := marked_task(history)) is not None:
        task, first = history.tasks[worst], history.first_worst_task
        assert task.start is not None and task.end is not None, "the worst task has losses"
        if first in (None, worst):
            sentences.append(f"The worst task, {worst}, {_describe_change(task.start, task.end)}.")
        elif (start := history.tasks[first].start) is not None:
            change = _describe_change(start, task.end, f" ({first})", f" ({worst})")
            sentences.append(f"The worst loss of a task {change}.")
    sentences += map(_to_sentence, describe_changes(history))
    if history.held_out:
        sentences.append(_describe_held_out(history))
    if history.lesson is not None:
        sentences.append(_to_sentence(describe_lesson(history.lesson)))
    if history.skipped_steps:
        sentences.append(
            f"{history.skipped_steps:,} steps were skipped: their loss or gradient was not finite, or a spike."
        )
    return sentences + [_to_sentence(f"{hook}: {shorten(notice, 1000)}") for hook, notice in history.notices.items()]


def _to_sentence(line: str) -> str:
    return f"{line[:1].upper()}{line[1:]}{'.' * (not line.endswith('.'))}"


def _describe_change(start: float, end: float, first: str = "", last: str = "") -> str:
    """Describe a change in words; `first` and `last` follow its two values."""
    change = (end - start) / abs(start) if start else 0.0
    if abs(change) < 0.005:
        return f"stayed at {figure_text(end)}{last}"
    verb, share = "fell" if end < start else "rose", f", {change:+.0%}" if last else f" ({change:+.0%})"
    return f"{verb} from {figure_text(start)}{first} to {figure_text(end)}{last}{share}"


def _describe_held_out(history: RunHistory) -> str:
    """Describe the first and last held-out loss, and the minimum if it is earlier."""
    name, (steps, losses) = held_out_name(history), zip(*history.held_out.items(), strict=True)
    if len(steps) == 1:
        return f"The {name} is {figure_text(losses[0])} after step {steps[0]:,}."
    text = f"The {name} {_describe_change(losses[0], losses[-1])} from step {steps[0]:,} to {steps[-1]:,}"
    best = min(history.held_out, key=lambda step: history.held_out[step])
    if history.held_out[best] < losses[-1] - 0.005 * abs(losses[-1]):
        text += f", and was lowest, {figure_text(history.held_out[best])}, at step {best:,}"
    return f"{text}."


def report_lines(run_dir: Path, history: RunHistory, summary: Mapping[str, Any]) -> list[str]:
    """Return the lines under the table: end of the run, speed, memory; last the outcome."""
    reason = summary.get("exit_reason", "no summary.json: still running, or killed")
    steps = summary.get("steps_asked", history.last_step)
    lines = [f"steps {history.last_step}{f' of {steps}' if steps > history.last_step else ''} ({reason})"]
    if goes_on := summary.get("goes_on"):
        lines.append(f"newest checkpoint: {goes_on}")
    if rows := summary.get("rows"):
        lines.append(f"rows: {', '.join(f'{name} {count:,}' for name, count in rows.items())}")
    if (best := summary.get("best")) and best["step"]:
        checkpoint = run_dir / "checkpoints" / f"step_{best['step']:08d}"
        lines.append(f"best {best['figure']} {figure_text(best['value'], DIGITS)} at step {best['step']}: {checkpoint}")
    if history.tokens_per_second is not None:
        speed = f"{history.tokens_per_second:,.0f} tokens/s over all ranks (median; padding included)"
        if history.images_per_second is not None:
            speed = f"{history.images_per_second:,.0f} images/s over all ranks (median)"
        if history.model_flops_utilisation is not None:
            speed += f", {history.model_flops_utilisation:.1%} of the devices' bf16 peak"
        lines.append(speed)
    if history.data_wait_share is not None:
        lines.append(f"waited for data: {history.data_wait_share:.1%} of the steps' time (rank 0{_workers(summary)})")
    lines += describe_start(history, summary)
    lines.append(f"peak memory of rank 0: {history.peak_memory_bytes / 2**20:,.0f} MiB")
    lines += [*map(str, summary.get("hooks", [])), f"run directory: {run_dir}"]
    return [*lines, *describe_outcome(history)]


def describe_changes(history: RunHistory) -> list[str]:
    """Describe which balanced tasks improved and which did not; empty for a single task."""
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
    lines = [f"better: {len(better)} of {len(known)} tasks{enough}{_list_changes(better, 3)}"]
    if worse:
        weights = [task.weight or 0.0 for name, task in history.tasks.items() if name not in history.outside_tasks]
        even = sum(weights) / len(weights) * (1 - 1e-6)  # equal weights differ by rounding
        light = sum((task.weight or 0.0) < even for task in worse.values())
        if light == len(worse):  # minimax takes their weight for the worst
            lines.append(f"the price{_list_changes(worse, 3)}, with less than an even share of the weight")
        else:
            why = f"; {light} of them have less than an even share of the weight" if light else ""
            lines.append(f"worse: {len(worse)}{_list_changes(worse, 3)}{why}")
    return lines


def held_out_name(history: RunHistory) -> str:
    """Return the name of the held-out loss, with its differences from the training loss."""
    parts = ["mean of the balanced tasks"] * (len(history.tasks) > 1) + [RANDOM_MASKS] * (history.lesson is not None)
    return f"held-out loss ({'; '.join(parts)})" if parts else "held-out loss"


def _list_changes(tasks: Mapping[str, TaskHistory], most: int) -> str:
    order = sorted(tasks, key=lambda name: -abs(tasks[name].change or 0.0))
    changes = ", ".join(f"{name} {figure_text(tasks[name].change, DIGITS, sign=True)}" for name in order[:most])
    return f": {changes}{', ...' if len(order) > most else ''}" if order else ""


def describe_cache(cache: Mapping[str, int]) -> str:
    """Describe the use of the cache of remote tars by rank 0's loader."""
    opened, fetched = cache["found"] + cache["fetched"], cache["fetched"] + cache["ahead"]
    local = f"{cache['found'] / opened:.1%}" if opened else "none"
    size = (cache["fetched_bytes"] + cache["ahead_bytes"]) / 1e9
    return (
        f"cache: {local} of {opened:,} tars or blocks opened were cached; {fetched:,} fetched, "
        f"{cache['ahead']:,} of them prefetched, {size:,.3f} GB (rank 0)"
    )


def describe_lesson(lesson: LastLesson) -> str:
    """Describe the overlap with the untrained network's masks and with those before the last update."""
    if lesson.overlap_untrained is None or lesson.overlap_last is None:
        return f"learned masks: {lesson.lessons:,} lessons; the next one compares the masks"
    return (
        f"learned masks: {lesson.overlap_untrained:.1%} of the patches are those of the untrained network, "
        f"{lesson.overlap_last:.1%} those before the last of {lesson.lessons:,} lessons"
    )


def _workers(summary: Mapping[str, Any]) -> str:
    """Return the number of loader workers as text; "" for an unfinished run."""
    if "loader_workers" not in summary:
        return ""
    workers = summary["loader_workers"]
    wished = summary.get("loader_workers_asked", workers)
    return f", loader workers: {workers}" + (f" of {wished}, limited by its CPUs" if workers < wished else "")


def describe_start(history: RunHistory, summary: Mapping[str, Any]) -> list[str]:
    """Return lines on the cache of remote tars, the duration of the last start, and the graphs of torch.compile."""
    lines = [describe_cache(history.cache)] if history.cache else []
    graphs = summary.get("graphs")
    if (seconds := summary.get("start_seconds")) is not None:
        compiling = f", {summary.get('start_compile_seconds') or 0.0:.1f} s of them compilation" if graphs else ""
        lines.append(f"start: the first step was made after {seconds:.1f} s{compiling}")
    if graphs:
        surplus = f"; {graphs['surplus']} not needed" if graphs["surplus"] else ""
        lines.append(
            f"graphs compiled: {graphs['made']} in {graphs['seconds']:.1f} s, {graphs['found']} found in the "
            f"cache{surplus}"
        )
    return lines


def is_fine_tuning(run_dir: Path) -> bool:
    """Whether the run's settings have a section `downstream`."""
    path = Path(run_dir) / "config.yaml"
    return path.is_file() and "downstream" in Fields(read_yaml(path) or {}, str(path))


def report_table(run_dir: Path, history: RunHistory | None = None) -> RenderableType:
    """Return the report for rich. Raises what `read_metrics` raises.

    Args:
        history: the run's history, if already read.
    """
    history, summary = history or read_history(run_dir), read_summary(run_dir)
    title = "Fine-tuning report" if is_fine_tuning(run_dir) else "Pre-training report"
    head = ": ".join(part for part in (title, str(summary.get("description", ""))) if part)
    # Text, not markup: a path or a task name may contain square brackets.
    lines = [Text(line) for line in report_lines(Path(run_dir), history, summary)]
    return Group(Text(head, style="bold"), task_table(history).to_rich(), *lines)


def report(run_dir: Path, history: RunHistory | None = None) -> str:
    """Return the report as plain text, from metrics.jsonl and, if the run has ended, summary.json.

    Args:
        history: the run's history, if already read.

    Raises:
        RefusedError: no metrics.jsonl exists, or a file is damaged.
    """
    console = Console(file=io.StringIO(), width=REPORT_WIDTH, color_system=None, force_terminal=False)
    with console.capture() as capture:
        console.print(report_table(run_dir, history))
    return "\n".join(line.rstrip() for line in capture.get().splitlines()) + "\n"
