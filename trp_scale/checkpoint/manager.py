"""Write the parts of a checkpoint, and load it on all ranks.

Every rank writes its pieces into checkpoints/.step_00000123.tmp and flushes them. Rank 0 checks that the pieces of all
ranks contain every element once, writes checkpoint.json last and renames the directory. A process killed at any time
leaves a complete checkpoint, or a hidden directory that the next start removes. writer.py calls this module in the
background of training steps.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trp_scale.checkpoint.document import (
    HOOKS_NAME,
    STEPS,
    CheckpointDocument,
    FileEntry,
    Header,
    dtype_name,
    other_engines,
    read_document,
    read_hooks_state,
    write_tensor_file,
)
from trp_scale.checkpoint.format import (
    StoredPiece,
    check_same_tensors,
    join_pieces,
    open_pieces,
    own_names,
    without_values,
    write_pieces,
)
from trp_scale.checkpoint.run_directory import incompleteness
from trp_scale.core.engine import Stores
from trp_scale.core.pieces import STATE_NAMES, Piece, Shards
from trp_scale.distributed.groups import Group, on_every_rank, on_rank_zero, run_on_all_ranks
from trp_scale.errors import CheckpointError


class EngineGroup:
    """Several engines with the interface of one.

    Args:
        main: the run's engine.
        others: by name; names have no dot.
        sharded: returns the hooks' vectors by name, sharded like the main engine's weights; called at each save and
            load.
    """

    def __init__(
        self, main: Stores, others: Mapping[str, Stores], sharded: Callable[[], Mapping[str, Shards]] = dict
    ) -> None:
        self.main, self.others, self.sharded = main, others, sharded
        self.name, self.zero_stage = main.name, main.zero_stage

    def pieces(self) -> Iterator[Piece]:
        vectors = self.sharded()
        for number, piece in enumerate(self.main.pieces()):
            parts = {name: vector.parts[number] for name, vector in vectors.items()}
            yield replace(piece, tensors={**piece.tensors, **parts})
        for name, engine in self.others.items():
            for piece in engine.pieces():
                yield replace(piece, name=f"{name}.{piece.name}")

    def create_optimizer_state(self) -> None:
        for engine in (self.main, *self.others.values()):
            engine.create_optimizer_state()

    def prepare(self) -> None:
        """Prepare a save: create zero moments of engines without a step, since a checkpoint has moments of all its
        tensors or of none."""
        if self.main.optimizer_steps() > 0:
            for engine in self.others.values():
                if engine.optimizer_steps() == 0:
                    engine.create_optimizer_state()

    def optimizer_steps(self) -> int:
        """Return the main engine's steps."""
        return self.main.optimizer_steps()

    def after_load(self, optimizer_steps: int) -> None:
        """Forward to the main engine; `load_extra_state` has the others' step counts."""
        self.main.after_load(optimizer_steps)

    def extra_state(self) -> Mapping[str, float]:
        state = dict(self.main.extra_state())
        for name, engine in self.others.items():
            stored = {STEPS: float(engine.optimizer_steps()), **engine.extra_state()}
            state |= {f"{name}.{key}": value for key, value in stored.items()}
        return state

    def load_extra_state(self, state: Mapping[str, float]) -> None:
        self.main.load_extra_state({key: value for key, value in state.items() if "." not in key})
        for name, engine in self.others.items():
            prefix = f"{name}."
            of_engine = {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}
            engine.after_load(int(of_engine[STEPS]))
            engine.load_extra_state(of_engine)


def check_same_engines(directory: Path, stored: Mapping[str, float], present: Mapping[str, float]) -> None:
    """Check that the checkpoint's run had the same engines.

    Args:
        stored: engine_state of the checkpoint.
        present: extra_state of the present engines.

    Raises:
        CheckpointError: names each engine that only one of them has.
    """
    in_checkpoint, in_run = other_engines(stored), other_engines(present)
    problems = [
        f"the engine {name} is in the checkpoint and not in this run" for name in in_checkpoint if name not in in_run
    ]
    problems += [
        f"the engine {name} is in this run and not in the checkpoint" for name in in_run if name not in in_checkpoint
    ]
    if problems:
        raise CheckpointError(f"{directory}: {'; '.join(problems)}; resume with the settings of the checkpoint's run")


@dataclass(frozen=True, kw_only=True)
class Content:
    """Content of a checkpoint at one step.

    Attributes:
        step: completed steps.
        engine: engine with the weights and moments; they are read while they are written or copied.
        hooks_state: nested dicts of JSON values and tensors, the same on every rank.
        cursors: consumed rows, by source.
        extra: JSON values of the training loop; an export needs `vocab_size`, and `data_digest`
            allows the data set to move between runs.
    """

    step: int
    engine: Stores
    hooks_state: Mapping[str, Any]
    cursors: Mapping[str, int]
    config: Mapping[str, Any]
    extra: Mapping[str, Any]

    def facts(self, group: Group) -> dict[str, Any]:
        """Return the fields of checkpoint.json except tensors, files and hooks; later steps do not change them."""
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
    """Files written by one rank: its pieces, and on rank 0 the hooks' tensors."""

    entry: FileEntry
    pieces: list[StoredPiece]
    hooks: FileEntry | None


def owned_pieces(engine: Stores) -> Iterator[Piece]:
    """Yield the non-empty pieces that this rank owns."""
    return (piece for piece in engine.pieces() if piece.owner and piece.region.size)


def write_part(
    temporary: Path, rank: int, pieces: Callable[[], Iterable[Piece]], hooks_tensors: Mapping[str, Tensor]
) -> CheckpointPart:
    """Write and flush the files of one rank.

    Args:
        temporary: hidden directory of the unfinished checkpoint.
        pieces: returns the rank's pieces.
        hooks_tensors: tensors of the hooks' state, by path; rank 0 writes them.

    Raises:
        OSError: a file cannot be written.
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
    """Write checkpoint.json on rank 0, after the parts of all ranks are on the disk."""
    tensors = join_pieces(piece for part in written for piece in part.pieces)
    files = (*(part.entry for part in written), *(part.hooks for part in written if part.hooks is not None))
    CheckpointDocument(tensors=tensors, files=files, hooks=dict(hooks_document), **facts).write(temporary)
    if problem := incompleteness(temporary):
        raise CheckpointError(problem)


def _without_hooks(document: CheckpointDocument) -> CheckpointDocument:
    """Return the document with the main engine's weights and moments alone."""
    tensors = {}
    for name in own_names(document):
        states = document.tensors[name].states
        kept = {state: states[state] for state in ("weight", *STATE_NAMES) if state in states}
        tensors[name] = replace(document.tensors[name], states=kept)
    state = {key: value for key, value in document.engine_state.items() if "." not in key}
    return replace(document, tensors=tensors, engine_state=state)


def load(
    path: Path, *, engine: Stores, group: Group, checked: bool = False, main_only: bool = False
) -> CheckpointDocument:
    """Load a checkpoint of any engine and number of ranks into `engine`. Collective.

    Every file is first verified by its checksums, each on one rank, unless it was `checked` just now.

    Args:
        main_only: load weights and moments of the main engine, and leave out the state of the hooks, for a new run.

    Returns:
        the document, with the tensors of the hooks' state.

    Raises:
        CheckpointError: on every rank: the checkpoint is incomplete, damaged, or does not fit the model.
    """
    document = on_rank_zero(group, f"reading {path}", lambda: read_document(path))
    stored = open_pieces(path, document, group, checked=checked)
    if main_only:
        document = _without_hooks(document)
    check_same_engines(path, document.engine_state, engine.extra_state())  # the same on every rank
    # This runs the engine's own collectives, so an error of one rank cannot be reported to the others.
    engine.create_optimizer_state()

    def list_pieces() -> list[StoredPiece]:
        return [
            without_values(piece) for piece in owned_pieces(engine)
        ]  # without replicas, which would be gathered once per rank

    wanted = run_on_all_ranks(group, f"listing the tensors for {path}", list_pieces)

    def fill() -> dict[str, Any]:
        check_same_tensors(path, document, join_pieces(piece for pieces in wanted for piece in pieces))
        with stored, torch.no_grad():
            for piece in engine.pieces():  # replicas too
                for state, target in piece.tensors.items():
                    if state not in document.tensors[piece.name].states:
                        target.zero_()  # only moments of a run without steps: check_same_tensors ensures it
                    elif target.numel():
                        stored.fill(state, piece.name, piece.region, target)
        return read_hooks_state(path, document)

    hooks = on_every_rank(group, f"loading {path}", fill)
    engine.after_load(document.optimizer_steps)
    engine.load_extra_state(document.engine_state)
    return replace(document, hooks=hooks)
