"""Checkpoints as a run writes them, for tests without a run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trp_scale.checkpoint.format import read_full_state
from trp_scale.checkpoint.keeper import Keeper
from trp_scale.checkpoint.manager import Content
from trp_scale.checkpoint.run_directory import checkpoint_path
from trp_scale.checkpoint.writer import CheckpointWriter
from trp_scale.config import CheckpointConfig
from trp_scale.core.engine import Stores
from trp_scale.core.pieces import STATE_NAMES
from trp_scale.distributed.groups import Group, RankError


def save_checkpoint(
    run_dir: Path,
    *,
    step: int,
    engine: Stores,
    hooks_state: Mapping[str, Any],
    cursors: Mapping[str, int],
    group: Group,
    config: Mapping[str, Any] | None = None,
    extra: Mapping[str, Any] | None = None,
    keep: int = 0,
) -> Path:
    """Write the checkpoint of `step` and remove older ones; all ranks call it together and wait.

    Args:
        step, engine, hooks_state, cursors, config, extra: fields of `Content`.
        keep: newest checkpoints that stay; 0 = all.

    Raises:
        RankError: on every rank, if any of them failed.
    """
    settings = CheckpointConfig(every=1, keep=keep, asynchronous=False)
    writer = CheckpointWriter(run_dir=run_dir, group=group, settings=settings)
    if group.rank == 0:
        writer._keeper = Keeper(run_dir)
        writer._keeper.note_written = writer._keeper._keep  # type: ignore[method-assign]  # its end ends the save
    content = Content(
        step=step, engine=engine, hooks_state=hooks_state, cursors=cursors, config=config or {}, extra=extra or {}
    )
    writer.save(content, wait=True)
    writer.close()
    if writer.problem:
        raise RankError(writer.problem)
    return checkpoint_path(run_dir, step)


def stored_state(checkpoint: Path, engine: str = "") -> dict[str, Tensor]:
    """Return weights and moments of a checkpoint, by "exp_avg/ENGINE/NAME"."""
    return {
        f"{state}/{engine}/{name}": tensor
        for state in ("weight", *STATE_NAMES)
        for name, tensor in read_full_state(checkpoint, state, engine).items()
    }


def unequal(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> list[str]:
    """Return names of tensors, of which both have the same, that are not equal bit for bit."""
    assert ours.keys() == theirs.keys() != set()
    return [name for name, tensor in theirs.items() if not torch.equal(ours[name], tensor)]
