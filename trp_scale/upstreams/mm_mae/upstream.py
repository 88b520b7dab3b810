"""Pre-training on images with depth and segmentation: MM-MAE (TRP 4.2)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import nn

from trp_scale.checkpoint.initial_weights import give_weights
from trp_scale.core.hooks import Hook, built
from trp_scale.core.run import RunContext
from trp_scale.distributed.environment import Environment
from trp_scale.upstreams.base import UpstreamParts
from trp_scale.upstreams.mm_mae.batch import open_rows
from trp_scale.upstreams.mm_mae.export import CLASSES
from trp_scale.upstreams.mm_mae.flops import mm_mae_step_flops
from trp_scale.upstreams.mm_mae.model import MultimodalMaskedAutoencoder
from trp_scale.upstreams.mm_mae.objective import MultimodalReconstruction
from trp_scale.upstreams.mm_mae.settings import MmMaeConfig
from trp_scale.upstreams.mm_mae.weights import load_multimae


class MultimodalUpstream(UpstreamParts):
    """Images with masked patches in several modalities; see `Upstream`."""

    exports: ClassVar[Mapping[str, str]] = {"timm": "trp_scale.upstreams.mm_mae.export:write_multimodal_timm"}
    open_rows = staticmethod(open_rows)

    def __init__(self, config: MmMaeConfig, environment: Environment) -> None:
        data = environment.data
        self.config = config
        self.sources = self.open_sources(config, rank=data.rank, world=data.size, device_type=environment.device.type)
        self.source = self.sources.train
        self.objective = MultimodalReconstruction(config)
        self.classes = {
            name: classes
            for name, maps in self.sources.meta.maps.items()
            if (classes := self.objective.modalities.used[name].classes(maps))
        }
        rows, inputs = config.batch.global_size, len(config.modalities.inputs)
        self.positions_per_step = rows * inputs * self.objective.patches_per_row
        self.step_flops = mm_mae_step_flops(config, rows=rows, classes=self.classes)

    def model(self) -> nn.Module:
        model = MultimodalMaskedAutoencoder(self.config, self.classes)
        give_weights(model, self.config.model.weights, load_multimae)
        return model

    def hooks(self, run: RunContext) -> list[Hook]:
        adversary = built(run, "adversary")
        return [] if adversary is None else [adversary]

    def checkpoint_extra(self) -> dict[str, Any]:
        return {CLASSES: self.classes}
