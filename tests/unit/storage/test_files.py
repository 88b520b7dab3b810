"""What is written whole or not at all."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from trp_scale.storage.files import write_text


def test_a_disk_without_room_leaves_the_file_as_it_was_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_text(tmp_path / "page.html", "before")

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_text(tmp_path / "page.html", "after")
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]
    assert (tmp_path / "page.html").read_text() == "before"
