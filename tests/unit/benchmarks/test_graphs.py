"""What torch.compile makes of a step, counted: `whole` leaves nothing between a batch and its tasks' sums outside."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from benchmarks.graphs import counted, workload_of
from tests.grids import always


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("name", always(["pos_bert_tiny", "adpe_tiny", "mm_mae_tiny"], "pos_bert_tiny"))
def test_a_whole_forward_pass_with_its_losses_is_one_graph(name: str) -> None:
    found = counted(workload_of(name), "whole")
    assert (found.graphs, found.surplus, found.outside) == (1, 0, 0)
    assert found.inside > 100


def test_what_is_not_in_a_graph_is_seen() -> None:
    plain, blocks = (counted(workload_of("pos_bert_tiny"), how) for how in ("none", "blocks"))
    assert (plain.graphs, plain.inside, blocks.graphs) == (0, 0, 2)
    assert 0 < blocks.outside < plain.outside and blocks.inside > 0
