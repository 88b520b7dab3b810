"""Gradients between steps and forwards at moved weights (engines/shards.py), on every engine."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest
import torch
import torch.distributed as dist

from tests.checkpoints import unequal
from tests.distributed.engine_layouts import LAYOUTS, on_each_rank
from tests.distributed.shard_probe import LR, Double, Named, ShardProbe, largest_difference
from tests.grids import always
from tests.ranks import Ranks
from tests.synthetic import Layout, data_group
from tests.synthetic_images import batch, make_image_engine
from tests.synthetic_masks import mask_config
from trp_scale.pretraining.mae.upstream import MaskedPatchReconstruction

OFFLOAD = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
HERE = {
    **LAYOUTS,
    "zero2_offload": Layout(engine="deepspeed", stage=2, document={"zero_optimization": OFFLOAD}),
}
every_engine = pytest.mark.parametrize("name", always(HERE, "plain", "ddp", "fsdp", "zero3"))

KINDS = {
    "unused decoder": ("recognition",),
    "all": ("reconstruction",),
    "unused at the end": ("reconstruction", "recognition"),
    "unused at the start": ("recognition", "reconstruction"),
}
"""What the micro-batches of a window are for."""
FAR = 0.05
"""Length of a perturbation; losses change in the second digit."""


class InterruptionError(Exception):
    """Raised on purpose, on all ranks."""


@dataclass
class Seen:
    """What one rank saw. Vectors are whole; `weights` are so on rank 0 only."""

    weights: Named = field(default_factory=dict)
    gradients: dict[str, Named] = field(default_factory=dict)
    repeats: bool = True
    direction: Named = field(default_factory=dict)
    looks: dict[tuple[str, float], float] = field(default_factory=dict)
    response: Named = field(default_factory=dict)
    second_moment: Named = field(default_factory=dict)
    grad_norm: float = 0.0
    later_weights: Named = field(default_factory=dict)
    exchanged: dict[float, float] = field(default_factory=dict)
    bases: list[Named] = field(default_factory=list)
    swapped: list[float] = field(default_factory=list)
    squares: float = 0.0
    moved: list[str] = field(default_factory=list)
    last: Named = field(default_factory=dict)


class Exercise:
    """Three steps, and everything else between them."""

    def __init__(self, layout: Layout) -> None:
        self.probe = ShardProbe(layout)
        self.engine = self.probe.engine
        self.seen = Seen()

    @contextmanager
    def leaving_no_trace(self, what: str) -> Iterator[None]:
        before = self.probe.state()
        yield
        self.seen.moved += [f"{what}: {key}" for key in unequal(self.probe.state(), before)]

    def gradients(self) -> None:
        for name, kinds in KINDS.items():
            with self.leaving_no_trace(f"gradient_of, {name}"):
                found = self.engine.compute_gradient(self.probe.shares(1, *kinds))
            self.seen.gradients[name] = self.probe.whole(found)

    def interrupted_gradient(self) -> None:
        shares = self.probe.shares(2, "reconstruction")

        def interrupted() -> torch.Tensor:
            shares[1]()
            raise InterruptionError

        with self.leaving_no_trace("gradient_of, interrupted"), pytest.raises(InterruptionError):
            self.engine.compute_gradient([shares[0], interrupted])
        again = self.probe.whole(self.engine.compute_gradient(self.probe.shares(1, "reconstruction")))
        self.seen.repeats = unequal(again, self.seen.gradients["all"]) == []

    def perturbations(self) -> None:
        gradient = self.engine.compute_gradient(self.probe.shares(1, "reconstruction"))
        direction = gradient.times(1.0 / gradient.norm())
        self.seen.direction = self.probe.whole(direction)
        self.seen.looks["reconstruction", 0.0] = self.probe.look(3)
        for kind in ("reconstruction", "recognition"):
            with self.leaving_no_trace(f"perturbed, {kind}"), self.engine.perturb_weights(direction, FAR) as move_to:
                self.seen.looks[kind, FAR] = self.probe.look(3, kind)
                move_to(-FAR)
                self.seen.looks[kind, -FAR] = self.probe.look(3, kind)
        raised = pytest.raises(InterruptionError)
        with self.leaving_no_trace("perturbed, interrupted"), raised, self.engine.perturb_weights(direction, FAR):
            self.probe.look(3)
            raise InterruptionError
        self.seen.looks["restored", 0.0] = self.probe.look(3)

    def exchange(self) -> None:
        """With weights all of which are a little off."""
        other = self.engine.weights().shift(FAR / 10)
        before, present = self.probe.whole(other), self.probe.look(3)
        with self.leaving_no_trace("exchanged"), self.engine.exchange_weights(other):
            self.seen.swapped = [present, self.probe.look(3)]
        raised = pytest.raises(InterruptionError)
        with self.leaving_no_trace("exchanged, interrupted"), raised, self.engine.exchange_weights(other):
            self.probe.look(3)
            raise InterruptionError
        self.seen.swapped.append(self.probe.look(3))
        self.seen.moved += [f"exchanged: {key}" for key in unequal(self.probe.whole(other), before)]

    def run(self) -> Seen:
        probe, seen = self.probe, self.seen
        probe.step(0)
        seen.weights = self.engine.full_weights()
        self.gradients()
        self.interrupted_gradient()
        self.perturbations()
        gradient = self.engine.compute_gradient(probe.shares(1, "reconstruction"))
        direction, base = gradient.times(1.0 / gradient.norm()), self.engine.weights()
        probe.step(1)
        seen.later_weights, seen.grad_norm = self.engine.full_weights(), probe.grad_norm
        seen.second_moment = probe.moment("exp_avg_sq")
        seen.response = probe.whole(self.engine.step_response(gradient, lr=LR, grad_norm=probe.grad_norm))
        for scale in (FAR, -FAR):
            with (
                self.leaving_no_trace("perturbed, base"),
                self.engine.perturb_weights(direction, -scale, base=base) as move_to,
            ):
                move_to(scale)
                seen.exchanged[scale] = probe.look(3)
            seen.bases.append(probe.whole(base))
        raised, perturbed = pytest.raises(InterruptionError), self.engine.perturb_weights(direction, FAR, base=base)
        with self.leaving_no_trace("base, interrupted"), raised, perturbed as move_to:
            move_to(-FAR)
            raise InterruptionError
        seen.bases.append(probe.whole(base))
        self.exchange()
        probe.step(2)
        seen.last, seen.squares = self.engine.full_weights(), probe.squares
        self.engine.close()
        return seen


def exercised(layout: Layout) -> Seen:
    return Exercise(layout).run()


def three_steps(layout: Layout) -> Named:
    """Weights after the same steps with nothing between them."""
    probe = ShardProbe(layout)
    for number in range(3):
        probe.step(number)
    weights = probe.engine.full_weights()
    probe.engine.close()
    return weights


SeenOn = Callable[[str], list[Seen]]


@pytest.fixture(scope="module")
def seen_on(two_ranks: Ranks) -> SeenOn:
    """What each rank of an engine saw; every engine is run once."""
    return functools.cache(lambda name: two_ranks.run_layout(exercised, HERE[name]))


@every_engine
def test_nothing_between_steps_leaves_a_trace(seen_on: SeenOn, two_ranks: Ranks, name: str) -> None:
    for seen in seen_on(name):
        assert seen.moved == []
        assert seen.repeats, "a gradient after an interrupted one is another"
        assert seen.looks["restored", 0.0] == seen.looks["reconstruction", 0.0]
    quiet = two_ranks.run_layout(three_steps, HERE[name])[0]
    assert largest_difference(seen_on(name)[0].last, quiet) < 1e-7


@every_engine
@pytest.mark.parametrize("kinds", KINDS)
def test_a_gradient_is_that_of_the_global_batch_in_float64(seen_on: SeenOn, name: str, kinds: str) -> None:
    """Right after a step, in which every parameter had a gradient."""
    first, *others = seen_on(name)
    expected = Double(first.weights).gradient(1, *KINDS[kinds])
    unused = [key for key, value in expected.items() if not value.any()]
    assert bool(unused) == (kinds == "unused decoder")
    for seen in (first, *others):
        assert largest_difference(seen.gradients[kinds], expected) < 1e-5
        for key in unused:
            assert not seen.gradients[kinds][key].any(), key


@every_engine
def test_forwards_read_moved_weights(seen_on: SeenOn, name: str) -> None:
    first, *others = seen_on(name)
    double = Double(first.weights)
    for seen in (first, *others):
        assert seen.looks["reconstruction", 0.0] == pytest.approx(double.look(3), rel=1e-5)
        for kind in ("reconstruction", "recognition"):
            for scale in (FAR, -FAR):
                moved = double.moved(first.direction, scale).look(3, kind)
                assert seen.looks[kind, scale] == pytest.approx(moved, rel=1e-5)
                assert abs(moved / double.look(3, kind) - 1) > 1e-4, "too near to tell"


@every_engine
def test_weights_and_a_base_change_places(seen_on: SeenOn, name: str) -> None:
    first, *others = seen_on(name)
    assert largest_difference(first.later_weights, first.weights) > 1e-4, "too near to tell"
    double = Double(first.weights)
    for seen in (first, *others):
        for scale in (FAR, -FAR):
            moved = double.moved(first.direction, scale).look(3)
            assert seen.exchanged[scale] == pytest.approx(moved, rel=1e-5)
        for base in seen.bases:
            assert largest_difference(base, first.weights) < 1e-7


@every_engine
def test_weights_and_others_change_places_bit_for_bit(seen_on: SeenOn, name: str) -> None:
    first, *others = seen_on(name)
    double = Double(first.later_weights)
    shifted = double.moved({key: torch.ones_like(value) for key, value in first.later_weights.items()}, FAR / 10)
    expected = [double.look(3), shifted.look(3)]
    assert abs(expected[1] / expected[0] - 1) > 1e-4, "too near to tell"
    for seen in (first, *others):
        assert seen.swapped[:2] == pytest.approx(expected, rel=1e-5)
        assert seen.swapped[2] == seen.swapped[0]


@every_engine
def test_squares_of_micro_batches_gradients_in_float64(seen_on: SeenOn, name: str) -> None:
    """Of the step's own backward passes, whatever gradients were asked for before it."""
    first, *others = seen_on(name)
    expected = Double(first.later_weights).micro_batch_squares(2)
    for seen in (first, *others):
        assert seen.squares == pytest.approx(expected, rel=1e-5)


@every_engine
def test_a_step_s_response_is_the_closed_form(seen_on: SeenOn, name: str) -> None:
    """AdamW's second moment held, after two steps: lr (1 - b1) / (1 - b1^2) / (sqrt(v / (1 - b2^2)) + eps)."""
    first, *others = seen_on(name)
    settings = Double(first.weights).config.optimizer
    clipped = settings.clipping / (first.grad_norm + 1e-6)
    assert clipped < 1
    scale = clipped * LR * (1 - settings.beta1) / (1 - settings.beta1**2)
    expected = {
        key: scale * gradient / ((first.second_moment[key] / (1 - settings.beta2**2)).sqrt() + settings.eps)
        for key, gradient in first.gradients["all"].items()
    }
    for seen in (first, *others):
        assert largest_difference(seen.response, expected) < 1e-6
        assert largest_difference(seen.response, seen_on("plain")[0].response) < 1e-5


def interrupt_rank_1(layout: Layout) -> tuple[float, float]:
    """Loss before and after."""
    config, group = mask_config(layout), data_group()
    engine = make_image_engine(layout, config, group)
    objective, images = MaskedPatchReconstruction(config.objective, config.vision.patch_size), batch(range(4))
    direction = engine.weights()

    def loss() -> float:
        with torch.no_grad():
            return float(objective(engine, images).sums)

    before = loss()
    try:
        with engine.perturb_weights(direction, 0.5):
            if group.rank == 1:
                raise InterruptionError
            dist.all_reduce(torch.ones(1))
    except InterruptionError:
        dist.all_reduce(torch.ones(1))  # the collective that the other rank is in
    after = loss()
    engine.close()
    return before, after


@pytest.mark.parametrize("name", [name for name in LAYOUTS if name not in ("plain", "zero3_offload")])
def test_no_rank_waits_and_the_weights_are_back(two_ranks: Ranks, name: str) -> None:
    for before, after in on_each_rank(two_ranks, name, interrupt_rank_1):
        assert before == after
