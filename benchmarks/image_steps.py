"""Random images with masks, of one or several modalities, and masked autoencoders over them, for the benchmarks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from benchmarks.steps import Run, StepOptions, Workload
from trp_scale.config import split_patches
from trp_scale.config.loader import load_recipe
from trp_scale.core.batch import Batch
from trp_scale.pretraining.mae.model import MaskedAutoencoder
from trp_scale.pretraining.mae.settings import MaeConfig
from trp_scale.pretraining.mae.upstream import MaskedPatchReconstruction
from trp_scale.pretraining.mm_mae.batch import RunModalities
from trp_scale.pretraining.mm_mae.model import MultimodalMaskedAutoencoder
from trp_scale.pretraining.mm_mae.settings import MmMaeConfig
from trp_scale.pretraining.mm_mae.upstream import MultimodalReconstruction

EncoderSize = Literal["tiny", "small", "base", "large"]

ENCODERS: dict[EncoderSize, tuple[int, int, int]] = {
    "tiny": (12, 192, 3),
    "small": (12, 384, 6),
    "base": (12, 768, 12),
    "large": (24, 1024, 16),
}
"""Layers, width and heads of ViT-Ti, S, B and L."""

MM_MAE = "mm_mae_vit_b_in1k_400"
"""The recipe of MM-MAE whose steps are measured."""
CLASSES = {"semseg": 133}
"""Of segmentation: COCO's panoptic classes, which Mask2Former predicts."""


@dataclass(kw_only=True)
class ImageStepOptions(StepOptions):
    """What to measure."""

    model: EncoderSize = "tiny"
    """ViT-Ti, S, B or L."""


def image_recipe(name: str, kind: type[Run], size: EncoderSize) -> Run:
    """A recipe whose settings are of this kind, with an encoder of this size; the decoder stays."""
    config = load_recipe(name)
    assert isinstance(config, kind), f"{name} has settings of {type(config).__name__}"
    return resized(config, size)


def resized(config: Run, size: EncoderSize) -> Run:
    """The same settings with an encoder of this size; the decoder stays."""
    config.model.layers, config.model.hidden_size, config.model.heads = ENCODERS[size]
    config.model.intermediate_size = 4 * config.model.hidden_size
    return config


def random_images(config: MaeConfig, rows: int) -> Batch:
    """`rows` images of noise with the recipe's crops and random masks."""
    generator = torch.Generator().manual_seed(0)
    crops, side = config.crops.count, config.crops.size
    split = split_patches(side, config.vision.patch_size, config.masking.ratio)
    order = torch.rand(rows, crops, split.patches, generator=generator).argsort(-1)
    fields = {
        "images": torch.randint(0, 256, (rows, crops, 3, side, side), generator=generator, dtype=torch.uint8),
        "visible": order[..., : split.visible].sort(-1).values,
        "masked": order[..., split.visible :].sort(-1).values,
        "labels": torch.zeros(rows, dtype=torch.int64),
        "row_weights": torch.ones(rows),
    }
    return Batch(fields=fields, keys=torch.arange(rows), start=0)


def mae_objective(config: MaeConfig) -> MaskedPatchReconstruction:
    return MaskedPatchReconstruction(config.objective, config.vision.patch_size)


def mae_workload(config: MaeConfig) -> Workload:
    """A masked autoencoder of these settings over a global batch of random images."""
    rows = random_images(config, config.batch.global_size)
    return Workload(config=config, module=MaskedAutoencoder(config), objective=mae_objective(config), rows=rows)


def random_modalities(config: MmMaeConfig, rows: int) -> Batch:
    """`rows` images of noise with depth and segmentation of noise, and random visible patches."""
    generator = torch.Generator().manual_seed(0)
    side, patches = config.crops.size, config.patches
    semseg = RunModalities(config).output_modality("semseg")
    order = torch.rand(rows, len(config.modalities.inputs) * patches, generator=generator).argsort(-1)
    labels = (rows, side // semseg.stride, side // semseg.stride)
    fields = {
        "images": torch.randint(0, 256, (rows, 3, side, side), generator=generator, dtype=torch.uint8),
        "depth": torch.randint(1, 1 << 16, (rows, side, side), generator=generator, dtype=torch.uint16),
        "depth_statistics": torch.tensor([[32768.0, 0.0, 1 / 18919]]).expand(rows, 3).contiguous(),  # of such depth
        "semseg": torch.randint(0, CLASSES["semseg"], labels, generator=generator).to(torch.uint8),
        "visible": order[:, : config.modalities.visible_tokens].sort(-1).values,
        "depth_counts": torch.full((rows, patches), config.vision.patch_size**2, dtype=torch.int32),
        "semseg_counts": torch.full((rows, patches), semseg.side**2, dtype=torch.int32),
        "labels": torch.zeros(rows, dtype=torch.int64),
        "row_weights": torch.ones(rows),
    }
    return Batch(fields=fields, keys=torch.arange(rows), start=0)


def mm_mae_workload(config: MmMaeConfig) -> Workload:
    """A masked autoencoder of several modalities over a global batch of random images."""
    return Workload(
        config=config,
        module=MultimodalMaskedAutoencoder(config, CLASSES),
        objective=MultimodalReconstruction(config),
        rows=random_modalities(config, config.batch.global_size),
    )
