"""A model whose gradient is whatever a test asks for."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from trp_scale.config import OptimizerConfig, PretrainTrainingConfig
from trp_scale.engines.plain import PlainEngine
from trp_scale.pretraining.pos_bert.settings import PosBertConfig

CPU = torch.device("cpu")


class Small(nn.Module):
    """A matrix, its bias and a norm: one of each kind of parameter that decay treats differently."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(5, 3)
        self.LayerNorm = nn.LayerNorm(3)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))

    @property
    def layers(self) -> list[nn.Module]:
        return [self.dense]

    def forward(self, inputs: Tensor) -> Tensor:
        return self.LayerNorm(self.dense(inputs))  # type: ignore[no-any-return]


def engine_of(module: nn.Module | None = None, precision: Any = "fp32", **optimizer: Any) -> PlainEngine:
    """The plain engine; without a module with the small model, always at the same weights."""
    config = PosBertConfig(training=PretrainTrainingConfig(precision=precision), optimizer=OptimizerConfig(**optimizer))
    return PlainEngine(module if module is not None else Small(), config, device=CPU)


def gradients(seed: int, module: nn.Module, scale: float = 1.0) -> dict[str, Tensor]:
    """Any gradient of each parameter, by name; its elements differ in size by orders of magnitude."""
    generator = torch.Generator().manual_seed(seed)

    def draw(parameter: Tensor) -> Tensor:
        exponent = 2 * torch.randn(parameter.shape, generator=generator)
        return scale * torch.randn(parameter.shape, generator=generator) * torch.exp(exponent)

    return {name: draw(parameter) for name, parameter in module.named_parameters()}


def push(engine: PlainEngine, wanted: dict[str, Tensor], parts: int = 1) -> Tensor:
    """Backward passes that add up to the wanted gradient; returns its norm as the engine sees it."""
    for number in range(parts):
        products = [(parameter * wanted[name]).sum() / parts for name, parameter in engine.module.named_parameters()]
        engine.backward(torch.stack(products).sum(), last=number == parts - 1)
    return engine.check_gradients()


def state_of(engine: PlainEngine) -> dict[str, Tensor]:
    """Copies of everything that pieces() shows, by parameter and kind."""
    return {
        f"{piece.name}/{kind}": tensor.clone() for piece in engine.pieces() for kind, tensor in piece.tensors.items()
    }


def weights_of(engine: PlainEngine) -> dict[str, Tensor]:
    return copy.deepcopy({name: parameter.detach() for name, parameter in engine.module.named_parameters()})
