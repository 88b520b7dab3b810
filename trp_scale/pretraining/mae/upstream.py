"""Pre-training on images: MAE, MAE+, AdPE (AdPE 3, 4) and U-MAE (Zhang et al. 2022)."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import ClassVar

import torch
from torch import nn

from trp_scale.checkpoint.initial_weights import give_weights
from trp_scale.config import split_patches
from trp_scale.core.batch import Batch, WindowSource
from trp_scale.core.hooks import Hook, built
from trp_scale.core.objective import PatchObjective
from trp_scale.core.run import RunContext
from trp_scale.data.sources import OpenLabelled
from trp_scale.data.train_source import JoinedWindows
from trp_scale.distributed.environment import Environment
from trp_scale.methods.learned_masks.flops import masks_step_flops
from trp_scale.methods.learned_masks.joint import JointObjective
from trp_scale.methods.learned_masks.labelled import open_downstream
from trp_scale.methods.learned_masks.settings import LearnedMasksSettings, RandomMasksSettings
from trp_scale.pretraining.base import DataFacts, Outline, UpstreamParts
from trp_scale.pretraining.mae.batch import open_rows
from trp_scale.pretraining.mae.model import MaskedAutoencoder
from trp_scale.pretraining.mae.objective import MaskedPatchReconstruction
from trp_scale.pretraining.mae.settings import MaeConfig
from trp_scale.pretraining.mae.u_mae import Uniformity, UniformPatchReconstruction
from trp_scale.pretraining.mae.weights import load_weights


def blank_rows(config: MaeConfig, rows: int) -> Batch:
    """Black images, their first patches visible."""
    crops, side = config.crops.count, config.crops.size
    split = split_patches(side, config.vision.patch_size, config.masking.ratio)
    order = torch.arange(split.patches).expand(rows, crops, -1)
    fields = {
        "images": torch.zeros(rows, crops, 3, side, side, dtype=torch.uint8),
        "visible": order[..., : split.visible].contiguous(),
        "masked": order[..., split.visible :].contiguous(),
        "labels": torch.zeros(rows, dtype=torch.int64),
        "row_weights": torch.ones(rows),
    }
    return Batch(fields=fields, keys=torch.arange(rows), start=0)


@dataclass(frozen=True, kw_only=True)
class ImageOutline(Outline):
    """Outline of the pass over masked images; what learned masks add to it is in `step_flops` alone."""

    config: MaeConfig

    def step_flops(self, ranks: int) -> float:
        masks = self.config.multilevel
        if not isinstance(masks, LearnedMasksSettings):
            return super().step_flops(ranks)
        masked = self.forward_flops
        if masks.final_ratio:  # of a curriculum, the ratio in the middle of the run
            middle = copy.deepcopy(self.config)
            middle.masking.ratio = 0.5 * (middle.masking.ratio + masks.final_ratio)
            masked = replace(self, rows=partial(blank_rows, middle)).forward_flops
        return masks_step_flops(self.config, self.model, masked=masked, ranks=ranks)


class ImageUpstream(UpstreamParts):
    """Crops of images with masked patches; see `Upstream`."""

    exports: ClassVar[Mapping[str, str]] = {
        "hf": "trp_scale.pretraining.mae.weights:write_vitmae",
        "timm": "trp_scale.pretraining.mae.weights:write_timm",
    }
    open_rows = staticmethod(open_rows)

    def __init__(self, config: MaeConfig, environment: Environment) -> None:
        data = environment.data
        self.config = config
        self.sources = self.open_rank_sources(config, environment)
        self.reconstruction = MaskedPatchReconstruction(config.objective, config.vision.patch_size)
        if config.objective.uniformity > 0:
            self.reconstruction = UniformPatchReconstruction(config.objective, config.vision.patch_size, data)
        self.objective: PatchObjective = self.reconstruction
        self.source: WindowSource = self.sources.train
        if (labelled := self.sources.downstream) is not None and config.multilevel.joins_labelled:
            device = environment.device
            self.objective = JointObjective(config, self.reconstruction, classes=labelled.classes, device=device)
            self.source = JoinedWindows(self.sources.train, labelled.train)
        crops = config.batch.global_size * config.crops.count
        self.positions_per_step = crops * (config.crops.size // config.vision.patch_size) ** 2
        self._ranks = data.size

    @cached_property
    def step_flops(self) -> float:
        return self.outline(self.config, DataFacts()).step_flops(self._ranks)

    @classmethod
    def outline(cls, config: MaeConfig, facts: DataFacts) -> Outline:
        return ImageOutline(
            config=config,
            model=partial(MaskedAutoencoder, config),
            objective=MaskedPatchReconstruction(config.objective, config.vision.patch_size),
            rows=partial(blank_rows, config),
            step_rows=config.batch.global_size,
            positions=config.crops.count * config.patches,
        )

    @classmethod
    def inference_config(cls, config: MaeConfig) -> MaeConfig:
        """Return settings with random masks: no classes are needed, and images reserved for tests may be read."""
        config = copy.copy(config)
        config.multilevel = RandomMasksSettings()
        return config

    @staticmethod
    def open_labelled(config: MaeConfig, *, rank: int, world: int, pin: bool) -> OpenLabelled | None:
        if not config.multilevel.reads_labels:
            return None
        return partial(open_downstream, config, rank=rank, world=world, pin=pin)

    def model(self) -> nn.Module:
        model = MaskedAutoencoder(self.config)
        if self.config.model.weights:
            give_weights(model, self.config.model, load_weights)
        return model

    def hooks(self, run: RunContext) -> list[Hook]:
        methods = (built(run, "multilevel"), built(run, "adversary"))  # masks first: the adversary acts under them
        hooks = [hook for hook in methods if hook is not None]
        if isinstance(self.reconstruction, UniformPatchReconstruction):
            hooks.append(Uniformity(self.reconstruction))  # last: its pass sees what the others change
        return hooks
