"""Saving and loading by all ranks together.

Save: every rank writes its pieces into checkpoints/.step_00000123.tmp and flushes them; rank 0 checks that the pieces
of all ranks hold every element once, writes checkpoint.json last and renames the directory. A process killed at any
moment leaves either a whole checkpoint or a hidden directory that the next save removes.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from trp_scale.checkpoint.agreement import on_rank_zero, together
from trp_scale.checkpoint.document import HOOKS_NAME, CheckpointDocument, read_document
from trp_scale.checkpoint.engine_group import check_same_engines
from trp_scale.checkpoint.errors import CheckpointError, RankError
from trp_scale.checkpoint.format import (
    Part,
    StoredPart,
    check_same_tensors,
    collect_tensors,
    describe,
    parts_of,
    write_parts,
)
from trp_scale.checkpoint.nested_state import join_state, split_state
from trp_scale.checkpoint.run_directory import (
    checkpoint_path,
    incompleteness,
    publish,
    remove_leftovers,
    retain,
    temporary_path,
)
from trp_scale.checkpoint.stored_pieces import StoredPieces, open_pieces
from trp_scale.checkpoint.tensor_file import FileEntry, TensorInfo, write_tensor_file
from trp_scale.core.engine import Stores
from trp_scale.distributed.groups import Group


@dataclass(frozen=True, kw_only=True)
class LoadedCheckpoint:
    """What was stored beside weights and moments; those are in the engine. Attributes as in CheckpointDocument."""

    path: Path
    step: int
    optimizer_steps: int
    hooks_state: dict[str, Any]
    cursors: dict[str, int]
    config: dict[str, Any]
    extra: dict[str, Any]
    engine: str
    zero_stage: int | None
    world_size: int


def save(
    run_dir: Path,
    *,
    step: int,
    engine: Stores,
    hooks_state: Mapping[str, Any],
    cursors: Mapping[str, int],
    config: Mapping[str, Any],
    group: Group,
    keep: int,
    extra: Mapping[str, Any],
) -> Path:
    """Write the checkpoint of `step`; all ranks of `group`, the whole world, call it together.

    Args:
        run_dir: the run directory, shared by all ranks; the checkpoint becomes run_dir/checkpoints/step_00000123.
        step: steps done.
        hooks_state: nested dicts of JSON values and tensors, the same on every rank.
        cursors: rows consumed, by source.
        config: the resolved settings, nested.
        keep: newest checkpoints that stay, this one included; 0 = all.
        extra: JSON values of the training loop; `vocab_size` and `data_tokenizer` are needed for an export,
            `data_digest` lets the data set move between runs.
    Raises:
        RankError: on every rank, when any of them failed; nothing new is visible under the final name then.
    """
    final, temporary = checkpoint_path(run_dir, step), temporary_path(run_dir, step)
    facts = {
        "step": step,
        "optimizer_steps": engine.optimizer_steps(),
        "cursors": dict(cursors),
        "engine": engine.name,
        "zero_stage": engine.zero_stage,
        "world_size": group.size,
        "engine_state": dict(engine.extra_state()),
        "config": dict(config),
        "extra": dict(extra),
    }

    def prepare() -> None:
        remove_leftovers(run_dir)
        temporary.mkdir(parents=True)

    try:
        on_rank_zero(group, f"preparing the checkpoint {final}", prepare)
        written = together(group, f"writing the checkpoint {final}", lambda: _write_rank(temporary, engine, group.rank))
        on_rank_zero(group, f"finishing {final}", lambda: _finish(temporary, written, hooks_state, facts))
        on_rank_zero(group, f"naming the checkpoint {final}", lambda: publish(temporary, final))
        on_rank_zero(group, f"{final} is written; removing older ones", lambda: retain(run_dir, final, keep))
    except (CheckpointError, RankError) as error:
        if group.rank == 0:  # should this fail too, the error under way says more, and the next save removes the rest
            shutil.rmtree(temporary, ignore_errors=True)
        raise RankError(str(error)) from error
    return final


RankContent = tuple[FileEntry, list[StoredPart]]
"""What one rank wrote."""


def _write_rank(temporary: Path, engine: Stores, rank: int) -> RankContent:
    """Write the pieces that this rank owns, going through them twice: the header comes first and needs their sizes."""
    described = [describe(part) for part in _owned(engine)]
    return write_parts(temporary / f"rank-{rank:05d}.safetensors", described, _owned(engine)), described


def _owned(engine: Stores) -> Iterator[Part]:
    return (part for part in parts_of(engine.pieces()) if part.owner)


def _finish(
    temporary: Path, written: Sequence[RankContent], hooks_state: Mapping[str, Any], facts: Mapping[str, Any]
) -> None:
    """Write what rank 0 writes, checkpoint.json last, once the pieces of all ranks are on the disk."""
    hooks_document, hooks_tensors = split_state(hooks_state)
    infos = {key: TensorInfo.of(tensor) for key, tensor in hooks_tensors.items()}
    hooks_file = write_tensor_file(temporary / HOOKS_NAME, infos, hooks_tensors.items())
    tensors = collect_tensors(part for _, parts in written for part in parts)
    files = (*(entry for entry, _ in written), hooks_file)
    CheckpointDocument(tensors=tensors, files=files, hooks=hooks_document, **facts).write(temporary)
    if problem := incompleteness(temporary):
        raise CheckpointError(problem)


def load(path: Path, *, engine: Stores, group: Group) -> LoadedCheckpoint:
    """Fill the engine from a checkpoint written by any engine on any number of ranks; all ranks call it together.

    Every file is compared with its checksums first, each by one rank.

    Raises:
        CheckpointError: on every rank: the checkpoint is not complete, damaged, or does not fit the model.
    """
    document = on_rank_zero(group, f"reading {path}", lambda: read_document(path))
    check_same_engines(path, document.engine_state, engine.extra_state())  # the same on every rank
    stored = open_pieces(path, document, group)
    # The engine's own collectives run in here: an error that only one rank meets cannot be announced to the others.
    engine.create_optimizer_state()

    def described() -> list[StoredPart]:
        return [describe(part) for part in _owned(engine)]  # replicas would be gathered once for each rank

    wanted = together(group, f"listing the tensors for {path}", described)

    def fill() -> dict[str, Any]:
        check_same_tensors(path, document, collect_tensors(part for parts in wanted for part in parts))
        _fill_engine(engine, stored)
        return join_state(document.hooks, load_file(path / HOOKS_NAME))  # type: ignore[no-any-return]

    hooks_state: dict[str, Any] = {}
    together(group, f"loading {path}", lambda: hooks_state.update(fill()))
    engine.after_load(document.optimizer_steps)
    engine.load_extra_state(document.engine_state)
    return LoadedCheckpoint(
        path=path,
        step=document.step,
        optimizer_steps=document.optimizer_steps,
        hooks_state=hooks_state,
        cursors=document.cursors,
        config=document.config,
        extra=document.extra,
        engine=document.engine,
        zero_stage=document.zero_stage,
        world_size=document.world_size,
    )


@torch.no_grad()
def _fill_engine(engine: Stores, stored: StoredPieces) -> None:
    tensors = stored.document.tensors
    with stored.reader() as reader:
        for part in parts_of(engine.pieces()):
            for state, target in part.tensors.items():
                if state in tensors[part.name].states:
                    reader.fill(state, part.name, part.region, target)
                else:  # only moments of a run that had made no step: check_same_tensors has seen to it
                    target.zero_()
