"""Whole cycles of learned masks over random images, for the benchmarks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from benchmarks.image_steps import random_images
from benchmarks.minimax_overhead import SameWindow, Unobserved, rows_of
from trp_scale.config import Config
from trp_scale.core.batch import Batch
from trp_scale.core.engine import Engine
from trp_scale.core.hooks import build_hooks, built
from trp_scale.core.run import MakeEngine, RunContext
from trp_scale.distributed.groups import ALONE
from trp_scale.engines.plain import PlainEngine
from trp_scale.training.loop import StepAgreement, Trainer
from trp_scale.upstreams.mae.model import MaskedAutoencoder
from trp_scale.upstreams.mae.objective import MaskedPatchReconstruction

CLASSES = 1000
"""Of D_tr and D_val: ImageNet-1k's."""


@dataclass(kw_only=True)
class Labelled:
    """Stands for data.downstream.Downstream."""

    train: SameWindow
    validation: SameWindow
    classes: int = CLASSES


@dataclass(kw_only=True)
class Served:
    """Stands for data.sources.Sources: what it serves is random, and the same at every step."""

    train: SameWindow
    downstream: Labelled | None


def plain_engines(device: torch.device) -> MakeEngine:
    """Whole weights on one process."""
    return lambda module, config: PlainEngine(module, config, device=device)


def labelled_window(config: Config, rows: int) -> list[Batch]:
    """Images of noise with random classes, in micro-batches as multilevel.micro_size says."""
    images = random_images(config, rows)
    images.fields["labels"] = torch.randint(0, CLASSES, (rows,), generator=torch.Generator().manual_seed(1))
    micro = config.multilevel.micro_size or rows
    return [rows_of(images, start, start + micro) for start in range(0, rows, micro)]


def masks_trainer(config: Config, rows: int, make_engine: MakeEngine) -> Trainer:
    """The loop over random images, with learned masks where the settings have them.

    Args:
        rows: images of a step of this rank, in one micro-batch.
        make_engine: for the model, and for the masking network.
    """
    engine: Engine = make_engine(MaskedAutoencoder(config), config)
    objective = MaskedPatchReconstruction(config.objective, config.vision.patch_size)
    downstream = None
    if config.multilevel.reads_labels:
        labels = labelled_window(config, rows)
        downstream = Labelled(train=SameWindow(labels), validation=SameWindow(labels))
    served = Served(train=SameWindow([random_images(config, rows)]), downstream=downstream)
    run = RunContext(config=config, objective=objective, engine=engine, sources=served, make_engine=make_engine)
    masks = built(run, "multilevel")
    trainer = Trainer(
        run_context=run,
        hooks=build_hooks(run, [masks] if masks else []),
        source=served.train,
        observer=Unobserved(),  # type: ignore[arg-type]
        agreement=StepAgreement(ALONE if engine.data_group.size == 1 else engine.data_group, 0),
        save=lambda: None,
        validate=lambda: None,
        stop_requested=lambda: None,
    )
    engine.train(True)
    return trainer


def cycle_steps(config: Config) -> int:
    """Steps of the encoder from one update of the masking network to the next."""
    return config.multilevel.unroll * config.multilevel.every if config.multilevel.learns else 1


def cycle(config: Config, trainer: Trainer) -> Callable[[], object]:
    """So many steps: a plain one, or those with one update of the masking network."""

    def run() -> None:
        for _ in range(cycle_steps(config)):
            trainer.train_step()

    return run
