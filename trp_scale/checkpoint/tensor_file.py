"""Safetensors files, written tensor by tensor with a checksum of every 16 MiB.

Reading is the safetensors library's. Writing is ours for two reasons: `safetensors.torch.save_file` wants all tensors
at once, so that the whole state of a rank would be copied off the GPU at a time, and a checksum taken while the bytes
pass through spares reading the file again.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import IO

import torch
from safetensors import SafetensorError
from torch import Tensor

from trp_scale.config import RefusedError
from trp_scale.config.schema import FileName, Whole
from trp_scale.errors import CheckpointError, error_text

CHUNK = 16 * 2**20
"""Bytes covered by one checksum: small enough to say where a file is damaged, large enough to keep the list short."""

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""By their names in the safetensors format."""

_NAMES = {dtype: name for name, dtype in DTYPES.items()}


Header = dict[str, tuple[str, tuple[int, ...]]]
"""(dtype, shape) of each tensor in a file, by key; dtype is a name of the safetensors format."""


def dtype_name(tensor: Tensor) -> str:
    """Raises:
    CheckpointError: the format has no such type.
    """
    if tensor.dtype not in _NAMES:
        known = ", ".join(str(dtype) for dtype in _NAMES)
        raise CheckpointError(f"a tensor of {tensor.dtype} cannot be stored; these can: {known}")
    return _NAMES[tensor.dtype]


def stored_bytes(states: Mapping[str, str], elements: int) -> int:
    """Bytes of a piece's states in a file, their names left out; by the names of their types."""
    return elements * sum(DTYPES[dtype].itemsize for dtype in states.values())


@dataclass(frozen=True, kw_only=True)
class FileEntry:
    """A file of a checkpoint. `crc32` has zlib.crc32 of each CHUNK bytes in turn, the last one shorter."""

    name: FileName
    size: Whole
    crc32: tuple[Whole, ...]


@contextmanager
def reading_tensors(path: Path) -> Iterator[None]:
    """Convert errors while a safetensors file is read.

    Raises:
        CheckpointError: the library cannot read it.
    """
    try:
        yield
    except (
        SafetensorError,
        OSError,
        RuntimeError,
        ValueError,
        TypeError,
        KeyError,
    ) as error:  # of torch, and of itself
        if isinstance(error, RefusedError):
            raise
        raise CheckpointError(f"{path}: not a safetensors file that can be read ({error_text(error)})") from error


class ChecksumWriter:
    """Passes bytes on to a file and keeps the checksum of each CHUNK."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._sums: list[int] = []
        self.size = 0

    def write(self, content: bytes | memoryview) -> None:
        """Append `content`, in parts that end where chunks end."""
        view = memoryview(content)
        while len(view):
            filled = self.size % CHUNK
            part = view[: CHUNK - filled]
            self._file.write(part)
            if filled == 0:
                self._sums.append(0)
            self._sums[-1] = zlib.crc32(part, self._sums[-1])
            self.size += len(part)
            view = view[len(part) :]

    @property
    def crc32(self) -> tuple[int, ...]:
        return tuple(self._sums)


def write_tensor_file(path: Path, header: Header, tensors: Iterable[tuple[str, Tensor]]) -> FileEntry:
    """Write a safetensors file and flush it to the disk.

    Args:
        header: every tensor of the file, in the order in which they will come.
        tensors: (key, tensor) pairs, asked for one at a time; on any device.
    Raises:
        CheckpointError: `tensors` does not give what `header` announced.
        OSError: the file cannot be written.
    """
    entries: dict[str, object] = {}
    offset = 0
    for key, (dtype, shape) in header.items():
        behind = offset + prod(shape) * DTYPES[dtype].itemsize
        entries[key] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, behind]}
        offset = behind
    encoded = json.dumps(entries, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)  # the format wants the data to begin at a multiple of 8
    expected = list(header.items())
    written = 0
    with path.open("wb") as file:
        output = ChecksumWriter(file)
        output.write(len(encoded).to_bytes(8, "little"))
        output.write(encoded)
        for key, tensor in tensors:
            entry = (key, (dtype_name(tensor), tuple(tensor.shape)))
            if written >= len(expected) or entry != expected[written]:
                announced = expected[written] if written < len(expected) else "the end"
                raise CheckpointError(f"{path}: tensor {entry} came where {announced} was announced")
            flat = tensor.detach().reshape(-1).cpu().contiguous()
            output.write(flat.view(torch.uint8).numpy().data)
            written += 1
        if written != len(expected):
            raise CheckpointError(f"{path}: {written} tensors came, {len(expected)} were announced")
        file.flush()
        os.fsync(file.fileno())
    return FileEntry(name=path.name, size=output.size, crc32=output.crc32)


def damage(directory: Path, entry: FileEntry) -> str | None:
    """Read a whole file and compare it with what was written.

    Returns:
        None when it is sound, else a sentence that names the file and the first bad bytes.
    """
    path = directory / entry.name
    if problem := wrong_size(directory, entry):
        return problem
    with path.open("rb", buffering=0) as file:
        for number, expected in enumerate(entry.crc32):
            begin = number * CHUNK
            content = read_exactly(file, min(CHUNK, entry.size - begin))
            if zlib.crc32(content) != expected:
                return f"{path}: bytes {begin}:{begin + len(content)} do not have the checksum they were written with"
    return None


def wrong_size(directory: Path, entry: FileEntry) -> str | None:
    """None when the file is there with its size, else a sentence that says what is wrong."""
    path = directory / entry.name
    if not path.is_file():
        return f"{path}: missing"
    size = path.stat().st_size
    return None if size == entry.size else f"{path}: {size} bytes found, {entry.size} were written"


def read_exactly(file: IO[bytes], count: int) -> bytes:
    """`count` bytes, or fewer at the end of the file: one unbuffered read may return less than it was asked for."""
    parts: list[bytes] = []
    while count and (part := file.read(count)):
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


def check_sound(directory: Path, entries: Sequence[FileEntry]) -> None:
    """Compare files with their checksums.

    Raises:
        CheckpointError: listing every damaged file.
    """
    problems = [problem for entry in entries if (problem := damage(directory, entry)) is not None]
    if problems:
        raise CheckpointError("damaged checkpoint: " + "; ".join(problems))
