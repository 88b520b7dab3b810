"""Initial weights from (seed, the tensor's name), so that sharded and unsharded models start equal (invariant 1)."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from trp_scale.core.seeds import tensor_seed


def initial_tensor(seed: int, name: str, shape: tuple[int, ...], std: float) -> Tensor:
    """Normal values with standard deviation `std`, drawn on the CPU from a generator of this tensor's own, fp32."""
    generator = torch.Generator().manual_seed(tensor_seed(seed, name))
    return torch.randn(shape, generator=generator) * std


def xavier_uniform_tensor(seed: int, name: str, shape: tuple[int, ...], *, parts: int = 1) -> Tensor:
    """Uniform values within sqrt(6 / (inputs + outputs)) of 0 for a matrix [outputs, inputs] (Glorot and Bengio).

    Args:
        parts: matrices of outputs / parts rows that are stored as one; the bound is that of one of them.
    """
    bound = math.sqrt(6.0 / (shape[0] / parts + sum(shape[1:])))
    generator = torch.Generator().manual_seed(tensor_seed(seed, name))
    return (2.0 * torch.rand(shape, generator=generator) - 1.0) * bound


@torch.no_grad()
def write(module: nn.Module, rule: Callable[[str, nn.Parameter], Tensor | float]) -> None:
    """Give every parameter what the rule says for its name, whatever its module drew before."""
    for name, parameter in module.named_parameters():
        value = rule(name, parameter)
        if isinstance(value, Tensor):
            parameter.copy_(value)
        else:
            parameter.fill_(value)


@torch.no_grad()
def initialise(module: nn.Module, *, seed: int, std: float) -> None:
    """BERT's initialisation: matrices normal with `std`, biases 0, norm weights 1.

    The row of an embedding's padding token is zero, as in transformers.
    """

    def rule(name: str, parameter: nn.Parameter) -> Tensor | float:
        if parameter.ndim >= 2:
            return initial_tensor(seed, name, tuple(parameter.shape), std)
        return 1.0 if name.endswith("LayerNorm.weight") else 0.0

    write(module, rule)
    for child in module.modules():
        if isinstance(child, nn.Embedding) and child.padding_idx is not None:
            child.weight[child.padding_idx].zero_()


def initialise_vision(module: nn.Module, *, seed: int, std: float) -> None:
    """The masked autoencoder's initialisation (He et al., A.1; Wu et al.): matrices xavier uniform, class and mask
    tokens and embeddings normal with `std`, biases and relative tables 0, norm weights 1.

    Queries, keys and values are one matrix of 3 D rows, as there.
    """
    write(module, lambda name, parameter: vision_weights(seed, name, parameter, std))


def initialise_multimodal(module: nn.Module, *, seed: int, std: float) -> None:
    """MultiMAE's initialisation (Bachmann et al., public code): the masked autoencoder's, but queries, keys and values
    are matrices of D rows each, and mask tokens start at 0."""

    def rule(name: str, parameter: nn.Parameter) -> Tensor | float:
        if name.endswith("mask_token"):
            return 0.0
        parts = 3 if name.endswith("qkv.weight") else 2 if name.endswith("key_value.weight") else 1
        return vision_weights(seed, name, parameter, std, parts=parts)

    write(module, rule)


def vision_weights(seed: int, name: str, parameter: nn.Parameter, std: float, *, parts: int = 1) -> Tensor | float:
    """What `initialise_vision` gives one parameter; `parts` as in `xavier_uniform_tensor`."""
    if name.endswith(("_token", "_embedding")):
        return initial_tensor(seed, name, tuple(parameter.shape), std)
    if name.endswith(".table"):
        return 0.0
    if parameter.ndim >= 2:
        return xavier_uniform_tensor(seed, name, tuple(parameter.shape), parts=parts)
    return 1.0 if name.endswith(".weight") else 0.0  # the only vectors called weight are the norms'
