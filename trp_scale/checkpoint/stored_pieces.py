"""Reading pieces: into each wanted piece goes what overlaps it in whichever files hold it, and nothing else is read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from trp_scale.checkpoint.agreement import together
from trp_scale.checkpoint.document import CheckpointDocument, read_document
from trp_scale.checkpoint.engine_group import other_engines
from trp_scale.checkpoint.errors import CheckpointError
from trp_scale.checkpoint.regions import FlatRange, Region, Runs, check_covered_once, overlap, parse_region
from trp_scale.checkpoint.tensor_file import DTYPES, check_sound
from trp_scale.distributed.groups import Group

Header = dict[str, tuple[str, int]]
"""(dtype, elements) of every piece in one rank's file, by key."""


@dataclass(frozen=True, kw_only=True)
class Location:
    """Where a stored piece of one state lies: key of a tensor in a file. `runs` is its region in the flat tensor."""

    file: str
    key: str
    region: Region
    runs: Runs

    @property
    def first(self) -> int:
        return int(self.runs.starts[0])

    @property
    def behind(self) -> int:
        return int(self.runs.starts[-1]) + self.runs.length


def read_header(path: Path) -> Header:
    """Keys, types and sizes in one rank's file.

    Raises:
        CheckpointError: it is not a safetensors file.
    """
    try:
        with safe_open(path, framework="pt") as file:  # type: ignore[no-untyped-call]
            slices = ((key, file.get_slice(key)) for key in file.keys())  # noqa: SIM118 (not a dict)
            return {key: (each.get_dtype(), prod(each.get_shape())) for key, each in slices}
    except SafetensorError as error:
        raise CheckpointError(f"{path}: not a safetensors file ({error})") from error


class StoredPieces:
    """All pieces of a checkpoint, checked to hold every element of every tensor exactly once.

    Args:
        directory: the checkpoint.
        document: its checkpoint.json.
        headers: read_header of each of its rank files, by file name.
    Raises:
        CheckpointError: a key that cannot be understood; a piece of another type or size than announced; a gap or an
            overlap, with tensor and range; tensors that are missing or unexpected.
    """

    def __init__(self, directory: Path, document: CheckpointDocument, headers: Mapping[str, Header]) -> None:
        self.directory = directory
        self.document = document
        self._locations: dict[tuple[str, str], list[Location]] = {}
        for file, header in headers.items():
            for key, (dtype, size) in header.items():
                self._add(file, key, dtype, size)
        for name, tensor in document.tensors.items():
            for state in tensor.states:
                found = self._locations.get((state, name), [])
                regions = [location.region for location in found]
                check_covered_once(f"{directory}: {state} of {name}", tensor.shape, regions)

    def _add(self, file: str, key: str, dtype: str, size: int) -> None:
        state, _, rest = key.partition(":")
        cut = max(rest.rfind("@"), rest.rfind("#"))
        name, region = rest[:cut], parse_region(rest[cut:]) if cut > 0 else None
        where = f"{self.directory / file}: {key}"
        if region is None:
            raise CheckpointError(f"{where}: not a piece; expected state:name@start:stop or state:name#[a:b,c:d]")
        tensor = self.document.tensors.get(name)
        if tensor is None or state not in tensor.states:
            raise CheckpointError(f"{where}: {state} of {name} is not listed in checkpoint.json")
        if not region.fits(tensor.shape):
            raise CheckpointError(f"{where}: the piece is empty or lies outside the shape {tensor.shape}")
        if (dtype, size) != (tensor.states[state], region.size):
            raise CheckpointError(
                f"{where}: {size} elements of {dtype} found, {region.size} of {tensor.states[state]} expected"
            )
        location = Location(file=file, key=key, region=region, runs=region.runs(tensor.shape))
        self._locations.setdefault((state, name), []).append(location)

    def reader(self) -> PieceReader:
        """To be used in a `with` statement."""
        return PieceReader(self)

    def overlapping(self, state: str, name: str, runs: Runs) -> Iterator[Location]:
        """Stored pieces that can share elements with the runs."""
        first, behind = int(runs.starts[0]), int(runs.starts[-1]) + runs.length
        for location in self._locations[state, name]:
            if location.first < behind and first < location.behind:
                yield location


class PieceReader:
    """Reads pieces; a context manager that keeps the files it has opened until it is left."""

    def __init__(self, stored: StoredPieces) -> None:
        self._stored = stored
        self._files: dict[str, Any] = {}
        self._stack = ExitStack()

    def __enter__(self) -> PieceReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._files.clear()
        self._stack.close()

    def _file(self, name: str) -> Any:
        if name not in self._files:
            opened = safe_open(self._stored.directory / name, framework="pt")  # type: ignore[no-untyped-call]
            self._files[name] = self._stack.enter_context(opened)
        return self._files[name]

    @torch.no_grad()
    def fill(self, state: str, name: str, region: Region, target: Tensor) -> None:
        """Copy the stored elements of `region` into `target`, flat, [region.size], on any device.

        Only the overlapping range of each stored piece is read. A box of columns means one short copy per row.
        """
        shape = self._stored.document.tensors[name].shape
        runs = region.runs(shape)
        buffer = target if target.device.type == "cpu" else torch.empty(region.size, dtype=target.dtype)
        copied = 0
        for location in self._stored.overlapping(state, name, runs):
            sources, targets, lengths = (values.tolist() for values in overlap(location.runs, runs))
            if not lengths:
                continue
            base = sources[0]
            stored = self._file(location.file).get_slice(location.key)[base : sources[-1] + lengths[-1]]
            for source, start, length in zip(sources, targets, lengths, strict=True):
                buffer[start : start + length].copy_(stored[source - base : source - base + length])
                copied += length
        if copied != region.size:
            raise CheckpointError(f"{state} of {name}{region}: {copied} of {region.size} elements were found")
        if buffer is not target:
            target.copy_(buffer)

    def whole(self, state: str, name: str) -> Tensor:
        """One whole tensor on the CPU."""
        tensor = self._stored.document.tensors[name]
        target = torch.empty(prod(tensor.shape), dtype=DTYPES[tensor.states[state]])
        if target.numel():
            self.fill(state, name, FlatRange(0, target.numel()), target)
        return target.reshape(tensor.shape)


def open_pieces(path: Path, document: CheckpointDocument, group: Group) -> StoredPieces:
    """Compare every file with its checksums, each by one rank, and learn on every rank which pieces are in them all.

    Raises:
        CheckpointError: on every rank: files are damaged, or do not hold every element once.
    """

    def examine() -> dict[str, Header]:
        mine = document.files[group.rank :: group.size]
        check_sound(path, mine)
        return {entry.name: read_header(path / entry.name) for entry in mine if entry in document.rank_files}

    examined = together(group, f"checking {path}", examine)
    headers = {name: header for found in examined for name, header in found.items()}
    return StoredPieces(path, document, headers)  # the same on every rank, and so are its errors


def read_full_state(path: Path, state: str = "weight", engine: str = "") -> dict[str, Tensor]:
    """All tensors of one state ("weight", "exp_avg", "exp_avg_sq"), whole, on the CPU; no engine is needed.

    Args:
        engine: whose; empty = the run's own, without those of its hooks' engines (engine_group.py).

    Raises:
        CheckpointError: the checkpoint is not complete or damaged.
    """
    document = read_document(path)
    with open_pieces(path, document, Group("world")).reader() as reader:
        own = own_names(document, engine)
        return {
            short: reader.whole(state, name) for short, name in own.items() if state in document.tensors[name].states
        }


def own_names(document: CheckpointDocument, engine: str = "") -> dict[str, str]:
    """Names of one engine's tensors: as the engine has them -> as they are stored."""
    if engine:
        prefix = f"{engine}."
        return {name.removeprefix(prefix): name for name in document.tensors if name.startswith(prefix)}
    others = tuple(f"{name}." for name in other_engines(document.engine_state))
    return {name: name for name in document.tensors if not name.startswith(others)}
