"""The plainest head: one linear layer on each patch token."""

from __future__ import annotations

from torch import Tensor, nn

from trp_scale.downstream.dense.heads.base import DenseHead, as_map


class LinearHead(DenseHead):
    """A 1 x 1 convolution of the last block's normalised tokens.

    Args:
        width: D, of a token.
        outputs: C, channels of the result.
    """

    outputs = ("classifier",)

    def __init__(self, width: int, outputs: int) -> None:
        super().__init__()
        self.classifier = nn.Conv2d(width, outputs, 1)

    def forward(self, tokens: list[Tensor]) -> list[Tensor]:
        """[B, 1 + G^2, D] -> [B, C, G, G]."""
        return [self.classifier(as_map(tokens[-1]))]
