"""Tokens split over the ranks that share matrices (Korthikanti et al. 2022, section 4.2.2): what they send, and
products that read all tokens and keep a rank's own.

T tokens need not divide. All ranks have `share(T)` of them, the last ones zeros in the place of what is missing: these
are dropped where tokens are gathered, so that no product and no attention sees them, and their gradient is zero.

megatron-core 0.16's functions of the same kind take their memory from a GPU, and split the first dimension alone.
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
    """Tokens of a rank, of so many in all: T / ranks, rounded up."""
    return -(-count // group.size)


def gather_tokens(tokens: Tensor, group: Group, count: int) -> Tensor:
    """[..., share(T), D] of each rank -> [..., T, D] on all.

    Args:
        count: T.
    """
    first = tokens.movedim(-2, 0).contiguous()
    whole = first.new_empty((group.size * len(first), *first.shape[1:]))
    dist.all_gather_into_tensor(whole, first, group=group.handle)
    return whole[:count].movedim(0, -2).contiguous()  # each layer that reads it would copy and keep its own


def reduce_scatter_tokens(tokens: Tensor, group: Group) -> Tensor:
    """[..., T, D] of each rank -> [..., share(T), D], the sum over the ranks of each one's own tokens."""
    first = tokens.movedim(-2, 0)
    part = share(len(first), group)
    missing = group.size * part - len(first)
    first = F.pad(first, (0, 0) * (first.dim() - 1) + (0, missing)) if missing else first.contiguous()
    sums = first.new_empty((part, *first.shape[1:]))
    dist.reduce_scatter_tensor(sums, first, group=group.handle)
    return sums.movedim(0, -2)


def split_tokens(tokens: Tensor, group: Group) -> Tensor:
    """[..., T, D] that all ranks have -> this one's [..., share(T), D]."""
    part = share(tokens.shape[-2], group)
    part_tokens = tokens[..., group.rank * part : (group.rank + 1) * part, :]
    return F.pad(part_tokens, (0, 0, 0, part - part_tokens.shape[-2]))


class Exchange(torch.autograd.Function):
    """One of these, whose backward pass is another of them."""

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
    """Layers' outputs for all tokens. The backward pass gathers the tokens again; a rank keeps its own alone."""

    @staticmethod
    def forward(
        ctx: Any, tokens: Tensor, gather: Operation, scatter: Operation, count: int, *parameters: Tensor
    ) -> tuple[Tensor, ...]:
        """[..., share(T), I], weights [O, I], and as many biases [O] -> of each [..., T, O]."""
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
    """Return the products of layers with `weight` and `bias`, as torch's own layers compute them under autocast.

    Args:
        gather: this rank's tokens -> all.
        scatter: all ranks' gradients of all tokens -> the sums of this rank's.
    """
    kind = tokens.device.type
    parameters = [*(layer.weight for layer in layers), *(layer.bias for layer in layers)]
    if torch.is_autocast_enabled(kind):
        tokens, *parameters = (tensor.to(torch.get_autocast_dtype(kind)) for tensor in (tokens, *parameters))
    with torch.autocast(kind, enabled=False):
        return Products.apply(tokens, gather, scatter, len(layers), *parameters)  # type: ignore[no-untyped-call, no-any-return]


class DropoutApart(nn.Dropout):
    """Dropout of a rank's own tokens."""

    def __init__(self, dropout: nn.Dropout, cut: Cut) -> None:
        super().__init__(dropout.p)
        self.cut = cut

    def forward(self, tokens: Tensor) -> Tensor:
        if not (self.training and self.p):
            return tokens
        with self.cut.drawing():
            return super().forward(tokens)
