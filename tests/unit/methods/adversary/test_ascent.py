"""The balls, and the rules of ascent, each against its definition or another library."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from hypothesis.extra import numpy as arrays
from torch import Tensor

from tests.unit.methods.adversary.toy import COORDINATES
from trp_scale.config import OptimizerConfig
from trp_scale.config.registry import make_settings
from trp_scale.methods.adversary.ascent import Ascent, Balls, Norm, project, size, steepest
from trp_scale.models.positions import PerturbationShape

NORMS: tuple[Norm, ...] = ("l2", "linf")
fp32 = st.floats(width=32, allow_nan=False, allow_infinity=False)
vectors = arrays.arrays("float32", st.tuples(st.integers(1, 4), st.integers(1, 5)), elements=fp32).map(torch.from_numpy)
radii = st.floats(2.0**-10, 2.0**10, width=32)
norms = st.sampled_from(NORMS)


def reference_size(vector: Tensor, norm: Norm) -> Tensor:
    """[..., D] -> [...] float64, from the definition."""
    wide = vector.double().abs()
    return wide.square().sum(-1).sqrt() if norm == "l2" else wide.amax(-1)


@given(vectors, radii, norms)
def test_the_projection_is_inside_the_ball(given_vectors: Tensor, eps: float, norm: Norm) -> None:
    inside = project(given_vectors, norm, eps)
    assert inside.dtype == torch.float32 and inside.shape == given_vectors.shape
    assert inside.isfinite().all()
    assert (reference_size(inside, norm) <= eps * (1 + 1e-6)).all()
    assert torch.equal(size(inside, norm), reference_size(inside, norm)) or torch.allclose(
        size(inside, norm), reference_size(inside, norm), rtol=1e-12
    )


@given(vectors, radii, norms)
def test_what_is_inside_stays_bit_for_bit(given_vectors: Tensor, eps: float, norm: Norm) -> None:
    inside = reference_size(given_vectors, norm) <= eps * (1 - 1e-6)  # [n]
    assert torch.equal(project(given_vectors, norm, eps)[inside], given_vectors[inside])


@given(vectors, radii, norms, vectors)
def test_no_point_of_the_ball_is_nearer(given_vectors: Tensor, eps: float, norm: Norm, others: Tensor) -> None:
    given_vectors = given_vectors.clamp(-1e6, 1e6)
    rows, width = min(len(given_vectors), len(others)), min(given_vectors.shape[1], others.shape[1])
    given_vectors, others = given_vectors[:rows, :width], others[:rows, :width]
    nearest, other = project(given_vectors, norm, eps), project(others, norm, eps)
    to_nearest = (given_vectors - nearest).double().norm(dim=-1)
    to_other = (given_vectors - other).double().norm(dim=-1)
    assert (to_nearest <= to_other * (1 + 1e-5) + 1e-4 * eps).all()


@given(vectors, radii, norms)
def test_the_one_step_rule_goes_furthest_along_the_gradient(gradients: Tensor, eps: float, norm: Norm) -> None:
    shift = steepest(gradients, norm, eps)
    assert shift.isfinite().all()
    zero = reference_size(gradients, norm) == 0
    assert (shift[zero] == 0).all()
    gained = (shift.double() * gradients.double()).sum(-1)
    dual = reference_size(gradients, "l2") if norm == "l2" else gradients.double().abs().sum(-1)
    torch.testing.assert_close(gained, eps * dual, rtol=1e-5, atol=1e-30)


@pytest.mark.parametrize("norm", NORMS)
def test_each_vector_of_the_last_dimension_has_a_ball_of_its_own(norm: Norm) -> None:
    shape = PerturbationShape(kind="relative_embedding", encoder=(2, 3, 4), decoder=(1, 3, 5))
    balls = Balls(shape, norm, 1.5)  # type: ignore[arg-type]
    flat = torch.linspace(-9.0, 9.0, shape.numel)
    flat[4:8] = 0.0
    encoder, decoder = flat[:24].view(2, 3, 4), flat[24:].view(1, 3, 5)
    expected: list[Any] = [project(vector, norm, 1.5) for vector in (*encoder.reshape(-1, 4), *decoder.reshape(-1, 5))]
    assert torch.equal(balls.project(flat), torch.cat(expected))
    sizes = [float(reference_size(vector, norm)) for vector in (*encoder.reshape(-1, 4), *decoder.reshape(-1, 5))]
    assert balls.sizes(flat).tolist() == pytest.approx(sizes)
    climbed = balls.steepest(flat)
    # From one end of the ball to the other the linearised loss changes by twice what the one-step rule gains.
    assert float(balls.reach(flat)) == pytest.approx(2 * float((climbed.double() * flat.double()).sum()), rel=1e-6)


def rule(name: str, **settings: object) -> Ascent:
    adversary = make_settings("adversary", "relative_coordinate", eps=2.0, ascent=name, **settings)  # type: ignore[arg-type]
    optimizer = OptimizerConfig(beta1=0.8, beta2=0.97, eps=1e-5, weight_decay=0.1)
    return Ascent(adversary, optimizer, Balls(COORDINATES, adversary.norm, adversary.eps))  # type: ignore[arg-type]


def gradients(steps: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    scales = torch.tensor([1e-6, 1e-3, 1.0, 10.0, 0.0, 1e-9])
    return [torch.randn(6, generator=generator) * scales for _ in range(steps)]


def test_adamw_is_torch_s_maximising_without_decay() -> None:
    ours = rule("adamw")
    vector = torch.linspace(-1.0, 1.0, 6)
    theirs = torch.nn.Parameter(vector.clone())
    optimizer = torch.optim.AdamW([theirs], betas=(0.8, 0.97), eps=1e-5, weight_decay=0.0, maximize=True)
    state = ours.start(vector)
    for step, gradient in enumerate(gradients(60)):
        lr = 0.05 / (step + 1)
        optimizer.param_groups[0]["lr"] = lr
        theirs.grad = gradient.clone()
        optimizer.step()
        vector, state = ours.step(vector, gradient, state, lr)
        torch.testing.assert_close(vector, theirs.detach(), rtol=1e-5, atol=1e-8)
    assert int(state["steps"]) == 60
    # torch negates the gradient to maximise, and so holds the negative of its mean.
    for name, sign in (("exp_avg", -1), ("exp_avg_sq", 1)):
        torch.testing.assert_close(state[name], sign * optimizer.state[theirs][name], rtol=1e-5, atol=1e-20)
    assert vector[4] == torch.linspace(-1.0, 1.0, 6)[4], "no gradient, no decay: it stays"


@pytest.mark.parametrize("norm", ["l2", "linf"])
def test_linear_steps_from_zero_to_the_edge_of_each_ball(norm: str) -> None:
    ours = rule("linear", norm=norm)
    vector, gradient = torch.ones(6), torch.tensor([3.0, -4.0, 0.0, 0.0, 1e-20, 0.0])
    assert torch.equal(ours.origin(vector), torch.zeros(6))
    climbed, _ = ours.step(vector, gradient, {}, 99.0)
    expected = [1.2, -1.6, 0.0, 0.0, 2.0, 0.0] if norm == "l2" else [2.0, -2.0, 0.0, 0.0, 2.0, 0.0]
    assert climbed.tolist() == pytest.approx(expected)
