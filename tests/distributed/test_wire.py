"""What travels between ranks in a step (benchmarks/wire.py counts it): no more than this, and between ranks that share
matrices what the planner says."""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import Any

import pytest
from torch import nn

from benchmarks.plan_checks import predicted
from benchmarks.wire import CountsCollectives, Options, counted_of
from tests.distributed.engine_layouts import LAYOUTS, needs_megatron
from tests.grids import always
from tests.ranks import Ranks
from tests.synthetic import Layout, small_config, trainer_for
from trp_scale.distributed.environment import Environment

MOST = {
    "ddp": ((3, 8.1), (3, 8.1)),
    "fsdp": ((11, 10.9), (26, 31.4)),
    "zero1": ((10, 8.1), (10, 8.1)),
    "zero2": ((10, 8.1), (25, 20.1)),
    "zero3": ((46, 8.1), (55, 31.5)),
}
"""Collectives of a step, and bytes a parameter on the wire, with one micro-batch and with four."""
HALF = {"precision": "bf16", "weights": "bf16", "gradients": "bf16"}


def counted(layout: Layout, accumulation: int, training: dict[str, str]) -> tuple[int, float]:
    batch = {"global_size": 8, "micro_size": 4 // accumulation}
    config = small_config(layout, batch=batch, balancer={"kind": "uniform"}, training=training)
    trainer = trainer_for(layout, config)
    parameters = sum(tensor.numel() for tensor in trainer.engine.full_weights().values())
    trainer.engine.train(True)
    trainer.train_step()
    with CountsCollectives() as found:
        trainer.train_step()
    trainer.engine.close()
    wire = sum(found.bytes.values()) + found.bytes["all-reduce"]
    return sum(found.calls.values()), wire / max(parameters, 1)


@pytest.mark.parametrize("name", always(MOST, "ddp", "fsdp", "zero2", "zero3"))
def test_no_more_travels_than_did(two_ranks: Ranks, name: str) -> None:
    for accumulation, (calls, wire) in zip((1, 4), MOST[name], strict=True):
        found = two_ranks(counted, LAYOUTS[name], accumulation, {})[0]
        assert found[0] <= calls and found[1] <= wire, (accumulation, found)


@pytest.mark.parametrize("name", always(["ddp", "fsdp"], "fsdp"))
def test_bf16_weights_and_gradients_take_half(two_ranks: Ranks, name: str) -> None:
    for accumulation in (1, 4):
        calls, wire = two_ranks(counted, LAYOUTS[name], accumulation, {})[0]
        found = two_ranks(counted, LAYOUTS[name], accumulation, HALF)[0]
        assert found == (calls, pytest.approx(wire / 2, rel=0.02)), accumulation


class OrderOfGathers(CountsCollectives):
    """Attributes: seen: gathers of weights, and blocks that compute, in order."""

    def __init__(self, blocks: nn.ModuleList) -> None:
        super().__init__()
        self.seen: list[str] = []
        for number, block in enumerate(blocks):
            first = next(part for part in block.modules() if isinstance(part, nn.Linear))
            first.register_forward_hook(partial(self.note, f"block {number}"))
            first.register_full_backward_hook(partial(self.note, f"back {number}"))

    def note(self, what: str, *_: Any) -> None:
        self.seen.append(what)

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        before = self.calls["gather"]
        result = super().__torch_dispatch__(function, types, arguments, named)
        self.seen += ["gather"] * (self.calls["gather"] - before)
        return result


def order_of_gathers(layout: Layout) -> list[str]:
    """In a step of four blocks."""
    trainer = trainer_for(layout, small_config(layout, model={"layers": 4}, balancer={"kind": "uniform"}))
    trainer.engine.train(True)
    trainer.train_step()
    with OrderOfGathers(trainer.engine.module.layers) as order:  # type: ignore[arg-type]
        trainer.train_step()
    trainer.engine.close()
    return order.seen


def test_fsdp_gathers_a_block_before_the_one_before_computes(two_ranks: Ranks) -> None:
    seen = two_ranks(order_of_gathers, Layout(engine="fsdp", micro_size=4))[0]
    forward = ["gather", "gather", "gather", "block 0", "gather", "block 1", "gather", "block 2", "block 3"]
    assert seen == [*forward, "gather", "gather", "back 3", "gather", "back 2", "gather", "back 1", "back 0"]


SMALL = Options(layers=2, hidden_size=128, rows=4)
IMAGES = Options(layers=2, hidden_size=128, rows=4, model="mae")
"""50 tokens divide over two ranks; the 37 that end the decoder do not."""


def counted_by_group(options: Options, name: str, world: int, accumulation: int) -> tuple[int, int]:
    """Collectives of a step, and their bytes on the wire."""
    with Environment() as environment:
        found = counted_of(environment, name, options, world, accumulation)
    return sum(found.calls.values()), sum(found.bytes.values()) + found.bytes["all-reduce"]


def agree(ranks: Ranks, name: str, accumulation: int, options: Options) -> None:
    calls, sent, _ = predicted(name, options, ranks.world, accumulation)
    for found in ranks(counted_by_group, options, name, ranks.world, accumulation):
        assert found == (pytest.approx(calls, rel=0.1), pytest.approx(sent, rel=0.1))


TEXT_CASES = product([SMALL], ["tp1", "tp2", "tp2sp"], [1, 4])
IMAGE_CASES = [(IMAGES, "tp2", 1), (IMAGES, "tp2sp", 1), (IMAGES, "tp2sp", 4)]


@needs_megatron
@pytest.mark.parametrize(
    ("options", "name", "accumulation"),
    always([*TEXT_CASES, *IMAGE_CASES], (SMALL, "tp2", 4), (IMAGES, "tp2sp", 1)),
)
def test_two_ranks_send_what_is_predicted(two_ranks: Ranks, options: Options, name: str, accumulation: int) -> None:
    agree(two_ranks, name, accumulation, options)


@needs_megatron
@pytest.mark.exhaustive
@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("name", ["tp1", "tp2", "tp2sp"])
def test_four_ranks_send_what_is_predicted(four_ranks: Ranks, name: str, accumulation: int) -> None:
    agree(four_ranks, name, accumulation, SMALL)
    agree(four_ranks, name, accumulation, IMAGES)
