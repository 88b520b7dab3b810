"""Layout-neutral format: tensors are stored as pieces that any engine on any number of ranks can read.

Each rank writes the pieces that it owns, flattened, into one safetensors file under keys such as

    weight:bert.pooler.dense.weight@0:2048              elements [0, 2048) of the flattened tensor
    exp_avg:bert.pooler.dense.weight#[0:64,32:64]       a box of the tensor

The part before the colon is the state: the weight, a moment, or a hook's vector (core/hooks.py: sharded_state).

torch.distributed.checkpoint is not used: its shards are boxes of a tensor while ZeRO's are ranges of flattened tensors,
so that runs could not move between ZeRO and FSDP2. Its metadata is pickled, so that a foreign checkpoint could execute
code. It has no checksums, so that truncation is noticed only when the bytes are missing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor

from trp_scale.checkpoint.document import (
    DTYPES,
    CheckpointDocument,
    FileEntry,
    Header,
    StoredTensor,
    check_sound,
    dtype_name,
    other_engines,
    read_document,
    reading_tensors,
    write_tensor_file,
)
from trp_scale.config import AVERAGE, Weights
from trp_scale.core.pieces import STATE_NAMES, WEIGHT_AVERAGE, Box, FlatRange, Integers, Piece, Region, Runs
from trp_scale.distributed.groups import Group, run_on_all_ranks
from trp_scale.errors import CheckpointError, shorten

_NUMBER = r"[0-9]{1,18}"
_KEY = re.compile(rf"(\w+):(.+)(?:@({_NUMBER}):({_NUMBER})|#\[({_NUMBER}:{_NUMBER}(?:,{_NUMBER}:{_NUMBER})*)\])")


@dataclass(frozen=True, kw_only=True)
class StoredPiece:
    """Metadata of a piece, before it is stored or for one state in a file.

    Attributes:
        name, shape, region: as in Piece.
        states: safetensors dtype name of each state.
        file: file in the checkpoint; empty before it is stored.
    """

    name: str
    shape: tuple[int, ...]
    region: Region
    states: dict[str, str]
    file: str = ""

    def key(self, state: str) -> str:
        return f"{state}:{self.name}{self.region}"

    @cached_property
    def runs(self) -> Runs:
        """Region in the flattened tensor."""
        return self.region.runs(self.shape)


def parse_key(key: str) -> tuple[str, str, Region] | None:
    """Return (state, name, region) of a key; `None` if it is not the key of a piece."""
    match = _KEY.fullmatch(key)
    if match is None:
        return None
    state, name, start, stop, bounds = match.groups()
    if bounds is None:
        return state, name, FlatRange(int(start), int(stop))
    pairs = [bound.split(":") for bound in bounds.split(",")]
    return state, name, Box(tuple((int(first), int(behind)) for first, behind in pairs))


def without_values(piece: Piece) -> StoredPiece:
    """Return the metadata of a piece. Raises CheckpointError: a tensor is not flat or not of the region's size."""
    for state, tensor in piece.tensors.items():
        if tuple(tensor.shape) != (piece.region.size,):
            raise CheckpointError(
                f"{state} of {piece.name}{piece.region}: shape {tuple(tensor.shape)}, {(piece.region.size,)} expected"
            )
    states = {state: dtype_name(tensor) for state, tensor in piece.tensors.items()}
    return StoredPiece(name=piece.name, shape=piece.shape, region=piece.region, states=states)


def write_pieces(path: Path, pieces: Callable[[], Iterable[Piece]]) -> tuple[FileEntry, list[StoredPiece]]:
    """Write one rank's file; one tensor at a time is copied to the CPU. `pieces`: returns the rank's pieces; called
    twice, since the header comes first and needs all sizes."""
    stored = [without_values(piece) for piece in pieces()]
    header: Header = {}
    for piece_stored in stored:
        for state, dtype in piece_stored.states.items():
            if piece_stored.key(state) in header:
                raise CheckpointError(f"{path}: the piece {piece_stored.key(state)} is duplicated")
            header[piece_stored.key(state)] = (dtype, (piece_stored.region.size,))
    values = (piece.tensors[state] for piece in pieces() for state in piece.tensors)
    return write_tensor_file(path, header, zip(header, values, strict=True)), stored


def join_pieces(pieces: Iterable[StoredPiece]) -> dict[str, StoredTensor]:
    """Return the whole tensors that the pieces of all ranks form. Raises CheckpointError: pieces disagree about a
    tensor, or miss or repeat elements."""
    by_name: dict[str, list[StoredPiece]] = {}
    for piece in pieces:
        by_name.setdefault(piece.name, []).append(piece)
    for name, of_tensor in by_name.items():
        first = of_tensor[0]
        for piece in of_tensor:
            if (piece.shape, piece.states) != (first.shape, first.states):
                raise CheckpointError(
                    f"{name}{piece.region} has shape {piece.shape} and {piece.states}, but {name}{first.region} has "
                    f"{first.shape} and {first.states}"
                )
        check_covered_once(name, first.shape, of_tensor)
    return {
        name: StoredTensor(shape=of_tensor[0].shape, states=of_tensor[0].states) for name, of_tensor in by_name.items()
    }


def check_covered_once(what: str, shape: Sequence[int], pieces: Sequence[StoredPiece]) -> None:
    """Check that the pieces contain every element of the tensor exactly once. Raises CheckpointError: names `what` and
    the first elements that are outside the tensor, missing or duplicated."""
    total = prod(shape)
    for piece in pieces:
        if not piece.region.fits(shape):
            raise CheckpointError(f"{what}: the piece {piece.region} is empty or outside the shape {tuple(shape)}")
    runs = [piece.runs for piece in pieces]
    starts = np.concatenate([np.empty(0, np.int64), *(run.starts for run in runs)])
    stops = np.concatenate([np.empty(0, np.int64), *(run.starts + run.length for run in runs)])
    order = np.argsort(starts, kind="stable")
    begin = np.append(starts[order], total)
    end = np.insert(stops[order], 0, 0)
    wrong = np.flatnonzero(begin != end)
    if len(wrong) == 0:
        return
    at, reached = int(begin[wrong[0]]), int(end[wrong[0]])
    if at > reached:
        raise CheckpointError(f"{what}: elements {reached}:{at} of {total} are in no piece")
    raise CheckpointError(f"{what}: elements {at}:{reached} of {total} are in more than one piece")


def check_same_tensors(directory: Path, document: CheckpointDocument, wanted: Mapping[str, StoredTensor]) -> None:
    """Check that the checkpoint has the model's tensors with the same shapes and dtypes.

    Moments may be missing if the run has not made an optimizer step: they are zero.

    Raises:
        CheckpointError: lists missing, unexpected and different tensors.
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
            dtype_stored, dtype_present = stored.states.get(state, "nothing"), present.states.get(state, "nothing")
            unborn = dtype_stored == "nothing" and state in STATE_NAMES and document.optimizer_steps == 0
            if dtype_stored != dtype_present and not unborn:
                problems.append(f"{state} of {name}: {dtype_stored} in the checkpoint, {dtype_present} in the model")
    if problems:
        shown = "; ".join(map(shorten, problems[:8])) + (f"; and {len(problems) - 8} more" if len(problems) > 8 else "")
        raise CheckpointError(f"{directory} does not fit the model: {shown}")


class StoredPieces:
    """Pieces of a checkpoint, checked to contain every element of every tensor exactly once.

    `fill` reads the overlap with a wanted piece from all files. A `with` statement closes the files.

    Args:
        headers: `read_header` of each rank file, by file name.

    Raises:
        CheckpointError: an invalid key; a piece of another dtype or size than listed; a gap or an overlap, with tensor
            and range; missing or unexpected tensors.
    """

    def __init__(self, directory: Path, document: CheckpointDocument, headers: Mapping[str, Header]) -> None:
        self.directory = directory
        self.document = document
        self._pieces: dict[tuple[str, str], list[StoredPiece]] = {}
        self._open: dict[str, Any] = {}
        self._stack = ExitStack()
        for file, header in headers.items():
            for key, (dtype, shape) in header.items():
                state, piece = self._parse_piece(file, key, dtype, shape)
                self._pieces.setdefault((state, piece.name), []).append(piece)
        for name, tensor in document.tensors.items():
            for state in tensor.states:
                of_state = self._pieces.get((state, name), [])
                check_covered_once(f"{directory}: {state} of {name}", tensor.shape, of_state)

    def _parse_piece(self, file: str, key: str, dtype: str, shape: tuple[int, ...]) -> tuple[str, StoredPiece]:
        where, parsed = f"{self.directory / file}: {shorten(key)}", parse_key(key)
        if parsed is None:
            raise CheckpointError(f"{where}: not a piece; expected state:name@start:stop or state:name#[a:b,c:d]")
        state, name, region = parsed
        tensor = self.document.tensors.get(name)
        if tensor is None or state not in tensor.states:
            raise CheckpointError(f"{where}: {shorten(f'{state} of {name}')} is not listed in checkpoint.json")
        if not region.fits(tensor.shape):
            raise CheckpointError(f"{where}: the piece is empty or outside the shape {tensor.shape}")
        if (dtype, shape) != (tensor.states[state], (region.size,)):
            raise CheckpointError(
                f"{where}: shape {shape} of {dtype} found, {(region.size,)} of {tensor.states[state]} expected"
            )
        return state, StoredPiece(name=name, shape=tensor.shape, region=region, states={state: dtype}, file=file)

    def __enter__(self) -> StoredPieces:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.clear()
        self._stack.close()

    def _file(self, name: str) -> Any:
        if name not in self._open:
            opened = safe_open(self.directory / name, framework="pt")  # type: ignore[no-untyped-call]
            self._open[name] = self._stack.enter_context(opened)
        return self._open[name]

    @torch.no_grad()
    def fill(self, state: str, name: str, region: Region, target: Tensor) -> None:
        """Copy the stored elements of `region` into `target`, flat, [region.size], on any device.

        Only the overlapping range of each stored piece is read. A box of columns means one short copy per row.
        """
        runs = region.runs(self.document.tensors[name].shape)
        buffer = target if target.device.type == "cpu" else torch.empty(region.size, dtype=target.dtype)
        copied = 0
        for piece in self._pieces[state, name]:
            sources, targets, lengths = (values.tolist() for values in overlap(piece.runs, runs))
            if not lengths:
                continue
            base = sources[0]
            with reading_tensors(self.directory / piece.file):
                stored = self._file(piece.file).get_slice(piece.key(state))[base : sources[-1] + lengths[-1]]
            for source, start, length in zip(sources, targets, lengths, strict=True):
                buffer[start : start + length].copy_(stored[source - base : source - base + length])
                copied += length
        if copied != region.size:
            raise CheckpointError(f"{state} of {name}{region}: {copied} of {region.size} elements were found")
        if buffer is not target:
            target.copy_(buffer)

    def whole(self, state: str, name: str) -> Tensor:
        """Return one whole tensor on the CPU."""
        tensor = self.document.tensors[name]
        target = torch.empty(prod(tensor.shape), dtype=DTYPES[tensor.states[state]])
        if target.numel():
            self.fill(state, name, FlatRange(0, target.numel()), target)
        return target.reshape(tensor.shape)


def overlap(stored: Runs, wanted: Runs) -> tuple[Integers, Integers, Integers]:
    """Return the common elements of two pieces as segments.

    Returns:
        [S] offsets in the stored piece, [S] offsets in the wanted piece, [S] lengths. Both offsets ascend.
    """
    first = np.searchsorted(stored.starts + stored.length, wanted.starts, side="right")
    behind = np.searchsorted(stored.starts, wanted.starts + wanted.length, side="left")
    counts = np.maximum(behind - first, 0)  # [W] stored runs that meet each wanted run
    wanted_run = np.repeat(np.arange(len(wanted.starts)), counts)  # [S]
    within = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
    stored_run = np.repeat(first, counts) + within  # [S]
    begin = np.maximum(stored.starts[stored_run], wanted.starts[wanted_run])
    end = np.minimum(stored.starts[stored_run] + stored.length, wanted.starts[wanted_run] + wanted.length)
    in_stored = begin - stored.starts[stored_run] + stored_run * stored.length
    in_wanted = begin - wanted.starts[wanted_run] + wanted_run * wanted.length
    return in_stored, in_wanted, end - begin


def read_header(path: Path) -> Header:
    """Return the keys, dtypes and shapes in one rank's file. Raises CheckpointError: it is not a safetensors file."""
    with reading_tensors(path), safe_open(path, framework="pt") as file:  # type: ignore[no-untyped-call]
        slices = ((key, file.get_slice(key)) for key in file.keys())  # noqa: SIM118 (not a dict)
        return {key: (piece_slice.get_dtype(), tuple(piece_slice.get_shape())) for key, piece_slice in slices}


def open_pieces(path: Path, document: CheckpointDocument, group: Group, *, checked: bool = False) -> StoredPieces:
    """Verify the checksums of every file, each on one rank, and return all pieces on every rank. Collective. `checked`:
    the checksums were verified just now (run_directory.select), so they are not verified again. Raises CheckpointError:
    on every rank: files are damaged, or do not contain every element once."""

    def examine() -> dict[str, Header]:
        mine = document.files[group.rank :: group.size]
        if not checked:
            check_sound(path, mine)
        return {entry.name: read_header(path / entry.name) for entry in mine if entry in document.rank_files}

    examined = run_on_all_ranks(group, f"checking {path}", examine)
    headers = {name: header for of_rank in examined for name, header in of_rank.items()}
    return StoredPieces(path, document, headers)  # the same on every rank, errors included


STATE_OF: dict[Weights, str] = {"last": "weight", "average": WEIGHT_AVERAGE}
"""State to read as the weights."""


def named_weights(path: str) -> tuple[str, str]:
    """Return a setting's path without the suffix AVERAGE, and the state to read there."""
    return path.removesuffix(AVERAGE), STATE_OF["average" if path.endswith(AVERAGE) else "last"]


def read_full_state(path: Path, state: str = "weight", engine: str = "") -> dict[str, Tensor]:
    """Return all tensors of one state ("weight", "exp_avg", "exp_avg_sq", "weight_average"), whole, on the CPU. No
    engine is needed. `engine`: name of the engine; empty = the main one, without engines of hooks (manager.py:
    EngineGroup). Raises CheckpointError: the checkpoint is incomplete or damaged, or has no average."""
    document, names = stored_names(path, state, engine)
    with open_pieces(path, document, Group("world")) as pieces:
        return {short: pieces.whole(state, name) for short, name in names.items()}


def stored_names(path: Path, state: str = "weight", engine: str = "") -> tuple[CheckpointDocument, dict[str, str]]:
    """Return the document, and {name in the engine: stored name} of one engine's tensors that have a state. Arguments
    and errors as for `read_full_state`."""
    document = read_document(path)
    if state == WEIGHT_AVERAGE and not any(state in tensor.states for tensor in document.tensors.values()):
        raise CheckpointError(
            f"--weights average: {path} has no average of the weights, its run had no hook {WEIGHT_AVERAGE}; "
            "allowed: --weights last"
        )
    names = own_names(document, engine)
    return document, {short: name for short, name in names.items() if state in document.tensors[name].states}


def read_tensor(path: Path, document: CheckpointDocument, state: str, name: str) -> Tensor:
    """Return one whole tensor on the CPU, by its stored name."""
    with open_pieces(path, document, Group("world")) as pieces:
        return pieces.whole(state, name)


def own_names(document: CheckpointDocument, engine: str = "") -> dict[str, str]:
    """Return {name in the engine: stored name} of one engine's tensors."""
    if engine:
        prefix = f"{engine}."
        return {name.removeprefix(prefix): name for name in document.tensors if name.startswith(prefix)}
    others = tuple(f"{name}." for name in other_engines(document.engine_state))
    return {name: name for name in document.tensors if not name.startswith(others)}
