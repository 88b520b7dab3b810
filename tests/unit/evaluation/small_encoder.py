"""A small encoder for tests of probes and figures, and images that a hand-made one tells apart."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from PIL import Image

from tests.unit.data.images.stored import jpeg, write_images
from trp_scale.finetuning.classification.settings import ClassificationTaskConfig

GRID, PATCH, WIDTH = 4, 4, 16
SIZE = GRID * PATCH


def small_config(
    positions: str = "absolute", classes: int = 3, pooling: str = "mean", micro_size: int = 8
) -> ClassificationTaskConfig:
    """Two blocks of 16 numbers, 4 x 4 patches of 4 pixels, whole images in batches of 8."""
    config = ClassificationTaskConfig()
    model, vision = config.model, config.vision
    model.layers, model.hidden_size, model.heads, model.intermediate_size = 2, WIDTH, 2, 32
    vision.patch_size, config.crops.size = PATCH, SIZE
    vision.positions, vision.index = positions, "relaxed"  # type: ignore[assignment]
    config.downstream.classes, config.downstream.dropout = classes, 0.0
    config.downstream.pooling = pooling  # type: ignore[assignment]
    config.batch.micro_size = config.batch.global_size = micro_size
    config.data.workers, config.augmentation.measured = 0, "whole"
    return config


def with_large_weights(module: torch.nn.Module, seed: int = 0) -> torch.nn.Module:
    """All parameters drawn from a normal distribution, in float64, so that attention is far from uniform."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(0.5 * torch.randn(parameter.shape, generator=generator))
    return module.double().eval()


def stripes(across: bool) -> np.ndarray:
    """[4, 4] 1 and -1, column by column, or row by row."""
    columns = np.where(np.arange(PATCH) % 2 == 0, 1.0, -1.0)[None, :].repeat(PATCH, axis=0)
    return columns.T if across else columns


def striped_images(directory: Path, count: int, seed: int) -> Path:
    """Noise with faint stripes, upright or across: the class. In each patch it is drawn which ones are bright, so that
    nothing linear in the pixels tells them apart."""
    draws = np.random.default_rng(seed)
    samples: list[dict[str, str | bytes]] = []
    for number in range(count):
        label = int(draws.integers(2))
        signs = draws.choice([-1.0, 1.0], size=(SIZE // PATCH, SIZE // PATCH))
        grey = 128 + 25 * draws.standard_normal((SIZE, SIZE)) + 15 * np.kron(signs, stripes(label == 1))
        image = Image.fromarray(grey.clip(0, 255).astype(np.uint8)).convert("RGB")
        samples.append({"__key__": f"n{number:05d}", "jpg": jpeg(image), "cls": str(label).encode()})
    changes: dict[str, object] = {"classes": ["upright", "across"]}
    return write_images(directory, [samples], rows_per_block=8, changes=changes)
