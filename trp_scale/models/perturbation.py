"""Perturbations of a masked autoencoder: one flat vector, and the places where its parts act (AdPE 4).

A perturbation acts at masked patches only and is shared by them and by all images; of relative positions, each block
has its own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from trp_scale.config import DecodedVisionConfig, ModelConfig
from trp_scale.core.batch import Extra
from trp_scale.models.relative_positions import BUCKETS

PERTURBATION = Extra("perturbation")
"""[numel] the flat vector, added where its parts act."""
PIXEL_SHIFT = Extra("pixel_shift")
"""[R, 3, S, S], or [R, k, 3, S, S] of several crops: added to pixels in [0, 1]."""


@dataclass(frozen=True, kw_only=True)
class PerturbationShape:
    """Shapes of the encoder's and the decoder's part. The last dimension is that of one ball, the first is the block.

    absolute_embedding: (1, D). absolute_coordinate: (1, 2), row and column in patches. relative_embedding: (L, 50,
    D / H) with a vector for each entry of the table, else (L, D / H). relative_coordinate: (L, 2), added to the row and
    the column of x_i - x_j.

    Attributes:
        kind: of the adversary.
        encoder, decoder: shapes; the decoder is None where it stays clean.
    """

    kind: str
    encoder: tuple[int, ...]
    decoder: tuple[int, ...] | None = None

    @property
    def numel(self) -> int:
        """Length of the flat vector."""
        return math.prod(self.encoder) + (0 if self.decoder is None else math.prod(self.decoder))

    def split(self, flat: Tensor) -> tuple[Tensor, Tensor | None]:
        """[numel] -> views of the encoder's and of the decoder's part."""
        encoder = math.prod(self.encoder)
        decoder = None if self.decoder is None else flat[encoder:].view(self.decoder)
        return flat[:encoder].view(self.encoder), decoder


def perturbation_shape(model: ModelConfig, vision: DecodedVisionConfig, adversary: Any) -> PerturbationShape | None:
    """The shape for these settings, None where no position is perturbed (kinds none and pixels).

    That the adversary has something to act on is for the checks of the recipes to say.
    """
    if adversary.kind in ("none", "pixels"):
        return None
    encoder = _part(adversary, model.layers, model.hidden_size, model.heads)
    if adversary.where == "encoder":
        return PerturbationShape(kind=adversary.kind, encoder=encoder)
    decoder = _part(adversary, vision.decoder_layers, vision.decoder_hidden_size, vision.decoder_heads)
    return PerturbationShape(kind=adversary.kind, encoder=encoder, decoder=decoder)


def _part(adversary: Any, layers: int, width: int, heads: int) -> tuple[int, ...]:
    per_bucket = adversary.kind == "relative_embedding" and adversary.scope == "per_bucket"
    return {
        "absolute_embedding": (1, width),
        "absolute_coordinate": (1, 2),
        "relative_embedding": (layers, BUCKETS, width // heads) if per_bucket else (layers, width // heads),
        "relative_coordinate": (layers, 2),
    }[adversary.kind]


class Perturbed(NamedTuple):
    """The part of a perturbation that acts in the encoder, or in the decoder; None where nothing acts.

    Attributes:
        embedding: [D], added to the position embedding of masked patches (AdPE 4.1.1).
        coordinate: [2], added to their row and column (AdPE 4.1.2).
        tables: [L, 50 or 1, D / H], added to the relative table for masked queries (AdPE 4.2.2).
        values: [L, D / H], added to what each head of masked queries attends to: r^V of AdPE 4.2.1.
        offsets: [L, 2], added to the offsets of masked queries (AdPE 4.2.3).
    """

    embedding: Tensor | None = None
    coordinate: Tensor | None = None
    tables: Tensor | None = None
    values: Tensor | None = None
    offsets: Tensor | None = None


def perturbed_attribute(part: Tensor | None, adversary: Any) -> Perturbed:
    """Return the attribute that a part perturbs, or none."""
    if part is None:
        return Perturbed()
    if adversary.kind == "absolute_embedding":
        return Perturbed(embedding=part[0])
    if adversary.kind == "absolute_coordinate":
        return Perturbed(coordinate=part[0])
    if adversary.kind == "relative_coordinate":
        return Perturbed(offsets=part)
    if adversary.scope == "value":
        return Perturbed(values=part)
    return Perturbed(tables=part if adversary.scope == "per_bucket" else part.unsqueeze(1))
