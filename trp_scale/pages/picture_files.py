"""The section of a run's pictures: PNG files of its directory, over time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from trp_scale.observe.picture_files import PICTURES, pictures_of
from trp_scale.pages.document import Pictures, Section
from trp_scale.pages.record import RunRecord

MOST_PICTURES = 12
LARGEST_PICTURE = 4 << 20
"""Pictures on a page, and bytes of one: the page is one file."""


def pictures_section(run: RunRecord, drawn: Sequence[Path] = ()) -> Section:
    """PNG files of RUN/pictures, by the steps in their names, and those that were drawn just now."""
    found = [*pictures_of(run.run_dir / PICTURES), *drawn]
    pictures = []
    for path in dict.fromkeys(path.resolve() for path in found):
        content = path.read_bytes()
        if content.startswith(b"\x89PNG") and len(content) <= LARGEST_PICTURE:
            pictures.append((_caption(path), content))
    if len(pictures) > MOST_PICTURES:  # evenly over time, the first and the last among them
        places = [round(place * (len(pictures) - 1) / (MOST_PICTURES - 1)) for place in range(MOST_PICTURES)]
        pictures = [pictures[place] for place in places]
    look_for = "What is predicted and what is hidden, oldest first: whether masks follow the image, and what changes."
    return Section(
        name="pictures", title="Pictures", look_for=look_for, blocks=[Pictures(pictures=pictures)] if pictures else []
    )


def _caption(path: Path) -> str:
    folder = "" if path.parent.name == PICTURES else f"{path.parent.name} / "
    return f"{folder}{path.stem.replace('_', ' ')}"
