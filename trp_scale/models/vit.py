"""Block of a vision transformer: timm's block with a choice of queries and relative positions."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from timm.layers import Mlp
from timm.models.vision_transformer import Block
from torch import Tensor, nn

from trp_scale.models.positions import RelativeInputs, RelativePositions
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
        relative: whether attention has relative positions, with a table for this block.
        drop_path: probability to drop a branch for a sequence in training (Huang et al. 2016).
    """

    cut: Cut = WHOLE

    def __init__(
        self, width: int, heads: int, intermediate: int, *, eps: float, relative: bool, drop_path: float = 0.0
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
        self.relative_positions = RelativePositions(width // heads) if relative else None

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
        """
        (projected,) = self.cut.project(self.norm1(tokens), self.attn.qkv)  # [B, T, 3 D]
        parts = projected.chunk(3, dim=-1)  # [B, T, D]; one copy in the backward pass
        # With tensor parallelism, D is the width of this rank's heads.
        queries, keys, values = (part.unflatten(-1, (-1, self.head_size)).transpose(1, 2) for part in parts)  # type: ignore[no-untyped-call]
        if last is not None:
            queries, tokens = queries[:, :, -last:], self.cut.split(self.cut.whole(tokens)[:, -last:])
        bias = None if self.relative_positions is None else self.relative_positions(queries, relative)
        context = attend(queries, keys, values, bias)  # [B, H, Q, D / H]
        if value is not None:
            context = context + masked_rows(self.cut.share_input(value).to(context.dtype), context.shape[2], masked)
        tokens = tokens + self.drop_path1(self.attn.proj(context.transpose(1, 2).flatten(2)))  # [B, Q, D]
        more, hidden = feed_forward(self.mlp, self.norm2(tokens), self.cut)
        tokens = tokens + self.drop_path2(more)
        return (tokens, self.cut.join_features(hidden.detach())) if feed_forward_input else tokens


def stack_blocks(
    count: int, width: int, heads: int, intermediate: int, *, eps: float, relative: bool = False, drop_path: float = 0.0
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


def attend(queries: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None) -> Tensor:
    """Return softmax attention [B, H, Q, D / H] with a bias [B, H, Q, T] on its scaled scores.

    On a CPU it is computed in fp32 or fp64: torch's fused kernel is 1.6 to 2.5 times slower in bf16, and rounds more.
    """
    if queries.device.type != "cpu" or queries.dtype not in (torch.bfloat16, torch.float16):
        return F.scaled_dot_product_attention(queries, keys, values, attn_mask=bias)
    with torch.autocast("cpu", enabled=False):
        widened = None if bias is None else bias.float()
        context = F.scaled_dot_product_attention(queries.float(), keys.float(), values.float(), attn_mask=widened)
    return context.to(queries.dtype)


def masked_rows(value: Tensor, count: int, masked: int) -> Tensor:
    """Return the value in the last `masked` rows of [count, D / H], zero before them."""
    return F.pad(value.expand(masked, -1), (0, 0, count - masked, 0))
