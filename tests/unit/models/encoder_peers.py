"""Settings of tiny image encoders, and timm's vision transformers with weights that all matter."""

from __future__ import annotations

from typing import Any

import torch
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from tests.unit.models.small_images import GRID, PATCH, randomise_weights
from trp_scale.config import BatchConfig, ModelConfig
from trp_scale.config.images import CropsConfig, RelativeVisionConfig
from trp_scale.finetuning.classification.settings import ClassificationDownstreamConfig, ClassificationTaskConfig
from trp_scale.pretraining.mae.image_weights import TIMM

CLASSES = 7


def finetune_config(grid: int = GRID, **downstream: Any) -> ClassificationTaskConfig:
    """The encoder of `small_images.config`, two blocks of 24, on `grid` x `grid` patches; 7 classes."""
    return ClassificationTaskConfig(
        model=ModelConfig(layers=2, hidden_size=24, heads=2, intermediate_size=40, layer_norm_eps=1e-6),
        vision=RelativeVisionConfig(patch_size=PATCH),
        crops=CropsConfig(size=grid * PATCH),
        batch=BatchConfig(global_size=8, micro_size=4),
        downstream=ClassificationDownstreamConfig(**{"dropout": 0.0, "classes": CLASSES, **downstream}),
    )


def timm_vit(grid: int = GRID, **changes: Any) -> VisionTransformer:
    """timm's model in the sizes of `finetune_config`, in evaluation mode."""
    settings = {"embed_dim": 24, "depth": 2, "num_heads": 2, "mlp_ratio": 40 / 24, "num_classes": CLASSES, **changes}
    model = VisionTransformer(img_size=grid * PATCH, patch_size=PATCH, **settings)
    randomise_weights(model)
    return model.eval()


def copy_timm_weights(encoder: nn.Module, peer: VisionTransformer) -> None:
    """Copy the weights by hand; positions into the encoder's, those of the class token into the token."""
    state = {name.replace("patch_embed.proj.", "patch_embed."): tensor for name, tensor in peer.state_dict().items()}
    positions = state.pop("pos_embed")[0]
    with torch.no_grad():
        for name, parameter in encoder.named_parameters():
            parameter.copy_(torch.zeros(()) if name == "pos_embed" else TIMM.to_ours(name, [state[name]]))
        encoder.cls_token.add_(positions[0])  # type: ignore[operator]
        encoder.pos_embed[1:].copy_(positions[1:])  # type: ignore[index]
