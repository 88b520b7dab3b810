"""Parts of a checkpoint, and loading by all ranks together.

Every rank writes its pieces into checkpoints/.step_00000123.tmp and flushes them; rank 0 checks that the pieces of all
ranks hold every element once, writes checkpoint.json last and renames the directory. A process killed at any moment
leaves either a whole checkpoint or a hidden directory that the next start removes. writer.py calls this behind the
steps of a run.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trp_scale.checkpoint.agreement import on_rank_zero, run_on_all_ranks
from trp_scale.checkpoint.document import HOOKS_NAME, CheckpointDocument, read_document, read_hooks_state
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
    incompleteness,
)
from trp_scale.checkpoint.tensor_file import FileEntry, Header, dtype_name, write_tensor_file
from trp_scale.core.engine import Stores
from trp_scale.core.pieces import Piece
from trp_scale.distributed.groups import Group
from trp_scale.errors import CheckpointError


@dataclass(frozen=True, kw_only=True)
class Content:
    """Content of a checkpoint, at one step.

    Attributes:
        step: steps done.
        engine: whose weights and moments; read while they are written or copied.
        hooks_state: nested dicts of JSON values and tensors, the same on every rank.
        cursors: rows consumed, by source.
        config: the resolved settings, nested.
        extra: JSON values of the training loop; `vocab_size` and `data_tokenizer` are needed for an export,
            `data_digest` lets the data set move between runs.
    """

    step: int
    engine: Stores
    hooks_state: Mapping[str, Any]
    cursors: Mapping[str, int]
    config: Mapping[str, Any]
    extra: Mapping[str, Any]

    def facts(self, group: Group) -> dict[str, Any]:
        """Fields of checkpoint.json but tensors, files and hooks; nothing in them changes with later steps."""
        return {
            "step": self.step,
            "optimizer_steps": self.engine.optimizer_steps(),
            "cursors": dict(self.cursors),
            "engine": self.engine.name,
            "zero_stage": self.engine.zero_stage,
            "world_size": group.size,
            "engine_state": dict(self.engine.extra_state()),
            "config": copy.deepcopy(dict(self.config)),
            "extra": copy.deepcopy(dict(self.extra)),
        }


@dataclass(frozen=True, kw_only=True)
class CheckpointPart:
    """Files that one rank has written: its own, and on rank 0 the hooks' tensors."""

    entry: FileEntry
    pieces: list[StoredPiece]
    hooks: FileEntry | None


def owned_pieces(engine: Stores) -> Iterator[Piece]:
    """Yield the pieces that this rank owns, without empty ones."""
    return (piece for piece in engine.pieces() if piece.owner and piece.region.size)


def write_part(
    temporary: Path, rank: int, pieces: Callable[[], Iterable[Piece]], hooks_tensors: Mapping[str, Tensor]
) -> CheckpointPart:
    """Write what one rank writes, flushed.

    Args:
        temporary: the checkpoint's directory under its hidden name.
        pieces: what the rank owns.
        hooks_tensors: of the hooks' state, by path; rank 0 writes them.
    Raises:
        OSError: it cannot be written.
    """
    entry, stored = write_pieces(temporary / f"rank-{rank:05d}.safetensors", pieces)
    hooks = None
    if rank == 0:
        header: Header = {key: (dtype_name(tensor), tuple(tensor.shape)) for key, tensor in hooks_tensors.items()}
        hooks = write_tensor_file(temporary / HOOKS_NAME, header, hooks_tensors.items())
    return CheckpointPart(entry=entry, pieces=stored, hooks=hooks)


def finish(
    temporary: Path, written: Sequence[CheckpointPart], hooks_document: Mapping[str, Any], facts: Mapping[str, Any]
) -> None:
    """On rank 0: write checkpoint.json, last, once the parts of all ranks are on the disk."""
    tensors = join_pieces(piece for part in written for piece in part.pieces)
    files = (*(part.entry for part in written), *(part.hooks for part in written if part.hooks is not None))
    CheckpointDocument(tensors=tensors, files=files, hooks=dict(hooks_document), **facts).write(temporary)
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
        return [
            without_values(piece) for piece in owned_pieces(engine)
        ]  # replicas would be gathered once for each rank

    wanted = run_on_all_ranks(group, f"listing the tensors for {path}", listed)

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

    run_on_all_ranks(group, f"loading {path}", fill)
    engine.after_load(document.optimizer_steps)
    engine.load_extra_state(document.engine_state)
    return replace(document, hooks=hooks)
