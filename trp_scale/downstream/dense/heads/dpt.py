"""The dense prediction transformer's neck and depth head (Ranftl et al. 2021), transformers' modules on our tokens."""

from __future__ import annotations

from torch import Tensor, nn

from trp_scale.downstream.dense.heads.base import DenseHead

WIDTH = 256


class DptHead(DenseHead):
    """Tokens of four blocks, each with the class token mixed in, become maps of 4, 2, 1 and 1/2 times the patches'
    grid, are fused from the coarsest on, and give one value for each pixel.

    It differs from transformers' in two places. The first fusion has nothing to fuse, so its first residual unit, whose
    weights nothing would ever reach, is left out. And the last ReLU is left out: the result is in standard deviations
    from a mean, of either sign, and a head that begins at zero would have no gradient.

    Args:
        width: D, of a token.
        outputs: 1.
        after: four blocks.
        channels: of the fused maps; those before have 3/8, 3/4, 3/2 and 3 times as many (96 to 768 of 256).
    """

    def __init__(self, width: int, outputs: int, after: tuple[int, ...], channels: int = WIDTH) -> None:
        super().__init__()
        from transformers import DPTConfig
        from transformers.models.dpt.modeling_dpt import DPTDepthEstimationHead, DPTNeck

        if outputs != 1:
            raise ValueError(f"{outputs} outputs: the DPT head here is of depth, 1 is allowed")
        self.after = after
        settings = DPTConfig(
            hidden_size=width,
            is_hybrid=False,
            neck_hidden_sizes=[channels * eighths // 8 for eighths in (3, 6, 12, 24)],
            fusion_hidden_size=channels,
            readout_type="project",
        )
        self.neck = DPTNeck(settings)
        self.neck.fusion_stage.layers[0].residual_layer1 = nn.Identity()
        self.decoder = DPTDepthEstimationHead(settings)
        self.decoder.head[-1] = nn.Identity()
        self.outputs = (f"decoder.head.{len(self.decoder.head) - 2}",)

    def forward(self, tokens: list[Tensor]) -> list[Tensor]:
        """Four times [B, 1 + G^2, D] -> [B, 1, 16 G, 16 G]."""
        return [self.decoder(self.neck(tokens)).unsqueeze(1)]
