"""New pictures of a run, as loggers take them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from PIL import Image

from trp_scale.training.sinks import NewPictures


def draw(run_dir: Path, step: int, value: int) -> None:
    folder = run_dir / "pictures" / f"step_{step:08d}"
    folder.mkdir(parents=True)
    Image.new("RGB", (12, 8), (value, 0, 0)).save(folder / "masks.png")


def test_a_picture_comes_again_when_it_was_not_taken_or_is_drawn_again(tmp_path: Path) -> None:
    new = NewPictures(tmp_path)
    draw(tmp_path, 1, 10)
    with pytest.raises(OSError):
        for _ in new.take():
            raise OSError
    assert [step for _, step, _ in new.take()] == [1] and list(new.take()) == []
    path = tmp_path / "pictures" / "step_00000001" / "masks.png"
    os.utime(path, (1, 1))
    assert [(name, step) for name, step, _ in new.take()] == [("pictures/masks", 1)]
    path.write_bytes(path.read_bytes() + bytes(5 << 20))
    assert list(new.take()) == []
