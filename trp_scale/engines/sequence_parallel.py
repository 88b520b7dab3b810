"""Sequence parallelism (Korthikanti et al. 2022, section 4.2.2): collectives that split tokens over a tensor group, and
linear layers that gather all tokens.

T need not be divisible. Each rank has `share(T)` tokens, the last ranks with zero padding. Gathering drops the padding,
so no product and no attention reads it, and its gradient is zero.

The functions of megatron-core 0.16 need a GPU and split only the first dimension.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from trp_scale.distributed.groups import Group
from trp_scale.models.tensor_plan import Cut

Operation = Callable[[Tensor], Tensor]


def share(count: int, group: Group) -> int:
    """Return the tokens of a rank: count / ranks, rounded up."""
    return -(-count // group.size)


def gather_tokens(tokens: Tensor, group: Group, count: int) -> Tensor:
    """Gather [..., share(T), D] of each rank to [..., T, D] on all ranks; `count` is T."""
    first = tokens.movedim(-2, 0).contiguous()
    whole = first.new_empty((group.size * len(first), *first.shape[1:]))
    dist.all_gather_into_tensor(whole, first, group=group.handle)
    return whole[:count].movedim(0, -2).contiguous()  # otherwise each layer that reads it keeps a copy


def reduce_scatter_tokens(tokens: Tensor, group: Group) -> Tensor:
    """Sum [..., T, D] over the ranks and return this rank's share of the tokens, [..., share(T), D]."""
    first = tokens.movedim(-2, 0)
    part = share(len(first), group)
    missing = group.size * part - len(first)
    first = F.pad(first, (0, 0) * (first.dim() - 1) + (0, missing)) if missing else first.contiguous()
    sums = first.new_empty((part, *first.shape[1:]))
    dist.reduce_scatter_tensor(sums, first, group=group.handle)
    return sums.movedim(0, -2)


def split_tokens(tokens: Tensor, group: Group) -> Tensor:
    """Return this rank's share [..., share(T), D] of replicated tokens [..., T, D]."""
    part = share(tokens.shape[-2], group)
    part_tokens = tokens[..., group.rank * part : (group.rank + 1) * part, :]
    return F.pad(part_tokens, (0, 0, 0, part - part_tokens.shape[-2]))


class Exchange(torch.autograd.Function):
    """Apply an operation, and another operation in the backward pass."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, operation: Operation, back: Operation) -> Tensor:
        ctx.back = back
        return operation(tokens)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return ctx.back(gradient), None, None


def exchange(tokens: Tensor, forward: Operation, back: Operation) -> Tensor:
    """`Exchange`, with types."""
    return Exchange.apply(tokens, forward, back)  # type: ignore[no-untyped-call, no-any-return]


class Products(torch.autograd.Function):
    """Outputs of linear layers for all tokens. The rank keeps its tokens only; the backward pass gathers again."""

    @staticmethod
    def forward(
        ctx: Any, tokens: Tensor, gather: Operation, scatter: Operation, count: int, *parameters: Tensor
    ) -> tuple[Tensor, ...]:
        """Compute [..., T, O] for each layer from [..., share(T), I], weights [O, I] and biases [O]."""
        weights, biases = parameters[:count], parameters[count:]
        ctx.gather, ctx.scatter = gather, scatter
        ctx.save_for_backward(tokens, *weights)
        whole = gather(tokens)
        return tuple(F.linear(whole, *layer) for layer in zip(weights, biases, strict=True))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        tokens, *weights = ctx.saved_tensors
        whole = ctx.gather(tokens).flatten(0, -2)  # [T, I]
        by_tokens = sum(gradient @ weight for gradient, weight in zip(gradients, weights, strict=True))
        flat = [gradient.flatten(0, -2) for gradient in gradients]  # [T, O]
        by_weights, by_biases = [each.t() @ whole for each in flat], [each.sum(0) for each in flat]
        return ctx.scatter(by_tokens), None, None, None, *by_weights, *by_biases


def products(tokens: Tensor, gather: Operation, scatter: Operation, layers: tuple[Any, ...]) -> tuple[Tensor, ...]:
    """Apply linear layers to all tokens, with autocast as in torch's layers.

    Args:
        gather: this rank's tokens -> all tokens.
        scatter: gradients of all tokens -> their sums over the ranks for this rank's tokens.
    """
    kind = tokens.device.type
    parameters = [*(layer.weight for layer in layers), *(layer.bias for layer in layers)]
    if torch.is_autocast_enabled(kind):
        tokens, *parameters = (tensor.to(torch.get_autocast_dtype(kind)) for tensor in (tokens, *parameters))
    with torch.autocast(kind, enabled=False):
        return Products.apply(tokens, gather, scatter, len(layers), *parameters)  # type: ignore[no-untyped-call, no-any-return]


class DropoutApart(nn.Dropout):
    """Dropout of a rank's tokens, with random numbers of its own."""

    def __init__(self, dropout: nn.Dropout, cut: Cut) -> None:
        super().__init__(dropout.p)
        self.cut = cut

    def forward(self, tokens: Tensor) -> Tensor:
        if not (self.training and self.p):
            return tokens
        with self.cut.drawing():
            return super().forward(tokens)
