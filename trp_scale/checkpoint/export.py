"""A checkpoint as a directory that another library loads."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from safetensors import SafetensorError
from torch import Tensor, nn

from trp_scale.checkpoint.document import DOCUMENT_NAME, CheckpointDocument, read_document
from trp_scale.checkpoint.format import STATE_OF, read_full_state
from trp_scale.checkpoint.run_directory import name_seed_runs, newest_complete
from trp_scale.config import RefusedError, Weights
from trp_scale.config.json_files import read_object
from trp_scale.config.registry import find, import_name
from trp_scale.distributed.groups import RankError
from trp_scale.errors import CheckpointError
from trp_scale.storage.files import sync_directory


@dataclass(frozen=True, kw_only=True)
class Export:
    """Files to write for another library.

    Attributes:
        directory: empty; the files go there.
        checkpoint: whose weights they are.
        state: what is read as the weights (checkpoint/format.py: STATE_OF).
        image_size: timm: side of the images that it is for, in pixels; the fixed positions are those of its grid.
    """

    directory: Path
    checkpoint: Path
    document: CheckpointDocument
    state: str
    image_size: int

    def read_weights(self, model: nn.Module) -> dict[str, Tensor]:
        """Return all weights of the checkpoint in fp32; `model` is made from the checkpoint's settings.

        Raises:
            CheckpointError: they are of another model.
        """
        weights = {name: tensor.float() for name, tensor in read_full_state(self.checkpoint, self.state).items()}
        expected = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        shapes = {name: tuple(tensor.shape) for name, tensor in weights.items()}
        wrong = sorted(name for name in expected.keys() | shapes.keys() if expected.get(name) != shapes.get(name))
        if wrong:
            listed = ", ".join(
                f"{name} {shapes.get(name, 'missing')} (expected {expected.get(name, 'none')})" for name in wrong
            )
            raise CheckpointError(f"{self.checkpoint} is not of the model that its settings describe: {listed}")
        return weights


TRIES = 10
"""Of reading a run that goes on: each time the newest checkpoint was removed before it was read to its end."""

_found: ContextVar[list[Path] | None] = ContextVar("checkpoints that were found in runs", default=None)

T = TypeVar("T")

Writer = Callable[[Export], None]
"""Raises RefusedError where the library has no such model."""


def export(source: Path, output: Path, *, to: str = "hf", image_size: int = 224, weights: Weights = "last") -> Path:
    """Write config.json, model.safetensors (fp32) and, for text, the tokenizer's files.

    Args:
        source: run directory (its newest complete checkpoint is taken; it may be training) or checkpoint.
        output: directory that is created; it may exist if it is empty.
        to: hf (transformers) or timm.
        image_size: side of the images whose positions are written for timm, in pixels.
        weights: which.
    Returns:
        the checkpoint that was exported.
    Raises:
        RefusedError: output is not empty, source has no complete checkpoint, or its model is none of that library's.
        CheckpointError: the checkpoint is damaged, is not of the model that it says, or has no such weights.
    """
    output = output.absolute()  # "." has no name
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise RefusedError(f"--output {output}: exists and is not an empty directory; give another, or remove it")
    return while_training(lambda: _export(source, output, to=to, image_size=image_size, weights=weights))


def _export(source: Path, output: Path, *, to: str, image_size: int, weights: Weights) -> Path:
    checkpoint = find_checkpoint(source)
    document = read_document(checkpoint)
    write = find_writer(document, to)
    temporary = output.with_name(f".{output.name}.tmp")
    if temporary.exists():  # left by an export that was killed
        shutil.rmtree(temporary)
    temporary.mkdir(parents=True)
    try:
        write(
            Export(
                directory=temporary,
                checkpoint=checkpoint,
                document=document,
                state=STATE_OF[weights],
                image_size=image_size,
            )
        )
        for path in temporary.iterdir():
            path.chmod(temporary.stat().st_mode & 0o666)  # safetensors writes files that their owner alone can read
            with path.open("rb") as file:
                os.fsync(file.fileno())
        temporary.replace(output)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    sync_directory(output.parent)
    return checkpoint


def loading_call(directory: Path) -> str:
    """The Python expression that gives the model of an exported directory with its weights.

    A model that no library knows comes with a module of its own, which torch.hub loads. timm's `create_model` makes
    random weights unless `pretrained=True` is said, of a local directory too, and gives no warning.
    """
    described = read_object(directory / "config.json")
    if entry := described.get("hub_entry"):
        return f'torch.hub.load("{directory}", "{entry}", source="local")'
    if "architecture" in described:
        return f'timm.create_model("local-dir:{directory}", pretrained=True)'
    return f'transformers.{described["architectures"][0]}.from_pretrained("{directory}")'


def find_writer(document: CheckpointDocument, to: str) -> Writer:
    """The writer that the run's upstream names for a library in its `exports`.

    Raises:
        RefusedError: it names none, or there is no such upstream.
    """
    upstream = document.config.get("upstream", "")
    exports: Mapping[str, str] = find("upstream", upstream, "the run's upstream").load().exports if upstream else {}
    if to in exports:
        writer: Writer = import_name(exports[to])
        return writer
    raise RefusedError(
        f"--to {to}: the run's upstream is {upstream or 'none, it is a fine-tuned run'}; allowed for it: "
        f"{', '.join(exports) or 'nothing'}"
    )


def find_checkpoint(source: Path) -> Path:
    """The checkpoint itself, or the newest complete one of a run directory."""
    if (source / DOCUMENT_NAME).exists():
        return source
    newest = newest_complete(source)
    if newest.path is None:
        why = "; ".join(newest.notices) or "expected a run directory with checkpoints/step_..., or a checkpoint"
        raise RefusedError(f"{source}: no weights to read: {why}{name_seed_runs(source)}")
    if (noted := _found.get()) is not None:
        noted.append(newest.path)
    return newest.path


def while_training(action: Callable[[], T]) -> T:
    """Do what reads the newest checkpoints of runs (find_checkpoint). Where a run goes on and removes one before it was
    read to its end, it is done again, with the newer one."""
    for _ in range(TRIES - 1):
        noted: list[Path] = []
        token = _found.set(noted)
        try:
            return action()
        except (OSError, RefusedError, RankError, SafetensorError):
            if all((path / DOCUMENT_NAME).exists() for path in noted):
                raise
        finally:
            _found.reset(token)
    return action()
