"""Fine-tuned runs to look at, side by side."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from trp_scale.config import RefusedError
from trp_scale.distributed.environment import Environment
from trp_scale.downstream.compare import names
from trp_scale.downstream.finetuned_run import FinetunedRun, read_run
from trp_scale.downstream.pictures import Picture
from trp_scale.downstream.representation.classifier_pictures import classifier_pictures
from trp_scale.downstream.representation.images import ImageChoice
from trp_scale.downstream.representation.pixel_pictures import pixel_pictures
from trp_scale.downstream.representation.study import ShownImages

Draw = Callable[[Mapping[str, FinetunedRun], ShownImages, Path, Environment], list[Picture]]

PICTURES: dict[str, Draw] = {
    "classification": classifier_pictures,
    "segmentation": pixel_pictures,
    "depth": pixel_pictures,
}
"""What is drawn, by downstream.kind."""


def open_finetuned(runs: Sequence[Path], choice: ImageChoice) -> dict[str, FinetunedRun]:
    """The runs by name, all of one kind.

    Raises:
        RefusedError: one is no finished fine-tuned run, of a kind that has no pictures or of another kind than the
            first, or a classifier of other classes than the images have.
    """
    found = dict(zip(_names(runs), map(read_run, runs), strict=True)) if runs else {}
    kinds = [run.config.downstream.kind for run in found.values()]
    for run, kind in zip(found.values(), kinds, strict=True):
        if kind not in PICTURES:
            raise RefusedError(f"--run {run.directory}: fine-tuned on {kind}; allowed: {', '.join(PICTURES)}")
        if kind != kinds[0]:
            raise RefusedError(
                f"--run {run.directory}: fine-tuned on {kind}, the first on {kinds[0]}; allowed: one kind"
            )
        if kind == "classification":
            _check_classes(run, choice)
    return found


def _names(runs: Sequence[Path]) -> list[str]:
    """Those of the directories that trp-scale finetune was given (DIR/TASK/seed_N), if they tell the runs apart."""
    given = [run.resolve().parent.parent.name for run in runs]
    return given if len(set(given)) == len(given) else names(runs)


def _check_classes(run: FinetunedRun, choice: ImageChoice) -> None:
    classes, count = choice.classes, run.config.downstream.classes
    other_names = run.classes is not None and choice.dataset.meta.classes not in (None, run.classes)
    if classes and (other_names or len(classes) > count):
        raise RefusedError(
            f"--run {run.directory}: tells {count} classes apart, {choice.dataset.directory} has {len(classes)}, or of "
            "other names; allowed: a run of the same classes"
        )


def finetuned_pictures(
    runs: Mapping[str, FinetunedRun], shown: ShownImages, output: Path, environment: Environment
) -> list[Picture]:
    """Draw what the kind of the runs has; nothing without runs.

    Raises:
        RefusedError: the images lack the maps of the runs' task.
    """
    if not runs:
        return []
    kind = next(iter(runs.values())).config.downstream.kind
    return PICTURES[kind](runs, shown, output, environment)
