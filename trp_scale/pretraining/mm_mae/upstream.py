"""Pre-training on images with depth and segmentation: MM-MAE (TRP 4.2)."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property, partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn

from trp_scale.checkpoint.initial_weights import give_weights
from trp_scale.config import RefusedError
from trp_scale.config.registry import find
from trp_scale.core.batch import Batch
from trp_scale.core.hooks import Hook, built
from trp_scale.core.run import RunContext
from trp_scale.data.images.dataset import ImageMeta
from trp_scale.data.mixture import parse_paths
from trp_scale.data.sources import Rows
from trp_scale.distributed.environment import Environment
from trp_scale.errors import shorten
from trp_scale.pretraining.base import DataFacts, Outline, UpstreamParts
from trp_scale.pretraining.mm_mae.batch import open_rows
from trp_scale.pretraining.mm_mae.model import MultimodalMaskedAutoencoder
from trp_scale.pretraining.mm_mae.objective import MultimodalReconstruction
from trp_scale.pretraining.mm_mae.settings import MmMaeConfig
from trp_scale.pretraining.mm_mae.tokens import RunModalities
from trp_scale.pretraining.mm_mae.weights import CLASSES, load_multimae

CLASS_NAMES = "class_names"
"""In a checkpoint: of each modality's maps that have classes, their names by number."""


def class_counts(modalities: RunModalities, meta: ImageMeta) -> dict[str, int]:
    """Number of classes of each modality's maps, where they have any."""
    return {name: classes for name, maps in meta.maps.items() if (classes := modalities.used[name].classes(maps))}


def blank_rows(config: MmMaeConfig, rows: int) -> Batch:
    """Samples of which nothing is known in any modality."""
    fields = {
        "visible": torch.arange(config.modalities.visible_tokens).expand(rows, -1).contiguous(),
        "labels": torch.zeros(rows, dtype=torch.int64),
        "row_weights": torch.ones(rows),
    }
    for modality in RunModalities(config).used.values():
        fields |= modality.empty_fields(rows, config.crops)
    return Batch(fields=fields, keys=torch.arange(rows), start=0)


class MultimodalUpstream(UpstreamParts):
    """Images with masked patches in several modalities; see `Upstream`."""

    exports: ClassVar[Mapping[str, str]] = {"timm": "trp_scale.pretraining.mm_mae.weights:write_multimodal_timm"}
    open_rows = staticmethod(open_rows)

    def __init__(self, config: MmMaeConfig, environment: Environment) -> None:
        self.config = config
        self.sources = self.open_rank_sources(config, environment)
        self.source = self.sources.train
        self.objective = MultimodalReconstruction(config)
        self.classes = class_counts(self.objective.modalities, self.sources.meta)
        used, maps = self.objective.modalities.used, self.sources.meta.maps
        self._names = {name: list(used[name].class_names(maps[name])) for name in self.classes}
        rows, inputs = config.batch.global_size, len(config.modalities.inputs)
        self.positions_per_step = rows * inputs * self.objective.patches_per_row
        self._ranks = environment.data.size

    @cached_property
    def step_flops(self) -> float:
        return self.outline(self.config, DataFacts(classes=self.classes)).step_flops(self._ranks)

    @classmethod
    def facts(cls, config: MmMaeConfig) -> DataFacts:
        meta = open_rows(config, parse_paths(config.data.path)).meta
        assert isinstance(meta, ImageMeta)
        return DataFacts(classes=class_counts(RunModalities(config), meta))

    @classmethod
    def outline(cls, config: MmMaeConfig, facts: DataFacts) -> Outline:
        classes = {name: count for name, count in facts.classes.items() if name in RunModalities(config).used}
        return Outline(
            model=partial(MultimodalMaskedAutoencoder, config, classes),
            objective=MultimodalReconstruction(config),
            rows=partial(blank_rows, config),
            step_rows=config.batch.global_size,
            positions=len(config.modalities.inputs) * config.patches,
        )

    def model(self) -> nn.Module:
        model = MultimodalMaskedAutoencoder(self.config, self.classes)
        if self.config.model.weights:
            give_weights(model, self.config.model, load_multimae)
        return model

    def hooks(self, run: RunContext) -> list[Hook]:
        adversary = built(run, "adversary")
        return [] if adversary is None else [adversary]

    def checkpoint_extra(self) -> dict[str, Any]:
        return {CLASSES: self.classes, CLASS_NAMES: self._names}

    @classmethod
    def require_readable(cls, rows: Rows, path: str, run_dir: Path, extra: Mapping[str, Any]) -> None:
        """Refuse rows whose maps have other classes than those that the run learned from."""
        assert isinstance(rows.meta, ImageMeta)
        for name, learned in extra[CLASSES].items():
            kind, stored = find("modality", name).load(), rows.meta.maps[name]
            classes, names = kind.classes(stored), list(kind.class_names(stored))
            if classes != learned or names != extra[CLASS_NAMES][name]:
                raise RefusedError(
                    f"{path}: {name} maps of {classes} classes found ({shorten(', '.join(names))}), the run has "
                    f"learned {learned} others; give data of the same classes, in the same order"
                )
