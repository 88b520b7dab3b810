"""Small random images with depth, segmentation and normals, made from positions alone, and a run of the multi-modal
masked autoencoder over them on any engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tests.settings import changed
from tests.synthetic import Layout, RecordingTrainer, Result, SyntheticWindows, data_group, engine_of, stack_rows
from tests.synthetic_images import by_projection
from trp_scale.config import BatchConfig, Config, ModelConfig, OptimizerConfig, PretrainTrainingConfig
from trp_scale.config.images import CropConfig, DecodedVisionConfig
from trp_scale.config.registry import make_settings
from trp_scale.core.batch import Batch
from trp_scale.core.engine import Engine
from trp_scale.core.run import RunContext
from trp_scale.distributed.groups import Group
from trp_scale.models.patches import patchify
from trp_scale.pretraining.mm_mae.model import MultimodalMaskedAutoencoder
from trp_scale.pretraining.mm_mae.settings import MmMaeConfig, ModalitiesConfig
from trp_scale.pretraining.mm_mae.upstream import MultimodalReconstruction
from trp_scale.pretraining.modalities.depth import NOT_MEASURED, standardise
from trp_scale.pretraining.modalities.semseg import VOID

SIDE, PATCH, STRIDE = 16, 4, 2
PATCHES = (SIDE // PATCH) ** 2
VISIBLE = 9
CLASSES = 5

Absent = tuple[str, ...]
"""Modalities of which a row has no valid element."""


def row(
    position: int, visible: int = VISIBLE, inputs: int = 3, absent: Absent = (), side: int = SIDE
) -> dict[str, Tensor]:
    """One image: a function of its position. Smooth, so that there is something to predict, with holes in the depth and
    void labels, more in some rows than in others."""
    generator = torch.Generator().manual_seed(4000 + position)
    coarse = torch.rand(1, 5, 4, 4, generator=generator)
    smooth = torch.nn.functional.interpolate(coarse, side, mode="bilinear", align_corners=True)[0]
    smooth = smooth + 0.05 * torch.randn(smooth.shape, generator=generator)
    holes = torch.rand(2, side, side, generator=generator) < 0.4 * torch.rand(2, 1, 1, generator=generator)
    depth = torch.where(holes[0], NOT_MEASURED, 32768 + 24000 * (smooth[3] - 0.5)).to(torch.uint16)
    labels = (smooth[4].clamp(0, 0.999) * CLASSES).to(torch.uint8)
    semseg = torch.where(holes[1], VOID, labels)[::STRIDE, ::STRIDE].to(torch.uint8)
    if "depth" in absent:
        depth = torch.full_like(depth, NOT_MEASURED)
    if "semseg" in absent:
        semseg = torch.full_like(semseg, VOID)
    order = torch.randperm(inputs * (side // PATCH) ** 2, generator=generator)
    normals = torch.nn.functional.normalize(torch.stack([*(smooth[:2] - 0.5), 0.2 + smooth[2]]), dim=0)  # [3, S, S]
    normals = torch.where(holes[1], torch.nan, normals)
    if "normals" in absent:
        normals = torch.full_like(normals, torch.nan)
    return {
        "images": (smooth[:3].clamp(0, 1) * 255).to(torch.uint8),
        "depth": depth,
        "depth_statistics": torch.tensor([32768.0, 0.5, 1 / 8000]),
        "semseg": semseg,
        "normals": normals,
        "visible": order[:visible].sort().values,
        "depth_counts": patch_sums(depth != NOT_MEASURED, PATCH),
        "semseg_counts": patch_sums(semseg != VOID, PATCH // STRIDE),
        "normals_counts": patch_sums(~normals[0].isnan(), PATCH),
        "labels": torch.tensor(-1),
        "row_weights": torch.tensor(1.0),
    }


def depth_of(rows: Batch) -> Tensor:
    """[R, S, S] as the model sees it."""
    return standardise(rows["depth"], rows["depth_statistics"])


def patch_sums(valid: Tensor, side: int) -> Tensor:
    """[S, S] bool -> [N] int32."""
    return patchify(valid[None, None].int(), side)[0].sum(-1).int()


def batch(positions: range, visible: int = VISIBLE, inputs: int = 3, absent: Absent = (), side: int = SIDE) -> Batch:
    """Images at `positions` as one micro-batch."""
    rows = [row(position, visible, inputs, absent, side) for position in positions]
    return stack_rows(rows, positions)


@dataclass
class SyntheticModalities(SyntheticWindows):
    """Attributes: absent: of a step, the modalities that its whole global batch lacks."""

    absent: Callable[[int], Absent] = lambda step: ()

    def micro_batch(self, positions: range, step: int) -> Batch:
        modalities = self.config.modalities
        inputs, side = len(modalities.inputs), self.config.crops.size
        return batch(positions, modalities.visible_tokens, inputs, self.absent(step), side)


def modality_config(layout: Layout | None = None, **changes: Any) -> Config:
    """Two blocks of 32 and decoders of one block of 32, 4 x 4 patches in three modalities; `changes` are section
    dicts. AdamW's epsilon is large, so that rounding in gradients near zero is not scaled up."""
    config = MmMaeConfig(
        model=ModelConfig(layers=2, hidden_size=32, heads=2, intermediate_size=64, layer_norm_eps=1e-6),
        vision=DecodedVisionConfig(patch_size=PATCH, decoder_layers=1, decoder_hidden_size=32, decoder_heads=2),
        modalities=ModalitiesConfig(visible_tokens=VISIBLE),
        crops=CropConfig(size=SIDE),
        batch=BatchConfig(global_size=8, micro_size=(layout or Layout()).micro_size),
        training=PretrainTrainingConfig(steps=6, seed=3),
        optimizer=OptimizerConfig(lr=1e-3, eps=1e-4, warmup_steps=0, schedule="constant"),
        balancer=make_settings("balancer", "uniform"),
    )
    sections = {**(layout.settings if layout else {}), **changes}
    return changed(changed(config, semseg={"stride": STRIDE, "class_embedding": 8}), **sections)


def make_modality_engine(layout: Layout, config: Config, group: Group) -> Engine:
    """The engine of a layout with the small model in it."""
    return engine_of(layout, MultimodalMaskedAutoencoder(config, {"semseg": CLASSES}), config, group)


def modality_trainer(layout: Layout, config: Config, **source: Any) -> RecordingTrainer:
    """A trainer over synthetic images with depth and segmentation."""
    group = data_group(config)
    engine = make_modality_engine(layout, config, group)
    objective = MultimodalReconstruction(config)
    run = RunContext(config=config, objective=objective, engine=engine)
    return RecordingTrainer.over(run, SyntheticModalities(config, group, **source))


def run_modalities(
    layout: Layout, changes: dict[str, Any], absent: Callable[[int], Absent] = lambda step: ()
) -> Result:
    """Train the small model; call on all ranks."""
    return modality_trainer(layout, modality_config(layout, **changes), absent=absent).result(by_parts)


def by_parts(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same weights with every projection's bias by its parts, so that key biases can be told from the others."""
    found = by_projection(weights)
    for name in [name for name in found if name.endswith("key_value.bias")]:
        for part, value in zip(("key", "value"), found.pop(name).chunk(2), strict=True):
            found[name.replace("key_value", part)] = value
    return found
