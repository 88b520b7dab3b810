"""One pass of the encoder over the chosen images: what all figures and pictures are made of."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trp_scale.downstream.classification.settings import ClassificationTaskConfig
from trp_scale.downstream.probe.encoder import FrozenEncoder
from trp_scale.downstream.representation.attention import recorded_attention
from trp_scale.downstream.representation.images import ImageChoice, measured_images


@dataclass(frozen=True, kw_only=True)
class ShownImages:
    """The first of the chosen images.

    Attributes:
        choice: which they are.
        images: [R, 3, S, S] in [0, 1], as the encoder sees them.
        labels: [R] classes, -1 without.
    """

    choice: ImageChoice
    images: Tensor
    labels: Tensor


@dataclass(frozen=True, kw_only=True)
class Study:
    """What the encoder makes of n images.

    Attributes:
        features: [n, D] fp32.
        labels: [n] classes, -1 without.
        block: whose attention it is.
        attention: [N, N] float64 over patches, mean over heads and images.
        shown: images to show.
        shown_attention: [R, N, N] over patches, mean over heads, of the images to show.
    """

    features: npt.NDArray[np.float32]
    labels: npt.NDArray[np.int64]
    block: int
    attention: Tensor
    shown: ShownImages
    shown_attention: Tensor


@torch.no_grad()
def study_images(
    encoder: FrozenEncoder, config: ClassificationTaskConfig, choice: ImageChoice, *, block: int, shown: int
) -> Study:
    """Read the images and encode them.

    Args:
        config: of the encoder, and of what is seen of an image.
        block: whose attention is recorded.
        shown: how many of the images are kept for pictures.

    Raises:
        RefusedError: an image cannot be read.
    """
    features, labels = [], []
    images: list[Tensor] = []
    maps: list[Tensor] = []
    patches = encoder.module.grid**2
    total = torch.zeros(patches, patches, dtype=torch.float64)
    with recorded_attention(encoder.module, block) as recorded:
        for batch in measured_images(config, choice):
            features.append(encoder(batch["images"]).cpu().numpy())  # [B, D]
            labels.append(batch["labels"].numpy())
            attention = recorded.pop().cpu()  # [B, N, N]
            total += attention.double().sum(0)
            if (missing := shown - sum(len(one) for one in images)) > 0:
                images.append(batch["images"][:missing].float() / 255.0)
                maps.append(attention[:missing])
    return Study(
        features=np.concatenate(features),
        labels=np.concatenate(labels),
        block=block,
        attention=total / len(choice.positions),
        shown=ShownImages(
            choice=choice.first(shown),
            images=torch.cat(images),
            labels=torch.from_numpy(np.concatenate(labels)[:shown]),
        ),
        shown_attention=torch.cat(maps),
    )
