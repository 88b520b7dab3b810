"""The layout-neutral format: tensors as pieces that any engine on any number of ranks can read into its own pieces.

Each rank writes the pieces it owns into one safetensors file, flattened, under keys such as

    weight:bert.pooler.dense.weight@0:2048              elements [0, 2048) of the flattened tensor
    exp_avg:bert.pooler.dense.weight#[0:64,32:64]       a box of it

This file says what is written; stored_pieces.py reads it back.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from trp_scale.checkpoint.document import CheckpointDocument, StoredTensor
from trp_scale.checkpoint.errors import CheckpointError
from trp_scale.checkpoint.regions import FlatRange, Region, check_covered_once
from trp_scale.checkpoint.tensor_file import FileEntry, TensorInfo, write_tensor_file
from trp_scale.core.pieces import Piece


@dataclass(frozen=True, kw_only=True)
class Part:
    """A region of one tensor with its values: what is written, and what is filled when read.

    Attributes:
        name: parameter name.
        shape: shape of the whole parameter.
        region: which of its elements.
        tensors: by state ("weight", "exp_avg", "exp_avg_sq"), flat, [region.size], in the order of the region's runs.
        owner: False for a replica of what another rank owns: filled when reading, never written.
    """

    name: str
    shape: tuple[int, ...]
    region: Region
    tensors: Mapping[str, Tensor]
    owner: bool = True


@dataclass(frozen=True, kw_only=True)
class StoredPart:
    """What is known of a part without its values. `dtypes`: state -> safetensors dtype name."""

    name: str
    shape: tuple[int, ...]
    region: Region
    dtypes: dict[str, str]


def parts_of(pieces: Iterable[Piece]) -> Iterator[Part]:
    """An engine's pieces as parts; pieces without elements are left out."""
    for piece in pieces:
        if piece.stop > piece.start:
            region = FlatRange(piece.start, piece.stop)
            yield Part(name=piece.name, shape=piece.shape, region=region, tensors=piece.tensors, owner=piece.owner)


def describe(part: Part) -> StoredPart:
    """The part without its values.

    Raises:
        CheckpointError: a tensor is not flat or not of the region's size.
    """
    for state, tensor in part.tensors.items():
        if tuple(tensor.shape) != (part.region.size,):
            raise CheckpointError(
                f"{state} of {part.name}{part.region}: shape {tuple(tensor.shape)}, {(part.region.size,)} expected"
            )
    dtypes = {state: TensorInfo.of(tensor).dtype for state, tensor in part.tensors.items()}
    return StoredPart(name=part.name, shape=part.shape, region=part.region, dtypes=dtypes)


def write_parts(path: Path, described: Iterable[StoredPart], parts: Iterable[Part]) -> FileEntry:
    """Write one rank's file; `parts` is gone through once, with one tensor at a time copied to the CPU.

    Args:
        described: describe(part) of each of `parts`, in the same order.
    """
    infos: dict[str, TensorInfo] = {}
    for part in described:
        for state, dtype in part.dtypes.items():
            key = f"{state}:{part.name}{part.region}"
            if key in infos:
                raise CheckpointError(f"{path}: the piece {key} comes twice")
            infos[key] = TensorInfo(dtype=dtype, shape=(part.region.size,))
    tensors = (
        (f"{state}:{part.name}{part.region}", tensor) for part in parts for state, tensor in part.tensors.items()
    )
    return write_tensor_file(path, infos, tensors)


def collect_tensors(described: Iterable[StoredPart]) -> dict[str, StoredTensor]:
    """Whole tensors from the parts of all ranks.

    Raises:
        CheckpointError: parts disagree about a tensor, or leave out or repeat elements of it.
    """
    by_name: dict[str, list[StoredPart]] = {}
    for part in described:
        by_name.setdefault(part.name, []).append(part)
    for name, parts in by_name.items():
        for part in parts:
            if (part.shape, part.dtypes) != (parts[0].shape, parts[0].dtypes):
                raise CheckpointError(
                    f"{name}{part.region} has shape {part.shape} and {part.dtypes}, but {name}{parts[0].region} has "
                    f"{parts[0].shape} and {parts[0].dtypes}"
                )
        check_covered_once(name, parts[0].shape, [part.region for part in parts])
    return {name: StoredTensor(shape=parts[0].shape, states=parts[0].dtypes) for name, parts in by_name.items()}


def check_same_tensors(directory: Path, document: CheckpointDocument, wanted: Mapping[str, StoredTensor]) -> None:
    """Check that the model has the checkpoint's tensors, with the same shapes and types.

    A checkpoint of a run that has not yet made an optimizer step may lack moments: they are zero.

    Raises:
        CheckpointError: naming tensors that are missing, unexpected or different.
    """
    problems: list[str] = []
    for name in sorted(document.tensors.keys() | wanted.keys()):
        if name not in document.tensors:
            problems.append(f"{name}: in the model, not in the checkpoint")
            continue
        if name not in wanted:
            problems.append(f"{name}: in the checkpoint, not in the model")
            continue
        stored, present = document.tensors[name], wanted[name]
        if stored.shape != present.shape:
            problems.append(f"{name}: shape {stored.shape} in the checkpoint, {present.shape} in the model")
        for state in sorted(stored.states.keys() | present.states.keys()):
            there, here = stored.states.get(state, "nothing"), present.states.get(state, "nothing")
            unborn = there == "nothing" and state != "weight" and document.optimizer_steps == 0
            if there != here and not unborn:
                problems.append(f"{state} of {name}: {there} in the checkpoint, {here} in the model")
    if problems:
        shown = "; ".join(problems[:8]) + (f"; and {len(problems) - 8} more" if len(problems) > 8 else "")
        raise CheckpointError(f"{directory} does not fit the model: {shown}")
