"""A frozen encoder that gives one vector for each image."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, fields
from typing import Any

import torch
from torch import Tensor

from trp_scale.config import RefusedError
from trp_scale.config.finetuning import ImageTaskConfig
from trp_scale.config.images import ImagePretrainConfig
from trp_scale.config.loader import load_recipe
from trp_scale.evaluation.probe.arguments import FrozenPositions
from trp_scale.finetuning.arguments import SCRATCH
from trp_scale.finetuning.classification.settings import ClassificationTaskConfig
from trp_scale.finetuning.encoder_source import open_encoder
from trp_scale.finetuning.task import take_encoder
from trp_scale.models.image_encoder import ImageEncoder
from trp_scale.models.initialise import initialise_vision
from trp_scale.models.patches import Pixels

BATCH = 64
"""Images of one forward pass."""

NOT_OF_THE_WEIGHTS = ("weights", "weights_names", "dropout", "initializer_range")
"""Fields of `model` that say where an encoder came from or how it learns, not what it computes."""


def encoder_config(
    path: str, *, recipe: str = "", size: int = 0, batch: int = BATCH, positions: FrozenPositions = "recomputed"
) -> ClassificationTaskConfig:
    """The settings of an encoder, and of the images that it is shown.

    Args:
        path: as --from names it.
        recipe: for scratch.
        size: side of the images in pixels; 0 = that of the pre-training.
        batch: images of one forward pass.
        positions: fixed ones on a grid of another size than in pre-training.

    Raises:
        RefusedError: no such encoder, one of text, or a size that patches do not fill.
    """
    config = ClassificationTaskConfig()
    config.downstream.positions = positions
    if path == SCRATCH:
        loaded = load_recipe(recipe)
        if not isinstance(loaded, (ImagePretrainConfig, ImageTaskConfig)):
            raise RefusedError(f"--recipe {recipe}: an encoder of text; allowed: a recipe of images")
        _take(config.model, loaded.model)
        _take(config.vision, loaded.vision)
        config.model.weights = ""
        config.downstream.pretraining_grid = loaded.crops.size // loaded.vision.patch_size
    else:
        open_encoder(path).adopt(config)
    return show(config, size=size, batch=batch)


def show(config: ClassificationTaskConfig, *, size: int, batch: int) -> ClassificationTaskConfig:
    """Fill in, in place, which images an encoder of these settings is shown.

    Args:
        size: side in pixels; 0 = that of the pre-training.
        batch: images of one forward pass.

    Raises:
        RefusedError: a size that patches do not fill.
    """
    config.batch.global_size = config.batch.micro_size = batch
    config.data.workers = 0
    patch_size = config.vision.patch_size
    config.crops.size = size or config.downstream.pretraining_grid * patch_size
    if config.crops.size < patch_size or config.crops.size % patch_size:
        raise RefusedError(
            f"--image_size is {config.crops.size}, allowed: multiples of the encoder's patches, {patch_size} pixels"
        )
    return config


def _take(target: object, source: Any) -> None:
    """Every setting of a section that the other has too."""
    for field in fields(source):
        if hasattr(target, field.name):
            setattr(target, field.name, getattr(source, field.name))


class FrozenEncoder:
    """Images [R, 3, S, S] uint8 -> vectors [R, D] fp32.

    Args:
        config: of the encoder (`encoder_config`).
        pooling: mean of the patch tokens, or the class token; of the last block, normalised.
        device: where it computes.
        precision: fp32 or bf16.
        seed: of the weights of scratch.
        weights: in place of those that the settings name (model.weights), by the names of `ImageEncoder`.

    Raises:
        RefusedError: weights that are not of this encoder.
    """

    def __init__(
        self,
        config: ClassificationTaskConfig,
        *,
        pooling: str,
        device: torch.device | None = None,
        precision: str = "fp32",
        seed: int = 0,
        weights: dict[str, Tensor] | None = None,
    ) -> None:
        self.pooling, self.precision = pooling, precision
        self.device = device or torch.device("cpu")
        path = config.model.weights
        if weights is None and path:
            weights = open_encoder(path).image_weights(config)
        # What was fine-tuned on the mean of its tokens has no last norm.
        module = ImageEncoder(config, norm=weights is None or "norm.weight" in weights)
        if weights is None:
            initialise_vision(module, seed=seed, std=config.model.initializer_range)
        else:
            take_encoder(module, weights, path)
        self._settings = {
            "model": {name: value for name, value in asdict(config.model).items() if name not in NOT_OF_THE_WEIGHTS},
            "vision": asdict(config.vision),
            "positions": [config.downstream.positions, config.downstream.pretraining_grid],
            "size": [config.crops.size, config.crops.interpolation],
            "seen": [config.augmentation.measured, config.augmentation.centre_share],
            "pooling": pooling,
            "precision": precision,
        }
        self.module = module.requires_grad_(False).eval().to(self.device)
        self._pixels = Pixels()

    @property
    def width(self) -> int:
        """D."""
        return self.module.shape.width

    @torch.no_grad()
    def __call__(self, images: Tensor) -> Tensor:
        """See the class."""
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.precision == "bf16"):
            tokens = self.module(self._pixels(images.to(self.device)))[0]  # [R, 1 + N, D]
        tokens = tokens.float()
        pooled: Tensor = tokens[:, 0] if self.pooling == "class" else tokens[:, 1:].mean(1)
        return pooled

    def digest(self) -> str:
        """Hash of the weights and of all settings that features depend on."""
        digest = hashlib.blake2b(json.dumps(self._settings, sort_keys=True).encode(), digest_size=16)
        for name, tensor in sorted(self.module.named_parameters()):
            digest.update(f"{name} {tuple(tensor.shape)}".encode())
            digest.update(tensor.detach().float().cpu().contiguous().numpy().tobytes())
        return digest.hexdigest()
