"""Initial weights from (seed, the tensor's name), so that sharded and unsharded models start equal (invariant 1)."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor, nn


def tensor_seed(seed: int, name: str) -> int:
    """63-bit seed of one tensor."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest(), "little") >> 1


def initial_tensor(seed: int, name: str, shape: tuple[int, ...], std: float) -> Tensor:
    """Normal values with standard deviation `std`, drawn on the CPU from a generator of this tensor's own, fp32."""
    generator = torch.Generator().manual_seed(tensor_seed(seed, name))
    return torch.randn(shape, generator=generator) * std


@torch.no_grad()
def initialise(module: nn.Module, *, seed: int, std: float) -> None:
    """BERT's initialisation: matrices normal with `std`, biases 0, norm weights 1.

    Every parameter is written, whatever its module drew before. The row of an embedding's padding token is zero, as in
    transformers.
    """
    for name, parameter in module.named_parameters():
        if parameter.ndim >= 2:
            parameter.copy_(initial_tensor(seed, name, tuple(parameter.shape), std))
        elif name.endswith("LayerNorm.weight"):
            parameter.fill_(1.0)
        else:
            parameter.zero_()
    for child in module.modules():
        if isinstance(child, nn.Embedding) and child.padding_idx is not None:
            child.weight[child.padding_idx].zero_()
