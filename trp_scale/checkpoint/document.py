"""checkpoint.json: everything of a checkpoint that is not a tensor, and the list of its files.

checkpoints/step_00000123/
  rank-00000.safetensors   pieces that rank 0 owned, keys like exp_avg:bert.pooler.dense.weight@0:4096
  rank-00001.safetensors
  hooks.safetensors        tensors of the hooks' state, by path
  checkpoint.json          written last: a directory without it is not a checkpoint
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from trp_scale.checkpoint.durable import write_json
from trp_scale.checkpoint.errors import CheckpointError
from trp_scale.checkpoint.tensor_file import CHUNK, FileEntry

FORMAT = 1
DOCUMENT_NAME = "checkpoint.json"
HOOKS_NAME = "hooks.safetensors"


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
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path}: not JSON ({error})") from error
    try:
        found = (content.pop("format"), content.pop("checksum_bytes"))
        if found != (FORMAT, CHUNK):
            raise CheckpointError(f"{path}: format {found} found, this version reads {(FORMAT, CHUNK)}")
        tensors = {
            name: StoredTensor(shape=tuple(tensor["shape"]), states=dict(tensor["states"]))
            for name, tensor in content.pop("tensors").items()
        }
        files = tuple(
            FileEntry(name=entry["name"], size=entry["size"], crc32=tuple(entry["crc32"]))
            for entry in content.pop("files")
        )
        return CheckpointDocument(tensors=tensors, files=files, **content)
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path}: not a checkpoint's document ({type(error).__name__}: {error})") from error
