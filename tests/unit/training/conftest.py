"""Observers of small runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.unit.training.small_run import TASKS
from trp_scale.config import Config
from trp_scale.pretraining.pos_bert.settings import PosBertConfig
from trp_scale.training.metrics import RunInfo
from trp_scale.training.observer import Observer


@pytest.fixture
def config() -> Config:
    settings = PosBertConfig()
    settings.training.steps = 20
    settings.logging.every = 1
    return settings


@pytest.fixture
def info() -> RunInfo:
    return RunInfo(
        positions_per_step=1000, flops_per_step=2e9, outside_tasks=("other",), description="plain, 1 rank, fp32"
    )


@pytest.fixture
def start(tmp_path: Path, config: Config, info: RunInfo) -> Callable[..., Observer]:
    """Make an observer of the run directory tmp_path/run."""

    def make(**changes: Any) -> Observer:
        return Observer(tmp_path / "run", config, TASKS, info, **changes)

    return make
