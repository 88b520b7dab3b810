"""The balls that a perturbation stays in: one for each vector along the last dimension (AdPE 4.1.1)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from trp_scale.models.perturbation import PerturbationShape

Norm = Literal["l2", "linf"]


def size(vectors: Tensor, norm: Norm) -> Tensor:
    """Norms of vectors [..., D] -> [...] float64; in fp32 the squares of large or tiny numbers leave its range."""
    order = 2.0 if norm == "l2" else float("inf")
    return torch.linalg.vector_norm(vectors, order, dim=-1, dtype=torch.float64)  # type: ignore[no-any-return]


def project(vectors: Tensor, norm: Norm, eps: float) -> Tensor:
    """Vectors [..., D] put into the ball: v min(eps, ||v||) / ||v|| for l2 (zero stays zero), clamped for linf."""
    if norm == "linf":
        return vectors.clamp(-eps, eps)
    # eps / 0 is infinite and is clamped to 1: there is nothing to divide by in a zero vector.
    factor = (eps / size(vectors, norm)).clamp(max=1.0)  # [...]
    return (vectors * factor.unsqueeze(-1)).to(vectors.dtype)


def steepest(gradients: Tensor, norm: Norm, eps: float) -> Tensor:
    """The one-step rule from zero: eps g / ||g|| for l2, eps sign(g) for linf (AdPE, footnote 2); zero stays zero.

    Gradients [..., D] -> perturbations [..., D].
    """
    if norm == "linf":
        return eps * gradients.sign()
    sizes = size(gradients, norm).unsqueeze(-1)  # [..., 1]
    return torch.where(sizes > 0, eps * (gradients / sizes), 0.0).to(gradients.dtype)


@dataclass(frozen=True)
class Balls:
    """All balls of one perturbation, which travels as one flat vector [numel].

    Attributes:
        shape: how the flat vector falls into views whose last dimension is one ball's.
        norm: of every ball.
        eps: radius of every ball.
    """

    shape: PerturbationShape
    norm: Norm
    eps: float

    def views(self, flat: Tensor) -> list[Tensor]:
        """[numel] -> the encoder's view and, where there is one, the decoder's, each [blocks, ..., D]."""
        return [view for view in self.shape.split(flat) if view is not None]

    def _on_views(self, flat: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
        return torch.cat([function(view).flatten() for view in self.views(flat)])

    def project(self, flat: Tensor) -> Tensor:
        """[numel] -> [numel], each ball's vector inside it."""
        return self._on_views(flat, lambda view: project(view, self.norm, self.eps))

    def steepest(self, gradient: Tensor) -> Tensor:
        """[numel] -> [numel], the one-step rule in each ball."""
        return self._on_views(gradient, lambda view: steepest(view, self.norm, self.eps))

    def sizes(self, flat: Tensor) -> Tensor:
        """[balls] float64, the norm of each ball's vector."""
        return self._on_views(flat, lambda view: size(view, self.norm))

    def reach(self, gradient: Tensor) -> Tensor:
        """0-dimensional float64: the most the loss can change, to first order, from one end of the balls to the other.

        2 eps times the dual norm of the gradient: l1 for linf, the sum of the balls' l2 norms for l2.
        """
        if self.norm == "linf":
            return 2 * self.eps * gradient.double().abs().sum()
        return 2 * self.eps * self._on_views(gradient, lambda view: size(view, "l2")).sum()
