"""Forwards at moved weights and gradients between steps in bf16 and fp16."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import pytest
import torch

from tests.checkpoints import unequal
from tests.distributed.engine_layouts import LAYOUTS, fp16_layout, fp16_on_a_cpu
from tests.distributed.shard_probe import Double, Named, ShardProbe, largest_difference
from tests.grids import always
from tests.ranks import Ranks
from tests.synthetic import Layout

BF16: dict[str, Any] = {"training": {"precision": "bf16"}}
DIFFERENCE = 1e-2
AUTOCAST = [name for name in LAYOUTS if name not in ("zero1", "zero3_offload")]
"""zero1 differs from zero2, and zero3_offload from zero3, in nothing that autocast knows."""


def looks_in_bf16(layout: Layout) -> dict[str, Any]:
    """Losses of a run in autocast: as they are, exact, exact at moved weights, after an error, and as they are."""
    probe = ShardProbe(layout, **BF16)
    engine = probe.engine
    probe.step(0)
    found: dict[str, Any] = {"weights": engine.full_weights(), "rounds": engine.rounds_weights}
    found["rounded"] = [probe.look(1)]
    with engine.exact_forwards():
        found["exact"] = probe.look(1)
        gradient = engine.compute_gradient(probe.shares(1, "reconstruction"))
        sides = []
        for sign in (1, -1):
            with engine.perturb_weights(gradient, sign * DIFFERENCE / gradient.norm()):
                sides.append(probe.look(1))
        found["slope"], found["norm"] = (sides[0] - sides[1]) / (2 * DIFFERENCE), float(gradient.norm())
    found["rounded"].append(probe.look(1))
    with pytest.raises(ZeroDivisionError), engine.exact_forwards():
        probe.look(1 // 0)
    found["rounded"].append(probe.look(1))
    engine.close()
    return found


@pytest.mark.parametrize("name", always(AUTOCAST, "plain", "ddp", "fsdp", "zero2", "zero3"))
def test_exact_forwards_are_those_of_fp32(two_ranks: Ranks, name: str) -> None:
    first, *others = two_ranks.run_layout(looks_in_bf16, LAYOUTS[name])
    double = Double(first["weights"])
    expected = double.look(1)
    norm = torch.stack([value.norm() for value in double.gradient(1, "reconstruction").values()]).norm()
    for found in (first, *others):
        assert found["exact"] == pytest.approx(expected, rel=1e-6)
        assert found["rounded"][0] != pytest.approx(expected, rel=2e-6), "autocast was off to begin with"
        assert found["rounded"] == [found["rounded"][0]] * 3
        assert found["norm"] == pytest.approx(float(norm), rel=1e-5)
        assert found["slope"] == pytest.approx(float(norm), rel=1e-3)
        assert found["rounds"] is False


def half_weights(layout: Layout, precision: str) -> tuple[bool, list[str], Named, Named, list[float], bool]:
    """Whether weights are rounded; what an operation moved; whole weights and gradient; losses before, within and after
    a perturbation; whether the scaler is as before."""
    with ExitStack() as stack:
        if precision == "fp16":
            stack.enter_context(fp16_on_a_cpu())
        probe = ShardProbe(layout, training={"precision": precision})
        engine = probe.engine
        probe.step(0)
        weights, before, scaler = engine.full_weights(), probe.state(), dict(engine.extra_state())
        gradient = engine.compute_gradient(probe.shares(1, "reconstruction"))
        found = probe.whole(gradient)
        losses = [probe.look(1)]
        with engine.perturb_weights(gradient, -0.2 / gradient.norm()):
            losses.append(probe.look(1))
        losses.append(probe.look(1))
        moved, same_scaler = unequal(probe.state(), before), dict(engine.extra_state()) == scaler
        rounds = engine.rounds_weights
        engine.close()
        return rounds, moved, weights, found, losses, same_scaler


HALF = {
    **{f"bf16 weights, stage {stage}": (Layout(engine="deepspeed", stage=stage), "bf16") for stage in (1, 2, 3)},
    **{f"fp16, stage {stage}": (fp16_layout(stage, initial_scale_power=10), "fp16") for stage in (0, 1, 2, 3)},
}


@pytest.mark.parametrize("name", always(HALF, "bf16 weights, stage 2", "fp16, stage 3"))
def test_half_precision_weights_are_said_to_round_and_the_loss_scale_is_divided_out(
    two_ranks: Ranks, name: str
) -> None:
    answers = two_ranks(half_weights, *HALF[name])
    double = Double(answers[0][2])
    expected, loss = double.gradient(1, "reconstruction"), double.look(1)
    for rounds, moved, _, gradient, losses, same_scaler in answers:
        assert rounds is True
        assert moved == [] and same_scaler
        assert largest_difference(gradient, expected) < 3e-2
        assert losses[0] == losses[2] == pytest.approx(loss, rel=3e-2)
        assert losses[1] < losses[0] - 0.05
