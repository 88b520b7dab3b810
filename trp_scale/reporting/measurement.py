"""Result of a command that measures: figures of tasks, their table, and the directory with results.json."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import RenderableType

from trp_scale.console import Shown
from trp_scale.errors import ExitStatus
from trp_scale.reporting.comparison import compare_results, find_worst
from trp_scale.reporting.results import RESULTS_FILE, Results, judged_together
from trp_scale.training.metrics import FINISHED


@dataclass(frozen=True, kw_only=True, repr=False)
class Measurement(os.PathLike[str], Shown):
    """Result of `trp-scale finetune`, `evaluate` or `probe`, usable as the path of its directory.

    Attributes:
        path: directory with results.json.
        results: tasks with figures of each seed; those that are finished if the command was stopped.
        baseline: results of --baseline.
        reason: "finished", or why it was stopped.
        predictions: written files.
        status: exit status of the command.
        written: whether results.json was written: not for rows without labels, and not with --only.
    """

    path: Path
    results: Results
    baseline: Results | None = None
    reason: str = FINISHED
    predictions: Sequence[Path] = ()
    status: ExitStatus = ExitStatus.DONE
    written: bool = True

    @property
    def finished(self) -> bool:
        """Whether all runs are done."""
        return self.reason == FINISHED

    @property
    def scores(self) -> dict[str, float]:
        """Main figure of each task: mean over seeds."""
        return {task.task: task.mean for task in self.results.tasks}

    @property
    def worst_task(self) -> str | None:
        """Worst of the judged tasks whose figures are comparable (`judged_together`), of the first such group; `None`
        without a judged task."""
        judged = [task for task in self.results.tasks if task.judged]
        group = {task.task: task for task in judged if judged_together(task) == judged_together(judged[0])}
        return find_worst(group) if group else None

    def parts(self) -> Iterator[RenderableType]:
        """Yield the predictions, the table with the differences from the baseline, and the path of results.json."""
        yield from map(str, self.predictions)
        if self.results.tasks:
            named = {} if self.baseline is None else {"baseline": self.baseline}
            yield from compare_results({**named, "this run": self.results}).parts()
        if not self.finished:
            yield f"stopped: {self.reason}; the same call continues"
        elif self.written:
            yield str(self.path / RESULTS_FILE)

    def __fspath__(self) -> str:
        return str(self.path)
