"""A run that goes back to a checkpoint before a spike is gone before the next one is made: both may not fit."""

from __future__ import annotations

import weakref
from types import SimpleNamespace

from trp_scale.exit_status import ExitStatus
from trp_scale.training.pretrain import Rollback, Run, train_run


def test_the_run_before_is_gone_when_the_next_is_made() -> None:
    made: list[weakref.ref[object]] = []
    alive: list[bool] = []

    class Spiked:
        """As `trained` sees a run; a reference cycle, as a run and its trainer are."""

        def __init__(self, over: Rollback | None) -> None:
            self.rollback, self.itself = over, self
            self.sources = SimpleNamespace(cursors=lambda: {"train": 8})
            self.should_roll_back = over is None or over.rollbacks < 2

        def train(self, then: object) -> ExitStatus:
            return ExitStatus.DIVERGED if self.should_roll_back else ExitStatus.DONE

    def make(over: Rollback | None) -> Run:
        alive.append(any(each() is not None for each in made))
        run = Spiked(over)
        made.append(weakref.ref(run))
        return run  # type: ignore[return-value]

    last, status = train_run(make)
    assert (last.rollback, status) == (Rollback({"train": 8}, 2), ExitStatus.DONE)
    assert alive == [False] * 3
