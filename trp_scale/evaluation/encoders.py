"""Pre-trained encoders as torch modules: `trp_scale.load` returns token features, `FrozenEncoder` one vector per
image."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, fields
from typing import Any

import torch
from torch import Tensor, nn

from trp_scale.config import Config, RefusedError
from trp_scale.config.finetuning import ImageTaskConfig
from trp_scale.config.images import ImagePretrainConfig
from trp_scale.config.loader import load_recipe
from trp_scale.data.text.tokenizer import open_tokenizer
from trp_scale.evaluation.arguments import FrozenPositions
from trp_scale.finetuning.arguments import SCRATCH
from trp_scale.finetuning.classification.settings import ClassificationTaskConfig
from trp_scale.finetuning.encoders import WORDS, EncoderSource, load_weights, open_encoder
from trp_scale.finetuning.glue.settings import GlueTaskConfig
from trp_scale.models.initialise import initialise_vision
from trp_scale.models.patches import Pixels


class Encoder(nn.Module):
    """Return the token features of the last block.

    Attributes:
        backbone: transformers' `BertModel` or `ModernBertModel`, or `ImageEncoder` (models/vit.py).
        settings: encoder sizes, under `model` and `vision`.
        tokenizer: text: transformers' tokenizer from pre-training; `None` for images.
        image_size: images: side in pixels; 0 for text.
    """

    backbone: nn.Module
    settings: Config
    tokenizer: Any = None
    image_size: int = 0


class TextEncoder(Encoder):
    """BERT or ModernBERT without heads."""

    def __init__(self, source: EncoderSource, config: GlueTaskConfig) -> None:
        super().__init__()
        from transformers import BertModel

        from trp_scale.pretraining.pos_bert.model import bert_config
        from trp_scale.pretraining.pos_bert.modern import ModernBertForMaskedPositions

        assert source.tokenizer is not None
        self.settings, self.tokenizer = config, open_tokenizer(source.tokenizer, flag="--run")
        self.has_token_types = config.model.kind == "bert"
        weights = {name: tensor for name, tensor in source.read().items() if not name.startswith("head.")}
        name, pieces = WORDS[config.model.kind], len(self.tokenizer)
        weights[name] = weights[name][:pieces]  # the rest is padding for efficient kernels
        if self.has_token_types:
            pooled = any(name.startswith("pooler.") for name in weights)
            self.backbone = BertModel(bert_config(config.model, pieces), add_pooling_layer=pooled)
        else:
            special = {role: getattr(self.tokenizer, f"{role}_token_id") for role in ("pad", "cls", "sep")}
            self.backbone = ModernBertForMaskedPositions.transformers_model(config.model, pieces, special).model
        load_weights(self.backbone, weights, f"--from {source.path}")

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, token_type_ids: Tensor | None = None
    ) -> Tensor:
        """Encode tokens [B, L] of `tokenizer(texts, padding=True, return_tensors="pt")` as [B, L, D]. ModernBERT has no
        token types."""
        types = {"token_type_ids": token_type_ids} if self.has_token_types else {}
        output = self.backbone(input_ids=input_ids, attention_mask=attention_mask, **types)
        return output.last_hidden_state  # type: ignore[no-any-return]


class VisionEncoder(Encoder):
    backbone: nn.Module

    def __init__(self, config: ClassificationTaskConfig) -> None:
        super().__init__()
        self.settings, self.image_size = config, config.crops.size
        self.backbone = FrozenEncoder(config, pooling="mean").module.requires_grad_()
        self._pixels = Pixels()

    def forward(self, images: Tensor) -> Tensor:
        """Encode unnormalised uint8 images [B, 3, S, S], S = image_size, as [B, 1 + N, D], class token first."""
        if images.dtype != torch.uint8 or images.shape[1:] != (3, self.image_size, self.image_size):
            raise RefusedError(
                f"images of {images.dtype} and shape {list(images.shape)}; allowed: torch.uint8, [B, 3, "
                f"{self.image_size}, {self.image_size}]; trp_scale.load(..., image_size=S) takes other sizes"
            )
        tokens: Tensor = self.backbone(self._pixels(images))[0]
        return tokens


def load_encoder(path: str, image_size: int = 0) -> Encoder:
    """Load the encoder that --from names (finetuning/encoders.py), in evaluation mode.

    Args:
        image_size: images: side in pixels; 0 = as in pre-training.

    Raises:
        RefusedError: no such encoder, or a size that is not a multiple of the patch size.
    """
    source = open_encoder(path)
    if not source.text:
        return VisionEncoder(encoder_config(path, size=image_size)).eval()
    if image_size:
        raise RefusedError(f"image_size is {image_size}, but {path} is a text encoder")
    config = GlueTaskConfig()
    source.adopt(config)
    return TextEncoder(source, config).eval()


BATCH = 64
"""Images per forward pass."""


def encoder_config(
    path: str, *, recipe: str = "", size: int = 0, batch: int = BATCH, positions: FrozenPositions = "recomputed"
) -> ClassificationTaskConfig:
    """Return the settings of an encoder and of its input images.

    Args:
        path: value of --from.
        recipe: for scratch.
        size: image side in pixels; 0 = as in pre-training.
        batch: images per forward pass.
        positions: see --encoder_positions.

    Raises:
        RefusedError: no such encoder, a text encoder, or a size that is not a multiple of the patch size.
    """
    config = ClassificationTaskConfig()
    config.downstream.positions = positions
    if path == SCRATCH:
        loaded = load_recipe(recipe)
        if not isinstance(loaded, (ImagePretrainConfig, ImageTaskConfig)):
            raise RefusedError(f"--recipe {recipe}: a text encoder; expected: a recipe of images")
        for target, section in ((config.model, loaded.model), (config.vision, loaded.vision)):
            for field in fields(section):
                if hasattr(target, field.name):
                    setattr(target, field.name, getattr(section, field.name))
        config.model.weights = ""
        config.downstream.pretraining_grid = loaded.crops.size // loaded.vision.patch_size
    else:
        open_encoder(path).adopt(config)
    return set_shown_images(config, size=size, batch=batch)


def set_shown_images(config: ClassificationTaskConfig, *, size: int, batch: int) -> ClassificationTaskConfig:
    """Set the input images of an encoder in place; arguments as for `encoder_config`."""
    config.batch.global_size = config.batch.micro_size = batch
    config.data.workers = 0
    patch_size = config.vision.patch_size
    config.crops.size = size or config.downstream.pretraining_grid * patch_size
    if config.crops.size < patch_size or config.crops.size % patch_size:
        raise RefusedError(
            f"--image_size is {config.crops.size}; allowed: multiples of the patch size, {patch_size} pixels"
        )
    return config


class FrozenEncoder:
    """Encode images [R, 3, S, S] uint8 as vectors [R, D] fp32.

    Args:
        pooling: mean: of the patch tokens after the last norm; class: the class token.
        precision: fp32 or bf16.
        seed: for random weights.
        weights: replace those of model.weights; names of `ImageEncoder`.

    Raises:
        RefusedError: weights of another encoder.
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
        from trp_scale.models.vit import ImageEncoder  # with timm, which text goes without

        self.pooling, self.precision = pooling, precision
        self.device = device or torch.device("cpu")
        path = config.model.weights
        if weights is None and path:
            weights = open_encoder(path).image_weights(config)
        # An encoder that was fine-tuned with mean pooling has no last norm.
        module = ImageEncoder(config, norm=weights is None or "norm.weight" in weights)
        if weights is None:
            initialise_vision(module, seed=seed, std=config.model.initializer_range)
        else:
            load_weights(module, weights, f"--from {path}")
        without_effect = ("weights", "weights_names", "dropout", "initializer_range")
        self._settings = {
            "model": {name: value for name, value in asdict(config.model).items() if name not in without_effect},
            "vision": asdict(config.vision),
            "positions": [config.downstream.positions, config.downstream.pretraining_grid],
            "size": [config.crops.size, config.crops.interpolation],
            "seen": [config.augmentation.measured, config.augmentation.centre_share],
            "pooling": pooling,
            "precision": precision,
        }
        self.width = config.model.hidden_size  # D
        self.module = module.requires_grad_(False).eval().to(self.device)
        self._pixels = Pixels()

    @torch.no_grad()
    def __call__(self, images: Tensor) -> Tensor:
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.precision == "bf16"):
            tokens = self.module(self._pixels(images.to(self.device)))[0]  # [R, 1 + N, D]
        tokens = tokens.float()
        pooled: Tensor = tokens[:, 0] if self.pooling == "class" else tokens[:, 1:].mean(1)
        return pooled

    def digest(self) -> str:
        """Hash the weights and all settings that affect features."""
        digest = hashlib.blake2b(json.dumps(self._settings, sort_keys=True).encode(), digest_size=16)
        for name, tensor in sorted(self.module.named_parameters()):
            digest.update(f"{name} {tuple(tensor.shape)}".encode())
            digest.update(tensor.detach().float().cpu().contiguous().numpy().tobytes())
        return digest.hexdigest()
