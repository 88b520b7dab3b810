"""Python's garbage collector runs between steps, at set ones, and as before once a run has ended."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

from tests.synthetic import Layout, RecordingTrainer, SilentObserver, small_config, trainer_for
from trp_scale.training import loop

STEPS, EVERY = 9, 3


class Told(SilentObserver):
    """Keeps its messages."""

    def __init__(self) -> None:
        self.messages: list[str] = []

    def message(self, text: str) -> None:
        self.messages.append(text)


class Cycle:
    """Held by itself."""

    def __init__(self) -> None:
        self.itself = self


class Watched:
    """A run's trainer, with the steps done when the collector ran, and those within which it ran."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        config = small_config(Layout(), training={"steps": STEPS}, validation={"every": 0}, checkpoint={"every": 0})
        self.trainer: RecordingTrainer = trainer_for(Layout(), config)
        self.trainer.observer = self.told = Told()  # type: ignore[assignment]
        self.trainer.control.save = lambda: None
        self.between: list[int] = []
        self.within: list[int] = []
        self.left: list[weakref.ref[Cycle]] = []
        self.alive: list[int] = []
        self.stepping = False
        train_step = self.trainer.train_step

        def watched() -> str | None:
            self.stepping = True
            kept: list[Any] = [[] for _ in range(1000)]  # many more objects than the collector waits for
            self.left.append(weakref.ref(Cycle()))
            try:
                return train_step()
            finally:
                self.stepping = False
                kept.clear()

        monkeypatch.setattr(self.trainer, "train_step", watched)

    def noted(self, phase: str, info: dict[str, int]) -> None:
        if phase == "stop":
            self.alive.append(sum(each() is not None for each in self.left))
        else:
            (self.within if self.stepping else self.between).append(self.trainer.state.step)


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[Watched]:
    monkeypatch.setattr(loop, "COLLECT_EVERY", EVERY)
    monkeypatch.setattr(loop, "gc", gc)  # tests/young_objects.py
    thresholds = gc.get_threshold()
    found = Watched(monkeypatch)
    gc.callbacks.append(found.noted)
    gc.set_threshold(100, 2, 2)
    yield found
    gc.set_threshold(*thresholds)
    gc.callbacks.remove(found.noted)


def test_by_itself_it_would_run_within_steps(watched: Watched) -> None:
    watched.trainer.train_step()
    assert watched.within


def test_it_runs_between_steps_only_and_frees_what_they_left(watched: Watched) -> None:
    assert watched.trainer.run() == "finished"
    assert watched.within == []
    times = zip(watched.between, watched.alive, strict=True)
    assert [(step, alive) for step, alive in times if 0 < step < STEPS] == [(1, 0), (3, 0), (6, 0)]
    assert gc.isenabled() and gc.get_freeze_count() == 0
    assert not watched.told.messages, "a reader of the log has nothing to do about it"


def test_after_an_error_it_is_as_before(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watched.trainer, "train_step", lambda: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        watched.trainer.run()
    assert gc.isenabled() and gc.get_freeze_count() == 0


def test_where_it_was_off_it_stays_off(watched: Watched) -> None:
    gc.disable()
    try:
        watched.trainer.run()
        assert not gc.isenabled()
    finally:
        gc.enable()
