"""The PNG files in a run directory: pictures over time, by the steps in their names."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from trp_scale.checkpoint.run_directory import PICTURES, SET_ASIDE

LARGEST_PICTURE = 4 << 20
"""Bytes of one that is taken."""


class NewPictures:
    """The PNG files of RUN/pictures that were not there before, or were drawn again."""

    def __init__(self, run_dir: Path) -> None:
        self._folder = run_dir / PICTURES
        self._known = {self._drawn(path) for path in pictures_of(self._folder)}

    def take(self) -> Iterator[tuple[str, int, Path]]:
        """(what it shows, step, file) of each that has come since the last call; one whose turn ends in an error comes
        again."""
        for path in pictures_of(self._folder):
            if (drawn := self._drawn(path)) not in self._known and path.stat().st_size <= LARGEST_PICTURE:
                yield f"{PICTURES}/{re.sub('_?[0-9]+$', '', path.stem)}", _step(self._folder, path), path
                self._known.add(drawn)

    def _drawn(self, path: Path) -> tuple[Path, int]:
        return path, path.stat().st_mtime_ns


def pictures_of(folder: Path) -> list[Path]:
    """The PNG files in a folder and the folders in it, in the order of the last numbers in their names; not those of
    steps that the run went back behind."""
    found = [path for pattern in ("*.png", "*/*.png") for path in folder.glob(pattern) if path.is_file()]
    found = [path for path in found if not path.parent.name.startswith(SET_ASIDE)]
    return sorted(found, key=lambda path: (_step(folder, path), str(path)))


def _step(folder: Path, path: Path) -> int:
    """The last number in the path of a picture; 0 without one."""
    return int((re.findall(r"\d+", str(path.relative_to(folder))) or ["0"])[-1])
