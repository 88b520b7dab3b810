"""Models over random rows for the benchmarks: text, images of one or several modalities, and learned masks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from benchmarks.steps import (
    Model,
    Precision,
    Run,
    SameWindow,
    Workload,
    endless,
    loop_over,
    micro_batches,
)
from trp_scale.config import PretrainConfig
from trp_scale.config.images import split_patches
from trp_scale.config.loader import load_recipe
from trp_scale.config.registry import Settings, make_settings
from trp_scale.core.batch import Batch, WindowSource
from trp_scale.core.hooks import built
from trp_scale.core.run import MakeEngine, RunContext
from trp_scale.engines.plain import PlainEngine
from trp_scale.methods.learned_masks.settings import LearnedMasksSettings
from trp_scale.pretraining.base import DataFacts, find_upstream
from trp_scale.pretraining.mae.model import MaskedAutoencoder
from trp_scale.pretraining.mae.settings import MaeConfig
from trp_scale.pretraining.mae.upstream import MaskedPatchReconstruction
from trp_scale.pretraining.mm_mae.batch import RunModalities
from trp_scale.pretraining.mm_mae.settings import MmMaeConfig
from trp_scale.pretraining.pos_bert.settings import PosBertConfig, PosBertModelConfig
from trp_scale.training.loop import Trainer

VOCABULARY, LENGTH, MASKED = 30522, 128, 19


def set_encoder(model: Model, layers: int, width: int) -> Model:
    """Set the size of an encoder: heads of 64 values, feed-forward layers of four times the width."""
    model.layers, model.hidden_size, model.heads, model.intermediate_size = (
        layers,
        width,
        max(1, width // 64),
        4 * width,
    )
    return model


def small_bert(dropout: float = 0.1) -> PosBertModelConfig:
    """4 layers x 256."""
    return set_encoder(PosBertModelConfig(max_positions=LENGTH, dropout=dropout), 4, 256)


def random_batch(rows: int, length: int = LENGTH, masked: int = MASKED) -> Batch:
    """Full-length rows of `length` tokens with `masked` masked positions each, uneven groups."""
    generator = torch.Generator().manual_seed(0)
    share = torch.tensor([4.0, 6.0, 1.5, 1.0, 0.5, 0.5, 1.0, 0.3, 0.1, 2.0])
    positions = torch.stack([torch.randperm(length, generator=generator)[:masked].sort().values for _ in range(rows)])
    fields = {
        "tokens": torch.randint(0, VOCABULARY, (rows, length), generator=generator),
        "token_types": (torch.arange(length) >= length // 2).long().expand(rows, -1).contiguous(),
        "masked_positions": positions,
        "labels": torch.randint(0, VOCABULARY, (rows, masked), generator=generator),
        "label_groups": torch.multinomial(share.expand(rows, -1), masked, replacement=True, generator=generator),
        "label_weights": torch.ones(rows, masked),
        "next_sentence": torch.randint(0, 2, (rows,), generator=generator),
        "row_weights": torch.ones(rows),
    }
    return Batch(fields=fields, keys=torch.arange(rows), start=0)


def text_config(
    model: PosBertModelConfig,
    *,
    rows: int,
    accumulation: int = 1,
    precision: Precision = "bf16",
    balancer: Settings | None = None,
    lr: float = 1e-4,
) -> PosBertConfig:
    """Settings of PoS-BERT without end."""
    config = PosBertConfig(model=model, balancer=balancer or make_settings("balancer", "uniform"))
    config.optimizer.lr = lr
    return endless(config, rows, accumulation=accumulation, precision=precision)


EncoderSize = Literal["tiny", "small", "base", "large"]

ENCODERS: dict[EncoderSize, tuple[int, int]] = {
    "tiny": (12, 192),
    "small": (12, 384),
    "base": (12, 768),
    "large": (24, 1024),
}
"""Layers and width of ViT-Ti, S, B and L."""

MM_MAE = "mm_mae_vit_b_in1k_400"
"""The recipe of MM-MAE whose steps are measured."""
CLASSES = {"semseg": 133}
"""Of segmentation: COCO's panoptic classes, which Mask2Former predicts."""


def image_recipe(name: str, kind: type[Run], size: EncoderSize) -> Run:
    """A recipe whose settings are of this kind, with an encoder of this size; the decoder stays."""
    config = load_recipe(name)
    assert isinstance(config, kind), f"{name} has settings of {type(config).__name__}"
    return resized(config, size)


def resized(config: Run, size: EncoderSize) -> Run:
    """The same settings with an encoder of this size; the decoder stays."""
    set_encoder(config.model, *ENCODERS[size])
    return config


def random_images(config: Any, rows: int) -> Batch:
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


def build_workload(config: PretrainConfig, length: int = LENGTH, masked: int = MASKED) -> Workload:
    """Return the model and objective of these settings over a global batch of random rows of its kind; `length` and
    `masked`: of text."""
    facts, rows = DataFacts(length=length, vocabulary=VOCABULARY, classes=CLASSES), config.batch.global_size
    outline = find_upstream(config).outline(config, facts)
    if isinstance(config, PosBertConfig):
        batch = random_batch(rows, length, masked)
    else:
        batch = random_modalities(config, rows) if isinstance(config, MmMaeConfig) else random_images(config, rows)
    return Workload(config=config, module=outline.model(), objective=outline.objective, rows=batch)


LABEL_CLASSES = 1000
"""Of D_tr and D_val: ImageNet-1k's."""


@dataclass(kw_only=True)
class Labelled:
    """Windows of D_tr and D_val in place of data.downstream.Downstream."""

    train: WindowSource
    validation: WindowSource
    classes: int = LABEL_CLASSES


@dataclass(kw_only=True)
class Served:
    """Windows of all levels in place of data.sources.Sources."""

    train: WindowSource
    downstream: Labelled | None


def plain_engines(device: torch.device) -> MakeEngine:
    return lambda module, config: PlainEngine(module, config, device=device)


def labelled_window(config: MaeConfig, rows: int) -> list[Batch]:
    """Images of noise with random classes, in micro-batches as multilevel.micro_size says."""
    images = random_images(config, rows)
    images.fields["labels"] = torch.randint(0, LABEL_CLASSES, (rows,), generator=torch.Generator().manual_seed(1))
    return micro_batches(images, config.multilevel.micro_size or rows)


def masks_trainer(config: MaeConfig, rows: int, make_engine: MakeEngine) -> Trainer:
    """The loop over random images, with learned masks where the settings have them.

    Args:
        rows: images of a step of this rank, in one micro-batch.
        make_engine: for the model, and for the masking network.
    """
    source, labelled = SameWindow([random_images(config, rows)]), None
    if config.multilevel.reads_labels:
        labels = SameWindow(labelled_window(config, rows))
        labelled = Labelled(train=labels, validation=labels)
    return loop_with_masks(config, MaskedAutoencoder(config), make_engine, source, labelled)


def loop_with_masks(
    config: MaeConfig, model: nn.Module, make_engine: MakeEngine, source: WindowSource, labelled: Labelled | None
) -> Trainer:
    """Return the loop over these windows, with learned masks where the settings have them."""
    run = RunContext(
        config=config,
        objective=MaskedPatchReconstruction(config.objective, config.vision.patch_size),
        engine=make_engine(model, config),
        sources=Served(train=source, downstream=labelled),
        make_engine=make_engine,
    )
    masks = built(run, "multilevel")
    return loop_over(run, source, [masks] if masks else [])


def cycle_steps(config: MaeConfig) -> int:
    """Steps of the encoder from one update of the masking network to the next."""
    masks = config.multilevel
    return masks.unroll * masks.every if isinstance(masks, LearnedMasksSettings) else 1


def cycle(config: MaeConfig, trainer: Trainer) -> Callable[[], object]:
    """So many steps: a plain one, or those with one update of the masking network."""

    def run() -> None:
        for _ in range(cycle_steps(config)):
            trainer.train_step()

    return run
