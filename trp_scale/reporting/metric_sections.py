"""Sections of a run's metrics: losses of its tasks, the optimizer, and what each hook logged, with titles and words
where its room describes them (config/registry.py), under its own names where it does not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from trp_scale.config.registry import MetricPlot, MetricsDescription, metrics_description
from trp_scale.errors import shorten
from trp_scale.reporting.curves import MOST_POINTS, OWN_STEP, Curve, Points, Tree, leaves
from trp_scale.reporting.document import Block, Facts, PageSection, Sentences
from trp_scale.reporting.figures import Line, Plot, colours
from trp_scale.reporting.record import RunRecord
from trp_scale.table import Colour, figure_text
from trp_scale.training.report import RANDOM_MASKS, held_out_name, marked_task, task_table, to_words

FEW_LINES = 3
POINTS_OF_MANY = 100
"""Points of a curve in a plot of more lines than FEW_LINES: the noise of one task would hide the others."""


def task_lines(curves: Mapping[str, Curve], colour_of: Mapping[str, Colour], worst: str | None = None) -> list[Line]:
    """A line for each curve that has values, the worst task's emphasised; the largest at the end first."""
    most = MOST_POINTS if len(curves) <= FEW_LINES else POINTS_OF_MANY
    drawn = {name: curve.points(most) for name, curve in curves.items() if len(curve)}
    order = sorted(drawn, key=lambda name: -_end(drawn[name]))
    return [
        Line(name=name, points=drawn[name], colour=colour_of[name], emphasis="worst" if name == worst else "")
        for name in order
    ]


def _end(points: Points) -> float:
    last = points.values[-max(1, len(points.values) // 10) :]
    return sum(last) / len(last)


def task_colours(run: RunRecord) -> dict[str, Colour]:
    """Return the colour of each task, equal in all plots and tables of a run."""
    names = [*run.history.tasks, *(name for curves in run.curves.held_out.values() for name in curves)]
    return colours(name for name in names if name)


def tasks_section(run: RunRecord) -> PageSection:
    """Losses of each task, the held-out ones after them, and a table of both."""
    worst, colour_of = marked_task(run.history), task_colours(run)
    several = len(run.history.tasks) > 1
    plots = [Plot(title="Training loss", lines=task_lines(run.curves.losses, colour_of, worst))]
    titles = {"loss": f"Held-out loss ({RANDOM_MASKS})" if run.history.lesson is not None else "Held-out loss"}
    for name, curves in sorted(run.curves.held_out.items(), key=lambda item: item[0] != "loss"):
        if lines := task_lines({task: curve for task, curve in curves.items() if task}, colour_of, worst):
            unit = "share" if name == "accuracy" else ""
            plots.append(Plot(title=titles.get(name, f"Held-out {to_words(name)}"), lines=lines, unit=unit))
    look_for = "How far each loss has come down, and whether the held-out one comes down with it."
    if several:
        look_for = (
            "Whether the worst task, drawn thick, comes down: that is what the run is for. Held-out losses that rise "
            "while training losses fall mean that rows are being learned by heart."
        )
    return PageSection(
        name="losses",
        title="Losses of the tasks" if several else "Loss",
        look_for=look_for,
        blocks=[*(plot.limit_lines() for plot in plots if plot.lines), task_table(run.history, colour_of)],
    )


def optimizer_section(run: RunRecord) -> PageSection:
    """The loss that is minimised, the learning rate and the gradient's norm."""
    return PageSection(
        name="optimizer",
        title="Optimizer",
        look_for=(
            "A gradient norm that grows or jumps comes before a loss that does. The band of a long run shows spikes "
            "that its mean hides."
        ),
        blocks=list(_optimizer_plots(run)),
    )


def _optimizer_plots(run: RunRecord) -> Iterator[Plot]:
    loss, rate, norm, held_out = colours(("loss", "lr", "grad_norm", "held out")).values()
    fields = run.curves.fields
    if len(run.history.tasks) > 1 and len(total := fields.get("loss", Curve())):
        lines = [Line(name="training", points=total.points(), colour=loss)]
        note = "The weighted sum that is minimised moves with the weights too."
        yield Plot(title="Loss in all", lines=lines, note=note)
        if len(curve := run.curves.held_out.get("loss", {}).get("", Curve())):
            lines = [Line(name="held out", points=curve.points(), colour=held_out)]
            yield Plot(title=held_out_name(run.history).capitalize(), lines=lines)
    for name, title, colour in (("lr", "Learning rate", rate), ("grad_norm", "Norm of the gradient", norm)):
        values = fields.get(name)
        if isinstance(values, Curve) and len(values):
            yield Plot(title=title, lines=[Line(name=name, points=values.points(), colour=colour)])


BALANCER = "balancer"
"""The hook that gives tasks their weights, which are drawn from the tasks' figures."""

NOTICE = "notice"

MOST_OTHERS = 24
"""Plots of one hook that nothing describes; the rest is named."""


def method_sections(run: RunRecord) -> Iterator[PageSection]:
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
            yield PageSection(
                name=f"hook-{_anchor(name)}",
                title=description.title,
                look_for=description.look_for,
                blocks=blocks,
            )
    if others:
        look_for = "What hooks logged that say no more of it; their own documents tell what the figures mean."
        yield PageSection(name="other-metrics", title="Other metrics", look_for=look_for, blocks=others)


def _anchor(name: str) -> str:
    return "".join(sign if sign.isascii() and sign.isalnum() else "-" for sign in name).lower()


def _weights(run: RunRecord) -> Iterator[Plot]:
    """Yield the plot of task weights if they change."""
    curves = run.curves.weights
    if len(curves) > 1 and any(curve.varies for curve in curves.values()):
        moving = {name: curve for name, curve in curves.items() if name not in run.history.outside_tasks}
        note = "Each time the task was there."
        lines = task_lines(moving, task_colours(run), marked_task(run.history))
        if lines:
            yield Plot(title="Weight of each task", lines=lines, note=note, wide=True).limit_lines()


def _blocks(run: RunRecord, hook: str, tree: Tree, description: MetricsDescription | None) -> Iterator[Block]:
    described = description.plots if description else ()
    constants = {name for name, curves in tree.items() if not any(curve.varies for curve in leaves(curves))}
    # A constant line is drawn where another line of its plot moves.
    drawn = {name for plot in described if set(plot.names) & tree.keys() - constants for name in plot.names}
    constants -= {*drawn, OWN_STEP}
    # A notice is at the head of the page while the last line has it.
    facts = [(to_words(name), text) for name, text in run.curves.words.get(hook, {}).items() if name != NOTICE]
    facts += [(to_words(name), _constant(tree[name])) for name in tree if name in constants and _is_curve(tree[name])]
    if facts:
        yield Facts(facts=[(name, shorten(text)) for name, text in facts])
    known = {name for plot in described for name in plot.names} | {OWN_STEP, *constants}
    rest = [name for name in tree if name not in known]
    plots = [*described, *(MetricPlot(title=to_words(name).capitalize(), names=(name,)) for name in rest[:MOST_OTHERS])]
    for plot in plots:
        if lines := _lines(run, tree, [name for name in plot.names if name not in constants]):
            yield Plot(
                title=plot.title, lines=lines, unit=plot.unit, log=plot.log, edge=plot.edge, note=plot.note
            ).limit_lines()
    if len(rest) > MOST_OTHERS:
        yield Sentences(sentences=[f"Not drawn: {shorten(', '.join(rest[MOST_OTHERS:]), 2000)}"])


def _is_curve(value: object) -> bool:
    return isinstance(value, Curve) and len(value) > 0


def _constant(curve: Curve) -> str:
    value = curve.values[-1]
    return figure_text(int(value) if value.is_integer() else value)


def _lines(run: RunRecord, tree: Mapping[str, Any], names: Sequence[str]) -> list[Line]:
    """A line for each name; for each task where an object is by tasks; for each field of another object."""
    tasks = task_colours(run)
    curves: dict[str, Curve] = {}
    for name in names:
        value = tree.get(name)
        curves |= {to_words(name): value} if isinstance(value, Curve) else dict(value or {})
    curves = {name: curve for name, curve in curves.items() if _is_curve(curve)}
    if curves and set(curves) <= set(tasks):
        return task_lines(curves, tasks, marked_task(run.history))
    colour_of = colours(curves)
    return [Line(name=name, points=curve.points(), colour=colour_of[name]) for name, curve in curves.items()]
