"""The engine protocol (trp_scale/core/engine.py), on every engine. What holds for training as a whole is elsewhere."""

from __future__ import annotations

import gc
import weakref
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.checkpoints import unequal
from tests.distributed.engine_layouts import AND_SHARED_MOMENTS, LAYOUTS, on_each_rank_once
from tests.distributed.engine_probe import LR, CountsReductions, Probe, Reference, write_pieces
from tests.grids import always
from tests.ranks import Ranks
from tests.synthetic import Layout
from trp_scale.core.pieces import Region

STATES = ("weight", "exp_avg", "exp_avg_sq")
every_engine = pytest.mark.parametrize("name", [*always(LAYOUTS, "plain", "ddp", "fsdp", "zero3"), AND_SHARED_MOMENTS])


@dataclass
class Seen:
    """What one rank saw of two engines, made one after the other, with the same two steps; and of one with dropout.

    Attributes:
        quiet, losses: state and losses of the first engine, which was closed in the middle of a window.
        gone, restored: whether it is collected, and torch's linear, which ZeRO-3 replaces, in its place again.
        reductions: reducing collectives in each backward pass of its first window.
        weights, pieces: of the second engine at its start; pieces again, with empty moments, and after a step.
        norms: of the gradients of windows that were skipped, and of what was left after each.
        disturbed, its_losses: its state and losses, with skipped steps and passes without gradients before each step.
        steps: its count of optimizer steps after all that happened to it.
        looks, written, later: losses and weights after others were written into its pieces; weights a step later.
        modes: losses of a batch under two generator states, with dropout, without, and with it again.
    """

    quiet: dict[str, Tensor] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    gone: bool = False
    restored: bool = False
    reductions: list[int] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    pieces: list[Any] = field(default_factory=list)
    norms: list[tuple[float, float]] = field(default_factory=list)
    disturbed: dict[str, Tensor] = field(default_factory=dict)
    its_losses: list[float] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    looks: list[float] = field(default_factory=list)
    written: dict[str, Tensor] = field(default_factory=dict)
    later: dict[str, Tensor] = field(default_factory=dict)
    modes: list[list[float]] = field(default_factory=list)


def listed(probe: Probe) -> list[tuple[str, tuple[int, ...], Region, bool, tuple[str, ...]]]:
    return [(p.name, p.shape, p.region, p.owner, tuple(sorted(p.tensors))) for p in probe.engine.pieces()]


def skip(probe: Probe, number: int, factor: float = 1.0) -> tuple[float, float]:
    """Norm of the gradient of a skipped window, and of what is left of it."""
    return probe.skip(number, factor=factor), float(probe.engine.check_gradients())


def disturb(probe: Probe) -> None:
    """Skipped steps, and passes without gradients: nothing moves."""
    before = probe.state()
    skip(probe, 1)
    assert skip(probe, 4, factor=float("nan"))[0] != 0.0
    assert unequal(probe.state(), before) == [], "a skipped step"
    probe.look(1)
    probe.engine.train(False)
    probe.look(4)
    probe.engine.train(True)
    assert unequal(probe.state(), before) == [], "a look"


def after_two_steps(
    layout: Layout, precision: str = "fp32", *, disturbed: bool = False
) -> tuple[dict[str, Tensor], list[float]]:
    """State and losses after steps on global batches 0 and 2."""
    probe, losses = Probe(layout, training={"precision": precision}), []
    for number in (0, 2):
        if disturbed:
            disturb(probe)
        losses.append(probe.step(number))
    state = probe.state()
    probe.engine.close()
    return state, losses


def see_first(layout: Layout, seen: Seen) -> weakref.ref[Any]:
    """The engine that is only stepped."""
    probe = Probe(layout)
    window = probe.window(0)
    counts = probe.counts(window)
    for place, micro in enumerate(window):
        loss = (probe.objective(probe.engine, micro).sums / counts.clamp(min=1)).sum()
        with CountsReductions() as reductions:
            probe.engine.backward(loss, last=place == len(window) - 1)
        seen.reductions.append(reductions.count)
    probe.engine.check_gradients()
    probe.engine.step(LR)
    seen.losses = [probe.step(2)]
    seen.quiet = probe.state()
    probe.backward(3)
    probe.engine.close()
    return weakref.ref(probe.engine)


def see_second(layout: Layout, seen: Seen) -> None:
    """The engine to which more happens."""
    probe = Probe(layout)
    seen.weights, seen.pieces = probe.engine.full_weights(), [listed(probe), listed(probe)]
    seen.norms = [skip(probe, 0), skip(probe, 3), skip(probe, 3, factor=100.0)]
    probe.engine.create_optimizer_state()
    seen.pieces.append(listed(probe))
    for number in (0, 2):
        seen.steps.append(probe.engine.optimizer_steps())
        disturb(probe)
        seen.its_losses.append(probe.step(number))
        seen.steps.append(probe.engine.optimizer_steps())
    seen.pieces.append(listed(probe))
    seen.disturbed = probe.state()
    write_pieces(probe.engine)
    seen.steps.append(probe.engine.optimizer_steps())
    seen.looks, seen.written = probe.look(1), probe.engine.full_weights()
    probe.step(1)
    seen.steps.append(probe.engine.optimizer_steps())
    seen.later = probe.engine.full_weights()
    probe.engine.close()


def see(layout: Layout) -> Seen:
    seen = Seen()
    first = see_first(layout, seen)
    gc.collect()
    seen.gone, seen.restored = first() is None, torch.nn.functional.linear is torch._C._nn.linear
    see_second(layout, seen)
    probe = Probe(layout, model={"dropout": 0.1})
    for mode, seed in ((True, 1), (True, 2), (False, 1), (False, 2), (True, 1)):
        probe.engine.train(mode)
        torch.manual_seed(seed)
        seen.modes.append(probe.look(0))
    probe.engine.close()
    return seen


@every_engine
def test_pieces_cover_every_element_once_in_one_order(two_ranks: Ranks, name: str) -> None:
    shapes = {key: tuple(value.shape) for key, value in Reference().module.named_parameters()}
    covered = {key: torch.zeros(shape).flatten() for key, shape in shapes.items()}
    for seen in on_each_rank_once(two_ranks, name, see):
        at_start, again, with_state, after_step = seen.pieces
        assert at_start == again
        assert with_state == after_step
        assert [piece[:4] for piece in at_start] == [piece[:4] for piece in after_step]
        assert {piece[4] for piece in after_step} == {tuple(sorted(STATES))}
        for key, shape, region, owner, _ in at_start:
            assert shape == shapes[key]
            region.of(covered[key].view(shape)).add_(owner)
    for key, times in covered.items():
        assert (times == 1).all(), f"{key}: elements owned {times.unique().tolist()} times"


@every_engine
def test_what_is_written_into_pieces_is_what_the_next_forward_and_step_use(two_ranks: Ranks, name: str) -> None:
    reference = Reference()
    optimizer = reference.adamw(0.01, written=True)
    losses, written = reference.look(1), reference.weights()
    reference.gradients(1)
    optimizer.step()
    end = reference.weights()
    first, *others = on_each_rank_once(two_ranks, name, see)
    for seen in (first, *others):
        assert seen.looks == pytest.approx(losses, rel=1e-5)
    assert unequal(first.written, written) == []
    for key, value in written.items():
        assert (first.later[key] - end[key]).norm() < 1e-4 * (end[key] - value).norm(), key


@every_engine
def test_the_gradient_s_norm_is_that_of_the_global_batch_on_all_ranks_and_a_skip_drops_it(
    two_ranks: Ranks, name: str
) -> None:
    """Also where the next window would replace it: nobody may read it, and its memory is free until then."""
    reference = Reference()
    expected = [reference.gradient_norm(0), reference.gradient_norm(3), 100.0 * reference.gradient_norm(3)]
    first, *others = on_each_rank_once(two_ranks, name, see)
    for seen in (first, *others):
        assert seen.norms == first.norms
        assert [norm for norm, _ in seen.norms] == pytest.approx(expected, rel=1e-5)
        assert [left for _, left in seen.norms] == [0.0] * 3


@every_engine
def test_skipped_steps_passes_without_gradient_and_an_engine_before_leave_no_trace(two_ranks: Ranks, name: str) -> None:
    for seen in on_each_rank_once(two_ranks, name, see):
        assert seen.its_losses[1:] == seen.losses
        assert unequal(seen.disturbed, seen.quiet) == []
        assert seen.gone and seen.restored


@every_engine
def test_train_false_turns_dropout_off(two_ranks: Ranks, name: str) -> None:
    reference = Reference(dropout=0.1)
    reference.module.eval()
    for seen in on_each_rank_once(two_ranks, name, see):
        first, other, off, still_off, again = seen.modes
        assert first != other
        assert off == still_off
        assert off == pytest.approx(reference.look(0), rel=1e-5)
        assert again == first


@every_engine
def test_full_weights_are_whole_and_on_rank_0_only(two_ranks: Ranks, name: str) -> None:
    first, *others = on_each_rank_once(two_ranks, name, see)
    assert unequal(first.weights, Reference().weights()) == []
    assert {(value.dtype, value.device.type) for value in first.weights.values()} == {(torch.float32, "cpu")}
    assert [seen.weights for seen in others] == ([] if name == "plain" else [{}])


@pytest.mark.parametrize("name", always(["ddp", "fsdp", "zero0", "zero1"], "ddp", "fsdp"))
def test_a_window_is_reduced_once_at_its_end(two_ranks: Ranks, name: str) -> None:
    """Not so at stages 2 and 3: a rank keeps its share of the gradient only, so each micro-batch is reduced."""
    for seen in on_each_rank_once(two_ranks, name, see):
        first, last = seen.reductions
        assert first == 0
        assert last > 0


@every_engine
def test_optimizer_steps_are_those_applied(two_ranks: Ranks, name: str) -> None:
    for seen in on_each_rank_once(two_ranks, name, see):
        assert seen.steps == [0, 1, 1, 2, 7, 8]
