"""Fixtures of the planner's tests."""

from __future__ import annotations

import pytest

from trp_scale.config.loader import load_recipe
from trp_scale.planning.counting import Counted
from trp_scale.pretraining.base import DataFacts


@pytest.fixture(scope="module")
def counted() -> Counted:
    config = load_recipe("pos_bert_tiny")
    config.batch.global_size, config.batch.micro_size, config.training.precision = 4096, "auto", "bf16"
    config.data.path = "(none)"
    return Counted(config, DataFacts(length=64, vocabulary=8000))
