"""A run that ends by an error: nothing of it is left that its process would wait for."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest

from tests.runs import flags, pretrain_here
from trp_scale.pretraining.pos_bert.objective import PosMaskedLanguageModelling
from trp_scale.training.observer import Observer


@pytest.mark.parametrize("reported", [True, False], ids=["", "and its report fails too"])
def test_loader_workers_end_with_it(
    text_dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reported: bool
) -> None:
    before = set(multiprocessing.active_children())
    working: list[int] = []

    def fail(*_: object) -> None:
        working.append(len(set(multiprocessing.active_children()) - before))
        raise ArithmeticError("on purpose")

    if not reported:
        monkeypatch.setattr(Observer, "close", lambda *_: 1 / 0)
    monkeypatch.setattr(PosMaskedLanguageModelling, "__call__", fail)
    with pytest.raises(ArithmeticError) as raised:
        pretrain_here(flags(text_dataset, tmp_path, data__workers=1))
    assert working == [1] and raised.value.__traceback__ is not None  # which holds on to all of the run's objects
    assert set(multiprocessing.active_children()) == before
