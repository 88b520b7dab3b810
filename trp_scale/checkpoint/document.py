"""checkpoint.json: everything of a checkpoint that is not a tensor, and the list of its files.

checkpoints/step_00000123/
  rank-00000.safetensors   pieces that rank 0 owned, keys like exp_avg:bert.pooler.dense.weight@0:4096
  rank-00001.safetensors
  hooks.safetensors        tensors of the hooks' state, by path
  checkpoint.json          written last: a directory without it is not a checkpoint
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from trp_scale.checkpoint.durable import write_json
from trp_scale.checkpoint.tensor_file import CHUNK, CheckpointError, FileEntry

FORMAT = 2
DOCUMENT_NAME = "checkpoint.json"
HOOKS_NAME = "hooks.safetensors"
REFERENCE = "__tensor__"
"""Key that stands, in the JSON part, for a tensor of the file beside it."""


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """One tensor of the model. `states` maps "weight", "exp_avg", "exp_avg_sq" to a safetensors dtype name."""

    shape: tuple[int, ...]
    states: dict[str, str]


@dataclass(frozen=True, kw_only=True)
class CheckpointDocument:
    """Contents of checkpoint.json.

    Attributes:
        step: steps done, skipped ones included.
        optimizer_steps: updates applied.
        tensors: by parameter name.
        files: all files but checkpoint.json itself.
        cursors: rows consumed, by source.
        engine, zero_stage, world_size: who wrote it; for information, any other may read it.
        engine_state: the engine's own small state, such as a loss scale.
        config: the resolved settings, nested by section.
        hooks: JSON part of the hooks' state.
        extra: what the training loop stores beside, such as vocab_size and data_digest.
    """

    step: int
    optimizer_steps: int
    tensors: dict[str, StoredTensor]
    files: tuple[FileEntry, ...]
    cursors: dict[str, int]
    engine: str
    zero_stage: int | None
    world_size: int
    engine_state: dict[str, float]
    config: dict[str, Any]
    hooks: dict[str, Any]
    extra: dict[str, Any]

    def write(self, directory: Path) -> None:
        """Write checkpoint.json, flushed, under a hidden name first."""
        write_json(directory / DOCUMENT_NAME, {"format": FORMAT, "checksum_bytes": CHUNK, **asdict(self)})

    def file(self, name: str) -> FileEntry:
        return next(entry for entry in self.files if entry.name == name)

    @property
    def rank_files(self) -> tuple[FileEntry, ...]:
        return tuple(entry for entry in self.files if entry.name != HOOKS_NAME)


def read_document(directory: Path) -> CheckpointDocument:
    """Read checkpoint.json of a checkpoint directory.

    Raises:
        CheckpointError: it is missing, damaged or of another format.
    """
    path = directory / DOCUMENT_NAME
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: missing, so {directory} is not a finished checkpoint") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not JSON ({error})") from error
    try:
        found = (content.pop("format"), content.pop("checksum_bytes"))
        if found != (FORMAT, CHUNK):
            raise CheckpointError(
                f"{path}: a checkpoint of format {found[0]}, and this version reads format {FORMAT} only; read it with "
                "the version that wrote it, or start a new run"
            )
        tensors = {
            name: StoredTensor(shape=tuple(tensor["shape"]), states=dict(tensor["states"]))
            for name, tensor in content.pop("tensors").items()
        }
        files = tuple(
            FileEntry(name=entry["name"], size=entry["size"], crc32=tuple(entry["crc32"]))
            for entry in content.pop("files")
        )
        return CheckpointDocument(tensors=tensors, files=files, **content)
    except CheckpointError:
        raise
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise CheckpointError(f"{path}: not a checkpoint's document ({type(error).__name__}: {error})") from error


def read_hooks_state(directory: Path, document: CheckpointDocument) -> dict[str, Any]:
    """The hooks' state as it was saved, tensors in their places."""
    return join_state(document.hooks, load_file(directory / HOOKS_NAME))  # type: ignore[no-any-return]


def split_state(state: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Take the tensors out of nested dicts and lists.

    Returns:
        the same nesting with {"__tensor__": path} for each tensor, and the tensors by path ("balancer/losses").
    Raises:
        CheckpointError: naming the path of a value that would not come back as it was: a tuple, a key that is not a
            string, an object.
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
            return {name: part(each, (*path, name)) for name, each in value.items()}
        if isinstance(value, list):
            return [part(each, (*path, str(index))) for index, each in enumerate(value)]
        if value is None or isinstance(value, str | bool | int | float):
            return value
        kind = type(value).__name__
        raise CheckpointError(f"{where}: a {kind} cannot be stored; use dicts, lists, numbers, strings and tensors")

    return part(dict(state), ()), tensors


def join_state(document: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The inverse of split_state.

    Raises:
        CheckpointError: a tensor that the document refers to is not there.
    """
    if isinstance(document, dict):
        if set(document) == {REFERENCE}:
            if document[REFERENCE] not in tensors:
                raise CheckpointError(f"hooks' state: the tensor {document[REFERENCE]!r} is not in the file")
            return torch.clone(tensors[document[REFERENCE]])
        return {name: join_state(each, tensors) for name, each in document.items()}
    if isinstance(document, list):
        return [join_state(each, tensors) for each in document]
    return document


def escape(name: str) -> str:
    """A key as one part of a path, so that {"a/b": x} and {"a": {"b": y}} stay apart (as JSON pointers do)."""
    return name.replace("~", "~0").replace("/", "~1")
