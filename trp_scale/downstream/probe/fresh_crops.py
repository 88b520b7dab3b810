"""The linear probe on random crops that are drawn anew in every epoch: the encoder runs all the time."""

from __future__ import annotations

import torch

from trp_scale.data.hashing import Integers
from trp_scale.distributed.groups import Group
from trp_scale.downstream.probe.arguments import LinearSettings
from trp_scale.downstream.probe.classifiers import LR_ROWS, LinearProbe, step_counts
from trp_scale.downstream.probe.encoder import FrozenEncoder
from trp_scale.downstream.probe.features import Features, extract
from trp_scale.downstream.probe.images import ProbedImages

SMALLEST_CROP = 0.08
"""Share of an image's area that a crop shows at least (Szegedy et al. 2015), as in He et al., A.1."""


def fit_fresh(
    encoder: FrozenEncoder,
    images: ProbedImages,
    features: Features,
    settings: LinearSettings,
    *,
    fraction: float,
    seed: int,
    group: Group,
) -> Integers | None:
    """Learn from crops; [m] classes of `features` [m, D], on rank 0 alone. All ranks run the encoder; rank 0 learns.

    Steps go across the end of an epoch, and are of whole forward passes on every rank: linear.batch_size is rounded
    down to those. Where that gives the same size, any number of ranks learns the same.

    Args:
        images: learned from, but for what is held out.
        features: measured.
        fraction: share that is held out.
    """
    micro, world = images.config.batch.micro_size, group.size
    rows = int((~images.held_out(fraction)).sum())
    size, _, _ = step_counts(rows, settings)
    size = max(micro * world, size - size % (micro * world))
    steps = max(1, round(settings.epochs * rows / size))
    probe = LinearProbe(
        encoder.width,
        len(images.classes),
        steps=steps,
        warmup_steps=round(settings.warmup_epochs * rows / size),
        lr=settings.base_lr * size / LR_ROWS,
        seed=seed,
    )
    source = images.random_crops(group, fraction, smallest=SMALLEST_CROP, batch=size, seed=seed)
    try:
        for _ in range(steps):
            batch, labels = extract(encoder, source.next_window(), group)
            if group.rank == 0:
                probe.learn(torch.from_numpy(batch), torch.from_numpy(labels))
    finally:
        source.close()
    return probe.predict(features) if group.rank == 0 else None
