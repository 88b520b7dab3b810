"""The section of a run's pictures: PNG files of its directory, over time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from trp_scale.checkpoint.run_directory import PICTURES
from trp_scale.reporting.document import Pictures, Section
from trp_scale.reporting.record import RunRecord
from trp_scale.training.picture_files import LARGEST_PICTURE, pictures_of

MOST_PICTURES = 12
"""Pictures on a page, which is one file."""


def pictures_section(run: RunRecord, drawn: Sequence[Path] = ()) -> Section:
    """PNG files of RUN/pictures, by the steps in their names, and those that were drawn just now."""
    folders: dict[Path, list[tuple[str, bytes]]] = {}  # of a step each, or of files without one
    for path in dict.fromkeys(path.resolve() for path in [*pictures_of(run.run_dir / PICTURES), *drawn]):
        content = path.read_bytes()
        if content.startswith(b"\x89PNG") and len(content) <= LARGEST_PICTURE:
            own = path.parent if path.parent.parent.name == PICTURES else path
            folders.setdefault(own, []).append((_caption(path), content))
    steps = list(folders.values())
    most = max(2, MOST_PICTURES // max(map(len, steps), default=1))
    if len(steps) > most:  # evenly over time, the first and the last among them
        steps = [steps[round(place * (len(steps) - 1) / (most - 1))] for place in range(most)]
    pictures = [picture for step in steps for picture in step]
    look_for = "What is predicted and what is hidden, oldest first: whether masks follow the image, and what changes."
    return Section(
        name="pictures", title="Pictures", look_for=look_for, blocks=[Pictures(pictures=pictures)] if pictures else []
    )


def _caption(path: Path) -> str:
    folder = "" if path.parent.name == PICTURES else f"{path.parent.name} / "
    return f"{folder}{path.stem.replace('_', ' ')}"
