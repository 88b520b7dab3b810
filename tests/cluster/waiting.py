"""Wait for what other processes do."""

from __future__ import annotations

import time
from collections.abc import Callable


def wait_until(true: Callable[[], object], what: str, seconds: float = 300.0) -> None:
    """Look every tenth of a second."""
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, f"not after {seconds:g} s: {what}"
        time.sleep(0.1)
