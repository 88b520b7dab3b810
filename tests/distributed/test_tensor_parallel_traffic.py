"""What ranks that share matrices send each other in a step is what the planner says."""

from __future__ import annotations

from itertools import product

import pytest

from benchmarks.plan_checks import predicted
from benchmarks.wire import Options, counted_of
from tests.distributed.engine_layouts import needs_megatron
from tests.grids import always
from tests.ranks import Ranks
from trp_scale.distributed.environment import Environment

pytestmark = needs_megatron

SMALL = Options(layers=2, hidden_size=128, rows=4)
IMAGES = Options(layers=2, hidden_size=128, rows=4, model="mae")
"""50 tokens divide over two ranks; the 37 that end the decoder do not."""


def counted(options: Options, name: str, world: int, accumulation: int) -> tuple[int, int]:
    """Collectives of a step, and their bytes on the wire."""
    with Environment() as environment:
        found = counted_of(environment, name, options, world, accumulation)
    return sum(found.calls.values()), sum(found.bytes.values()) + found.bytes["all-reduce"]


def agree(ranks: Ranks, name: str, accumulation: int, options: Options = SMALL) -> None:
    calls, sent, _ = predicted(name, options, ranks.world, accumulation)
    for found in ranks(counted, options, name, ranks.world, accumulation):
        assert found == (pytest.approx(calls, rel=0.1), pytest.approx(sent, rel=0.1))


@pytest.mark.parametrize(("name", "accumulation"), always(product(["tp1", "tp2", "tp2sp"], [1, 4]), ("tp2", 4)))
def test_two_ranks_send_what_is_predicted(two_ranks: Ranks, name: str, accumulation: int) -> None:
    agree(two_ranks, name, accumulation)


@pytest.mark.parametrize(("name", "accumulation"), always([("tp2", 1), ("tp2sp", 1), ("tp2sp", 4)], ("tp2sp", 1)))
def test_of_images_too(two_ranks: Ranks, name: str, accumulation: int) -> None:
    agree(two_ranks, name, accumulation, IMAGES)


@pytest.mark.exhaustive
@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("name", ["tp1", "tp2", "tp2sp"])
def test_four_ranks_send_what_is_predicted(four_ranks: Ranks, name: str, accumulation: int) -> None:
    agree(four_ranks, name, accumulation)
    agree(four_ranks, name, accumulation, IMAGES)
