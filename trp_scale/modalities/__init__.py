"""Modalities by name, and by the tasks that predict them. settings.py has the package's, one file holds each whole."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trp_scale.config.components import find, names
from trp_scale.errors import RefusedError, nearest

if TYPE_CHECKING:
    from trp_scale.modalities.base import Modality


def modalities() -> dict[str, type[Modality]]:
    """Every modality by its name, in the order of a sample's members."""
    return {name: find("modality", name).load() for name in names("modality")}


def modality(name: str) -> type[Modality]:
    """The modality of this name.

    Raises:
        RefusedError: there is none.
    """
    found: type[Modality] = find("modality", name, "--modalities.inputs").load()
    return found


def modality_of(task: str) -> type[Modality]:
    """The modality that a task, one of --modalities.outputs, predicts.

    Raises:
        RefusedError: there is none.
    """
    tasks = {name: kind for kind in modalities().values() for name in kind.tasks}
    if task not in tasks:
        raise RefusedError(
            f"--modalities.outputs has {task!r}: no modality has such a task{nearest(task, tasks)}\n"
            f"Known: {', '.join(tasks)}"
        )
    return tasks[task]
