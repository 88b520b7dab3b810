"""Blocks that are compiled one by one, on every engine that can: the run that is not compiled."""

from __future__ import annotations

from functools import lru_cache, partial
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from tests.parity.compare import too_far
from tests.ranks import Ranks
from tests.synthetic import TWO_RANKS, Layout, Result, make_engine, run, small_config
from trp_scale.core.engine import EngineError
from trp_scale.distributed.groups import ALONE

CHANGES: dict[str, Any] = {"optimizer": {"eps": 1e-4}, "balancer": {"kind": "minimax", "estimate": "exact"}}
GRAPHS = 4
"""A block and the last one, each with gradients and without (the pass that finds the weights)."""


def compiled(layout: Layout) -> tuple[Result, int]:
    """A run, and how many graphs were made; traced by aot_eager, since the default backend takes minutes of a C++
    compiler."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
        torch._dynamo.reset()
        counters.clear()
        found = run(layout, {**CHANGES, "training": {"compile": "blocks", "steps": 5}})
        return found, counters["stats"]["unique_graphs"]


@lru_cache
def reference() -> Result:
    return run(Layout(micro_size=2), {**CHANGES, "training": {"steps": 5}})


def test_one_rank_gives_the_weights_of_the_plain_run() -> None:
    found, graphs = compiled(Layout(micro_size=2))
    assert found.moved and too_far(found, reference()) == []
    assert graphs == GRAPHS


@pytest.mark.parametrize("layout", ["ddp", "fsdp", "zero1", "zero2"])
def test_two_ranks_give_the_weights_of_the_plain_run(two_ranks: Ranks, layout: str) -> None:
    found, graphs = two_ranks(compiled, TWO_RANKS[layout])[0]
    assert too_far(found, reference()) == []
    assert graphs == GRAPHS


def refused(layout: Layout) -> str:
    with pytest.raises(EngineError) as caught:
        make_engine(layout, small_config(layout, training={"compile": "blocks"}), ALONE)
    return str(caught.value)


def test_stage_3_is_refused(two_ranks: Ranks) -> None:
    assert "does not work with ZeRO stage 3" in two_ranks(refused, TWO_RANKS["zero3"])[0]
