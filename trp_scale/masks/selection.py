"""Which patches are masked, given each patch's probability, and how that choice is differentiated (MLO-MAE 3.2, A.4).

The choice itself is always hard: the N r most probable patches. What differs is what the loss's derivative by a
probability sees of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from trp_scale.config import MaskingConfig, PatchSplit


@dataclass(frozen=True, kw_only=True)
class Selection:
    """Masks of one micro-batch.

    Attributes:
        visible: [B, V] int64, masked: [B, M] int64; patch numbers, ascending.
        probabilities: [B, N] what they were chosen by, without a graph.
        embeddings: [B, N, D] the masking network's input, kept where it learns from this micro-batch.
    """

    visible: Tensor
    masked: Tensor
    probabilities: Tensor
    embeddings: Tensor | None = None

    def weights(self) -> Tensor:
        """[B, M] the masked patches' probabilities."""
        return self.probabilities.gather(1, self.masked)


def split_at(step: int, steps: int, patches: int, masking: MaskingConfig) -> PatchSplit:
    """How many patches are visible in this step: with a curriculum the ratio grows linearly (D.4)."""
    ratio = masking.ratio
    if masking.final_ratio > 0.0 and steps > 1:
        ratio += (masking.final_ratio - masking.ratio) * step / (steps - 1)
    return PatchSplit(patches=patches, visible=int(patches * (1.0 - ratio)))


def select(probabilities: Tensor, split: PatchSplit, embeddings: Tensor | None = None) -> Selection:
    """Mask the most probable patches of each image; of equal ones those with the lowest numbers."""
    order = probabilities.argsort(dim=1, descending=True, stable=True)  # [B, N]
    return Selection(
        masked=order[:, : split.masked].sort(dim=1).values,
        visible=order[:, split.masked :].sort(dim=1).values,
        probabilities=probabilities,
        embeddings=embeddings,
    )


Choice = Callable[[Tensor, Selection], Tensor | None]
"""Probabilities with a graph, [B, N] -> what stands for the mask in derivatives, [B, N]; None where it has none."""


def hard(probabilities: Tensor, selection: Selection) -> None:
    """The choice is a constant: probabilities act through the weights alone."""


def straight_through(probabilities: Tensor, selection: Selection) -> Tensor:
    """The choice's derivative is the identity's (A.4)."""
    return probabilities


def softsort(temperature: float) -> Choice:
    """The choice's derivative is that of a soft one: the rows of SoftSort's relaxed permutation that are masked, added
    up (Prillo and Eisenschlos 2020, with the absolute difference)."""

    def soft_mask(probabilities: Tensor, selection: Selection) -> Tensor:
        ranked = probabilities.sort(dim=1, descending=True).values[:, : selection.masked.shape[1]]  # [B, M]
        distance = (ranked.unsqueeze(2) - probabilities.unsqueeze(1)).abs()  # [B, M, N]
        return (-distance / temperature).softmax(dim=2).sum(1)  # [B, N]

    return soft_mask


def choice_of(masking: MaskingConfig) -> Choice:
    """As masking.selection says."""
    choices: dict[str, Choice] = {
        "hard": hard,
        "straight_through": straight_through,
        "softsort": softsort(masking.temperature),
    }
    return choices[masking.selection]


@dataclass(frozen=True, kw_only=True)
class PatchWeights:
    """How the probabilities enter the loss.

    Attributes:
        masked: [B, M] by which each masked patch's error counts, before any normalisation.
        gate: [B, V] by which the visible patches' tokens are multiplied: 1, with the derivative of not being masked;
            None for a hard choice.
    """

    masked: Tensor
    gate: Tensor | None


def patch_weights(probabilities: Tensor, selection: Selection, choice: Choice) -> PatchWeights:
    """Weights and gates as functions of the probabilities [B, N]; a graph in them is kept."""
    weights = probabilities.gather(1, selection.masked)  # [B, M]
    mask = choice(probabilities, selection)
    if mask is None:
        return PatchWeights(masked=weights, gate=None)
    slope = mask - mask.detach()  # 0, with the derivative of the choice
    return PatchWeights(
        masked=weights * (1.0 + slope.gather(1, selection.masked)),
        gate=1.0 - slope.gather(1, selection.visible),
    )
