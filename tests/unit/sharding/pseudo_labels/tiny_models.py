"""Depth estimators and segmentation models of a few thousand random weights, saved as real ones are."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from transformers import (
    DepthAnythingConfig,
    DepthAnythingForDepthEstimation,
    Dinov2Config,
    DPTConfig,
    DPTForDepthEstimation,
    DPTForSemanticSegmentation,
    DPTImageProcessor,
    Mask2FormerConfig,
    Mask2FormerForUniversalSegmentation,
    Mask2FormerImageProcessor,
    SegformerConfig,
    SegformerForSemanticSegmentation,
    SegformerImageProcessor,
    SwinConfig,
)

SWATCHES = [f"swatch {number}" for number in range(6)]
"""Classes of the Mask2Former."""


def depth_anything(directory: Path, *, seed: int = 1, **changes: object) -> Path:
    """A depth estimator whose image processor keeps the aspect ratio, so that inputs have many shapes."""
    backbone = Dinov2Config(
        hidden_size=16,
        num_hidden_layers=4,
        num_attention_heads=2,
        mlp_ratio=1,
        image_size=28,
        patch_size=14,
        out_indices=[1, 2, 3, 4],
        reshape_hidden_states=False,
        apply_layernorm=True,
    )
    config = DepthAnythingConfig(
        backbone_config=backbone,
        patch_size=14,
        reassemble_hidden_size=16,
        neck_hidden_sizes=[4, 4, 4, 4],
        fusion_hidden_size=8,
        head_hidden_size=4,
        **changes,
    )
    processor = DPTImageProcessor(
        size={"height": 42, "width": 42}, keep_aspect_ratio=True, ensure_multiple_of=14, resample=3
    )
    return save(directory, DepthAnythingForDepthEstimation(config), processor, seed)


def mask2former(directory: Path, *, seed: int = 1) -> Path:
    """A model for universal segmentation, whose image processor keeps the aspect ratio."""
    backbone = SwinConfig(
        image_size=32,
        patch_size=4,
        embed_dim=8,
        depths=[1, 1, 1, 1],
        num_heads=[1, 1, 2, 2],
        window_size=2,
        out_features=["stage1", "stage2", "stage3", "stage4"],
    )
    config = Mask2FormerConfig(
        backbone_config=backbone,
        feature_size=32,  # its norms have 32 groups
        mask_feature_size=32,
        hidden_dim=32,
        encoder_feedforward_dim=16,
        encoder_layers=1,
        decoder_layers=2,
        num_attention_heads=2,
        dim_feedforward=16,
        num_queries=8,
        id2label=dict(enumerate(SWATCHES)),
    )
    processor = Mask2FormerImageProcessor(size={"shortest_edge": 48, "longest_edge": 96})
    model = Mask2FormerForUniversalSegmentation(config)
    return save(directory, model, processor, seed, louder={"class_predictor.weight": 10.0, "mask_embedder": 2.0})


def segformer(directory: Path, *, classes: int = 4, **processing: object) -> Path:
    """A model for semantic segmentation at one size of input."""
    config = SegformerConfig(
        depths=[1, 1, 1, 1],
        hidden_sizes=[8, 8, 8, 8],
        num_attention_heads=[1, 1, 1, 1],
        mlp_ratios=[1, 1, 1, 1],
        sr_ratios=[4, 2, 1, 1],
        decoder_hidden_size=8,
        id2label={number: f"part {number}" for number in range(classes)},
    )
    processor = SegformerImageProcessor(size={"height": 32, "width": 32}, **processing)
    return save(directory, SegformerForSemanticSegmentation(config), processor, 0)


def dpt_segmentation(directory: Path) -> Path:
    """DPT with the head for segmentation: of the same kind as its depth estimators."""
    config = dpt_config(id2label={0: "floor", 1: "wall"})
    processor = DPTImageProcessor(size={"height": 32, "width": 32})
    return save(directory, DPTForSemanticSegmentation(config), processor, 0)


def dpt_depth(directory: Path) -> Path:
    """DPT with the head for depth."""
    processor = DPTImageProcessor(size={"height": 32, "width": 32})
    return save(directory, DPTForDepthEstimation(dpt_config()), processor, 0)


def dpt_config(**changes: Any) -> DPTConfig:
    """Four layers, inputs of 32 pixels."""
    return DPTConfig(
        hidden_size=16,
        num_hidden_layers=4,
        num_attention_heads=2,
        intermediate_size=16,
        image_size=32,
        patch_size=8,
        backbone_out_indices=[0, 1, 2, 3],
        neck_hidden_sizes=[4, 4, 4, 4],
        fusion_hidden_size=8,
        **changes,
    )


def save(
    directory: Path, model: Any, processor: Any, seed: int, louder: Mapping[str, float] = MappingProxyType({})
) -> Path:
    """Draw weights large enough for the output to follow the image, and save model and processor.

    Args:
        louder: factors of weights, by a part of their names.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            if parameter.ndim > 1:
                fan_in = parameter[0].numel()
                gain = math.prod(factor for part, factor in louder.items() if part in name)
                parameter.normal_(0, gain * fan_in**-0.5, generator=generator)
            elif name.endswith("bias"):
                parameter.uniform_(0, 0.2, generator=generator)
    model.save_pretrained(directory)
    processor.save_pretrained(directory)
    return directory
