"""Files of a checkpoint: tensors with a checksum per 16 MiB, and checkpoint.json, which lists them.

checkpoints/step_00000123/
    rank-00000.safetensors   pieces that rank 0 owned, keys like exp_avg:bert.pooler.dense.weight@0:4096
    rank-00001.safetensors
    hooks.safetensors        tensors of the hooks' state, by path
    checkpoint.json          written last: a directory without it is not a checkpoint

safetensors reads the tensors. This module writes them, for two reasons: `safetensors.torch.save_file` needs all tensors
at once, so a rank's whole state would be copied off the GPU; and checksums are computed while writing, without reading
the file again.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import IO, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from trp_scale.config import RefusedError
from trp_scale.config.files import read_object
from trp_scale.config.schema import LARGEST, Fields, FileName, Positive, Whole, record
from trp_scale.errors import CheckpointError, error_text, quote, shorten
from trp_scale.storage.files import json_text, write_text

CHUNK = 16 * 2**20
"""Bytes covered by one checksum: small enough to locate damage, large enough for a short list."""

PARALLEL_READS = 4
"""Files of a checkpoint that are read in parallel."""

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
    """Return the safetensors name of a tensor's dtype. Raises CheckpointError: the format has no such dtype."""
    if tensor.dtype not in _NAMES:
        known = ", ".join(str(dtype) for dtype in _NAMES)
        raise CheckpointError(f"a tensor of {tensor.dtype} cannot be stored; these can: {known}")
    return _NAMES[tensor.dtype]


def stored_bytes(states: Mapping[str, str], elements: int) -> int:
    """Return the bytes of a piece's states in a file, by the names of their dtypes; keys are not counted."""
    return elements * sum(DTYPES[dtype].itemsize for dtype in states.values())


@dataclass(frozen=True, kw_only=True)
class FileEntry:
    """File of a checkpoint. `crc32` has zlib.crc32 of each CHUNK bytes in turn; the last chunk may be shorter."""

    name: FileName
    size: Whole
    crc32: tuple[Whole, ...]


@contextmanager
def reading_tensors(path: Path) -> Iterator[None]:
    """Convert errors of reading a safetensors file to CheckpointError."""
    try:
        yield
    except (
        SafetensorError,
        OSError,
        RuntimeError,
        ValueError,
        TypeError,
        KeyError,
    ) as error:  # of torch and of safetensors
        if isinstance(error, RefusedError):
            raise
        raise CheckpointError(f"{path}: not a safetensors file that can be read ({error_text(error)})") from error


class ChecksumWriter:
    """Writes bytes to a file and computes the checksum of each CHUNK."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._sums: list[int] = []
        self.size = 0

    def write(self, content: bytes | memoryview) -> None:
        """Append `content`, split at the ends of chunks."""
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
        header: all tensors of the file, in the order of `tensors`.
        tensors: (key, tensor) pairs on any device, consumed one at a time.

    Raises:
        CheckpointError: `tensors` and `header` differ.
        OSError: the file cannot be written.
    """
    entries: dict[str, object] = {}
    offset = 0
    for key, (dtype, shape) in header.items():
        behind = offset + prod(shape) * DTYPES[dtype].itemsize
        entries[key] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, behind]}
        offset = behind
    encoded = json.dumps(entries, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)  # the format aligns the data to 8 bytes
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
                raise CheckpointError(f"{path}: tensor {entry} found, {announced} expected by the header")
            flat = tensor.detach().reshape(-1).cpu().contiguous()
            output.write(flat.view(torch.uint8).numpy().data)
            written += 1
        if written != len(expected):
            raise CheckpointError(f"{path}: {written} tensors found, {len(expected)} expected by the header")
        file.flush()
        os.fsync(file.fileno())
    return FileEntry(name=path.name, size=output.size, crc32=output.crc32)


def damage(directory: Path, entry: FileEntry) -> str | None:
    """Read a whole file and compare it with its checksums.

    Returns:
        `None` if it is intact, otherwise a message with the file and the first damaged bytes.
    """
    path = directory / entry.name
    if problem := wrong_size(directory, entry):
        return problem
    with path.open("rb", buffering=0) as file:
        for number, expected in enumerate(entry.crc32):
            begin = number * CHUNK
            content = read_exactly(file, min(CHUNK, entry.size - begin))
            if zlib.crc32(content) != expected:
                return f"{path}: bytes {begin}:{begin + len(content)} do not match their checksum"
    return None


def wrong_size(directory: Path, entry: FileEntry) -> str | None:
    """Return `None` if the file exists with its size, otherwise a message."""
    path = directory / entry.name
    if not path.is_file():
        return f"{path}: missing"
    size = path.stat().st_size
    return None if size == entry.size else f"{path}: {size} bytes found, {entry.size} were written"


def read_exactly(file: IO[bytes], count: int) -> bytes:
    """Return `count` bytes, or fewer at the end of the file: one unbuffered read may return less than requested."""
    parts: list[bytes] = []
    while count and (part := file.read(count)):
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


def check_sound(directory: Path, entries: Sequence[FileEntry]) -> None:
    """Compare files with their checksums. Raises CheckpointError: lists every damaged file."""
    with ThreadPoolExecutor(PARALLEL_READS) as readers:
        problems = [problem for problem in readers.map(partial(damage, directory), entries) if problem]
    if problems:
        raise CheckpointError("damaged checkpoint: " + "; ".join(problems))


FORMAT = 2
DOCUMENT_NAME = "checkpoint.json"
HOOKS_NAME = "hooks.safetensors"
REFERENCE = "__tensor__"
"""Key in the JSON part that refers to a tensor of the hooks' file."""

_DIGEST = re.compile(rb'\A(\{\n "digest": ")([0-9a-f]{64})(",\n)')
"""Start of checkpoint.json, with the SHA-256 of its bytes without these 64."""
_STEP = re.compile(r"step_(\d{8,})")


LARGEST_DOCUMENT = 1 << 30
"""Maximum bytes of checkpoint.json."""


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """Tensor of the model. `states` maps "weight", "exp_avg", "exp_avg_sq" to safetensors dtype names."""

    shape: tuple[Whole, ...]
    states: dict[str, str]


@dataclass(frozen=True, kw_only=True)
class CheckpointDocument:
    """Contents of checkpoint.json.

    Attributes:
        step: completed steps, including skipped ones.
        optimizer_steps: applied updates.
        tensors: by parameter name.
        files: all files except checkpoint.json.
        cursors: consumed rows, by source.
        engine, zero_stage, world_size: the writer, for information; any other engine and world size may read it.
        engine_state: small state of the engine, such as a loss scale.
        config: resolved settings, nested by section.
        hooks: JSON part of the hooks' state.
        extra: values of the training loop, such as vocab_size and data_digest.
    """

    step: Whole
    optimizer_steps: Whole
    tensors: dict[str, StoredTensor]
    files: tuple[FileEntry, ...]
    cursors: dict[str, Whole]
    engine: str
    zero_stage: Whole | None
    world_size: Positive
    engine_state: dict[str, float]
    config: dict[str, Any]
    hooks: dict[str, Any]
    extra: dict[str, Any]

    def write(self, directory: Path) -> None:
        """Write checkpoint.json atomically and flush it. It starts with a digest of all its other bytes."""
        path = directory / DOCUMENT_NAME
        text = json_text(path, {"digest": "", "format": FORMAT, "checksum_bytes": CHUNK, **asdict(self)})
        digest = hashlib.sha256(text.encode()).hexdigest()
        write_text(path, text.replace('"digest": ""', f'"digest": "{digest}"', 1))

    @property
    def rank_files(self) -> tuple[FileEntry, ...]:
        return tuple(entry for entry in self.files if entry.name != HOOKS_NAME)


def read_document(directory: Path) -> CheckpointDocument:
    """Read checkpoint.json of a checkpoint directory. Raises CheckpointError: it is missing, damaged, of another
    format, or disagrees with the directory's name."""
    path = directory / DOCUMENT_NAME
    missing = f"missing, so {directory} is not a finished checkpoint"
    content = read_object(path, CheckpointError, missing=missing, largest=LARGEST_DOCUMENT)
    header = (content.pop("format", None), content.pop("checksum_bytes", None))
    if header != (FORMAT, CHUNK):
        raise CheckpointError(
            f"{path}: format {quote(header[0])} found, this version reads only format {FORMAT}; use the version that "
            "wrote it, or start a new run"
        )
    check_digest(path)
    content.pop("digest")
    document = record(CheckpointDocument, content, str(path), CheckpointError)
    check_tensors(path, document)
    named = _STEP.search(directory.name)
    if named is not None and int(named[1]) != document.step:
        raise CheckpointError(f"{path}: step {document.step} found in a directory of step {int(named[1])}")
    Fields(document.config, f"{path}: config", CheckpointError).section("batch").whole("global_size", default=0)
    return document


def check_tensors(path: Path, document: CheckpointDocument) -> None:
    """Check sizes that the types of a document do not check. Raises CheckpointError: an impossible tensor or file."""
    for name, tensor in document.tensors.items():
        if prod(tensor.shape) > LARGEST or any(dtype not in DTYPES for dtype in tensor.states.values()):
            raise CheckpointError(
                f"{path}: tensor {shorten(name)}: shape {quote(tensor.shape)} of {quote(tensor.states)} found, "
                f"less than 2^63 elements of {', '.join(DTYPES)} expected"
            )
    names = [entry.name for entry in document.files]
    if len(set(names)) < len(names) or HOOKS_NAME not in names:
        raise CheckpointError(f"{path}: files {quote(names)} found, {HOOKS_NAME} and no duplicates expected")
    for entry in document.files:
        if len(entry.crc32) != -(-entry.size // CHUNK):
            raise CheckpointError(
                f"{path}: {len(entry.crc32)} checksums of {entry.name} found, {-(-entry.size // CHUNK)} expected of "
                f"{entry.size} bytes"
            )


def check_digest(path: Path) -> None:
    """Compare checkpoint.json with the digest at its start. Raises CheckpointError: a byte differs, or there is no
    digest."""
    raw = path.read_bytes()
    begin = _DIGEST.match(raw)
    if begin is None or hashlib.sha256(_DIGEST.sub(rb"\1\3", raw, count=1)).hexdigest().encode() != begin[2]:
        raise CheckpointError(f"{path}: does not match its digest")


STEPS = "optimizer_steps"
"""Suffix of an engine's name in engine_state: number of updates of an engine other than the main one."""


def other_engines(engine_state: Mapping[str, float]) -> list[str]:
    """Return the names of a checkpoint's engines other than the main one."""
    return sorted(key.removesuffix(f".{STEPS}") for key in engine_state if key.endswith(f".{STEPS}"))


def read_hooks_state(directory: Path, document: CheckpointDocument) -> dict[str, Any]:
    """Return the hooks' state as it was saved, with its tensors."""
    with reading_tensors(directory / HOOKS_NAME):
        tensors = load_file(directory / HOOKS_NAME)
    return join_state(document.hooks, tensors)  # type: ignore[no-any-return]


def split_state(state: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Separate the tensors from nested dicts and lists.

    Returns:
        the nested state with {"__tensor__": path} for each tensor, and the tensors by path ("balancer/losses").

    Raises:
        CheckpointError: a value that would change when loaded (a tuple, a non-string key, an object); names its path.
    """
    tensors: dict[str, Tensor] = {}

    def part(value: Any, path: tuple[str, ...]) -> Any:
        where = "/".join(path) or "the state"
        if isinstance(value, Tensor):
            tensors[key := "/".join(escape(name) for name in path)] = value
            return {REFERENCE: key}
        if isinstance(value, Mapping):
            for name in value:
                if not isinstance(name, str) or name == REFERENCE:
                    raise CheckpointError(f"{where}: the key {name!r} cannot be stored; use strings, not {REFERENCE!r}")
            return {name: part(nested, (*path, name)) for name, nested in value.items()}
        if isinstance(value, list):
            return [part(nested, (*path, str(index))) for index, nested in enumerate(value)]
        if value is None or isinstance(value, str | bool | int | float):
            return value
        kind = type(value).__name__
        raise CheckpointError(f"{where}: a {kind} cannot be stored; use dicts, lists, numbers, strings and tensors")

    return part(dict(state), ()), tensors


def join_state(document: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Invert `split_state`. Raises CheckpointError: the document refers to a missing tensor."""
    if isinstance(document, dict):
        if set(document) == {REFERENCE}:
            key = document[REFERENCE]
            if not isinstance(key, str) or key not in tensors:
                raise CheckpointError(f"hooks' state: the tensor {quote(key)} is not in the file")
            return torch.clone(tensors[key])
        return {name: join_state(nested, tensors) for name, nested in document.items()}
    if isinstance(document, list):
        return [join_state(nested, tensors) for nested in document]
    return document


def escape(name: str) -> str:
    """Return a key as one part of a path, so that {"a/b": x} and {"a": {"b": y}} differ (as in JSON pointers)."""
    return name.replace("~", "~0").replace("/", "~1")
