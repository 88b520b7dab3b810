"""Labelled images for learned masks: D_tr for the head, D_val for the masking network."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import numpy as np

from trp_scale.config import RefusedError
from trp_scale.config.images import MaskedAutoencoderConfig
from trp_scale.data.hashing import Integers, stream
from trp_scale.data.mixture import MemberPath
from trp_scale.data.plan import MixtureMember, TrainPlan, downstream_validation
from trp_scale.data.sources import TRAIN, VALIDATION, Chosen, Downstream, Rows, TrainSource


def open_downstream(
    config: MaskedAutoencoderConfig,
    rows: Rows,
    paths: Sequence[MemberPath],
    training: Sequence[Chosen],
    *,
    rank: int,
    world: int,
    pin: bool,
) -> tuple[Downstream, Sequence[Chosen]]:
    """Return D_tr and D_val, and the blocks of D_u of each data set.

    Args:
        rows: the opened data.
        paths: of the data sets.
        training: blocks of each data set that are not held out, [n].
        rank, world: rank in, and size of, the data-parallel group.
        pin: pin the memory of batches.

    Raises:
        RefusedError: the images have fewer than two classes, there are too few blocks, or the batches do not divide
            over the ranks.
    """
    labels, classes = _labels(config, rows)
    validation = [
        downstream_validation(
            blocks.identities, config.multilevel.validation_share, training=mask, where=str(path.path)
        )
        for blocks, mask, path in zip(rows.blocks, training, paths, strict=True)
    ]
    train = [every & ~mask for every, mask in zip(training, validation, strict=True)]
    unlabelled, workers_train, workers_validation = shared_workers(config)
    notices: list[str] = []
    if config.data.workers:
        notices.append(
            f"loader workers of a rank: {unlabelled} for D_u, {workers_train} for D_tr, {workers_validation} for D_val "
            "(--data.workers, in proportion to the images per step)"
        )

    def open_source(name: str, shown: str, chosen: Sequence[Chosen], workers: int) -> TrainSource:
        members = rows.members(paths, chosen)
        seed, blocks_per_group = stream(config.training.seed, name), config.data.blocks_per_group
        plan = TrainPlan(seed=seed, members=members, blocks_per_group=blocks_per_group)
        sized = copy.deepcopy(config)
        sized.batch.global_size, sized.batch.micro_size = config.multilevel.batches(config, world)
        notices.extend(_notices(config, shown, plan.rows, members, labels, rows, classes))
        return TrainSource(
            plan,
            rows.builder,
            sized,
            rank=rank,
            world=world,
            pin_memory=pin,
            workers=workers,
            flags=("multilevel.batch_size", "multilevel.micro_size"),
            stored=rows.stored,
        )

    downstream = Downstream(
        train=open_source(TRAIN, "D_tr", train, workers_train),
        validation=open_source(VALIDATION, "D_val", validation, workers_validation),
        classes=classes,
        notices=notices,
        workers_left=unlabelled,
    )
    return downstream, training if config.multilevel.unlabelled == "all" else train


def shared_workers(config: MaskedAutoencoderConfig) -> tuple[int, int, int]:
    """Return the loader workers of D_u, D_tr and D_val: at least one each, in total data.workers, in proportion to
    their mean number of images per step."""
    total, settings = config.data.workers, config.multilevel
    if total == 0:
        return 0, 0, 0
    size = settings.batch_size or config.batch.global_size
    steps_train = 1 if settings.joins_labelled else settings.unroll
    images = (config.batch.global_size, size / steps_train, size / (settings.unroll * settings.every))
    train, validation = (max(1, int(total * count / sum(images))) for count in images[1:])
    return max(1, total - train - validation), train, validation


def _labels(config: MaskedAutoencoderConfig, rows: Rows) -> tuple[list[Integers], int]:
    """Return the labels of each data set, and the number of classes."""
    if rows.labels is None or "cls" not in rows.meta.suffixes:  # type: ignore[union-attr]  # text has no labels
        raise RefusedError(
            f"--multilevel.kind {config.multilevel.kind} needs classes, but the images of --data.path "
            f"{config.data.path} have none (no .cls; in a mixture every member needs them); allowed: images with "
            "classes, or --multilevel.kind reconstruction or none"
        )
    names = rows.meta.classes  # type: ignore[union-attr]  # images, as they have labels
    count = 1 + max(int(numbers.max()) for numbers in rows.labels) if names is None else len(names)
    if count < 2:
        raise RefusedError(
            f"{config.data.path} has {count} class, but --multilevel.kind {config.multilevel.kind} needs at least 2; "
            "allowed: --multilevel.kind reconstruction"
        )
    return rows.labels, count


def _notices(
    config: MaskedAutoencoderConfig,
    shown: str,
    images: int,
    members: Sequence[MixtureMember],
    labels: Sequence[Integers],
    rows: Rows,
    classes: int,
) -> list[str]:
    """Return notices of a source that is smaller than a batch or lacks classes."""
    notices = []
    size = config.multilevel.batch_size or config.batch.global_size
    split = f"{shown} (--multilevel.validation_share {config.multilevel.validation_share:g})"
    if images < size:
        notices.append(
            f"{split} has {images} images, fewer than the {size} of a batch (--multilevel.batch_size): batches repeat "
            "images"
        )
    present = {
        number
        for member, numbers in zip(members, labels, strict=True)
        for number in np.unique(numbers[np.repeat(member.chosen, member.table.rows)]).tolist()
    }
    lacking = [number for number in range(classes) if number not in present]
    if lacking and -1 not in present:
        names = rows.meta.classes  # type: ignore[union-attr]  # images, as they have labels
        listed = ", ".join(str(number) if names is None else names[number] for number in lacking[:5])
        notices.append(
            f"{split} has no image of {len(lacking)} of {classes} classes ({listed}{', ...' if lacking[5:] else ''}); "
            "smaller blocks (--rows_per_block of trp-scale shard-images) distribute classes better"
        )
    return notices
