"""Pre-training on images: MAE, MAE+, AdPE (AdPE 3, 4) and U-MAE (Zhang et al. 2022)."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trp_scale.checkpoint.initial_weights import GivenWeights
from trp_scale.config.images import split_patches
from trp_scale.core.batch import Batch, Extra, TaskLosses, WindowSource
from trp_scale.core.hooks import Hook, StepContext, built
from trp_scale.core.run import GATE, PATCH_WEIGHTS, PatchObjective, RunContext
from trp_scale.data.sources import JoinedWindows, OpenLabelled
from trp_scale.distributed.environment import Environment
from trp_scale.distributed.groups import Group
from trp_scale.methods.learned_masks.hook import count_whole_image, masks_step_flops
from trp_scale.methods.learned_masks.labelled import open_downstream
from trp_scale.methods.learned_masks.second_levels import JointObjective
from trp_scale.methods.learned_masks.settings import LearnedMasksSettings, RandomMasksSettings, SelfGuidedSettings
from trp_scale.models.patches import ImagePatches, gather_patches, normalise_patches
from trp_scale.models.positions import PERTURBATION, PIXEL_SHIFT
from trp_scale.pretraining.base import DataFacts, Outline, Upstream
from trp_scale.pretraining.mae.batch import open_rows
from trp_scale.pretraining.mae.image_weights import read_image_weights
from trp_scale.pretraining.mae.model import ForwardOutput, MaeOutput, MaskedAutoencoder
from trp_scale.pretraining.mae.settings import MaeConfig, MaeObjectiveConfig
from trp_scale.pretraining.mae.weights import load_weights
from trp_scale.pretraining.tasks import blank_batch, rows_by_source, source_names

UNIFORMITY = "uniformity"
MOMENT = Extra("uniformity_moment")
ROWS = Extra("uniformity_rows")
"""Extras of a batch: the second moment S of the global batch, or the global number of rows when each rank has one
micro-batch."""


class MaskedPatchReconstruction(PatchObjective):
    """One task: the mean squared error of each masked patch (He et al.; AdPE 3.1). An element is a masked patch. With
    names of `sources`, the patches of each source are a task.

    Each of the k crops of an image is one row of the model. Hooks may set these keys of `batch.extras`:
        perturbation: perturbation of the model's positions (models/positions.py).
        pixel_shift: [R, k, 3, S, S] added to the input pixels in [0, 1]; the target stays clean.
        patch_weights: [R, k, M] weight of each masked patch's error (MLO-MAE eq. 1).
        gate: [R, k, V] factor of each visible patch's token.
    """

    tasks: tuple[str, ...] = ("reconstruction",)
    balanced: tuple[int, ...] = (0,)
    regression: tuple[int, ...] = (0,)

    def __init__(self, config: MaeObjectiveConfig, patch_size: int, sources: tuple[str, ...] = ()) -> None:
        self._sources = len(sources)
        if sources:
            self.tasks, self.balanced = sources, tuple(range(len(sources)))
            self.regression = self.balanced
        self.normalised = config.target == "normalised"
        self.patch_size = patch_size
        self._image_patches = ImagePatches(patch_size)

    def count(self, batch: Batch) -> Tensor:
        """[1] or [S] float64, masked patches of present rows."""
        _, crops, masked = batch["masked"].shape
        return self._membership(batch).sum(0) * (crops * masked)

    def _membership(self, batch: Batch) -> Tensor:
        """Return the weight of each row in each task, [R, 1] or [R, S] float64."""
        weights = batch["row_weights"].double().unsqueeze(1)
        return weights * rows_by_source(batch, self._sources) if self._sources else weights

    def __call__(self, forward: Callable[..., MaeOutput], batch: Batch) -> TaskLosses:
        """Return the sum over masked patches of their mean squared error, in float64."""
        return self.losses(self.errors(forward, batch), batch)

    def losses(self, errors: Tensor, batch: Batch) -> TaskLosses:
        """Return the losses for errors [R, k, M]; linear in them."""
        errors = errors.double()
        if (weights := batch.extras.get(PATCH_WEIGHTS)) is not None:
            errors = errors * weights
        rows = errors.sum((1, 2))  # [R]
        sums = rows @ self._membership(batch) if self._sources else (rows @ batch["row_weights"].double()).reshape(1)
        return TaskLosses(sums=sums, counts=self.count(batch))

    def errors(self, forward: Callable[..., MaeOutput], batch: Batch) -> Tensor:
        """Return the mean squared error of each masked patch, [R, k, M]."""
        clean = self.patches(batch)  # [B, N, P], B = R k
        return self.compute_errors(self.run(forward, batch, clean).prediction, batch, clean)

    def run(self, forward: Callable[..., Any], batch: Batch, clean: Tensor, **options: ForwardOutput) -> Any:
        """Return the model's output for patches [B, N, P] and the extras of hooks."""
        seen = clean
        if (shift := batch.extras.get(PIXEL_SHIFT)) is not None:
            seen = self.patches(batch, shift)
        arguments: dict[str, Any] = {**options}
        if (perturbation := batch.extras.get(PERTURBATION)) is not None:
            arguments["perturbation"] = perturbation
        if (gate := batch.extras.get(GATE)) is not None:
            arguments["gate"] = gate.flatten(0, 1)
        return forward(seen, batch["visible"].flatten(0, 1), batch["masked"].flatten(0, 1), **arguments)

    def compute_errors(self, prediction: Tensor, batch: Batch, clean: Tensor) -> Tensor:
        """Return the errors [R, k, M] of a prediction [B, M, P] against the clean patches [B, N, P]."""
        target = self.target(gather_patches(clean, batch["masked"].flatten(0, 1)))  # [B, M, P]
        wide = prediction.to(torch.promote_types(prediction.dtype, torch.float32))
        return (wide - target).square().mean(-1).view(batch["masked"].shape)

    def patches(self, batch: Batch, pixel_shift: Tensor | None = None) -> Tensor:
        """Return the patches of the normalised images, [B, N, P] float32."""
        shift = None if pixel_shift is None else pixel_shift.flatten(0, 1)
        return self._image_patches(batch["images"].flatten(0, 1), shift)

    def target(self, patches: Tensor) -> Tensor:
        """Return the prediction target of patches, [B, M, P]."""
        patches = patches.detach()
        return normalise_patches(patches) if self.normalised else patches


class UniformPatchReconstruction(MaskedPatchReconstruction):
    """U-MAE (Zhang et al. 2022, How Mask Matters): a uniformity loss as a second task outside the balance. It is the
    mean squared cosine (f_i . f_j)^2 over all pairs (i, j) of the global batch, with i = j, where f_i is the normalised
    class token after the encoder in the masked pass.

    This mean is ||S||_F^2 with the second moment S = 1/B sum_i f_i f_i^T, [D, D]. For constant S, row i has the loss
    f_i^T S f_i and the gradient of 2 f_i^T S f_i. They sum to the mean over pairs and its gradient for every split of
    the global batch. `Uniformity` adds S to `batch.extras`. If each rank has one micro-batch, this pass computes S.
    Otherwise the task is absent: held-out rows would have the pairs of a micro-batch only.
    """

    in_a_graph = False  # the moment is a sum over ranks

    def __init__(
        self, config: MaeObjectiveConfig, patch_size: int, data_group: Group, sources: tuple[str, ...] = ()
    ) -> None:
        super().__init__(config, patch_size, sources)
        self.tasks = (*self.tasks, UNIFORMITY)
        self.weight = config.uniformity
        self.data_group = data_group

    def count(self, batch: Batch) -> Tensor:
        """[T] float64, masked patches, and for the last task crops, of present rows."""
        return torch.cat([super().count(batch), self.present(batch).sum().reshape(1)])

    def outside_weights(self, counts: Tensor) -> Tensor:
        """[T], objective.uniformity for the last task."""
        weights = torch.zeros_like(counts)
        weights[self.tasks.index(UNIFORMITY)].fill_(self.weight)
        return weights

    def __call__(self, forward: Callable[..., Any], batch: Batch) -> TaskLosses:
        """Return the sums of both tasks, in float64."""
        if MOMENT not in batch.extras and ROWS not in batch.extras:
            return super().__call__(forward, batch)
        clean = self.patches(batch)  # [B, N, P], B = R k
        output = self.run(forward, batch, clean, output="prediction_and_class")
        reconstruction = self.losses(self.compute_errors(output.prediction, batch, clean), batch)
        uniformity = self.uniformity_sum(output.class_token, batch).reshape(1)
        return TaskLosses(sums=torch.cat([reconstruction.sums[:-1], uniformity]), counts=self.count(batch))

    def losses(self, errors: Tensor, batch: Batch) -> TaskLosses:
        """Return the reconstruction losses for errors [R, k, M]; linear in them. The uniformity task is absent."""
        losses = super().losses(errors, batch)
        absent = losses.counts.new_zeros(1)
        return TaskLosses(sums=torch.cat([losses.sums, absent]), counts=torch.cat([losses.counts[:-1], absent]))

    def uniformity_sum(self, class_token: Tensor, batch: Batch) -> Tensor:
        """Return the sum of f_i^T S f_i over class tokens [B, D], a scalar, with the gradient of twice this sum."""
        features = F.normalize(class_token.double(), dim=-1)
        moment = batch.extras.get(MOMENT)
        if moment is None:
            total = self.data_group.sum(self.compute_moment(features, batch))
            moment = total / batch.extras[ROWS].clamp(min=1)
        rows = ((features @ moment) * features).sum(-1)  # [B]
        return (2.0 * rows - rows.detach()) @ self.present(batch)

    def moment(self, forward: Callable[..., Any], batch: Batch) -> Tensor:
        """Return the sum of f_i f_i^T over this micro-batch, [D, D], from a forward pass of the encoder."""
        class_token: Tensor = self.run(forward, batch, self.patches(batch), output="class_token")
        return self.compute_moment(F.normalize(class_token.double(), dim=-1), batch)

    def compute_moment(self, features: Tensor, batch: Batch) -> Tensor:
        """Sum f_i f_i^T over present rows without a graph: [B, D] -> [D, D]."""
        features = features.detach()
        return (features * self.present(batch).unsqueeze(1)).T @ features

    def present(self, batch: Batch) -> Tensor:
        """Return each crop's row weight, [B] float64."""
        return batch["row_weights"].double().repeat_interleave(batch["masked"].shape[1])


class Uniformity(Hook):
    """Adds the moment S to every micro-batch of a step. With several micro-batches, it runs the encoder without
    gradients on all of them, with the same inputs as the weighted pass. With one, the objective computes S itself.

    It must come after the hooks that change the model's input. Extra passes of those hooks are without this task.
    """

    name = "uniformity"

    def __init__(self, objective: UniformPatchReconstruction) -> None:
        self.objective = objective
        self._added: dict[Extra, Tensor] = {}

    def before_step(self, ctx: StepContext) -> None:
        rows = ctx.counts[self.objective.tasks.index(UNIFORMITY)]
        self._added = {ROWS: rows}
        if len(ctx.own_window) > 1:
            with torch.no_grad():
                moments = [self.objective.moment(ctx.engine, ctx.apply_hooks(micro)) for micro in ctx.own_window]
            self._added = {MOMENT: ctx.data_group.sum(torch.stack(moments).sum(0)) / rows.clamp(min=1)}

    def batch(self, ctx: StepContext, micro: Batch) -> Batch:
        return micro.adding(self._added)

    def after_step(self, ctx: StepContext) -> None:
        self._added = {}


def blank_rows(config: MaeConfig, rows: int) -> Batch:
    """Return a batch of black images with the first patches visible."""
    crops, side = config.crops.count, config.crops.size
    split = split_patches(side, config.vision.patch_size, config.masking.ratio)
    order = torch.arange(split.patches).expand(rows, crops, -1)
    fields = {
        "images": torch.zeros(rows, crops, 3, side, side, dtype=torch.uint8),
        "visible": order[..., : split.visible].contiguous(),
        "masked": order[..., split.visible :].contiguous(),
        "labels": torch.zeros(rows, dtype=torch.int64),
    }
    return blank_batch(config, rows, fields)


@dataclass(frozen=True, kw_only=True)
class ImageOutline(Outline):
    """Outline of the pass over masked images; only `step_flops` includes the cost of choosing masks."""

    config: MaeConfig

    def step_flops(self, ranks: int) -> float:
        masks = self.config.multilevel
        if isinstance(masks, SelfGuidedSettings):
            share = 1 - masks.first_step(self.config) / self.config.training.steps
            images = self.config.batch.global_size * self.config.crops.count
            return super().step_flops(ranks) + share * images * count_whole_image(self.config, self.model)
        if not isinstance(masks, LearnedMasksSettings):
            return super().step_flops(ranks)
        masked = self.forward_flops
        if masks.final_ratio:  # a curriculum: count with the ratio at the middle of the run
            middle = copy.deepcopy(self.config)
            middle.masking.ratio = 0.5 * (middle.masking.ratio + masks.final_ratio)
            masked = replace(self, rows=partial(blank_rows, middle)).forward_flops
        return masks_step_flops(self.config, self.model, masked=masked, ranks=ranks)


class ImageUpstream(Upstream):
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
        settings, patch_size, sources = config.objective, config.vision.patch_size, source_names(config)
        self.reconstruction = MaskedPatchReconstruction(settings, patch_size, sources)
        if settings.uniformity > 0:
            self.reconstruction = UniformPatchReconstruction(settings, patch_size, data, sources)
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
    def sizes_from_weights(cls, config: MaeConfig, source: GivenWeights) -> dict[tuple[str, str], Any]:
        return read_image_weights(source.tensors, source.fields).sizes

    @classmethod
    def outline(cls, config: MaeConfig, facts: DataFacts) -> Outline:
        return ImageOutline(
            config=config,
            model=partial(MaskedAutoencoder, config),
            objective=MaskedPatchReconstruction(config.objective, config.vision.patch_size, source_names(config)),
            rows=partial(blank_rows, config),
            step_rows=config.batch.global_size,
            positions=config.crops.count * config.patches,
        )

    @classmethod
    def inference_config(cls, config: MaeConfig) -> MaeConfig:
        """Return settings with random masks, which need no classes and may read images reserved for tests."""
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
        self.start_from_weights(model, load_weights)
        return model

    def hooks(self, run: RunContext) -> list[Hook]:
        methods = (built(run, "multilevel"), built(run, "adversary"))  # the adversary needs the masks
        hooks = [hook for hook in methods if hook is not None]
        if isinstance(self.reconstruction, UniformPatchReconstruction):
            hooks.append(Uniformity(self.reconstruction))  # last: its pass needs the changes of the others
        return hooks
