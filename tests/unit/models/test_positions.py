"""Sine-cosine positions (He et al.) and their shifts."""

from __future__ import annotations

import pytest
import torch
from transformers import ViTMAEConfig, ViTMAEForPreTraining

from trp_scale.models.positions import IndexRows, PositionOrder, shift_positions, sine_cosine

WIDTH = 24


@pytest.mark.parametrize(("grid", "width"), [(7, 24), (14, 512)])
def test_positions_equal_transformers_vitmae(grid: int, width: int) -> None:
    """Compare with the decoder: transformers 5.23 leaves the positions of a new encoder at zero."""
    peer = ViTMAEForPreTraining(
        ViTMAEConfig(
            hidden_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=8,
            image_size=8 * grid,
            patch_size=8,
            decoder_hidden_size=width,
            decoder_num_hidden_layers=1,
            decoder_num_attention_heads=2,
            decoder_intermediate_size=8,
        )
    ).decoder
    peer.initialize_weights(grid**2)
    theirs = peer.decoder_pos_embed.detach()[0]
    torch.testing.assert_close(sine_cosine(grid, width).float(), theirs[1:], rtol=0, atol=2e-6)
    assert not theirs[0].any()  # the class token has none, as here


def test_a_width_of_another_kind_is_refused() -> None:
    with pytest.raises(ValueError, match=r"width 30.*of 4"):
        sine_cosine(3, 30)


def test_a_shift_of_zero_changes_nothing_at_all() -> None:
    positions = sine_cosine(9, WIDTH).float()
    assert torch.equal(shift_positions(positions, torch.zeros(2)), positions)


@pytest.mark.parametrize("order", ["column_row", "row_column"])
@pytest.mark.parametrize(("row", "column"), [(1, 0), (0, 1), (2, -3), (-1, 4)])
def test_a_whole_shift_is_the_position_of_another_patch(row: int, column: int, order: PositionOrder) -> None:
    grid = sine_cosine(9, WIDTH, order).view(9, 9, WIDTH)
    inner = grid[3:6, 3:5]
    found = shift_positions(inner, torch.tensor([row, column], dtype=torch.float64), order)
    torch.testing.assert_close(found, grid[3 + row : 6 + row, 3 + column : 5 + column], rtol=0, atol=1e-13)


def test_shift_gradient_equals_finite_differences() -> None:
    positions = sine_cosine(4, WIDTH)
    shift = torch.tensor([0.37, -1.21], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda value: shift_positions(positions, value), shift)


def test_half_precision_positions_are_shifted_in_single_precision() -> None:
    found = shift_positions(sine_cosine(4, WIDTH).half(), torch.tensor([0.5, 0.5]))
    assert found.dtype == torch.float32


def test_index_rows_has_the_gradient_of_indexing() -> None:
    table = torch.randn(6, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0), requires_grad=True)
    places = torch.tensor([[0, 2, 2], [5, 2, 0]])
    assert torch.equal(IndexRows.apply(table, places), table[places])  # type: ignore[no-untyped-call]
    assert torch.autograd.gradcheck(lambda given: IndexRows.apply(given, places), table)  # type: ignore[no-untyped-call]
    none = places[:, :0]
    (gradient,) = torch.autograd.grad(IndexRows.apply(table, none).sum(), table)  # type: ignore[no-untyped-call]
    assert torch.equal(gradient, torch.zeros_like(table))
