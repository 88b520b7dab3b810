"""How a run stands, for whoever looks at it: losses smoothed over steps, and what the last lines of metrics say."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trp_scale.training.records import RunInfo, StepRecord

HORIZON = 20
"""Steps that a shown loss looks back over: an exponential moving average, without the bias of its start."""

POINTS = 64
"""A curve has at most so many; the longer the run, the further apart."""

BLOCKS = "▁▂▃▄▅▆▇█"


@dataclass(kw_only=True)
class SparkLine:
    """A loss over the steps.

    Attributes:
        points: smoothed, at even distances.
        first: the first value.
    """

    points: list[float] = field(default_factory=list)
    first: float = 0.0
    _sum: float = 0.0
    _weight: float = 0.0
    _seen: int = 0
    _stride: int = 1

    def add(self, value: float) -> None:
        """The loss of one more step."""
        if not self._seen:
            self.first = value
        self._sum += (value - self._sum) / HORIZON
        self._weight += (1.0 - self._weight) / HORIZON
        self._seen += 1
        if self._seen % self._stride == 0:
            self.points.append(self.now)
        if len(self.points) == POINTS:
            self.points, self._stride = self.points[1::2], 2 * self._stride

    @property
    def now(self) -> float:
        """The smoothed loss."""
        return self._sum / self._weight

    @property
    def change(self) -> float:
        """Since the first value."""
        return self.now - self.first

    def drawn(self, width: int) -> str:
        """The curve in one line of so many characters, from its lowest to its highest."""
        return sparks([self.points[place * len(self.points) // width] for place in range(width)] if self.points else [])


def sparks(values: Sequence[float]) -> str:
    """One character for each value."""
    low, high = min(values, default=0.0), max(values, default=0.0)
    scale = (len(BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(BLOCKS[round(scale * (value - low))] for value in values)


class Standing:
    """State of a run so far.

    Args:
        info: of the run.
    Attributes:
        curves: of the tasks that have been there.
        record: of the last step; None before it.
    """

    def __init__(self, info: RunInfo) -> None:
        self.info = info
        self.curves: dict[str, SparkLine] = {}
        self.record: StepRecord | None = None
        self._loss = SparkLine()
        self._worst: str | None = None
        self._speed = 0.0
        self._line: Mapping[str, Any] = {}
        self._validation: tuple[int, float] | None = None
        self._right: dict[str, float] = {}
        self._hooks: dict[str, str] = {}

    def update(self, record: StepRecord, positions_per_second: float, worst_task: str | None) -> None:
        """A step was made."""
        self.record, self._speed, self._worst = record, positions_per_second, worst_task
        self._loss.add(record.loss)
        for name, task in record.tasks.items():
            if task.loss is not None:
                self.curves.setdefault(name, SparkLine()).add(task.loss)

    def line(self, line: Mapping[str, Any]) -> None:
        """A line of metrics was written."""
        self._line = {**self._line, **line}
        validation = line.get("validation") or {}
        if (loss := validation.get("loss")) is not None:
            self._validation = line["step"], loss
            right = {name: figures.get("accuracy") for name, figures in validation.get("tasks", {}).items()}
            self._right = {name: share for name, share in right.items() if share is not None}
        self._hooks |= hook_lines(self.info, line)

    def steps(self) -> str:
        """Loss, worst task and speed, in one line."""
        assert self.record is not None, "a step was made"
        parts = [f"loss {self._loss.now:.4f}", f"lr {self.record.lr:.2e}"]
        if self._worst is not None and len(self.record.tasks) > 1:
            curve = self.curves[self._worst]
            change = f" ({curve.change:+.4f})" if len(curve.points) > 1 else ""
            parts.append(f"worst {self._worst} {curve.now:.4f}{change}")
        return "  ".join([*parts, speed(self.info, self._speed)])

    def more(self) -> Iterator[str]:
        """Yield further lines of the display."""
        parts = []
        if self._validation is not None:
            parts.append(f"held out {self._validation[1]:.4f} at step {self._validation[0]}")
        if memory := self._line.get("peak_memory_bytes"):
            parts.append(f"memory {memory / 2**30:.1f} GiB")
        if (share := self._line.get("data_wait_share")) is not None:
            parts.append(f"waits for data {share:.0%}")
        if parts:
            yield "  ".join(parts)
        if self._right:
            yield "right of those held out: " + "  ".join(f"{name} {share:.1%}" for name, share in self._right.items())
        yield from self._hooks.values()


def hook_lines(info: RunInfo, line: Mapping[str, Any]) -> dict[str, str]:
    """Return the display line of each hook in a metrics line: "adversary: norm 0.12 effect 0.004"."""
    lines = {}
    for hook, names in info.shown.items():
        values = line.get(hook) or {}
        found = [f"{name.replace('_', ' ')} {values[name]:.4g}" for name in names if values.get(name) is not None]
        if found:
            lines[hook] = f"{hook}: {'  '.join(found)}"
    return lines


def speed(info: RunInfo, positions_per_second: float) -> str:
    """Return images/s for image runs, tokens/s otherwise."""
    if info.images_per_step:
        return f"{info.image_count(positions_per_second):,.0f} images/s"
    return f"{positions_per_second:,.0f} tokens/s"
