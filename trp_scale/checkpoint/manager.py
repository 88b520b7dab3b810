"""Saving and loading by all ranks together.

Save: every rank writes its pieces into checkpoints/.step_00000123.tmp and flushes them; rank 0 checks that the pieces
of all ranks hold every element once, writes checkpoint.json last and renames the directory. A process killed at any
moment leaves either a whole checkpoint or a hidden directory that the next save removes.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from trp_scale.checkpoint.agreement import RankError, on_rank_zero, together
from trp_scale.checkpoint.document import (
    HOOKS_NAME,
    CheckpointDocument,
    read_document,
    read_hooks_state,
    split_state,
)
from trp_scale.checkpoint.engine_group import check_same_engines
from trp_scale.checkpoint.format import (
    StoredPiece,
    check_same_tensors,
    join_pieces,
    open_pieces,
    without_values,
    write_pieces,
)
from trp_scale.checkpoint.run_directory import (
    checkpoint_path,
    incompleteness,
    publish,
    remove_leftovers,
    retain,
    temporary_path,
)
from trp_scale.checkpoint.tensor_file import CheckpointError, FileEntry, Header, dtype_name, write_tensor_file
from trp_scale.core.engine import Stores
from trp_scale.core.pieces import Piece
from trp_scale.distributed.groups import Group


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

    def write() -> tuple[FileEntry, list[StoredPiece]]:
        return write_pieces(temporary / f"rank-{group.rank:05d}.safetensors", lambda: _owned(engine))

    try:
        on_rank_zero(group, f"preparing the checkpoint {final}", prepare)
        written = together(group, f"writing the checkpoint {final}", write)
        on_rank_zero(group, f"finishing {final}", lambda: _finish(temporary, written, hooks_state, facts))
        on_rank_zero(group, f"naming the checkpoint {final}", lambda: publish(temporary, final))
        on_rank_zero(group, f"{final} is written; removing older ones", lambda: retain(run_dir, final, keep))
    except (CheckpointError, RankError) as error:
        if group.rank == 0:  # should this fail too, the error under way says more, and the next save removes the rest
            shutil.rmtree(temporary, ignore_errors=True)
        raise RankError(str(error)) from error
    return final


def _owned(engine: Stores) -> Iterator[Piece]:
    """What this rank owns, pieces without elements left out."""
    return (piece for piece in engine.pieces() if piece.owner and piece.region.size)


def _finish(
    temporary: Path,
    written: Sequence[tuple[FileEntry, list[StoredPiece]]],
    hooks_state: Mapping[str, Any],
    facts: Mapping[str, Any],
) -> None:
    """Write what rank 0 writes, checkpoint.json last, once the pieces of all ranks are on the disk."""
    hooks_document, hooks_tensors = split_state(hooks_state)
    header: Header = {key: (dtype_name(tensor), tuple(tensor.shape)) for key, tensor in hooks_tensors.items()}
    hooks_file = write_tensor_file(temporary / HOOKS_NAME, header, hooks_tensors.items())
    tensors = join_pieces(piece for _, pieces in written for piece in pieces)
    files = (*(entry for entry, _ in written), hooks_file)
    CheckpointDocument(tensors=tensors, files=files, hooks=hooks_document, **facts).write(temporary)
    if problem := incompleteness(temporary):
        raise CheckpointError(problem)


def load(path: Path, *, engine: Stores, group: Group, checked: bool = False) -> CheckpointDocument:
    """Fill the engine from a checkpoint written by any engine on any number of ranks; all ranks call it together.

    Every file is compared with its checksums first, each by one rank, unless that was `checked` just now.

    Returns:
        what was stored beside weights and moments, the tensors of the hooks' state in their places.
    Raises:
        CheckpointError: on every rank: the checkpoint is not complete, damaged, or does not fit the model.
    """
    document = on_rank_zero(group, f"reading {path}", lambda: read_document(path))
    check_same_engines(path, document.engine_state, engine.extra_state())  # the same on every rank
    stored = open_pieces(path, document, group, checked=checked)
    # The engine's own collectives run in here: an error that only one rank meets cannot be announced to the others.
    engine.create_optimizer_state()

    def listed() -> list[StoredPiece]:
        return [without_values(piece) for piece in _owned(engine)]  # replicas would be gathered once for each rank

    wanted = together(group, f"listing the tensors for {path}", listed)

    hooks: dict[str, Any] = {}

    def fill() -> None:
        check_same_tensors(path, document, join_pieces(each for pieces in wanted for each in pieces))
        with stored, torch.no_grad():
            for piece in engine.pieces():  # replicas too
                for state, target in piece.tensors.items():
                    if state not in document.tensors[piece.name].states:
                        target.zero_()  # only moments of a run that had made no step: check_same_tensors has seen to it
                    elif target.numel():
                        stored.fill(state, piece.name, piece.region, target)
        hooks.update(read_hooks_state(path, document))

    together(group, f"loading {path}", fill)
    engine.after_load(document.optimizer_steps)
    engine.load_extra_state(document.engine_state)
    return replace(document, hooks=hooks)
