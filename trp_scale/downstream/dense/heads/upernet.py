"""UPerNet (Xiao et al. 2018) on a plain vision transformer: transformers' head on a pyramid made of four blocks."""

from __future__ import annotations

from torch import Tensor, nn

from trp_scale.downstream.dense.heads.base import DenseHead, as_map, group_norm, without_batch_norms

WIDTH = 512
AUXILIARY_WIDTH = 256
AUXILIARY_LEVEL = 2
"""The third feature map, as in MMSegmentation."""


class UperNetHead(DenseHead):
    """The tokens after four blocks as maps of 4, 2, 1 and 1/2 times the patches' grid: by transposed convolutions and
    pooling (Bao et al. 2022, He et al.), then transformers' UPerNet.

    The published head has batch norms over all ranks; here they are group norms (base.py, `group_norm`).

    Args:
        width: D, of a token.
        outputs: C, channels of the result.
        after: four blocks.
        channels: within the head.
        auxiliary: whether there is a second, small head on the third map.
    """

    def __init__(
        self, width: int, outputs: int, after: tuple[int, ...], channels: int = WIDTH, *, auxiliary: bool
    ) -> None:
        super().__init__()
        from transformers import UperNetConfig
        from transformers.models.upernet.modeling_upernet import UperNetFCNHead
        from transformers.models.upernet.modeling_upernet import UperNetHead as LibraryHead

        self.after = after
        settings = UperNetConfig(
            hidden_size=channels, num_labels=outputs, auxiliary_channels=AUXILIARY_WIDTH, auxiliary_num_convs=1
        )
        widths = [width] * len(after)
        self.pyramid = Pyramid(width)
        self.decoder = LibraryHead(settings, widths)
        self.auxiliary = UperNetFCNHead(settings, widths, in_index=AUXILIARY_LEVEL) if auxiliary else None
        without_batch_norms(self)
        self.outputs = ("decoder.classifier", "auxiliary.classifier")

    def forward(self, tokens: list[Tensor]) -> list[Tensor]:
        """Four times [B, 1 + G^2, D] -> [B, C, 4 G, 4 G], and with an auxiliary head [B, C, G, G]."""
        maps = self.pyramid([as_map(each) for each in tokens])
        found = [self.decoder(maps)]
        return found if self.auxiliary is None else [*found, self.auxiliary(maps)]


class Pyramid(nn.Module):
    """Maps of one resolution become four.

    Args:
        width: D, of every map.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.levels = nn.ModuleList(
            [
                nn.Sequential(_doubled(width), group_norm(width), nn.GELU(), _doubled(width)),
                _doubled(width),
                nn.Identity(),
                nn.MaxPool2d(2),
            ]
        )

    def forward(self, maps: list[Tensor]) -> list[Tensor]:
        """Four times [B, D, G, G] -> [B, D, 4 G, 4 G], [B, D, 2 G, 2 G], [B, D, G, G], [B, D, G / 2, G / 2]."""
        return [level(each) for level, each in zip(self.levels, maps, strict=True)]


def _doubled(width: int) -> nn.ConvTranspose2d:
    return nn.ConvTranspose2d(width, width, 2, stride=2)
