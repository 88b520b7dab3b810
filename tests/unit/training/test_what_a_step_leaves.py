"""What a step leaves behind: with many micro-batches a step, no batch and no open file of past steps."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch import Tensor

from tests.runs import flags, pretrain_here
from trp_scale.core.batch import Batch
from trp_scale.core.hooks import StepContext
from trp_scale.training.loop import Trainer

STEPS = 200
MICRO_BATCHES = 4


@pytest.fixture
def no_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.exhaustive
@pytest.mark.usefixtures("no_collection")
def test_batches_and_open_files_stay_as_many_over_two_hundred_steps(
    text_dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reference counts alone must free them: the collector may not run for a thousand steps."""
    seen: weakref.WeakSet[Batch] = weakref.WeakSet()
    alive: list[int] = []
    files: list[int] = []
    context = Trainer.context

    def watched(self: Trainer, window: list[Batch], counts: Tensor) -> StepContext:
        alive.append(len(seen))  # of the steps before this one
        files.append(len(list(Path("/proc/self/fd").iterdir())))
        seen.update(window)
        return context(self, window, counts)

    monkeypatch.setattr(Batch, "__hash__", object.__hash__, raising=False)
    monkeypatch.setattr(Trainer, "context", watched)
    small = {"model__layers": 1, "model__hidden_size": 16, "model__heads": 1, "model__intermediate_size": 16}
    sizes = {"batch__global_size": MICRO_BATCHES, "batch__micro_size": 1, "training__steps": STEPS}
    assert pretrain_here(flags(text_dataset, tmp_path, **small, **sizes, data__workers=1, checkpoint__every=0)) == 0
    assert len(alive) == STEPS
    assert max(alive) == 0, "a past step's batches are alive"
    # What the loader has ready ahead of the loop comes and goes; a file for each of a step's tensors would not.
    assert max(files[STEPS // 2 :]) <= max(files[10 : STEPS // 2]) + MICRO_BATCHES
