"""The engine protocol (trp_scale/core/engine.py), on every engine. What holds for training as a whole is elsewhere."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.distributed.engine_layouts import AND_SHARED_MOMENTS, LAYOUTS, on_each_rank
from tests.distributed.engine_probe import LR, CountsReductions, Probe, Reference
from tests.grids import always
from tests.ranks import Ranks
from tests.synthetic import Layout
from trp_scale.core.pieces import Region
from trp_scale.models.initialise import initial_tensor

STATES = ("weight", "exp_avg", "exp_avg_sq")
every_engine = pytest.mark.parametrize("name", [*always(LAYOUTS, "plain", "ddp", "fsdp", "zero3"), AND_SHARED_MOMENTS])


def listed(probe: Probe) -> list[tuple[str, tuple[int, ...], Region, bool, tuple[str, ...]]]:
    return [(p.name, p.shape, p.region, p.owner, tuple(sorted(p.tensors))) for p in probe.engine.pieces()]


def pieces_over_a_run(layout: Layout) -> list[Any]:
    """pieces() at the start, again, with empty moments, and after a step."""
    probe = Probe(layout)
    found = [listed(probe), listed(probe)]
    probe.engine.create_optimizer_state()
    found.append(listed(probe))
    probe.step(0)
    found.append(listed(probe))
    probe.engine.close()
    return found


@every_engine
def test_pieces_cover_every_element_once_in_one_order(two_ranks: Ranks, name: str) -> None:
    answers = on_each_rank(two_ranks, name, pieces_over_a_run)
    shapes = {key: tuple(value.shape) for key, value in Reference().module.named_parameters()}
    covered = {key: torch.zeros(shape).flatten() for key, shape in shapes.items()}
    for at_start, again, with_state, after_step in answers:
        assert at_start == again
        assert with_state == after_step
        assert [piece[:4] for piece in at_start] == [piece[:4] for piece in after_step]
        assert {piece[4] for piece in after_step} == {tuple(sorted(STATES))}
        for key, shape, region, owner, _ in at_start:
            assert shape == shapes[key]
            region.of(covered[key].view(shape)).add_(owner)
    for key, times in covered.items():
        assert (times == 1).all(), f"{key}: elements owned {times.unique().tolist()} times"


def written_value(kind: str, name: str, shape: tuple[int, ...]) -> Tensor:
    """Weights, or moments that could be, of a parameter; flat."""
    values = initial_tensor(77, f"{kind}/{name}", shape, std=0.05).flatten()
    return values.abs() if kind == "exp_avg_sq" else values


def write_and_look(layout: Layout) -> tuple[list[float], dict[str, Tensor], dict[str, Tensor], list[int]]:
    """After a step, write other weights and moments; returns losses, weights at once and after a step, step counts."""
    probe = Probe(layout)
    probe.look(0)
    probe.step(0)
    for piece in probe.engine.pieces():
        for kind, tensor in piece.tensors.items():
            whole = written_value(kind, piece.name, piece.shape).view(piece.shape)
            tensor.copy_(piece.region.of(whole).reshape(-1))
    probe.engine.after_load(7)
    steps = [probe.engine.optimizer_steps()]
    losses, weights = probe.look(1), probe.engine.full_weights()
    probe.step(1)
    later, steps = probe.engine.full_weights(), [*steps, probe.engine.optimizer_steps()]
    probe.engine.close()
    return losses, weights, later, steps


@every_engine
def test_what_is_written_into_pieces_is_what_the_next_forward_and_step_use(two_ranks: Ranks, name: str) -> None:
    answers = on_each_rank(two_ranks, name, write_and_look)
    reference = Reference()
    parameters = dict(reference.module.named_parameters())
    optimizer = torch.optim.AdamW(
        [{"params": [p for p in parameters.values() if (p.ndim >= 2) is matrix]} for matrix in (True, False)],
        lr=LR, betas=(0.9, 0.999), eps=1e-6, weight_decay=0.01,
    )  # fmt: skip
    optimizer.param_groups[1]["weight_decay"] = 0.0
    for key, parameter in parameters.items():
        values = {kind: written_value(kind, key, tuple(parameter.shape)).view(parameter.shape) for kind in STATES}
        parameter.data.copy_(values.pop("weight"))
        optimizer.state[parameter] = {"step": torch.tensor(7.0), **values}
    losses, written = reference.look(1), {key: p.detach().clone() for key, p in parameters.items()}
    reference.gradients(1)
    optimizer.step()
    for seen, _, _, steps in answers:
        assert seen == pytest.approx(losses, rel=1e-5)
        assert steps == [7, 8]
    _, weights, later, _ = answers[0]
    for key, value in written.items():
        assert torch.equal(weights[key], value), key
        moved = (parameters[key] - value).norm()
        assert (later[key] - parameters[key]).norm() < 1e-4 * moved, key


def gradient_norms(layout: Layout) -> list[float]:
    probe = Probe(layout)
    norms = [probe.skip(0), probe.skip(3), probe.skip(3, factor=100.0)]
    probe.engine.close()
    return norms


@every_engine
def test_the_gradient_s_norm_is_that_of_the_global_batch_on_all_ranks(two_ranks: Ranks, name: str) -> None:
    answers = on_each_rank(two_ranks, name, gradient_norms)
    reference = Reference()
    expected = [reference.gradient_norm(0), reference.gradient_norm(3), 100.0 * reference.gradient_norm(3)]
    for norms in answers:
        assert norms == answers[0]
        assert norms == pytest.approx(expected, rel=1e-5)


def after_two_steps(
    layout: Layout, between: str, precision: str = "fp32"
) -> tuple[dict[str, Tensor], list[float], int]:
    """State after the steps on global batches 0 and 2, with nothing, skipped steps or looks before each."""
    probe = Probe(layout, training={"precision": precision})
    losses = []
    for number in (0, 2):
        before = probe.state()
        if between == "skips":
            probe.skip(1)
            assert probe.skip(4, factor=float("nan")) != 0.0
        elif between == "looks":
            probe.look(1)
            probe.engine.train(False)
            probe.look(4)
            probe.engine.train(True)
        after = probe.state()
        assert all(torch.equal(after[key], value) for key, value in before.items()), f"{between} moved something"
        losses.append(probe.step(number))
    state, steps = probe.state(), probe.engine.optimizer_steps()
    probe.engine.close()
    return state, losses, steps


@every_engine
def test_skipped_steps_and_passes_without_gradient_leave_no_trace(two_ranks: Ranks, name: str) -> None:
    expected = on_each_rank(two_ranks, name, after_two_steps, "nothing")
    for between in ("skips", "looks"):
        answers = on_each_rank(two_ranks, name, after_two_steps, between)
        for (state, losses, steps), (wanted, wanted_losses, _) in zip(answers, expected, strict=True):
            assert losses == wanted_losses, between
            assert steps == 2, between
            assert state.keys() == wanted.keys()
            differing = [key for key, value in wanted.items() if not torch.equal(state[key], value)]
            assert differing == [], between


def losses_by_mode(layout: Layout) -> list[list[float]]:
    """The same global batch seen twice under different generator states: with dropout, without, with it again."""
    probe = Probe(layout, model={"dropout": 0.1})
    found = []
    for mode, seed in ((True, 1), (True, 2), (False, 1), (False, 2), (True, 1)):
        probe.engine.train(mode)
        torch.manual_seed(seed)
        found.append(probe.look(0))
    probe.engine.close()
    return found


@every_engine
def test_train_false_turns_dropout_off(two_ranks: Ranks, name: str) -> None:
    reference = Reference(dropout=0.1)
    reference.module.eval()
    for first, other, off, still_off, again in on_each_rank(two_ranks, name, losses_by_mode):
        assert first != other
        assert off == still_off
        assert off == pytest.approx(reference.look(0), rel=1e-5)
        assert again == first


def weights_at_start(layout: Layout) -> dict[str, Tensor]:
    probe = Probe(layout)
    weights = probe.engine.full_weights()
    probe.engine.close()
    return weights


@every_engine
def test_full_weights_are_whole_and_on_rank_0_only(two_ranks: Ranks, name: str) -> None:
    first, *others = on_each_rank(two_ranks, name, weights_at_start)
    expected = dict(Reference().module.named_parameters())
    assert first.keys() == expected.keys()
    for key, value in expected.items():
        assert first[key].dtype == torch.float32 and first[key].device.type == "cpu"
        assert torch.equal(first[key], value), key
    assert others == ([] if name == "plain" else [{}])


def reductions_by_backward(layout: Layout) -> tuple[list[int], float]:
    """Reducing collectives in each backward pass of a window of two, and the norm of the gradient after it."""
    probe = Probe(layout)
    window = probe.window(0)
    counts = probe.counts(window)
    found = []
    for place, micro in enumerate(window):
        loss = (probe.objective(probe.engine, micro).sums / counts.clamp(min=1)).sum()
        with CountsReductions() as reductions:
            probe.engine.backward(loss, last=place == len(window) - 1)
        found.append(reductions.count)
    norm = float(probe.engine.check_gradients())
    probe.engine.skip()
    probe.engine.close()
    return found, norm


@pytest.mark.parametrize("name", ["ddp", "fsdp", "zero0", "zero1"])
def test_a_window_is_reduced_once_at_its_end(two_ranks: Ranks, name: str) -> None:
    """Not so at stages 2 and 3: a rank keeps its share of the gradient only, so each micro-batch is reduced."""
    for (first, last), norm in on_each_rank(two_ranks, name, reductions_by_backward):
        assert first == 0
        assert last > 0
        assert norm == pytest.approx(Reference().gradient_norm(0), rel=1e-5)


def counted(layout: Layout) -> list[int]:
    probe = Probe(layout)
    found = [probe.engine.optimizer_steps()]
    for what in (probe.step, probe.skip, probe.step):
        what(0)
        found.append(probe.engine.optimizer_steps())
    probe.engine.after_load(41)
    probe.step(0)
    found.append(probe.engine.optimizer_steps())
    probe.engine.close()
    return found


@every_engine
def test_optimizer_steps_are_those_applied(two_ranks: Ranks, name: str) -> None:
    for found in on_each_rank(two_ranks, name, counted):
        assert found == [0, 1, 1, 2, 42]


def one_after_the_other(layout: Layout) -> tuple[list[list[float]], bool, bool]:
    """Losses of three engines made in turn, the second closed in the middle of a window; is the first one gone, and
    torch's linear, which ZeRO-3 replaces, in its place again?"""
    found, gone = [], None
    for number in range(3):
        probe = Probe(layout)
        if number == 0:
            gone = weakref.ref(probe.engine)
        found.append([probe.step(0), probe.step(1)])
        if number == 1:
            probe.backward(2)
        probe.engine.close()
        del probe
    gc.collect()
    assert gone is not None
    return found, gone() is None, torch.nn.functional.linear is torch._C._nn.linear


@every_engine
def test_after_close_another_engine_can_be_made(two_ranks: Ranks, name: str) -> None:
    for (first, second, third), gone, restored in on_each_rank(two_ranks, name, one_after_the_other):
        assert first == second == third
        assert gone and restored
