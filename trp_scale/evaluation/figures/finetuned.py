"""Fine-tuned runs to look at, side by side, as their task draws them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path

from trp_scale.config import RefusedError
from trp_scale.config.registry import find, import_name, names
from trp_scale.distributed.environment import Environment
from trp_scale.evaluation.figures.pictures import Picture
from trp_scale.evaluation.figures.study import ImageChoice, ShownImages
from trp_scale.finetuning.finetuned_run import FinetunedRun, read_run
from trp_scale.reporting.paired_tests import names as shortest_names


class FinetunedPictures(ABC):
    """How a task shows what its runs predict. The task names the class as `pictures` (finetuning/task.py)."""

    @staticmethod  # noqa: B027 - most need nothing
    def check(run: FinetunedRun, choice: ImageChoice) -> None:
        """Raises RefusedError if the run cannot be shown on these images; asked before anything is computed."""

    @staticmethod
    @abstractmethod
    def draw(
        runs: Mapping[str, FinetunedRun], shown: ShownImages, output: Path, environment: Environment
    ) -> list[Picture]:
        """Draw the runs side by side.

        Args:
            runs: of the task, by name.
            shown: images to draw, and their features.
            output: directory for the files.

        Raises:
            DataError, RefusedError: the images lack what the task needs.
        """


def open_finetuned(runs: Sequence[Path], choice: ImageChoice) -> dict[str, FinetunedRun]:
    """The runs by name, all of one kind.

    Raises:
        RefusedError: one is no finished fine-tuned run, of a kind that has no pictures or of another kind than the
            first, or cannot be shown on these images.
    """
    runs_by_name = dict(zip(_names(runs), map(read_run, runs), strict=True)) if runs else {}
    kinds = [run.config.downstream.kind for run in runs_by_name.values()]
    for run, kind in zip(runs_by_name.values(), kinds, strict=True):
        pictures = _pictures(kind)
        if pictures is None:
            allowed = ", ".join(task for task in names("task") if _pictures(task) is not None)
            raise RefusedError(f"--run {run.directory}: fine-tuned on {kind}; allowed: {allowed}")
        if kind != kinds[0]:
            raise RefusedError(
                f"--run {run.directory}: fine-tuned on {kind}, the first on {kinds[0]}; allowed: one kind"
            )
        pictures.check(run, choice)
    return runs_by_name


def _pictures(kind: str) -> type[FinetunedPictures] | None:
    """Return the class that draws the runs of a task, or `None`."""
    location: str = find("task", kind).load().pictures
    return import_name(location) if location else None


def _names(runs: Sequence[Path]) -> list[str]:
    """Return unique names of fine-tuned runs: their task directories (DIR/TASK/seed_N) if these differ."""
    folders = [run.resolve().parent.parent.name for run in runs]
    return folders if len(set(folders)) == len(folders) else shortest_names(runs)


def finetuned_pictures(
    runs: Mapping[str, FinetunedRun], shown: ShownImages, output: Path, environment: Environment
) -> list[Picture]:
    """Draw what the kind of the runs has; nothing without runs.

    Raises:
        DataError, RefusedError: the images lack what the runs' task needs.
    """
    if not runs:
        return []
    pictures = _pictures(next(iter(runs.values())).config.downstream.kind)
    assert pictures is not None, "open_finetuned refuses the others"
    return pictures.draw(runs, shown, output, environment)
