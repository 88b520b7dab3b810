"""Small random crops made from positions alone, and a run of a masked autoencoder over them on any engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tests.settings import changed
from tests.synthetic import Layout, RecordingTrainer, Result, SyntheticWindows, data_group, engine_of, stack_rows
from trp_scale.config import BatchConfig, Config, ModelConfig, OptimizerConfig, PretrainTrainingConfig
from trp_scale.config.images import CropsConfig, MaeMaskingConfig, MaeVisionConfig
from trp_scale.config.registry import make_settings
from trp_scale.core.batch import Batch, TaskLosses
from trp_scale.core.engine import Engine
from trp_scale.core.hooks import Hook, built
from trp_scale.core.run import RunContext
from trp_scale.distributed.groups import Group
from trp_scale.pretraining.mae.model import MaskedAutoencoder
from trp_scale.pretraining.mae.settings import MaeConfig
from trp_scale.pretraining.mae.upstream import MaskedPatchReconstruction, Uniformity, UniformPatchReconstruction
from trp_scale.pretraining.tasks import source_names

CROPS, SIDE, PATCH = 2, 16, 4
PATCHES = (SIDE // PATCH) ** 2
VISIBLE = 4


def row(position: int) -> dict[str, Tensor]:
    """One image of two crops: a function of its position. Smooth colours with noise, so that there is something to
    predict from neighbours."""
    generator = torch.Generator().manual_seed(9000 + position)
    coarse = torch.rand(CROPS, 3, 4, 4, generator=generator)
    smooth = torch.nn.functional.interpolate(coarse, SIDE, mode="bilinear", align_corners=True)
    noisy = smooth + 0.1 * torch.randn(smooth.shape, generator=generator)
    order = torch.stack([torch.randperm(PATCHES, generator=generator) for _ in range(CROPS)])
    return {
        "images": (noisy.clamp(0, 1) * 255).to(torch.uint8),
        "visible": order[:, :VISIBLE].sort(dim=1).values,
        "masked": order[:, VISIBLE:].sort(dim=1).values,
        "labels": torch.tensor(-1),
        "row_weights": torch.tensor(1.0),
    }


def batch(positions: range) -> Batch:
    """Images at `positions` as one micro-batch."""
    return stack_rows([row(position) for position in positions], positions)


@dataclass
class SyntheticImages(SyntheticWindows):
    """Attributes: make: gives the micro-batch at its positions."""

    make: Callable[[range], Batch] = batch

    def micro_batch(self, positions: range, step: int) -> Batch:
        return self.make(positions)


class TwoHalves(MaskedPatchReconstruction):
    """A stand-in for several modalities: masked patches of the upper and of the lower half are a task each."""

    tasks = ("upper", "lower")
    balanced = (0, 1)

    def count(self, batch: Batch) -> Tensor:
        weights = batch["row_weights"].double()[:, None, None]
        lower = (batch["masked"] >= PATCHES // 2) * weights
        return torch.stack([(weights - lower).sum(), lower.sum()])

    def losses(self, errors: Tensor, batch: Batch) -> TaskLosses:
        errors = errors.double() * batch.extras.get("patch_weights", 1.0)
        errors = errors * batch["row_weights"].double()[:, None, None]  # [R, k, M]
        lower = batch["masked"] >= PATCHES // 2
        return TaskLosses(sums=torch.stack([(errors * ~lower).sum(), (errors * lower).sum()]), counts=self.count(batch))


def image_config(layout: Layout, **changes: Any) -> Config:
    """A masked autoencoder of two blocks and a decoder of two; `changes` are section dicts."""
    config = MaeConfig(
        model=ModelConfig(layers=2, hidden_size=32, heads=2, intermediate_size=64, layer_norm_eps=1e-6),
        vision=MaeVisionConfig(
            patch_size=PATCH,
            tokens="all",
            decoder_layers=2,
            decoder_hidden_size=16,
            decoder_heads=2,
            positions="relative",
        ),
        crops=CropsConfig(count=CROPS, size=SIDE),
        masking=MaeMaskingConfig(ratio=1 - VISIBLE / PATCHES, maskings=0),
        batch=BatchConfig(global_size=8, micro_size=layout.micro_size),
        training=PretrainTrainingConfig(steps=6, seed=3),
        optimizer=OptimizerConfig(lr=1e-3, warmup_steps=0, schedule="constant"),
        balancer=make_settings("balancer", "uniform"),
        adversary=make_settings("adversary", "none"),
    )
    return changed(config, **{**layout.settings, **changes})


def make_image_engine(layout: Layout, config: Config, group: Group) -> Engine:
    """The engine of a layout with the small model in it."""
    return engine_of(layout, MaskedAutoencoder(config), config, group)


def image_trainer(layout: Layout, config: Config, *, halves: bool = False) -> tuple[RecordingTrainer, Any]:
    """A trainer over synthetic images, and its adversary (None where there is none)."""
    group = data_group(config)
    engine = make_image_engine(layout, config, group)
    objective = (TwoHalves if halves else MaskedPatchReconstruction)(config.objective, PATCH, source_names(config))
    if config.objective.uniformity:
        objective = UniformPatchReconstruction(config.objective, PATCH, group, source_names(config))
    run = RunContext(config=config, objective=objective, engine=engine)
    adversary = built(run, "adversary")
    others: list[Hook] = [hook for hook in (built(run, "multilevel"), adversary) if hook is not None]
    if isinstance(objective, UniformPatchReconstruction):
        others.append(Uniformity(objective))
    return RecordingTrainer.over(run, SyntheticImages(config, group), others), adversary


def by_projection(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same weights with each `attn.qkv.bias` as its three parts, so that key biases can be told from the others."""
    found = dict(weights)
    for name in [name for name in weights if name.endswith("attn.qkv.bias")]:
        for part, value in zip(("query", "key", "value"), found.pop(name).chunk(3), strict=True):
            found[name.replace("qkv", part)] = value
    return found


@dataclass(kw_only=True)
class AdversarialResult(Result):
    """What a run gave. Attributes: vector: [numel] the adversary at the end, None without one on positions;
    travelled: the length of its whole way."""

    vector: Tensor | None
    travelled: float


def run_images(layout: Layout, changes: dict[str, Any], *, halves: bool = False) -> AdversarialResult:
    """Train the small model; call on all ranks."""
    trainer, adversary = image_trainer(layout, image_config(layout, **changes), halves=halves)
    initial = trainer.engine.full_weights()
    vector = getattr(adversary, "vector", None)
    travelled, steps = 0.0, trainer.config.training.steps
    trainer.engine.train(True)
    for _ in range(steps):
        before = None if vector is None else vector.detach().clone()
        trainer.train_step()
        travelled += 0.0 if vector is None else float((vector.detach() - before).norm())
    result = trainer.end(initial, by_projection)
    at_end = None if vector is None else vector.detach().clone()
    return AdversarialResult(**vars(result), vector=at_end, travelled=travelled)
