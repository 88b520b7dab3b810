"""The sections of how a run went: speed, waiting for data, memory, and incidents."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from statistics import median

from trp_scale.errors import shorten
from trp_scale.reporting.curves import Curve
from trp_scale.reporting.document import Block, Cell, Facts, Section, Sentences, Table
from trp_scale.reporting.figures import Line, Plot, colours
from trp_scale.reporting.record import RunRecord
from trp_scale.training.report import cache_line, start_lines

GIB = 2.0**30

MOST_INCIDENTS = 200
"""Of which the page has a row; of more the latest."""

LONG = 20
"""Times the median. A step that took longer is not drawn: beside a first that compiled others would lie on the axis."""

MOST_SKIPPED = 50
"""Skipped steps that are listed; of more the latest."""


def speed_section(run: RunRecord) -> Section:
    """Throughput, waiting for data, memory."""
    images = "images_per_second" in run.curves.fields
    pace = (
        ("images_per_second", "images / s", "") if images else ("tokens_per_second", "tokens / s", ", padding included")
    )
    blocks: list[Block] = [
        *_plot(run, pace[0], "Throughput", unit=pace[1], note=f"Over all ranks{pace[2]}."),
        *_plot(run, "data_wait_share", "Waiting for data", unit="share", note="Share of a step's time, rank 0."),
        *_plot(run, "step_seconds", "Time of a step", unit="s", most=LONG),
        *_plot(run, "peak_memory_bytes", "Memory", unit="GiB", note="Largest so far, rank 0.", scale=1 / GIB),
        *_plot(run, "model_flops_utilisation", "Share of the devices' bf16 peak", unit="share"),
    ]
    more = [*start_lines(run.summary), *([cache_line(run.history.cache)] if run.history.cache else [])]
    return Section(
        name="speed",
        title="Speed and memory",
        look_for=(
            "More than a few per cent of waiting for data call for more --data.workers. Memory that keeps growing will "
            "end the run."
        ),
        blocks=[*blocks, *([Sentences(sentences=more)] if more and blocks else [])],
    )


def _plot(
    run: RunRecord, name: str, title: str, *, unit: str, note: str = "", scale: float = 1.0, most: float | None = None
) -> Iterator[Plot]:
    """The plot of a field, in the same colour on every page; none where it has no value or is 0 all the time.

    Args:
        most: times the median: values above are left out, and the note says so.
    """
    curve = run.curves.fields.get(name)
    if isinstance(curve, Curve) and len(curve) and any(curve.values):
        if most is not None:
            usual, longest = curve.below(most * median(curve.values)), max(curve.values)
            if left_out := len(curve) - len(usual):
                note += f"Left out: {left_out:,} of more than {most:g} times the median, the longest of "
                note += f"{longest:,.1f} {unit}."
            curve = usual
        line = Line(name=name, points=curve.scaled(scale).points(), colour=colours(FIELDS)[name])
        yield Plot(title=title, lines=[line], unit=unit, note=note, from_zero=True)


FIELDS = (
    *("tokens_per_second", "data_wait_share", "step_seconds", "peak_memory_bytes"),
    *("images_per_second", "model_flops_utilisation"),
)


def incidents_section(run: RunRecord) -> Section:
    """Return the section on incidents during the run."""
    kinds = Counter(str(each.get("kind", "")) for each in run.incidents)
    kinds.update({"skipped step": len(run.curves.skipped)} if run.curves.skipped else {})
    rows = []
    for each in run.incidents[-MOST_INCIDENTS:]:
        step = each.get("step")
        more = {name: value for name, value in each.items() if name not in ("at", "step", "kind")}
        details = ", ".join(
            f"{name} {value if isinstance(value, str) else json.dumps(value)}" for name, value in more.items()
        )
        order = float(step) if isinstance(step, int) and abs(step) < 1 << 53 else None
        cells = [Cell(text=shorten(str(each.get("kind", ""))), strong=True), Cell(text=shorten(details, 240))]
        cells += [
            Cell(text=f"{step:,}" if order is not None else "-", order=order),
            Cell(text=shorten(str(each.get("at", "")), 40)),
        ]
        rows.append(cells)
    blocks: list[Block] = (
        [Facts(facts=[(shorten(kind), f"{count:,}") for kind, count in kinds.items()])] if kinds else []
    )
    if run.curves.skipped:
        latest = run.curves.skipped[-MOST_SKIPPED:]
        which = f" (the last {MOST_SKIPPED})" if len(run.curves.skipped) > MOST_SKIPPED else ""
        blocks.append(Sentences(sentences=[f"Skipped steps{which}: {', '.join(f'{step:,}' for step in latest)}"]))
    if rows:
        note = f"The latest {MOST_INCIDENTS} of {len(run.incidents):,}." if len(run.incidents) > MOST_INCIDENTS else ""
        blocks.append(Table(head=["kind", "what", "step", "at"], rows=rows, words=2, note=note))
    look_for = "Single ones are survived; many of one kind, or of one file, have a cause that is worth finding."
    return Section(name="incidents", title="Incidents", look_for=look_for, blocks=blocks)
