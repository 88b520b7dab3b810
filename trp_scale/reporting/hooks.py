"""The sections of a run's methods: what hooks logged, with titles and words where their rooms describe them
(config/registry.py), under their own names where they do not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from trp_scale.config.registry import MetricPlot, MetricsDescription, metrics_description
from trp_scale.errors import shorten
from trp_scale.reporting.curves import OWN_STEP, Curve, Tree, leaves
from trp_scale.reporting.document import Block, Facts, Section, Sentences, figure_text
from trp_scale.reporting.figures import Colour, Line, Plot, colours
from trp_scale.reporting.record import RunRecord
from trp_scale.reporting.tasks import lines_of, task_colours, words, worst_task

BALANCER = "balancer"
"""The hook that gives tasks their weights, which stand in the tasks' own figures."""

NOTICE = "notice"

MOST_OTHERS = 24
"""Plots of one hook that nothing describes; the rest is named."""


def method_sections(run: RunRecord) -> Iterator[Section]:
    """A section for each hook that is described, and one for all others."""
    hooks = {BALANCER: {}, **run.curves.hooks}
    others: list[Block] = []
    for name, tree in hooks.items():
        first = list(_weights(run)) if name == BALANCER else []
        description = metrics_description(name)
        blocks = [*first, *_blocks(run, name, tree, description)]
        # A hook of constants alone, as the balancer of a run with one task, has nothing to look at.
        if not any(isinstance(block, Plot) for block in blocks):
            continue
        if description is None:
            others += [Facts(facts=[("hook", name)]), *blocks]
        else:
            yield Section(
                name=f"hook-{_anchor(name)}",
                title=description.title,
                look_for=description.look_for,
                blocks=blocks,
            )
    if others:
        look_for = "What hooks logged that say no more of it; their own documents tell what the figures mean."
        yield Section(name="other-metrics", title="Other metrics", look_for=look_for, blocks=others)


def _anchor(name: str) -> str:
    return "".join(sign if sign.isascii() and sign.isalnum() else "-" for sign in name).lower()


def _weights(run: RunRecord) -> Iterator[Plot]:
    """Yield the plot of task weights if they change."""
    curves = run.curves.weights
    if len(curves) > 1 and any(curve.varies for curve in curves.values()):
        moving = {name: curve for name, curve in curves.items() if name not in run.history.outside_tasks}
        note = "Each time the task was there."
        lines = lines_of(moving, task_colours(run), worst_task(run))
        if lines:
            yield Plot(title="Weight of each task", lines=lines, note=note, wide=True).shown()


def _blocks(run: RunRecord, hook: str, tree: Tree, description: MetricsDescription | None) -> Iterator[Block]:
    described = description.plots if description else ()
    # A notice stands at the head of the page while the last line has it.
    facts = [(words(name), text) for name, text in run.curves.words.get(hook, {}).items() if name != NOTICE]
    constants = [name for name, own in tree.items() if name != OWN_STEP and not any(one.varies for one in leaves(own))]
    taken = {name for plot in described for name in plot.names} | {OWN_STEP, *constants}
    # Beside a line that moves, one that does not says something.
    drawn = {name for plot in described if not set(plot.names) & tree.keys() <= {*constants} for name in plot.names}
    constants = [name for name in constants if name not in drawn]
    facts += [
        (words(name), _constant(tree[name])) for name in constants if isinstance(tree[name], Curve) and len(tree[name])
    ]
    if facts:
        yield Facts(facts=[(name, shorten(text)) for name, text in facts])
    rest = [name for name in tree if name not in taken]
    plots = [*described, *(MetricPlot(title=words(name).capitalize(), names=(name,)) for name in rest[:MOST_OTHERS])]
    for plot in plots:
        if lines := _lines(run, tree, [name for name in plot.names if name not in constants]):
            yield Plot(
                title=plot.title, lines=lines, unit=plot.unit, log=plot.log, edge=plot.edge, note=plot.note
            ).shown()
    if len(rest) > MOST_OTHERS:
        yield Sentences(sentences=[f"Not drawn: {shorten(', '.join(rest[MOST_OTHERS:]), 2000)}"])


def _constant(curve: Curve) -> str:
    value = curve.values[-1]
    return figure_text(int(value) if value.is_integer() else value)


def _lines(run: RunRecord, tree: Mapping[str, Any], names: Sequence[str]) -> list[Line]:
    """A line for each name; for each task where an object is by tasks; for each field of another object."""
    tasks = task_colours(run)
    found: dict[str, Curve] = {}
    for name in names:
        own = tree.get(name)
        if isinstance(own, Curve):
            found[words(name)] = own
        elif own is not None:
            found |= {field: curve for field, curve in own.items() if isinstance(curve, Curve)}
    found = {name: curve for name, curve in found.items() if len(curve)}
    by_task = bool(found) and set(found) <= set(tasks)
    colour_of: Mapping[str, Colour] = tasks if by_task else colours(found)
    if by_task:
        return lines_of(found, colour_of, worst_task(run))
    return [Line(name=name, points=curve.points(), colour=colour_of[name]) for name, curve in found.items()]
