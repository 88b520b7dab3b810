"""A process that stops in the middle of writing a checkpoint, for a test to kill: python -m ... RUN_DIR SIGNAL_FILE"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path

from tests.unit.checkpoint.fake_engine import FakeEngine, random_split, save_step, whole_state
from trp_scale.core.pieces import Piece


class Stalled(FakeEngine):
    """Never finishes going through its pieces the second time, when their values are written."""

    signal: Path
    passes = 0

    def pieces(self) -> Iterator[Piece]:
        self.passes += 1
        for number, piece in enumerate(super().pieces()):
            if self.passes == 2 and number == 3:
                self.signal.touch()
                time.sleep(600)
            yield piece


if __name__ == "__main__":
    engine = Stalled(0, random_split(0, 1), whole_state(0))
    engine.signal = Path(sys.argv[2])
    save_step(Path(sys.argv[1]), 2, engine=engine)
