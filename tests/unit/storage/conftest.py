"""A cache of its own for each test, and little patience."""

from __future__ import annotations

from pathlib import Path

import pytest

from trp_scale.storage import transfer


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache's directory."""
    monkeypatch.setenv("TRP_SCALE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("TRP_SCALE_REMOTE_SECONDS", "20")
    monkeypatch.setattr(transfer, "FIRST_PAUSE", 0.01)
    return tmp_path / "cache"
