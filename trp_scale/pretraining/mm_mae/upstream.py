"""Pre-training on images with depth and segmentation: MM-MAE (TRP 4.2)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property, partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from trp_scale.checkpoint.initial_weights import GivenWeights
from trp_scale.config import RefusedError
from trp_scale.config.registry import find
from trp_scale.core.batch import Batch, Extra, TaskLosses
from trp_scale.core.hooks import Hook, built
from trp_scale.core.run import RunContext, Tap, TappedObjective, TapPlace
from trp_scale.data.images.dataset import ImageMeta
from trp_scale.data.mixture import parse_paths
from trp_scale.data.sources import Rows
from trp_scale.distributed.environment import Environment
from trp_scale.errors import shorten
from trp_scale.pretraining.base import DataFacts, Outline, Upstream
from trp_scale.pretraining.mm_mae.batch import RunModalities, open_rows, visible_slots
from trp_scale.pretraining.mm_mae.model import MultimodalMaskedAutoencoder, MultimodalOutput
from trp_scale.pretraining.mm_mae.settings import MmMaeConfig
from trp_scale.pretraining.mm_mae.weights import CLASSES, load_multimae, sizes_from_weights
from trp_scale.pretraining.tasks import blank_batch, join_names, rows_by_source, source_names

TASK_TAPS = Extra("task_taps")
"""Name of the taps in `Batch.extras`, and of the model's argument for them."""


class MultimodalReconstruction(TappedObjective):
    """One task for each output; its modality computes the errors (pretraining/modalities). With tasks by source, one
    task for each source, over all outputs, or for each output of each source.

    Only masked patches have a loss; every patch is masked of an output that is not an input. An element is a pixel or a
    patch, as the modality defines. objective.reduction sets the sum and the count of a task:
        sample: sum of each row's mean over its elements, and number of rows that have any;
        element: sum over all elements, and their number.

    Hooks may set PIXEL_SHIFT [R, 3, S, S] in `batch.extras`: it is added to the input pixels; the target stays clean.
    """

    def __init__(self, config: MmMaeConfig) -> None:
        self.modalities = RunModalities(config)
        self.inputs: tuple[str, ...] = self.modalities.inputs
        self.outputs: tuple[str, ...] = self.modalities.tasks
        self.sources = source_names(config)
        self.together = config.objective.tasks == "sources"
        outputs = self.outputs if not self.sources else join_names(self.sources, self.outputs)
        self.tasks: tuple[str, ...] = self.sources if self.together else outputs
        self.balanced: tuple[int, ...] = tuple(range(len(self.tasks)))
        distances = [self.modalities.output_modality(task).regression for task in self.outputs]
        if self.together:
            distances = [all(distances)]
        self.regression: tuple[int, ...] = tuple(task for task in self.balanced if distances[task % len(distances)])
        self.per_sample = config.objective.reduction == "sample"
        self.patches_per_row = (config.crops.size // config.vision.patch_size) ** 2
        self.hidden_size = config.model.hidden_size

    def count(self, batch: Batch) -> Tensor:
        """[T] float64, from `visible` and the modalities' counts only."""
        rows = self.elements(batch).sum(2)  # [O, R]
        return self._sum_rows((rows > 0).double() if self.per_sample else rows, batch)

    def _sum_rows(self, rows: Tensor, batch: Batch) -> Tensor:
        """Sum the values of rows in each task, [O, R] -> [T], O outputs."""
        if not self.sources:
            return rows.sum(1)
        members = rows_by_source(batch, len(self.sources)).T  # [S, R]
        return members @ rows.sum(0) if self.together else (members @ rows.T).flatten()

    def elements(self, batch: Batch) -> Tensor:
        """Return the number of masked elements of each patch, [O, R, N] float64."""
        masked = self.masked_patches(batch)
        predicted = [self.modalities.output_modality(task) for task in self.outputs]
        return torch.stack([modality.elements(batch) * masked[modality.name] for modality in predicted])

    def masked_patches(self, batch: Batch) -> dict[str, Tensor]:
        """Return the masked patches [R, N] bool of each predicted modality; all are masked if it is not an input."""
        visible, count = batch["visible"], self.patches_per_row
        slots = visible_slots(visible, len(self.inputs) * count)
        masked = (slots == visible.shape[1]).view(len(visible), len(self.inputs), count)  # [R, I, N]
        every = torch.ones_like(masked[:, 0])
        predicted = {self.modalities.output_modality(task).name for task in self.outputs}
        return {
            name: masked[:, self.inputs.index(name)] if name in self.inputs else every for name in sorted(predicted)
        }

    def __call__(self, forward: Callable[..., MultimodalOutput], batch: Batch) -> TaskLosses:
        """Return the sums of the tasks' losses in float64; exactly 0 for a task without elements."""
        patches = self.patches(batch)
        taps = {TASK_TAPS: batch.extras[TASK_TAPS]} if TASK_TAPS in batch.extras else {}
        output = forward(self.seen(patches, batch), batch["visible"], **taps)
        elements = self.elements(batch)  # [O, R, N]
        errors = []
        for task, prediction in zip(self.outputs, output.predictions, strict=True):
            modality = self.modalities.output_modality(task)
            wide = prediction.to(torch.promote_types(prediction.dtype, torch.float32))
            errors.append(modality.errors(task, wide, patches[modality.name]))  # [R, N]
        rows = torch.where(elements > 0, torch.stack(errors).double(), 0.0).sum(2)  # [O, R]
        counts = elements.sum(2)
        if self.per_sample:
            rows, counts = rows / counts.clamp(min=1), (counts > 0).double()
        shared = output.shared_inputs
        return TaskLosses(
            sums=self._sum_rows(rows, batch),
            counts=self._sum_rows(counts, batch),
            shared_inputs=None if shared is None else shared.flatten(0, 1),  # [R (1 + V), intermediate]
        )

    def patches(self, batch: Batch) -> dict[str, Tensor]:
        """Return the patches [R, N, P] of each input and predicted modality."""
        return {name: modality.patches(batch) for name, modality in self.modalities.used.items()}

    def seen(self, patches: dict[str, Tensor], batch: Batch) -> dict[str, Tensor]:
        """Return the model's input [R, N, P] of each input modality, with masked patches."""
        return {name: self.modalities.used[name].seen(patches[name], batch) for name in self.inputs}

    def tapped_tasks(self, at: TapPlace) -> tuple[int, ...]:
        """All tasks: the encoder's last matrix is the last one that the decoders share."""
        return self.balanced

    def tap(self, batch: Batch, at: TapPlace) -> Tap:
        """Return the tap on each decoder's input from the encoder, [O, R, 1 + V, D], for both places."""
        rows, visible = batch["visible"].shape
        return Tap(TASK_TAPS, (len(self.outputs), rows, 1 + visible, self.hidden_size))

    def task_gradients(self, batch: Batch, at: TapPlace, gradient: Tensor) -> dict[int, Tensor]:
        """Return the gradient [R (1 + V), D] of each task."""
        if self.sources:
            members = rows_by_source(batch, len(self.sources)).T.to(gradient.dtype)  # [S, R]
            outputs = gradient.sum(0, keepdim=True) if self.together else gradient
            gradient = torch.einsum("sr,orvd->sorvd", members, outputs).flatten(0, 1)
        return dict(enumerate(gradient.flatten(1, 2).unbind(0)))


CLASS_NAMES = "class_names"
"""In `CheckpointDocument.extra`: class names of each modality's maps, in the order of their numbers."""


def class_counts(modalities: RunModalities, meta: ImageMeta) -> dict[str, int]:
    """Return the number of classes of each modality's maps, where it has classes."""
    return {name: classes for name, maps in meta.maps.items() if (classes := modalities.used[name].classes(maps))}


def blank_rows(config: MmMaeConfig, rows: int) -> Batch:
    """Return a batch of samples without content in any modality."""
    fields = {
        "visible": torch.arange(config.modalities.visible_tokens).expand(rows, -1).contiguous(),
        "labels": torch.zeros(rows, dtype=torch.int64),
    }
    for modality in RunModalities(config).used.values():
        fields |= modality.empty_fields(rows, config.crops)
    return blank_batch(config, rows, fields)


class MultimodalUpstream(Upstream):
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
    def sizes_from_weights(cls, config: MmMaeConfig, source: GivenWeights) -> dict[tuple[str, str], Any]:
        return sizes_from_weights(source)

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
        self.start_from_weights(model, load_multimae)
        return model

    def hooks(self, run: RunContext) -> list[Hook]:
        adversary = built(run, "adversary")
        return [] if adversary is None else [adversary]

    def checkpoint_extra(self) -> dict[str, Any]:
        return {CLASSES: self.classes, CLASS_NAMES: self._names}

    @classmethod
    def require_readable(cls, rows: Rows, path: str, run_dir: Path, extra: Mapping[str, Any]) -> None:
        """Refuse rows with other classes than the training data."""
        assert isinstance(rows.meta, ImageMeta)
        for name, learned in extra[CLASSES].items():
            kind, stored = find("modality", name).load(), rows.meta.maps[name]
            classes, names = kind.classes(stored), list(kind.class_names(stored))
            if classes != learned or names != extra[CLASS_NAMES][name]:
                raise RefusedError(
                    f"{path}: {name} maps have {classes} classes ({shorten(', '.join(names))}), the run was trained on "
                    f"{learned} others; give data with the same classes in the same order"
                )
