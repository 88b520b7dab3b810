"""Relative positions: Wu et al.'s rounded index, AdPE's relaxed index, and the attention bias."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from tests.unit.models.plain_autoencoder import wu_index
from trp_scale.models.positions import (
    BUCKETS,
    NODES,
    REACH,
    IndexKind,
    RelativePositions,
    grid_offsets,
    node_weights,
    relative_inputs,
    relaxed_index,
)

FAR = st.floats(-60, 60)
INDICES: list[IndexKind] = ["rounded", "relaxed", "straight_through"]


def real(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_rounded_is_the_piecewise_index_of_wu_et_al() -> None:
    """Grids of up to 60 patches a side, and shifts between whole patches."""
    offsets = torch.cat([torch.arange(-60, 61).double(), torch.linspace(-20, 20, 4001, dtype=torch.float64)])
    expected = [wu_index(float(offset)) for offset in offsets]
    weights = node_weights(offsets, "rounded")
    assert (weights.argmax(-1) - REACH).tolist() == expected
    assert weights.sum(-1).eq(1).all() and weights.max(-1).values.eq(1).all()
    assert expected[60 - 13 : 60 + 14] == [-3] * 10 + [-2, -2, -1, 0, 1, 2, 2] + [3] * 10


def test_the_relaxed_index_by_hand() -> None:
    """ALPHA, GAMMA and what lies beyond, from the formula of 4.2.3."""
    found = relaxed_index(real(0.0, 1.9, -1.9, 15.2, -15.2, 100.0, 1.9 * 8**0.5))
    torch.testing.assert_close(found, real(0.0, 1.9, -1.9, 3.8, -3.8, 3.8, 1.9 + 0.5 * 1.9))


@pytest.mark.parametrize("index", INDICES)
@given(offset=FAR)
def test_weights_are_shares_of_at_most_two_neighbouring_nodes(index: IndexKind, offset: float) -> None:
    weights = node_weights(real(offset), index)[0]
    assert weights.shape == (NODES,)
    assert (weights >= 0).all() and float(weights.sum()) == pytest.approx(1, abs=1e-12)
    used = weights.nonzero().flatten().tolist()
    assert len(used) <= (2 if index == "relaxed" else 1) and max(used) - min(used) <= 1


@given(FAR)
def test_interpolated_nodes_equal_the_index(offset: float) -> None:
    """Interpolating the node coordinates gives the clamped index, so weights are linear between nodes."""
    places = torch.arange(-REACH, REACH + 1).double()
    found = node_weights(real(offset), "relaxed") @ places
    torch.testing.assert_close(found, relaxed_index(real(offset)).clamp(-3, 3), rtol=0, atol=1e-12)


def inverse(index: float) -> Tensor:
    """The offset beyond ALPHA whose relaxed index this is."""
    sign = 1 if index > 0 else -1
    return real(sign * 1.9 * 8 ** ((abs(index) - 1.9) / 1.9))


@pytest.mark.parametrize("index", ["relaxed", "straight_through"])
def test_no_gradient_comes_from_beyond_the_clamp(index: IndexKind) -> None:
    edge = float(inverse(3.0))
    offsets = real(-30, -edge - 1e-6, -edge + 1e-6, 0.4, edge - 1e-6, edge + 1e-6, 30).requires_grad_()
    places = torch.arange(-REACH, REACH + 1).double()
    (node_weights(offsets, index) @ places).sum().backward()  # type: ignore[no-untyped-call]
    assert offsets.grad.ne(0).tolist() == [False, False, True, True, True, False, False]
    assert offsets.grad[3] == 1


@given(FAR)
@example(float(torch.tensor(1.9 * 8 ** (1.1 / 1.9), dtype=torch.float64)))
def test_sum_of_weights_has_no_gradient(offset: float) -> None:
    """At the table's very edge too, where torch's versions differ on the slope of a clamp."""
    offsets = real(offset).requires_grad_()
    for index in ("relaxed", "straight_through"):
        total = node_weights(offsets, index).sum()  # type: ignore[arg-type]
        assert abs(float(torch.autograd.grad(total, offsets)[0])) < 1e-12


def test_straight_through_is_rounded_forward_and_relaxed_backward() -> None:
    torch.manual_seed(0)
    values = torch.randn(NODES, dtype=torch.float64)
    gradients = []
    for index in ("relaxed", "straight_through"):
        offsets = torch.linspace(-9, 9, 500, dtype=torch.float64).requires_grad_()
        weights = node_weights(offsets, index)  # type: ignore[arg-type]
        (weights @ values).sum().backward()  # type: ignore[no-untyped-call]
        gradients.append(offsets.grad)
    assert torch.equal(weights, node_weights(offsets, "rounded"))
    assert torch.equal(gradients[0], gradients[1])


class Pairs:
    """Queries, a table and patches of one grid, with what is looked up for them."""

    def __init__(self, grid: int, patches: int, *, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.grid, self.patches = grid, patches
        self.places = torch.stack([torch.randperm(grid**2, generator=generator)[:patches] for _ in range(2)])
        self.module = RelativePositions(8).double()
        with torch.no_grad():
            self.module.table.normal_(generator=generator)
        self.queries = torch.randn(2, 3, 1 + patches, 8, generator=generator, dtype=torch.float64)

    def bias(
        self,
        index: IndexKind,
        shift: Tensor | None = None,
        *,
        added: Tensor | None = None,
        masked: int | None = None,
        asking: int | None = None,
    ) -> Tensor:
        """[2, 3, T, T] with all patches masked, or the last ones; or of the last tokens that ask."""
        inputs = relative_inputs(
            self.places,
            self.grid,
            index,
            8,
            dtype=torch.float64,
            blocks=1,
            masked=self.patches if masked is None else masked,
            shifts=None if shift is None else shift[None],
            tables=None if added is None else added[None],
        )
        return self.module(self.queries if asking is None else self.queries[:, :, -asking:], inputs[0])  # type: ignore[no-any-return]

    def explicit(self, index: IndexKind, shift: Tensor, added: Tensor, masked: int) -> Tensor:
        """[2, 3, T, T]: a vector for every pair of patches, interpolated by itself, and its product with the query."""
        rows, columns = self.places // self.grid, self.places % self.grid
        between = torch.stack([each.unsqueeze(2) - each.unsqueeze(1) for each in (rows, columns)], dim=-1)  # [B,K,K,2]
        hidden = (torch.arange(self.patches) >= self.patches - masked).double()  # [K]
        moved = between + hidden[:, None, None] * shift
        down, across = node_weights(moved, index).unbind(-2)  # [B, K, K, 7]
        tables = self.module.table + hidden[:, None, None] * added  # [K, 50, d], of each query
        nodes = tables[:, :-1].unflatten(1, (NODES, NODES))
        vectors = torch.einsum("bijr,bijc,ircd->bijd", down, across, nodes)
        asking = self.queries[:, :, 1:]
        to_patches = torch.einsum("bhid,bijd->bhij", asking, vectors)
        to_class = torch.einsum("bhid,id->bhi", asking, tables[:, -1])
        bias = torch.cat([to_class.unsqueeze(-1), to_patches], dim=-1) / 8**0.5
        return torch.cat([torch.zeros_like(bias[:, :, :1]), bias], dim=2)


SHIFTS = [(0.0, 0.0), (0.7, -2.6), (-9.45, 0.5), (21.0, -30.3)]
"""Zero, between patches, and shifts that clamp some or all offsets of an axis."""


@pytest.mark.parametrize(("grid", "patches"), [(3, 9), (7, 12), (8, 15), (9, 15), (14, 20)])
@pytest.mark.parametrize("index", ["relaxed", "straight_through"])
@pytest.mark.parametrize("shift", SHIFTS, ids=str)
@pytest.mark.parametrize("perturbed", ["shift", "table"])
def test_all_gradients_are_those_of_the_explicit_form(
    grid: int, patches: int, index: IndexKind, shift: tuple[float, float], perturbed: str
) -> None:
    """To the first and the second order, of queries, table, and what an adversary moves."""
    pairs, masked = Pairs(grid, patches), patches - 4
    moved = real(*shift).requires_grad_()
    added = torch.randn(BUCKETS, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(3)).requires_grad_()
    pairs.queries.requires_grad_()
    none = {"shift": torch.zeros_like(added), "table": torch.zeros_like(moved)}[perturbed]
    if perturbed == "shift":
        found = pairs.bias(index, moved, masked=masked)
        expected = pairs.explicit(index, moved, none, masked)
    else:
        found = pairs.bias(index, added=added, masked=masked)
        expected = pairs.explicit(index, none, added, masked)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    leaves = [pairs.queries, pairs.module.table, moved if perturbed == "shift" else added]
    first, second = derivatives(found, leaves), derivatives(expected, leaves)
    for one, other in zip(first, second, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-11)
    inside = max(map(abs, shift)) < 6 or perturbed == "table"
    assert not inside or all(each.any() for each in first[:3]), "nothing would be compared"


def derivatives(bias: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    """Of a curved function of the bias by the leaves, then of a linear function of these by the leaves again."""
    generator = torch.Generator().manual_seed(4)

    def like(values: Tensor) -> Tensor:
        return torch.randn(values.shape, dtype=torch.float64, generator=generator)

    gradients = torch.autograd.grad((bias.sin() * like(bias)).sum(), leaves, create_graph=True)
    total = sum((gradient * like(gradient)).sum() for gradient in gradients)
    assert isinstance(total, Tensor)
    return [*(each.detach() for each in gradients), *torch.autograd.grad(total, leaves)]


@pytest.mark.parametrize("index", INDICES)
@pytest.mark.parametrize("grid", [5, 14])
def test_the_last_tokens_alone_have_the_same_bias(index: IndexKind, grid: int) -> None:
    pairs, masked = Pairs(grid, 20), 13
    for bias in (
        lambda **asking: pairs.bias(index, real(0.3, -1.7), masked=masked, **asking),
        lambda **asking: pairs.bias(index, added=torch.ones(1, 8, dtype=torch.float64), masked=masked, **asking),
        lambda **asking: pairs.bias(index, masked=masked, **asking),
    ):
        torch.testing.assert_close(bias(asking=masked), bias()[:, :, -masked:], rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("index", "grid", "count"),
    [("rounded", 14, 49), ("relaxed", 3, 25), ("relaxed", 7, 169), ("relaxed", 8, 225), ("straight_through", 14, 225)],
)
def test_offsets_that_are_alike_share_a_vector(index: IndexKind, grid: int, count: int) -> None:
    """The class token and a zero vector are added, up to a multiple of 8."""
    found = grid_offsets(grid, index, real(0.4, 0.0), 8)
    assert len(found.weights) == -(-(count + 2) // 8) * 8
    assert int(found.numbers[:-2].max()) < count
    assert found.numbers[-2:].tolist() == [count, count + 1]
    assert not found.weights[count + 1 :].any()


@pytest.mark.parametrize("grid", [6, 14])
def test_blocks_may_be_shifted_differently(grid: int) -> None:
    pairs, shifts = Pairs(grid, 20), torch.randn(5, 2, dtype=torch.float64)
    inputs = relative_inputs(pairs.places, grid, "relaxed", 8, dtype=torch.float64, blocks=5, masked=20, shifts=shifts)
    together = [pairs.module(pairs.queries, each) for each in inputs]
    assert all(torch.equal(one, pairs.bias("relaxed", shift)) for one, shift in zip(together, shifts, strict=True))
    assert not torch.allclose(together[0], together[1])


@pytest.mark.parametrize("shifted", [False, True])
def test_autocast_rounds_no_weights(shifted: bool) -> None:
    """Autocast rounds only the vectors and later results."""
    pairs, module = Pairs(7, 12), RelativePositions(8)
    with torch.no_grad():
        module.table.copy_(pairs.module.table)
    shifts = torch.tensor([[0.3, -1.7]]) if shifted else None
    found = []
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            inputs = relative_inputs(
                pairs.places, 7, "relaxed", 8, dtype=torch.float32, blocks=1, masked=5, shifts=shifts
            )
            vectors = module.vectors(inputs[0], torch.bfloat16 if enabled else torch.float32)
            assert not enabled or module(pairs.queries.bfloat16(), inputs[0]).dtype == torch.bfloat16
        found.append((inputs[0].weights, *vectors))
    for exact, other in zip(*found, strict=True):
        assert torch.equal(exact.to(other.dtype), other)
    assert found[1][0].dtype == torch.float32 and found[1][1].dtype == torch.bfloat16
