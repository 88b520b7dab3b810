"""The PNG files in a run directory: pictures over time, by the steps in their names."""

from __future__ import annotations

import re
from pathlib import Path

PICTURES = "pictures"
"""Folder of a run directory whose PNG files are shown on its page, and go to Weights & Biases and TensorBoard."""


class NewPictures:
    """The PNG files of RUN/pictures that were not there before."""

    def __init__(self, run_dir: Path) -> None:
        self._folder = run_dir / PICTURES
        self._known = set(pictures_of(self._folder))

    def take(self) -> list[tuple[str, int, Path]]:
        """(what it shows, step, file) of each that has come since the last call."""
        new = [path for path in pictures_of(self._folder) if path not in self._known]
        self._known.update(new)
        return [(f"{PICTURES}/{re.sub('_?[0-9]+$', '', path.stem)}", _step(self._folder, path), path) for path in new]


def pictures_of(folder: Path) -> list[Path]:
    """The PNG files in a folder and the folders in it, in the order of the last numbers in their names."""
    found = [path for pattern in ("*.png", "*/*.png") for path in folder.glob(pattern) if path.is_file()]
    return sorted(found, key=lambda path: (_step(folder, path), str(path)))


def _step(folder: Path, path: Path) -> int:
    """The last number in the path of a picture; 0 without one."""
    return int((re.findall(r"\d+", str(path.relative_to(folder))) or ["0"])[-1])
