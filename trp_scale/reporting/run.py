"""The page of one run."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

from trp_scale.errors import shorten
from trp_scale.reporting.curves import Curve
from trp_scale.reporting.document import INSTALL, Page, can_draw, figure_text, page_text
from trp_scale.reporting.hooks import method_sections
from trp_scale.reporting.how_it_went import GIB, incidents_section, speed_section
from trp_scale.reporting.next_commands import next_section, settings_section
from trp_scale.reporting.picture_files import pictures_section
from trp_scale.reporting.record import RunRecord
from trp_scale.reporting.tasks import lead, optimizer_section, tasks_section, worst_task
from trp_scale.storage.files import write_text
from trp_scale.training.report import held_out_name

PAGE_FILE = "report.html"


def write_page(run: RunRecord, drawn: Sequence[Path] = ()) -> str:
    """Write RUN/report.html; gives the line that says where it is, or why it is not there: without plotly, and where a
    run directory takes no files, the report is its text alone.

    Args:
        drawn: PNG files to show beside those of the run directory.
    """
    path = run.run_dir / PAGE_FILE
    if not can_draw():
        return f"{path}: not written, the page needs plotly: {INSTALL}"
    try:
        write_text(path, page_text(run_page(run, drawn)))
    except OSError as error:
        return f"{path}: not written ({error.strerror})"
    return f"page: {path}"


def run_page(run: RunRecord, drawn: Sequence[Path] = ()) -> Page:
    """Build the page of a run; missing records have no section.

    Args:
        drawn: PNG files to show beside those of the run directory.
    """
    sections = [tasks_section(run), optimizer_section(run), *method_sections(run)]
    sections += [pictures_section(run, drawn), speed_section(run), incidents_section(run)]
    sections += [settings_section(run), next_section(run)]
    what = [str(run.summary.get("description", "")), f"recipe {run.changed.recipe}" if run.changed.recipe else ""]
    kind = "Fine-tuning report" if run.fine_tuning else "Pre-training report"
    return Page(
        kind=shorten(" · ".join(part for part in (kind, *what) if part), 300),
        title=run.name,
        state=run.state.word,
        mood=run.state.mood,
        lead=lead(run),
        tiles=tiles(run),
        sections=sections,
        made_of=f"Made by trp-scale report from {run.run_dir.resolve()}, up to step {run.history.last_step:,}.",
    )


def tiles(run: RunRecord) -> list[tuple[str, str, str]]:
    """The figures that matter most: (name, value, beside it)."""
    history = run.history
    steps = run.settings.get("training", {})
    asked = steps.get("steps") if isinstance(steps, dict) else None
    found = [("steps", f"{history.last_step:,}", f"of {asked:,}" if isinstance(asked, int) else "")]
    if history.loss_end is not None:
        found.append(("loss", figure_text(history.loss_end), f"from {figure_text(history.loss_start)}"))
    if (worst := worst_task(run)) is not None:
        task = history.tasks[worst]
        found.append((f"worst task: {worst}", figure_text(task.end), f"from {figure_text(task.start)}"))
    loss = run.curves.held_out.get("loss", {}).get("", Curve())
    if len(loss):
        found.append((held_out_name(history), figure_text(loss.values[-1]), f"after step {loss.steps[-1]:,.0f}"))
    if (speed := _speed(run)) is not None:
        found.append(speed)
    if history.data_wait_share is not None:
        found.append(("waiting for data", figure_text(history.data_wait_share, unit="share"), "of the steps' time"))
    if history.peak_memory_bytes:
        found.append(("peak memory", f"{history.peak_memory_bytes / GIB:.2f} GiB", "rank 0"))
    return found


def _speed(run: RunRecord) -> tuple[str, str, str] | None:
    for name, unit in (("images_per_second", "images / s"), ("tokens_per_second", "tokens / s")):
        curve = run.curves.fields.get(name)
        if isinstance(curve, Curve) and len(curve):
            return ("speed", f"{statistics.median(curve.values):,.0f}", f"{unit}, median")
    return None
