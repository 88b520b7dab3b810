"""Maps of several strides from the single stride of a plain vision transformer."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import torch.nn.functional as F
from timm.layers import LayerNorm2d
from torch import Tensor, nn
from torchvision.ops import FeaturePyramidNetwork

from trp_scale.downstream.dense.heads.base import as_map

LEVELS = ("0", "1", "2", "3")
"""Names of the maps of strides p/4, p/2, p and 2p, as torchvision's heads call them; "pool" has 4p."""


def rescale(width: int, level: int) -> tuple[nn.Module, int]:
    """What turns the map of stride p into that of a level, and the channels it then has: a transposed convolution of
    stride 2 for each doubling, with a norm and GELU between two, nothing, or the maximum of 2 x 2 (Li et al. 2021;
    Li et al. 2022, where each doubling halves the channels)."""
    half = nn.ConvTranspose2d(width, width // 2, 2, stride=2)
    if level == 0:
        quarter = nn.ConvTranspose2d(width // 2, width // 4, 2, stride=2)
        return nn.Sequential(half, LayerNorm2d(width // 2), nn.GELU(), quarter), width // 4
    if level == 1:
        return half, width // 2
    return (nn.Identity() if level == 2 else nn.MaxPool2d(2)), width


class SimplePyramid(nn.Module):
    """All levels from the last map alone (Li et al. 2022, section 3): rescaled, then a 1 x 1 and a 3 x 3 convolution,
    each with a norm over the channels.

    Args:
        width: D, of the tokens.
        channels: of each level.
    """

    def __init__(self, width: int, channels: int) -> None:
        super().__init__()
        self.rescale, self.output = nn.ModuleList(), nn.ModuleList()
        for level in range(len(LEVELS)):
            module, found = rescale(width, level)
            self.rescale.append(module)
            self.output.append(
                nn.Sequential(
                    nn.Conv2d(found, channels, 1, bias=False),
                    LayerNorm2d(channels),
                    nn.Conv2d(channels, channels, 3, padding=1, bias=False),
                    LayerNorm2d(channels),
                )
            )

    def reads(self, blocks: int) -> list[int]:
        """Numbers of the blocks whose tokens it takes; empty = the last block's, normalised."""
        return []

    def forward(self, tokens: Sequence[Tensor]) -> OrderedDict[str, Tensor]:
        """[[B, 1 + G^2, D]] -> maps [B, channels, H, W] by level, the finest first."""
        last = as_map(tokens[0])  # [B, D, G, G]
        maps = [output(scaled(last)) for scaled, output in zip(self.rescale, self.output, strict=True)]
        return with_pool(OrderedDict(zip(LEVELS, maps, strict=True)))


class BlockPyramid(nn.Module):
    """A level from the last block of each quarter of the encoder, joined from the top down (Li et al. 2021).

    Where the papers normalise over the batch, this does over the channels: images stay independent of each other.

    Args:
        width, channels: as for SimplePyramid.
    """

    def __init__(self, width: int, channels: int) -> None:
        super().__init__()
        scaled = [rescale(width, level) for level in range(len(LEVELS))]
        self.rescale = nn.ModuleList(module for module, _ in scaled)
        self.join = FeaturePyramidNetwork([found for _, found in scaled], channels, norm_layer=LayerNorm2d)

    def reads(self, blocks: int) -> list[int]:
        """Numbers of the blocks whose tokens it takes."""
        return [blocks * quarter // 4 - 1 for quarter in (1, 2, 3, 4)]

    def forward(self, tokens: Sequence[Tensor]) -> OrderedDict[str, Tensor]:
        """Four of [B, 1 + G^2, D] -> maps [B, channels, H, W] by level, the finest first."""
        maps = [scaled(as_map(one)) for scaled, one in zip(self.rescale, tokens, strict=True)]
        return with_pool(self.join(OrderedDict(zip(LEVELS, maps, strict=True))))


def with_pool(maps: OrderedDict[str, Tensor]) -> OrderedDict[str, Tensor]:
    """The maps in single precision, with every other cell of the coarsest as one more, for the largest anchors. Box
    coordinates follow their type: in bf16 they would be off by pixels."""
    single = OrderedDict((name, level.float()) for name, level in maps.items())
    single["pool"] = F.max_pool2d(single[LEVELS[-1]], kernel_size=1, stride=2)
    return single


PYRAMIDS: dict[str, type[SimplePyramid] | type[BlockPyramid]] = {"simple": SimplePyramid, "fpn": BlockPyramid}
