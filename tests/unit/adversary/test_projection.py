"""The balls: idempotent, inside, the nearest point, direction kept for l2, zero safe."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from hypothesis.extra import numpy as arrays
from torch import Tensor

from trp_scale.adversary.projection import Balls, Norm, project, size, steepest
from trp_scale.models.perturbation import PerturbationShape

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
def test_projecting_twice_is_projecting_once(given_vectors: Tensor, eps: float, norm: Norm) -> None:
    once = project(given_vectors, norm, eps)
    torch.testing.assert_close(project(once, norm, eps), once, rtol=1e-6, atol=0.0)


@given(vectors, radii, norms)
def test_what_is_inside_stays_bit_for_bit(given_vectors: Tensor, eps: float, norm: Norm) -> None:
    inside = reference_size(given_vectors, norm) <= eps * (1 - 1e-6)  # [n]
    assert torch.equal(project(given_vectors, norm, eps)[inside], given_vectors[inside])


@given(vectors, radii)
def test_l2_keeps_the_direction_and_reaches_the_edge(given_vectors: Tensor, eps: float) -> None:
    projected = project(given_vectors, "l2", eps).double()
    sizes = reference_size(given_vectors, "l2").unsqueeze(-1)
    outside = (sizes > eps).squeeze(-1)
    expected = eps * given_vectors.double() / sizes
    smallest = torch.finfo(torch.float32).tiny  # below it fp32 has fewer digits
    torch.testing.assert_close(projected[outside], expected[outside], rtol=1e-6, atol=smallest)


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
def test_zero_stays_zero(norm: Norm) -> None:
    zero = torch.zeros(3, 4)
    assert torch.equal(project(zero, norm, 1.0), zero)
    assert torch.equal(steepest(zero, norm, 1.0), zero)


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
