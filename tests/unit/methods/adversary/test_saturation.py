"""Which offsets lie beyond the table, and what starts again from zero."""

from __future__ import annotations

import math

import pytest
import torch

from tests.unit.methods.adversary.toy import CPU, Setting, toy_hook, toy_trainer
from trp_scale.methods.adversary.ascent import Balls
from trp_scale.methods.adversary.positions import Saturation
from trp_scale.models.positions import BUCKETS, PerturbationShape, grid_offsets, node_weights

GRID = 7
SHAPE = PerturbationShape(kind="relative_coordinate", encoder=(3, 2), decoder=(1, 2))
VECTOR = [0.0, 0.5, 12.4, -12.5, 12.4, 3.0, -20.0, 20.0]
"""(row, column) of three encoder blocks and one of the decoder; beyond 6 + 6.33 all offsets of an axis are
clamped."""
LOST = [False, False, True, True, True, False, True, True]
"""The third block is lost along its rows alone."""


def saturation() -> Saturation:
    return Saturation(Balls(SHAPE, "linf", 20.0), GRID, CPU)  # type: ignore[arg-type]


def receives_gradient(offset: float) -> bool:
    """Whether anything of a random table comes back through the interpolation at this offset."""
    place = torch.tensor(offset, dtype=torch.float64, requires_grad=True)
    (node_weights(place, "relaxed") * torch.arange(7.0).square()).sum().backward()  # type: ignore[no-untyped-call]
    assert place.grad is not None
    return bool(place.grad != 0)


def test_the_share_is_of_all_pairs_and_both_axes() -> None:
    clamped = pairs = 0
    for row, column in zip(VECTOR[::2], VECTOR[1::2], strict=True):
        for one in range(GRID**2):
            for other in range(GRID**2):
                for axis, shift in ((one // GRID - other // GRID, row), (one % GRID - other % GRID, column)):
                    clamped += not receives_gradient_at[axis + shift]
                    pairs += 1
    assert float(saturation().share(torch.tensor(VECTOR))) == pytest.approx(clamped / pairs)
    assert 0.3 < clamped / pairs < 0.9


receives_gradient_at = {
    offset + shift: receives_gradient(offset + shift) for offset in range(1 - GRID, GRID) for shift in VECTOR
}


def test_what_is_lost_is_what_no_gradient_comes_back_to() -> None:
    """Of a random table interpolated to all offsets of both axes; an axis is lost whatever the other does."""
    shifts = torch.tensor(VECTOR, dtype=torch.float64).view(-1, 2).requires_grad_()  # [L, 2]
    weights, numbers = grid_offsets(GRID, "relaxed", shifts, 1)  # [L, R, 50]
    table = torch.randn(BUCKETS, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    pairs = (weights @ table).gather(1, numbers)  # [L, (2G - 1)^2 + 2]
    (pairs * torch.randn(pairs.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(6))).sum().backward()  # type: ignore[no-untyped-call]
    assert shifts.grad is not None
    assert saturation().lost(torch.tensor(VECTOR)).tolist() == LOST == (shifts.grad == 0).flatten().tolist()


@pytest.mark.parametrize(("on_saturation", "kept"), [("keep", True), ("reset", False)])
def test_a_lost_axis_starts_again_from_zero_with_its_moments(on_saturation: str, kept: bool) -> None:
    setting = Setting(adversary={"ascent": "adamw", "eps": 20.0, "on_saturation": on_saturation}, shape=SHAPE)
    hook = toy_hook(setting)
    trainer = toy_trainer(setting, hook)
    with torch.no_grad():
        hook.vector.copy_(torch.tensor(VECTOR))
    trainer.train_step()
    lost = torch.tensor(LOST)
    for tensor in (hook.vector.detach(), hook.state["exp_avg"], hook.state["exp_avg_sq"]):
        assert (tensor[~lost] != 0).all()
        assert (tensor[lost] != 0).all() if kept else (tensor[lost] == 0).all()
    assert int(hook.state["steps"]) == 1
    trainer.train_step()
    assert (hook.vector.detach()[lost].abs() < 1).all() is not kept
    assert hook.vector.isfinite().all() and math.isfinite(hook.metrics()["saturated"])
