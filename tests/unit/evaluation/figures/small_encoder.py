"""A tiny encoder with weights of some size, in which attention is far from uniform."""

from __future__ import annotations

import torch

from trp_scale.finetuning.classification.settings import ClassificationTaskConfig

GRID = 4
PATCH = 4
SIZE = GRID * PATCH


def small_config(positions: str = "absolute", classes: int = 3, pooling: str = "mean") -> ClassificationTaskConfig:
    """Two blocks of 16 with 2 heads on 4 x 4 patches of 4 pixels."""
    config = ClassificationTaskConfig()
    config.model.layers, config.model.hidden_size, config.model.heads = 2, 16, 2
    config.model.intermediate_size = 24
    config.vision.patch_size, config.crops.size = PATCH, SIZE
    config.vision.positions, config.vision.index = positions, "relaxed"  # type: ignore[assignment]
    config.downstream.classes = classes
    config.downstream.pooling, config.downstream.dropout = pooling, 0.0  # type: ignore[assignment]
    return config


def with_large_weights(module: torch.nn.Module, seed: int = 0) -> torch.nn.Module:
    """All parameters drawn from a normal distribution, in float64."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(0.5 * torch.randn(parameter.shape, generator=generator))
    return module.double().eval()
