"""fp16 on every ZeRO stage: fp32 master weights and moments, gradients without the loss scale, and no trace of a skip;
an overflow moves nothing, lowers the scale and is no fault.

Run with a CPU's fp16. Numbers are compared with the model in fp32, to within the 11 bits of fp16.
"""

from __future__ import annotations

import copy
import functools
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from tests.checkpoints import unequal
from tests.distributed.engine_layouts import fp16_layout, fp16_on_a_cpu
from tests.distributed.engine_probe import LR, Probe, Reference, write_pieces
from tests.grids import always
from tests.parity.compare import way_apart
from tests.ranks import Ranks
from tests.synthetic import Layout, small_config, trainer_for

SCALE = 2.0**8
every_stage = pytest.mark.parametrize("stage", always([0, 1, 2, 3], 3))


def probe_in_fp16(layout: Layout) -> Probe:
    return Probe(layout, training={"precision": "fp16"}, optimizer={"weight_decay": 0.1, "clipping": 1.0})


def clipped_step(reference: Reference, optimizer: torch.optim.Optimizer, number: int) -> dict[str, Tensor]:
    """The reference's weights after a step with gradients clipped at 1."""
    reference.gradients(number)
    torch.nn.utils.clip_grad_norm_(reference.module.parameters(), 1.0)
    optimizer.step()
    return reference.weights()


@dataclass
class Seen:
    """What one rank saw of an engine.

    Attributes:
        module, pieces: types of the module's weights, and of what a checkpoint would hold.
        start, end: whole weights before and after the first step, whose gradient had this `norm`.
        norms: of the gradients of skipped windows; scales after them, and after gradients that were dropped.
        left: norm of what is left of a dropped gradient.
        moved: what differs after all that.
        same_losses: whether losses are those of before.
        next_norm: of the next gradient.
        looks, written, later: losses and weights after others were written into its pieces; weights a step later.
    """

    module: set[torch.dtype] = field(default_factory=set)
    pieces: set[torch.dtype] = field(default_factory=set)
    start: dict[str, Tensor] = field(default_factory=dict)
    end: dict[str, Tensor] = field(default_factory=dict)
    norm: float = 0.0
    norms: list[float] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)
    left: float = 0.0
    moved: list[str] = field(default_factory=list)
    same_losses: bool = False
    next_norm: float = 0.0
    looks: list[float] = field(default_factory=list)
    written: dict[str, Tensor] = field(default_factory=dict)
    later: dict[str, Tensor] = field(default_factory=dict)


def see(layout: Layout) -> Seen:
    seen = Seen()
    with fp16_on_a_cpu():
        probe = probe_in_fp16(layout)
        seen.module = {parameter.dtype for parameter in probe.engine.module.parameters()}
        seen.pieces = {tensor.dtype for piece in probe.engine.pieces() for tensor in piece.tensors.values()}
        seen.start = probe.engine.full_weights()
        probe.backward(0)
        seen.norm = float(probe.engine.check_gradients())
        probe.engine.step(LR)
        seen.end = probe.engine.full_weights()
        before, losses = probe.state(), probe.look(3)
        seen.norms = [probe.skip(1), probe.skip(4, factor=float("nan"))]
        seen.scales = [probe.engine.extra_state()["cur_scale"]]
        probe.backward(1)
        probe.engine.discard_gradients()
        seen.scales.append(probe.engine.extra_state()["cur_scale"])
        seen.left = float(probe.engine.check_gradients())
        seen.moved = unequal(probe.state(), before)
        seen.same_losses = probe.look(3) == losses
        seen.next_norm = probe.skip(2)
        probe.engine.create_optimizer_state()
        write_pieces(probe.engine)
        seen.looks, seen.written = probe.look(1), probe.engine.full_weights()
        probe.step(1)
        seen.later = probe.engine.full_weights()
        probe.engine.close()
    return seen


def unskipped_norm(layout: Layout) -> float:
    with fp16_on_a_cpu():
        probe = probe_in_fp16(layout)
        probe.step(0)
        norm = probe.skip(2)
        probe.engine.close()
        return norm


@functools.cache
def seen_on(two_ranks: Ranks, stage: int) -> list[Seen]:
    return copy.deepcopy(two_ranks(see, fp16_layout(stage, initial_scale_power=8)))  # each tensor keeps a file open


@every_stage
def test_the_first_step_is_that_of_fp32_from_the_same_weights(two_ranks: Ranks, stage: int) -> None:
    """With weight decay, clipping and AdamW's bias correction: nothing was stepped, decayed or scaled before."""
    first, second = seen_on(two_ranks, stage)
    for seen in (first, second):
        assert seen.module == {torch.float16}
        assert seen.pieces == {torch.float32}
        assert seen.norm == pytest.approx(Reference().gradient_norm(0), rel=5e-3)
    reference = Reference()
    with torch.no_grad():
        for parameter in reference.module.parameters():
            parameter.copy_(parameter.half())
    assert unequal(first.start, reference.weights()) == []
    assert way_apart(first.end, clipped_step(reference, reference.adamw(0.1), 0), first.start) < 0.1


@every_stage
def test_what_is_written_into_pieces_is_what_the_next_forward_and_step_use(two_ranks: Ranks, stage: int) -> None:
    first, second = seen_on(two_ranks, stage)
    reference = Reference()
    optimizer = reference.adamw(0.1, written=True)
    start, losses = reference.weights(), reference.look(1)
    end = clipped_step(reference, optimizer, 1)
    assert first.looks == second.looks == pytest.approx(losses, rel=1e-2)
    assert unequal(first.written, start) == [], "the fp32 master weights are what was written"
    assert way_apart(first.later, end, start) < 1e-2


@every_stage
def test_a_skip_moves_nothing_and_halves_the_scale(two_ranks: Ranks, stage: int) -> None:
    unskipped = two_ranks(unskipped_norm, fp16_layout(stage, initial_scale_power=8))[0]
    for seen in seen_on(two_ranks, stage):
        assert seen.norms[0] > 0.0 and seen.norms[1] != seen.norms[1]
        assert seen.scales == [SCALE / 4, SCALE / 4], "dropping gradients alone leaves the scale"
        assert seen.left == 0.0
        assert seen.moved == []
        assert seen.same_losses
        assert seen.next_norm == pytest.approx(unskipped, rel=5e-3)


STEPS = 10
NAMES = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


def searching_run(stage: int) -> dict[str, object]:
    """From a scale that must overflow (2^24 x a loss of 5) down to one that does not."""
    with fp16_on_a_cpu():
        layout = fp16_layout(stage, initial_scale_power=24)
        config = small_config(layout, training={"precision": "fp16", "steps": STEPS, "max_skipped_steps": 0})
        trainer = trainer_for(layout, config)
        scales, moved, weights = [], [], trainer.engine.full_weights()
        for _ in range(STEPS):
            trainer.train_step()
            now = trainer.engine.full_weights()
            moved.append(any(not torch.equal(now[name], weights[name]) for name in now))
            weights = now
            scales.append(trainer.engine.extra_state()["cur_scale"])
        state = dict(trainer.engine.extra_state())
        # As a checkpoint of another stage has it: all names, of which stage 0 lacks one.
        trainer.engine.load_extra_state({**dict.fromkeys(NAMES, 1.0), "cur_scale": 512.0})
        restored = dict(trainer.engine.extra_state())
        result = {
            "applied": [stats.applied for stats in trainer.history],
            "moved": moved,
            "scales": scales,
            "faults": trainer.state.skipped,
            "steps": trainer.engine.optimizer_steps(),
            "names": set(state),
            "restored": restored,
        }
        trainer.engine.close()
        return result


@pytest.mark.parametrize("stage", always([0, 1, 2, 3], 0, 2))
def test_the_scaler_searches_and_the_run_goes_on(two_ranks: Ranks, stage: int) -> None:
    first, second = two_ranks(searching_run, stage)
    assert first["applied"] == second["applied"] and first["scales"] == second["scales"]
    applied, scales = first["applied"], first["scales"]
    assert isinstance(applied, list) and isinstance(scales, list)
    assert not applied[0], "the first scale was meant to overflow"
    assert applied[-1], "no scale was found"
    assert first["moved"] == applied, "what is skipped moves nothing, what is applied moves"  # on rank 0: whole weights
    assert first["steps"] == sum(applied)
    for scale, lower, fine in zip(scales, scales[1:], applied[1:], strict=False):
        assert lower == scale if fine else lower < scale
    assert first["faults"] == 0
    # DeepSpeed's scaler of stage 0 has no hysteresis.
    names = NAMES if stage else NAMES[:-1]
    assert first["names"] == set(names)
    assert first["restored"] == {**dict.fromkeys(names, 1.0), "cur_scale": 512.0}


def with_a_given_scale(stage: int) -> tuple[dict[str, float], bool, dict[str, float]]:
    """The scaler's state, what a skip says, and the state after it."""
    with fp16_on_a_cpu():
        probe = Probe(fp16_layout(stage, loss_scale=128), training={"precision": "fp16"})
        before = dict(probe.engine.extra_state())
        probe.backward(0, factor=float("nan"))
        lowered, after = probe.engine.skip(), dict(probe.engine.extra_state())
        probe.engine.close()
        return before, lowered, after


@pytest.mark.parametrize("stage", [0, 1])
def test_a_scale_that_is_given_is_not_searched_for(two_ranks: Ranks, stage: int) -> None:
    for before, lowered, after in two_ranks(with_a_given_scale, stage):
        assert before["cur_scale"] == after["cur_scale"] == 128.0
        assert "last_overflow_iter" not in before
        assert not lowered, "nothing will be different at the next try: this is a fault"


def with_a_scale_that_helps_nothing(stage: int) -> list[tuple[float, bool]]:
    """The scale after each of five skips, and whether it has been lowered."""
    with fp16_on_a_cpu():
        probe = Probe(fp16_layout(stage, initial_scale_power=2), training={"precision": "fp16"})
        found = []
        for _ in range(5):
            probe.backward(0, factor=float("nan"))
            lowered = probe.engine.skip()
            found.append((probe.engine.extra_state()["cur_scale"], lowered))
        probe.engine.close()
        return found


@pytest.mark.parametrize("stage", always([0, 1, 2, 3], 0, 2))
def test_a_scale_that_cannot_be_lowered_is_a_fault(two_ranks: Ranks, stage: int) -> None:
    """Then the skipped steps count, and too many of them end the run with a checkpoint."""
    for found in two_ranks(with_a_scale_that_helps_nothing, stage):
        assert found == [(2.0, True), (1.0, True), *[(1.0, False)] * 3]
