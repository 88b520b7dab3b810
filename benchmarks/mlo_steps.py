"""Whole cycles of learned masks over random images, for the benchmarks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from benchmarks.image_steps import mae_objective, random_images
from benchmarks.steps import SameWindow, loop_over, micro_batches
from trp_scale.core.batch import Batch, WindowSource
from trp_scale.core.hooks import built
from trp_scale.core.run import MakeEngine, RunContext
from trp_scale.engines.plain import PlainEngine
from trp_scale.methods.learned_masks.settings import LearnedMasksSettings
from trp_scale.pretraining.mae.model import MaskedAutoencoder
from trp_scale.pretraining.mae.settings import MaeConfig
from trp_scale.training.loop import Trainer

CLASSES = 1000
"""Of D_tr and D_val: ImageNet-1k's."""


@dataclass(kw_only=True)
class Labelled:
    """Windows of D_tr and D_val in place of data.downstream.Downstream."""

    train: WindowSource
    validation: WindowSource
    classes: int = CLASSES


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
    images.fields["labels"] = torch.randint(0, CLASSES, (rows,), generator=torch.Generator().manual_seed(1))
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
        objective=mae_objective(config),
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
