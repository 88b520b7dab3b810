"""A small encoder for tests of probes, and images that a hand-made one tells apart."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from tests.unit.data.images.stored import jpeg, write_images
from trp_scale.finetuning.classification.settings import ClassificationTaskConfig
from trp_scale.models.image_encoder import ImageEncoder

SIZE, PATCH, WIDTH = 16, 4, 16


def small_config(micro_size: int = 8) -> ClassificationTaskConfig:
    """Two blocks of 16 numbers, 4 x 4 patches of 4 pixels, whole images in batches of 8."""
    config = ClassificationTaskConfig()
    model, vision = config.model, config.vision
    model.layers, model.hidden_size, model.heads, model.intermediate_size = 2, WIDTH, 2, 32
    vision.patch_size, config.crops.size = PATCH, SIZE
    config.batch.micro_size = config.batch.global_size = micro_size
    config.data.workers, config.augmentation.measured = 0, "whole"
    return config


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


def stripe_detector(config: ClassificationTaskConfig) -> dict[str, Tensor]:
    """Weights that look for stripes: numbers 0 and 1 of a token are a patch's responses to both kinds, and the first
    block's two layers put their sizes, whatever the sign, into 2 and 3. Nothing else is added to a token."""
    weights = {name: tensor.detach().clone() for name, tensor in ImageEncoder(config).named_parameters()}
    for name, tensor in weights.items():
        if ".proj." in name or "mlp." in name or name.startswith("patch_embed."):
            tensor.zero_()
    first, second = weights["blocks.0.mlp.fc1.weight"], weights["blocks.0.mlp.fc2.weight"]
    for kind in (0, 1):
        pattern = torch.from_numpy(stripes(kind == 1)).float()  # [p, p]
        weights["patch_embed.weight"][kind] = pattern[:, :, None].expand(-1, -1, 3).reshape(-1)
        for place, sign in enumerate((1.0, -1.0)):
            first[2 * kind + place, kind] = sign
            second[2 + kind, 2 * kind + place] = 10.0
    return weights
