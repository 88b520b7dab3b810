"""Encoder of unmasked images for downstream tasks.

Parameter names are those of the pre-training models' encoders, so weights load by name.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from trp_scale.config.finetuning import ImageTaskConfig
from trp_scale.models.patches import patchify
from trp_scale.models.positions import RelativeInputs, interpolate, relative_inputs, sine_cosine
from trp_scale.models.vit import stack_blocks

CHANNELS = 3


class EncoderShape(NamedTuple):
    """Sizes of an encoder that heads need.

    Attributes:
        width: D, width of a token.
        grid: G, patches along each side of an image.
        patch_size: side of a patch in pixels.
        blocks: number of transformer blocks.
    """

    width: int
    grid: int
    patch_size: int
    blocks: int


def sine_cosine_positions(config: ImageTaskConfig) -> Tensor:
    """Return sine-cosine positions [1 + G^2, D] of the class token, which are zero, and of G x G patches, computed for
    this grid or interpolated from the pre-training grid (`downstream.positions`)."""
    width, grid = config.model.hidden_size, config.grid
    if config.downstream.positions != "recomputed":
        grid = config.downstream.pretraining_grid or config.grid
    positions = torch.cat([torch.zeros(1, width), sine_cosine(grid, width, config.vision.position_order).float()])
    return interpolate(positions, config.grid)


class ImageEncoder(nn.Module):
    """A vision transformer on square images of crops.size pixels, with a class token.

    `norm` is False for heads with their own norm.
    """

    fixed_positions: Tensor | None

    def __init__(self, config: ImageTaskConfig, *, norm: bool = True) -> None:
        super().__init__()
        model, vision, downstream = config.model, config.vision, config.downstream
        self.patch_size = vision.patch_size
        self.grid = config.crops.size // vision.patch_size
        width = model.hidden_size
        self.index = vision.index
        self.relative = vision.positions == "relative"
        self.head_size = width // model.heads
        self.patch_embed = nn.Linear(vision.patch_size**2 * CHANNELS, width)
        self.cls_token = nn.Parameter(torch.zeros(width))
        if config.trains_positions:
            self.pos_embed = nn.Parameter(torch.zeros(1 + self.grid**2, width))
            self.register_buffer("fixed_positions", None, persistent=False)
        else:
            self.register_buffer("fixed_positions", sine_cosine_positions(config), persistent=False)
        self.blocks = stack_blocks(
            model.layers,
            width,
            model.heads,
            model.intermediate_size,
            eps=model.layer_norm_eps,
            relative=self.relative,
            drop_path=downstream.drop_path,
        )
        self.norm = nn.LayerNorm(width, eps=model.layer_norm_eps) if norm else nn.Identity()

    @property
    def shape(self) -> EncoderShape:
        """Sizes for the heads."""
        return EncoderShape(self.cls_token.shape[0], self.grid, self.patch_size, len(self.blocks))

    def parameter_depth(self, name: str) -> int:
        """Return the depth of a parameter, as in timm: 0 for the embeddings, i + 1 for block i, and that of the last
        block for the last norm."""
        first, _, rest = name.partition(".")
        if first == "blocks":
            return int(rest.split(".")[0]) + 1
        return len(self.blocks) if first == "norm" else 0

    def forward(self, images: Tensor, after: Sequence[int] = ()) -> list[Tensor]:
        """Return the normalised tokens of the last block, or the tokens after some blocks: [B, 1 + G^2, D] each, the
        class token first, patches row by row.

        Args:
            images: [B, 3, S, S] normalised pixels.
            after: ascending indices of blocks, whose outputs are returned before any norm.
        """
        patches = patchify(images, self.patch_size).to(self.cls_token.dtype)  # [B, N, P]
        tokens = self.patch_embed(patches)  # [B, N, D]
        tokens = torch.cat([self.cls_token.expand(len(tokens), 1, -1), tokens], dim=1)
        positions = self.pos_embed if self.fixed_positions is None else self.fixed_positions
        tokens = tokens + positions.to(tokens.dtype)
        relative = self._relative_inputs(tokens)
        features = []
        for number, block in enumerate(self.blocks):
            tokens = block(tokens, relative)
            if number in after:
                features.append(tokens)
        normalised: Tensor = self.norm(tokens)
        if not after:
            return [normalised]
        if isinstance(self.norm, nn.LayerNorm):
            # Every pass must use every parameter (ZeRO-3), also the norm if heads read earlier tokens.
            features[-1] = features[-1] + 0.0 * normalised
        return features

    def _relative_inputs(self, tokens: Tensor) -> RelativeInputs | None:
        if not self.relative:
            return None
        places = torch.arange(self.grid**2, device=tokens.device)[None]  # [1, N]
        dtype = torch.promote_types(self.cls_token.dtype, torch.float32)
        inputs = relative_inputs(places, self.grid, self.index, self.head_size, dtype=dtype, blocks=1)[0]
        return inputs._replace(pairs=inputs.pairs.expand(len(tokens), -1, -1))  # equal for all images


class OnImageEncoder(nn.Module):
    """An image encoder with a head: units of sharding, and depth of parameters (engines/optimizer.py, `Layered`)."""

    encoder: ImageEncoder

    @property
    def layers(self) -> list[nn.Module]:
        """The encoder's blocks; each is sharded as one unit."""
        return list(self.encoder.blocks)

    @property
    def depth(self) -> int:
        """Depth of the head."""
        return len(self.encoder.blocks) + 1

    def parameter_depth(self, name: str) -> int:
        """Return the depth of a parameter of the encoder or the head."""
        first, _, rest = name.partition(".")
        return self.encoder.parameter_depth(rest) if first == "encoder" else self.depth
