"""A process whose checkpoint is half-written behind its steps, for a test to kill: python -m ... RUN_DIR SIGNAL_FILE"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path

from tests.unit.checkpoint.fake_engine import FakeEngine, random_split, whole_state
from trp_scale.checkpoint import writer as writer_module
from trp_scale.checkpoint.manager import Content
from trp_scale.checkpoint.writer import CheckpointWriter
from trp_scale.config import CheckpointConfig
from trp_scale.core.pieces import Piece
from trp_scale.distributed.groups import ALONE

if __name__ == "__main__":
    run_dir, signal = Path(sys.argv[1]), Path(sys.argv[2])
    write = writer_module.write_part

    def stalls(pieces: Iterator[Piece]) -> Iterator[Piece]:
        for number, piece in enumerate(pieces):
            if number == 3:
                signal.touch()
                time.sleep(600)
            yield piece

    passes = [lambda pieces: pieces, stalls]

    def half(temporary, rank, pieces, tensors):  # type: ignore[no-untyped-def]
        return write(temporary, rank, lambda: passes.pop(0)(pieces()), tensors)

    writer_module.write_part = half
    writer = CheckpointWriter(run_dir=run_dir, group=ALONE, settings=CheckpointConfig(every=1))
    engine = FakeEngine(0, random_split(0, 1), whole_state(0))
    writer.save(Content(step=2, engine=engine, hooks_state={}, cursors={}, config={}, extra={}))
    time.sleep(600)
