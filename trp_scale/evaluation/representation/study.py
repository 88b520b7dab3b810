"""One pass of the encoder over the chosen images: what all figures and pictures are made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trp_scale.config import Config
from trp_scale.evaluation.representation.attention import recorded_attention
from trp_scale.evaluation.representation.images import ImageChoice, read_images, reading_settings
from trp_scale.models.image_encoder import ImageEncoder
from trp_scale.objectives.classification import Pixels

Pooling = Literal["mean", "class"]


@dataclass(frozen=True, kw_only=True)
class ShownImages:
    """The first of the chosen images.

    Attributes:
        images: [R, 3, S, S] in [0, 1].
        labels: [R] classes, -1 without.
    """

    images: Tensor
    labels: Tensor


@dataclass(frozen=True, kw_only=True)
class Study:
    """What the encoder makes of n images.

    Attributes:
        size: side of the images in pixels.
        pooling: how tokens became a representation.
        features: [n, D] fp32.
        labels: [n] classes, -1 without.
        block: whose attention it is.
        attention: [N, N] float64 over patches, mean over heads and images.
        shown: images to show.
        shown_attention: [R, N, N] over patches, mean over heads, of the images to show.
    """

    size: int
    pooling: Pooling
    features: npt.NDArray[np.float32]
    labels: npt.NDArray[np.int64]
    block: int
    attention: Tensor
    shown: ShownImages
    shown_attention: Tensor


@torch.no_grad()
def study_images(
    encoder: ImageEncoder, choice: ImageChoice, *, size: int, block: int, pooling: Pooling, shown: int
) -> Study:
    """Read the images and encode them.

    Args:
        encoder: in evaluation mode.
        size: side of the images in pixels.
        block: whose attention is recorded.
        shown: how many of the images are kept for pictures.

    Raises:
        RefusedError: an image cannot be read.
    """
    pixels, where = Pixels(), encoder.cls_token.device
    features, labels, images, maps = [], [], [], []
    total = torch.zeros(encoder.grid**2, encoder.grid**2, dtype=torch.float64)
    with recorded_attention(encoder, block) as recorded:
        for batch in read_images(reading_settings(Config(), size), choice.data, choice.positions):
            crops = batch["images"].flatten(0, 1)  # [B, 3, S, S]
            tokens = encoder(pixels(crops.to(where)))[0]  # [B, 1 + N, D]
            pooled = tokens[:, 0] if pooling == "class" else tokens[:, 1:].mean(1)  # [B, D]
            features.append(pooled.float().cpu().numpy())
            labels.append(batch["labels"].numpy())
            attention = recorded.pop().cpu()  # [B, N, N]
            total += attention.double().sum(0)
            if (missing := shown - sum(map(len, images))) > 0:
                images.append(crops[:missing].float() / 255.0)
                maps.append(attention[:missing])
    return Study(
        size=size,
        pooling=pooling,
        features=np.concatenate(features),
        labels=np.concatenate(labels),
        block=block,
        attention=total / len(choice.positions),
        shown=ShownImages(images=torch.cat(images), labels=torch.from_numpy(np.concatenate(labels)[:shown])),
        shown_attention=torch.cat(maps),
    )
