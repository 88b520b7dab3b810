"""Descriptions and plots of a hook's metrics, registered beside its settings and drawn on the page of a run (`trp-scale
report`).

    describe_metrics(
        "adversary",
        title="Adversary",
        look_for="A share of the ball that stays near 0 means that the adversary hardly acts.",
        plots=[MetricPlot(title="Share of its ball", names=("share_of_eps",), unit="share")],
    )

A hook that describes nothing has its metrics drawn too, under their names.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from trp_scale.config.registry import names
from trp_scale.errors import RefusedError


@dataclass(frozen=True, kw_only=True)
class MetricPlot:
    """One plot of a hook's metrics.

    Attributes:
        title: of the plot.
        names: metrics of the hook, a line each; of one that is an object, a line for each of its fields.
        unit: share: shown in per cent; otherwise what stands at the axis, empty for a number without a unit.
        log: a logarithmic axis.
        edge: a value that is marked by a line, with the words beside it; None: none.
        note: what the figures are, in a sentence.
    """

    title: str
    names: tuple[str, ...]
    unit: Literal["share"] | str = ""
    log: bool = False
    edge: tuple[float, str] | None = None
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class MetricsDescription:
    """Description of a hook's metrics.

    Attributes:
        title: of its section.
        look_for: what a reader should look for, in a sentence or two.
        plots: in the order of the page; metrics that none of them names are drawn below them.
        module: that described it.
    """

    title: str
    look_for: str
    plots: tuple[MetricPlot, ...] = ()
    module: str = ""


_described: dict[str, MetricsDescription] = {}


def describe_metrics(hook: str, *, title: str, look_for: str, plots: Sequence[MetricPlot] = ()) -> None:
    """Say what the metrics of a hook are.

    Args:
        hook: the name that its object has in metrics.jsonl: `Hook.name`, or `balancer`.
        title, look_for, plots: as of MetricsDescription.

    Raises:
        RefusedError: another module describes this hook.
    """
    module = str(sys._getframe(1).f_globals["__name__"])
    known = _described.get(hook)
    if known is not None and known.module != module:
        raise RefusedError(f"{module}: the metrics of the hook {hook!r} are described already, by {known.module}")
    _described[hook] = MetricsDescription(title=title, look_for=look_for, plots=tuple(plots), module=module)


def metrics_description(hook: str) -> MetricsDescription | None:
    """Return the description of a hook's metrics, or `None`."""
    names("hook")  # imports the rooms, which describe theirs
    return _described.get(hook)
