"""The sections of what a run learns: losses of its tasks, held-out figures, the loss in all and its optimizer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from trp_scale.errors import shorten
from trp_scale.reporting.curves import MOST_POINTS, Curve, Points
from trp_scale.reporting.document import Cell, Section, Table, figure_text, number_cell
from trp_scale.reporting.figures import Colour, Line, Plot, colours
from trp_scale.reporting.record import RunRecord
from trp_scale.training.metrics import end_begins
from trp_scale.training.report import RANDOM_MASKS, changes_in_words, held_out_name, lesson_line

ALL = "all tasks"
"""The loss over tasks, in legends."""


def worst_task(run: RunRecord) -> str | None:
    """The worst of several tasks; None where there is one."""
    return run.history.worst_task if len(run.history.tasks) > 1 else None


FEW_LINES = 3
POINTS_OF_MANY = 100
"""Curves of more lines than that are drawn in so many points: the noise of one task would hide the others."""


def lines_of(curves: Mapping[str, Curve], colour_of: Mapping[str, Colour], worst: str | None = None) -> list[Line]:
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
    names = [*run.history.tasks, *(name for own in run.curves.held_out.values() for name in own)]
    return colours(name for name in names if name)


def tasks_section(run: RunRecord) -> Section:
    """Losses of each task, the held-out ones beside them, and a table of both."""
    worst, colour_of = worst_task(run), task_colours(run)
    several = len(run.history.tasks) > 1
    plots = [Plot(title="Training loss", lines=lines_of(run.curves.losses, colour_of, worst))]
    held_out = {name: {task: one for task, one in own.items() if task} for name, own in run.curves.held_out.items()}
    titles = {"loss": f"Held-out loss ({RANDOM_MASKS})" if run.history.lesson is not None else "Held-out loss"}
    for name, own in sorted(held_out.items(), key=lambda item: item[0] != "loss"):
        if lines := lines_of(own, colour_of, worst):
            unit = "share" if name == "accuracy" else ""
            plots.append(Plot(title=titles.get(name, f"Held-out {words(name)}"), lines=lines, unit=unit))
    look_for = "How far each loss has come down, and whether the held-out one comes down with it."
    if several:
        look_for = (
            "Whether the worst task, drawn thick, comes down: that is what the run is for. Held-out losses that rise "
            "while training losses fall mean that rows are being learned by heart."
        )
    plots = [plot.shown() for plot in plots if plot.lines]
    return Section(
        name="losses",
        title="Losses of the tasks" if several else "Loss",
        look_for=look_for,
        blocks=[*plots, task_table(run)],
    )


def task_table(run: RunRecord) -> Table:
    """A row a task: start, end, change, weight, elements, and what was measured on held-out rows."""
    history, worst, colour_of = run.history, worst_task(run), task_colours(run)
    measured = (history.validation or {}).get("tasks", {})
    figures = [name for name, own in run.curves.held_out.items() if any(own)]
    head = ["task", "start", "end", "change", "in %", "weight", "elements"]
    loss = f"held out ({RANDOM_MASKS})" if history.lesson is not None else "held out"
    head += [loss if name == "loss" else words(name) for name in figures]
    rows = []
    for name, task in history.tasks.items():
        share = task.change / task.start if task.change is not None and task.start else None
        label = (
            f"{name} · worst" if name == worst else f"{name} · not balanced" if name in history.outside_tasks else name
        )
        cells = [Cell(text=label, colour=colour_of[name])]
        cells += [number_cell(task.start), number_cell(task.end), number_cell(task.change, sign=True)]
        cells += [number_cell(share, sign=True, unit="share"), number_cell(task.weight)]
        cells.append(number_cell(task.count))
        for figure in figures:
            unit = "share" if figure == "accuracy" else ""
            cells.append(number_cell(measured.get(name, {}).get(figure), unit=unit))
        rows.append(cells)
    marked = tuple(place for place, name in enumerate(history.tasks) if name == worst)
    first, last = end_begins(history.last_step), history.last_step
    return Table(head=head, rows=rows, marked=marked, note=_of_which_steps(run, first, last))


def _of_which_steps(run: RunRecord, first: int, last: int) -> str:
    steps = f"step {last:,}" if first == last else f"steps {first:,} to {last:,}"
    note = (
        f"Start: the first logged step that had the task. End and weight: means over the run's last tenth, {steps}, "
        "losses weighted by their elements, which the column beside counts there."
    )
    if run.history.validation_step is not None:
        note += f" On held-out rows: after step {run.history.validation_step:,}."
    if run.history.outside_tasks:
        note += " Not balanced: its weight is fixed, and it is never the worst."
    return note


def words(name: str) -> str:
    """A metric's name as words."""
    return name.replace("_", " ")


def optimizer_section(run: RunRecord) -> Section:
    """The loss that is minimised, the learning rate and the gradient's norm."""
    return Section(
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
        if len(own := run.curves.held_out.get("loss", {}).get("", Curve())):
            lines = [Line(name="held out", points=own.points(), colour=held_out)]
            yield Plot(title=held_out_name(run.history).capitalize(), lines=lines)
    for name, title, colour in (("lr", "Learning rate", rate), ("grad_norm", "Norm of the gradient", norm)):
        curve = fields.get(name)
        if isinstance(curve, Curve) and len(curve):
            yield Plot(title=title, lines=[Line(name=name, points=curve.points(), colour=colour)])


def lead(run: RunRecord) -> list[str]:
    """Describe how the run ended and which tasks improved, in sentences."""
    history = run.history
    found = [run.state.sentence]
    if history.loss_start is not None and history.loss_end is not None:
        found.append(f"The loss {_moved(history.loss_start, history.loss_end)} in {history.last_step:,} steps.")
    if (worst := worst_task(run)) is not None:
        task = history.tasks[worst]
        if task.start is not None and task.end is not None:
            found.append(f"The worst task, {worst}, {_moved(task.start, task.end)}.")
    found += [_sentence(line) for line in changes_in_words(history)]
    own = run.curves.held_out.get("loss", {}).get("", Curve())
    if len(own):
        found.append(_held_out(own, held_out_name(run.history)))
    if history.lesson is not None:
        found.append(_sentence(lesson_line(history.lesson)))
    if history.skipped_steps:
        found.append(
            f"{history.skipped_steps:,} steps were skipped: their loss or gradient was not finite, or a spike."
        )
    return found + [_sentence(f"{hook}: {shorten(notice, 1000)}") for hook, notice in history.notices.items()]


def _sentence(line: str) -> str:
    """A line of the report's text as a sentence."""
    return f"{line[:1].upper()}{line[1:]}{'.' * (not line.endswith('.'))}"


def _moved(start: float, end: float) -> str:
    change = (end - start) / abs(start) if start else 0.0
    if abs(change) < 0.005:
        return f"stayed at {figure_text(end)}"
    return f"{'fell' if end < start else 'rose'} from {figure_text(start)} to {figure_text(end)} ({change:+.0%})"


def _held_out(curve: Curve, name: str) -> str:
    """Describe the first and last held-out loss, and the minimum if it is earlier."""
    last, first = curve.values[-1], curve.values[0]
    if len(curve) == 1:
        return f"The {name} is {figure_text(last)} after step {curve.steps[-1]:,.0f}."
    best = min(range(len(curve)), key=lambda place: curve.values[place])
    found = f"The {name} {_moved(first, last)} from step {curve.steps[0]:,.0f} to {curve.steps[-1]:,.0f}"
    if curve.values[best] < last - 0.005 * abs(last):
        found += f", and was lowest, {figure_text(curve.values[best])}, at step {curve.steps[best]:,.0f}"
    return f"{found}."
