"""Offsets pushed beyond the relative table, where no gradient comes back (AdPE 4.2.3 says nothing of it)."""

from __future__ import annotations

import torch
from torch import Tensor

from trp_scale.adversary.ascent import State
from trp_scale.adversary.projection import Balls
from trp_scale.models.relative_positions import REACH, relaxed_index


class Saturation:
    """Which offsets of a relative coordinate perturbation are clamped.

    Args:
        balls: views [L, 2] (row, column) of the perturbation.
        grid: patches along a side.
        device: where the perturbation lives.
    """

    def __init__(self, balls: Balls, grid: int, device: torch.device) -> None:
        self.balls = balls
        self.offsets = torch.arange(1 - grid, grid, device=device)  # [2G - 1]
        # Each offset of an axis is that of G - |offset| of the G x G pairs of places on it.
        self.weights = (grid - self.offsets.abs()).double() / grid**2  # [2G - 1], sums to 1

    def _clamped(self, view: Tensor) -> Tensor:
        """[L, 2] -> [L, 2, 2G - 1] bool."""
        return relaxed_index(view.unsqueeze(-1) + self.offsets).abs() > REACH

    def share(self, flat: Tensor) -> Tensor:
        """0-dimensional float64: share of (pair, axis) offsets, over all pairs of patches and blocks, that are
        clamped."""
        parts = [(self._clamped(view).double() * self.weights).sum(-1).flatten() for view in self.balls.views(flat)]
        return torch.cat(parts).mean()

    def lost(self, flat: Tensor) -> Tensor:
        """[numel] bool: elements whose axis has all its offsets clamped: no gradient comes back to them, wherever the
        block's other axis stands."""
        return torch.cat([self._clamped(view).all(-1).flatten() for view in self.balls.views(flat)])

    def restarted(self, flat: Tensor, state: State) -> tuple[Tensor, State]:
        """The perturbation and what its ascent remembers, with zeros for the elements that are lost."""
        lost = self.lost(flat)

        def kept(value: Tensor) -> Tensor:
            return torch.where(lost, torch.zeros_like(value), value) if value.shape == flat.shape else value

        return kept(flat), {name: kept(value) for name, value in state.items()}
