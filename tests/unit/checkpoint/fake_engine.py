"""An engine that only holds tensors, split in any way, and ranks that are threads."""

from __future__ import annotations

import hashlib
import random
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.checkpoints import save_checkpoint
from trp_scale.core.pieces import STATE_NAMES, FlatRange, Piece
from trp_scale.distributed.groups import Group

SHAPES: dict[str, tuple[int, ...]] = {"matrix": (7, 5), "bias": (13,), "scalar": (), "cube": (4, 3, 2), "one": (1, 1)}
STATES = ("weight", *STATE_NAMES)

Split = dict[str, list[tuple[int, int, int]]]
"""By tensor name: (start, stop, owning rank)."""


def whole_state(seed: int, shapes: Mapping[str, tuple[int, ...]] = SHAPES) -> dict[str, dict[str, Tensor]]:
    """{state: {name: tensor}} with different values everywhere."""
    generator = torch.Generator().manual_seed(seed)
    return {
        state: {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()} for state in STATES
    }


def random_split(seed: int, world: int, shapes: Mapping[str, tuple[int, ...]] = SHAPES) -> Split:
    """Every tensor cut at random places, each part given to a random rank; some parts are empty."""
    chooser = random.Random(seed)
    split: Split = {}
    for name, shape in shapes.items():
        size = prod(shape)
        cuts = sorted([0, size, *(chooser.randint(0, size) for _ in range(chooser.randint(0, 4)))])
        ranges = list(pairwise(cuts))
        split[name] = [(start, stop, chooser.randrange(world)) for start, stop in ranges]
    return split


@dataclass
class FakeEngine:
    """Holds this rank's parts of `state`; with `replicas` also those of the others, not owned."""

    rank: int
    split: Split
    state: dict[str, dict[str, Tensor]]
    replicas: bool = False
    steps: int = 5
    name: str = "fake"
    zero_stage: int | None = None
    extra: dict[str, float] = field(default_factory=lambda: {"loss_scale": 1024.0})
    loaded_steps: int | None = None

    def __post_init__(self) -> None:
        self.held: list[Piece] = []
        for name, parts in self.split.items():
            for start, stop, owner in parts:
                if owner == self.rank or self.replicas:
                    tensors = {
                        state: whole[name].reshape(-1)[start:stop].clone() for state, whole in self.state.items()
                    }
                    shape = tuple(next(iter(self.state.values()))[name].shape)
                    piece = Piece(
                        name=name,
                        shape=shape,
                        region=FlatRange(start, stop),
                        tensors=tensors,
                        owner=owner == self.rank,
                    )
                    self.held.append(piece)

    @classmethod
    def empty(cls, rank: int, split: Split, seed: int = 99, **values: Any) -> FakeEngine:
        """Other weights, and no moments before create_optimizer_state."""
        return cls(rank, split, {"weight": whole_state(seed)["weight"]}, **values)

    def pieces(self) -> Iterator[Piece]:
        yield from self.held

    def create_optimizer_state(self) -> None:
        for piece in self.held:
            for state in STATE_NAMES:
                piece.tensors.setdefault(state, torch.full_like(piece.tensors["weight"], 7.0))

    def after_load(self, optimizer_steps: int) -> None:
        self.loaded_steps = optimizer_steps

    def optimizer_steps(self) -> int:
        return self.steps

    def extra_state(self) -> Mapping[str, float]:
        return self.extra

    def load_extra_state(self, state: Mapping[str, float]) -> None:
        self.extra = dict(state)


def assemble(engines: list[FakeEngine]) -> dict[str, dict[str, Tensor]]:
    """{state: {name: tensor}} from what the engines own."""
    whole = {state: {name: torch.full((prod(shape),), torch.nan) for name, shape in SHAPES.items()} for state in STATES}
    for engine in engines:
        for piece in engine.held:
            for state, tensor in piece.tensors.items():
                if piece.owner:
                    piece.region.of(whole[state][piece.name]).copy_(tensor)
    return {
        state: {name: tensors[name].reshape(shape) for name, shape in SHAPES.items()}
        for state, tensors in whole.items()
    }


def assert_equal_state(found: dict[str, dict[str, Tensor]], expected: dict[str, dict[str, Tensor]]) -> None:
    """Bit-equal, tensor by tensor."""
    for state, tensors in expected.items():
        for name, tensor in tensors.items():
            assert torch.equal(found[state][name], tensor), f"{state} of {name}"


class Exchange:
    """Where threads that act as ranks meet; a rank that never comes fails the test after 20 s."""

    def __init__(self, world: int) -> None:
        self.values: list[Any] = [None] * world
        self.meeting = threading.Barrier(world, timeout=120)


@dataclass(frozen=True)
class ThreadGroup(Group):
    """A group whose ranks are threads."""

    exchange: Any = None

    def gather_objects(self, value: Any) -> list[Any]:
        self.exchange.values[self.rank] = value
        self.exchange.meeting.wait()
        values = list(self.exchange.values)
        self.exchange.meeting.wait()
        return values

    def barrier(self) -> None:
        self.exchange.meeting.wait()


def on_ranks(world: int, function: Callable[[Group], Any]) -> list[Any]:
    """Run `function` on each rank; returns what each returned or the exception it raised."""
    exchange = Exchange(world)
    results: list[Any] = [None] * world

    def run(rank: int) -> None:
        try:
            results[rank] = function(ThreadGroup("world", rank, world, None, exchange))
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def save_step(run_dir: Path, step: int, *, seed: int = 0, engine: Any = None, **changes: Any) -> Path:
    """Save by one rank, with plausible values for whatever a test does not care about."""
    values: dict[str, Any] = {
        "engine": engine or FakeEngine(0, random_split(seed, 1), whole_state(seed)),
        "hooks_state": {"balancer": {"losses": torch.arange(3.0), "seen": 2}},
        "cursors": {"train": step * 8},
        "config": {"training": {"seed": 1}},
        "group": Group("world"),
        "keep": 0,
        "extra": {"vocab_size": 30},
    }
    return save_checkpoint(run_dir, step=step, **(values | changes))


def renew_digest(document: Path) -> None:
    """Write the digest of what checkpoint.json contains now, so that its reader sees other damage."""
    content = re.sub(rb'"digest": "[0-9a-f]{64}",\s*', b"", document.read_bytes(), count=1)
    content = re.sub(rb"\A\{\s*", b'{\n "digest": "",\n', content)
    digest = hashlib.sha256(content).hexdigest().encode()
    document.write_bytes(content.replace(b'"digest": ""', b'"digest": "' + digest + b'"', 1))
