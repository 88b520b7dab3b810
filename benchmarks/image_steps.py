"""Random images with masks, and whole training steps of masked autoencoders over them, for the benchmarks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.minimax_overhead import SameWindow, Unobserved
from trp_scale.config import Config, split_patches
from trp_scale.core.batch import Batch
from trp_scale.core.hooks import Hook, build_hooks, built
from trp_scale.core.objective import Objective
from trp_scale.core.run import RunContext
from trp_scale.distributed.groups import ALONE
from trp_scale.engines.plain import PlainEngine
from trp_scale.training.loop import StepAgreement, Trainer
from trp_scale.upstreams.mae.model import MaskedAutoencoder
from trp_scale.upstreams.mae.objective import MaskedPatchReconstruction

EncoderSize = Literal["tiny", "small", "base", "large"]

ENCODERS: dict[EncoderSize, tuple[int, int, int]] = {
    "tiny": (12, 192, 3),
    "small": (12, 384, 6),
    "base": (12, 768, 12),
    "large": (24, 1024, 16),
}
"""Layers, width and heads of ViT-Ti, S, B and L."""


def resized(config: Config, size: EncoderSize) -> Config:
    """The same settings with an encoder of this size; the decoder stays."""
    config.model.layers, config.model.hidden_size, config.model.heads = ENCODERS[size]
    config.model.intermediate_size = 4 * config.model.hidden_size
    return config


def random_images(config: Config, rows: int) -> Batch:
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


def training_step(config: Config, batch: Batch, device: torch.device) -> Callable[[], object]:
    """One whole training step of a masked autoencoder on one process, hooks and optimizer included."""
    objective = MaskedPatchReconstruction(config.objective, config.vision.patch_size)
    run = RunContext(
        config=config, objective=objective, engine=PlainEngine(MaskedAutoencoder(config), config, device=device)
    )
    adversary = built(run, "adversary")
    return repeated_step(run, batch, [adversary] if adversary else [])


def same_step(
    config: Config, module: nn.Module, objective: Objective, batch: Batch, device: torch.device
) -> Callable[[], object]:
    """The loop's own step on one process over the same micro-batch every time, with the balancer."""
    engine = PlainEngine(module, config, device=device)
    return repeated_step(RunContext(config=config, objective=objective, engine=engine), batch)


def repeated_step(run: RunContext, batch: Batch, others: Sequence[Hook] = ()) -> Callable[[], object]:
    """The loop's own step over the same micro-batch every time, with the balancer and other hooks."""
    trainer = Trainer(
        run_context=run,
        hooks=build_hooks(run, others),
        source=SameWindow([batch]),
        observer=Unobserved(),  # type: ignore[arg-type]
        agreement=StepAgreement(ALONE, 0),
        save=lambda: None,
        validate=lambda: None,
        stop_requested=lambda: None,
    )
    return trainer.train_step


def counted_flops(step: Callable[[], object]) -> int:
    """What torch's counter finds in a call: matrix products and attention; it knows no other arithmetic."""
    with FlopCounterMode(display=False) as counter:
        step()
    return int(counter.get_total_flops())
