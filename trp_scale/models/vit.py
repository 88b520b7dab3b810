"""Vision transformer: timm's block with a choice of queries and relative positions, and the encoder of unmasked images
for downstream tasks.

Parameter names are those of the pre-training models' encoders, so weights load by name.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from timm.layers import Mlp
from timm.models.vision_transformer import Block
from torch import Tensor, nn

from trp_scale.config.finetuning import ImageTaskConfig
from trp_scale.config.images import RelativeVisionConfig
from trp_scale.models.attention import attend, attention_shares, cut_windows, join_windows, window_padding
from trp_scale.models.patches import patchify
from trp_scale.models.positions import (
    PositionBias,
    RelativeInputs,
    RelativePositions,
    RelativeValues,
    interpolate,
    relative_inputs,
    sine_cosine,
)
from trp_scale.models.tensor_plan import WHOLE, Cut, TensorPlan


def feed_forward_ratio(width: int, intermediate: int) -> float:
    """Return a ratio with int(width x ratio) = intermediate, for timm."""
    ratio = intermediate / width
    return ratio if int(width * ratio) == intermediate else (intermediate + 0.5) / width


def block_plan(model: nn.Module, **divided: int) -> TensorPlan:
    """Return the tensor-parallel plan of a model of these blocks: heads and feed-forward are cut, tokens can be split.
    `divided` are sizes that the number of ranks must divide, by flag, with "__" for the dot."""
    return TensorPlan(
        columns=("*.mlp.fc1",),
        packed={"*.attn.qkv": 3},
        rows=("*.attn.proj", "*.mlp.fc2"),
        split=tuple(name for name, module in model.named_modules() if isinstance(module, TransformerBlock)),
        divided={"--" + flag.replace("__", "."): size for flag, size in divided.items()},
    )


class TransformerBlock(Block):  # type: ignore[misc]
    """timm's pre-norm block, with the same parameter names.

    Args:
        width: D, width of a token.
        heads: H, must divide the width.
        intermediate: width of the feed-forward layer.
        eps: epsilon of the layer norms.
        relative: settings of relative positions, with tables for this block; `None` without.
        drop_path: probability to drop a branch for a sequence in training (Huang et al. 2016).
    """

    cut: Cut = WHOLE

    def __init__(
        self,
        width: int,
        heads: int,
        intermediate: int,
        *,
        eps: float,
        relative: RelativeVisionConfig | None = None,
        drop_path: float = 0.0,
    ) -> None:
        super().__init__(
            dim=width,
            num_heads=heads,
            mlp_ratio=feed_forward_ratio(width, intermediate),
            qkv_bias=True,
            drop_path=drop_path,
            norm_layer=partial(nn.LayerNorm, eps=eps),
        )
        self.heads, self.head_size = heads, width // heads
        self.relative_positions = RelativePositions(self.head_size, relative.relative_mode) if relative else None
        self.relative_values = RelativeValues(self.head_size) if relative and relative.relative_values else None
        self.position_bias: PositionBias | None = None  # set by encoders that have one

    def sequence_length(self, tokens: Tensor, *others: object, **named: object) -> int:
        """Return T. A run has few different lengths, each with its own compiled graph (engines/compiled.py)."""
        return tokens.shape[1]

    def forward(
        self,
        tokens: Tensor,
        relative: RelativeInputs | None = None,
        value: Tensor | None = None,
        masked: int = 0,
        last: int | None = None,
        feed_forward_input: bool = False,
        window: int = 0,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """[B, T, D] -> [B, T, D], or [B, last, D].

        Args:
            relative: inputs of relative positions.
            value: [D / H], added to the attention output of each head for masked queries (AdPE 4.2.1, r^V).
            masked: number of masked tokens, which are the last ones.
            last: number of last tokens to compute, with equal results; keys and values come from all tokens. (Queries
                of all tokens are projected, because one matrix product is faster than two.)
            feed_forward_input: also return the input of the feed-forward's second matrix, [B, T, intermediate], without
                a graph.
            window: patches attend to the class token and to the patches of their window of window x window, instead of
                all tokens; tokens are those of a whole grid, [class, patches row by row], and `relative` is that of a
                window. The class token gets the mean of what it has in the windows. 0 = no windows.
        """
        (projected,) = self.cut.project(self.norm1(tokens), self.attn.qkv)  # [B, T, 3 D]
        parts = projected.chunk(3, dim=-1)  # [B, T, D]; one copy in the backward pass
        # With tensor parallelism, D is the width of this rank's heads.
        queries, keys, values = (part.unflatten(-1, (-1, self.head_size)).transpose(1, 2) for part in parts)  # type: ignore[no-untyped-call]
        if last is not None:
            queries, tokens = queries[:, :, -last:], self.cut.split(self.cut.whole(tokens)[:, -last:])
        grid = math.isqrt(queries.shape[2] - 1)
        if window:
            queries, keys, values = (cut_windows(part, window) for part in (queries, keys, values))
        bias = None if self.relative_positions is None else self.relative_positions(queries, relative)
        if self.position_bias is not None:
            by_offset = self.position_bias(queries.dtype)
            bias = by_offset if bias is None else bias + by_offset
        if window and grid % window:
            padding = window_padding(grid, window, queries).repeat(len(tokens), 1, 1, 1)  # [B n, 1, 1, 1 + w^2]
            bias = padding if bias is None else bias + padding
        if self.relative_values is None:
            context = attend(queries, keys, values, bias)  # [B, H, Q, D / H]
        else:
            shares = attention_shares(queries, keys, bias)  # [B, H, Q, T]
            context = shares @ values.to(shares.dtype) + self.relative_values(shares, relative)
            context = context.to(values.dtype)
        if window:
            context = join_windows(context, len(tokens), grid)
        if value is not None:
            added = self.cut.share_input(value).to(context.dtype).expand(masked, -1)
            context = context + F.pad(added, (0, 0, context.shape[2] - masked, 0))  # 0 before the masked rows
        tokens = tokens + self.drop_path1(self.attn.proj(context.transpose(1, 2).flatten(2)))  # [B, Q, D]
        more, hidden = feed_forward(self.mlp, self.norm2(tokens), self.cut)
        tokens = tokens + self.drop_path2(more)
        return (tokens, self.cut.join_features(hidden.detach())) if feed_forward_input else tokens


def stack_blocks(
    count: int,
    width: int,
    heads: int,
    intermediate: int,
    *,
    eps: float,
    relative: RelativeVisionConfig | None = None,
    drop_path: float = 0.0,
) -> nn.ModuleList:
    """Return blocks of one size; their drop path rates grow linearly from 0 to `drop_path`."""
    rates = torch.linspace(0.0, drop_path, count).tolist()
    return nn.ModuleList(
        TransformerBlock(width, heads, intermediate, eps=eps, relative=relative, drop_path=rate) for rate in rates
    )


def feed_forward(mlp: Mlp, tokens: Tensor, cut: Cut) -> tuple[Tensor, Tensor]:
    """Return the output [..., T, D] of timm's feed-forward layer, and the input [..., T, intermediate] of its second
    matrix: with tensor parallelism this rank's part, for all tokens."""
    (hidden,) = cut.project(tokens, mlp.fc1)
    hidden = mlp.norm(mlp.drop1(mlp.act(hidden)))
    return mlp.drop2(mlp.fc2(hidden)), hidden


CHANNELS = 3


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

    Args:
        norm: False for heads with their own norm.
        window: patches along the sides of attention windows (`TransformerBlock.forward`); 0 = no windows.
        whole: numbers of the blocks without windows.
        biased: whether each block has an attention bias by the offset of two patches; not with windows.
    """

    fixed_positions: Tensor | None

    def __init__(
        self,
        config: ImageTaskConfig,
        *,
        norm: bool = True,
        window: int = 0,
        whole: Collection[int] = (),
        biased: bool = False,
    ) -> None:
        super().__init__()
        model, vision, downstream = config.model, config.vision, config.downstream
        self.patch_size = vision.patch_size
        self.grid = config.crops.size // vision.patch_size
        self.window = min(window, self.grid)
        self.windowed = frozenset(range(model.layers)).difference(whole) if window else frozenset()
        width = model.hidden_size
        self.relative = vision if vision.positions == "relative" else None
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
        for block in self.blocks if biased else ():
            block.position_bias = PositionBias(self.grid, model.heads)
        self.norm = nn.LayerNorm(width, eps=model.layer_norm_eps) if norm else nn.Identity()

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
        relative = self._relative_inputs(len(tokens), self.grid)
        inside = None
        if self.windowed:
            inside = self._relative_inputs(len(tokens) * math.ceil(self.grid / self.window) ** 2, self.window)
        features = []
        for number, block in enumerate(self.blocks):
            tokens = block(tokens, inside, window=self.window) if number in self.windowed else block(tokens, relative)
            if number in after:
                features.append(tokens)
        normalised: Tensor = self.norm(tokens)
        if not after:
            return [normalised]
        if isinstance(self.norm, nn.LayerNorm):
            # Every pass must use every parameter (ZeRO-3), also the norm if heads read earlier tokens.
            features[-1] = features[-1] + 0.0 * normalised
        return features

    def _relative_inputs(self, count: int, grid: int) -> RelativeInputs | None:
        """Return the inputs of relative positions of `count` images or windows of grid x grid patches."""
        if self.relative is None:
            return None
        places = torch.arange(grid**2, device=self.cls_token.device)[None]  # [1, N]
        dtype = torch.promote_types(self.cls_token.dtype, torch.float32)
        index, values = self.relative.index, self.relative.relative_values
        (inputs,) = relative_inputs(places, grid, index, self.head_size, dtype=dtype, blocks=1, values=values)
        return inputs._replace(pairs=inputs.pairs.expand(count, -1, -1))  # equal for all images


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
