"""Patches of several modalities as the tokens of one sequence (TRP 4.2.1; Bachmann et al., 3.1).

Token i N + p is the patch at place p, of N row by row, of the modality that is number i among the inputs.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trp_scale.config import ModalitiesConfig

VOID = 255
"""Label of a segmentation map where no class is known."""

MODALITY_OF = {"rgb": "rgb", "depth": "depth", "semseg": "semseg", "raw_rgb": "rgb"}
"""The modality that a task predicts."""


def labels_per_patch(patch_size: int, modalities: ModalitiesConfig) -> int:
    """L, labels of a patch of the segmentation map, which is kept at 1/stride of the image's resolution."""
    return (patch_size // modalities.segmentation_stride) ** 2


def values_per_patch(task: str, patch_size: int, modalities: ModalitiesConfig, classes: int) -> int:
    """Numbers that are predicted of a patch: pixels, depths, or for each label a logit of each class."""
    if task == "semseg":
        return labels_per_patch(patch_size, modalities) * classes
    return patch_size**2 * (1 if task == "depth" else 3)


def visible_slots(visible: Tensor, tokens: int) -> Tensor:
    """Where among the V visible tokens each of all tokens is.

    Args:
        visible: [R, V] int64, numbers of the visible tokens.
        tokens: I N, all of them.

    Returns:
        [R, I N] int64, from 0 to V - 1; V for a token that is masked.
    """
    rows, count = visible.shape
    order = torch.arange(count, device=visible.device).expand(rows, -1)
    return torch.full((rows, tokens), count, device=visible.device).scatter(1, visible, order)


class SegmentationTokeniser(nn.Module):
    """A patch of labels as a token: a vector for each class, those of a patch's labels side by side through one matrix.

    Args:
        classes: C; one more vector stands for VOID.
        labels: L, of a patch.
        embedding: E, width of a class's vector.
        width: D, of the token.
    """

    def __init__(self, classes: int, labels: int, embedding: int, width: int) -> None:
        super().__init__()
        self.classes = classes
        # Flat, because weight decay goes by the number of dimensions and embeddings are not decayed.
        self.class_embedding = nn.Parameter(torch.empty((classes + 1) * embedding))
        self.projection = nn.Linear(labels * embedding, width)

    def forward(self, labels: Tensor) -> Tensor:
        """[R, K, L] uint8 or int64 -> [R, K, D]."""
        numbers = torch.where(labels == VOID, self.classes, labels.long())
        vectors = F.embedding(numbers, self.class_embedding.view(self.classes + 1, -1))  # [R, K, L, E]
        return self.projection(vectors.flatten(2))  # type: ignore[no-any-return]
