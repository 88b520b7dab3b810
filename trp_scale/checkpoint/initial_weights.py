"""Initial weights from another run's checkpoint or another library's model (continued pre-training). Errors name the
damaged or missing file or tensor."""

from __future__ import annotations

import argparse
import re
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from trp_scale.checkpoint.document import DOCUMENT_NAME
from trp_scale.checkpoint.export import find_checkpoint
from trp_scale.checkpoint.format import named_weights, read_tensor, stored_names
from trp_scale.checkpoint.run_directory import CHECKPOINTS
from trp_scale.config import ModelConfig, RefusedError
from trp_scale.config.files import read_object
from trp_scale.config.schema import Fields
from trp_scale.errors import error_text, shorten
from trp_scale.models.initialise import OtherTensorsError, check_names, check_shapes, set_value


def give_weights(model: Model, settings: ModelConfig, load: Load[Model]) -> str:
    """Load the weights at `model.weights` into a model; return a message on the differences from the file, "" for those
    of a run.

    A run directory or checkpoint provides weights only: no moments, data cursors or step; with "@average" appended, the
    average of its weights. Other engines of that run, such as a masking network, are ignored.

    Args:
        settings: `weights` is the path.
        load: loads the weights of another library.

    Raises:
        RefusedError: nothing to read, or the tensors do not fit: states how sizes differ, or names missing, unexpected
            and differently shaped tensors (all of them with `weights_names`).
    """
    path = settings.weights
    named, state = named_weights(path)
    with naming_tensors(settings):
        if is_run(Path(named)):
            load_checkpoint_weights(model, find_checkpoint(Path(named)), state)
            return ""
        return load_given_weights(model, path, load)


def is_run(path: Path) -> bool:
    """Return whether the path is a run directory or a checkpoint."""
    return (path / CHECKPOINTS).is_dir() or (path / DOCUMENT_NAME).is_file()


@contextmanager
def naming_tensors(settings: ModelConfig) -> Iterator[None]:
    """Add the names of all mismatched tensors to refusals inside this context if `weights_names` is set, otherwise name
    that flag."""
    try:
        yield
    except RefusedError as error:
        if not isinstance(cause := error.__cause__, OtherTensorsError):
            raise
        if settings.weights_names:
            raise RefusedError(f"{error}\n{cause.in_full()}") from cause
        if str(cause) in str(error) and not cause.are_shortened:
            raise
        raise RefusedError(f"{error}; --model.weights_names names every tensor") from cause


def load_checkpoint_weights(model: nn.Module, checkpoint: Path, state: str) -> None:
    """Load a checkpoint's weights into a model by name; each tensor is read when it is needed. Raises RefusedError: the
    weights are another model's."""
    document, stored = stored_names(checkpoint, state)
    parameters = dict(model.named_parameters())
    hint = "; give the same --model and --vision settings as that run's"
    with reading(f"--model.weights {checkpoint}", hint):
        check_names(parameters, stored)
        check_shapes(parameters, {name: tuple(document.tensors[other].shape) for name, other in stored.items()})
    for name, parameter in parameters.items():
        set_value(parameter, partial(read_tensor, checkpoint, document, state, stored[name]))


FILE = "model.safetensors"
"""Name that transformers' save_pretrained and timm's hub directories use."""

FILES = (FILE, "pytorch_model.bin")
PICKLED = (".pth", ".pt", ".bin")
STATE_KEYS = ("model", "state_dict")
"""Keys of the state dict in checkpoints, as in those of MAE and MultiMAE."""


Model = TypeVar("Model", bound=nn.Module)

Load = Callable[[Model, dict[str, Tensor], Fields], Iterable[str]]
"""Loads the state dict of another library's model with the fields of its config.json; returns a line on each difference
from that model. Raises ValueError if the tensors do not fit; names what is missing, unexpected or of another shape."""


NO_FIELDS = Fields({}, "config.json")


@dataclass(frozen=True, kw_only=True)
class GivenWeights:
    """Weights of another library.

    Attributes:
        where: flag and file, for messages.
        tensors: by name; they stay in the file until they are read.
        fields: of config.json next to the file; none without one.
    """

    where: str
    tensors: dict[str, Tensor]
    fields: Fields = NO_FIELDS


def read_given_weights(path: str, flag: str = "--model.weights") -> GivenWeights:
    """Read a safetensors file, a file of torch.save, or a directory that has one of FILES.

    Raises:
        RefusedError: no such file, or it cannot be read.
    """
    file = Path(path)
    if file.is_dir():
        file = next((file / name for name in FILES if (file / name).is_file()), file / FILE)
    if file.suffix not in (".safetensors", *PICKLED) or not file.is_file():
        raise RefusedError(
            f"{flag} {path}: a directory with {' or '.join(FILES)}, or a file that ends in .safetensors or "
            f"{', '.join(PICKLED)} expected (models are not downloaded from a hub)"
        )
    beside = file.with_name("config.json")
    source = f"{flag} {beside}"
    fields = Fields(read_object(beside, source=source) if beside.is_file() else {}, source)
    with reading(f"{flag} {file}"):
        tensors = _read_pickled(file) if file.suffix in PICKLED else load_file(file)
    return GivenWeights(where=f"{flag} {file}", tensors=tensors, fields=fields)


def _read_pickled(file: Path) -> dict[str, Tensor]:
    """Return the state dict in a file of torch.save, or under one of its STATE_KEYS, without running code of the file.

    The arguments of a training script, which MAE's checkpoints contain, are allowed. Raises ValueError: another file,
    or one that would need more memory than its size.
    """
    if not zipfile.is_zipfile(file) or any(item.compress_type for item in zipfile.ZipFile(file).infolist()):
        raise ValueError("not a file of torch.save, or of torch before 1.6; save it again")
    with torch.serialization.safe_globals([argparse.Namespace]):
        document = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
    for key in STATE_KEYS:
        if isinstance(document, Mapping) and isinstance(document.get(key), Mapping):
            document = document[key]
    named = document.items() if isinstance(document, Mapping) else ()
    tensors = {name: tensor for name, tensor in named if isinstance(name, str) and isinstance(tensor, Tensor)}
    if not tensors or any(tensor.nbytes > tensor.untyped_storage().nbytes() for tensor in tensors.values()):
        raise ValueError(f"no state dict in it, or under {' or '.join(STATE_KEYS)}")
    return tensors


def load_given_weights(model: Model, path: str, load: Load[Model]) -> str:
    """Load the weights at `path` (`read_given_weights`) into a model; return a message on the differences.

    Args:
        load: converts the other library's names.

    Raises:
        RefusedError: no such file, or its tensors do not fit: names missing, unexpected and differently shaped tensors.
    """
    source = read_given_weights(path)
    with reading(source.where):
        lines = [*load(model, source.tensors, source.fields)]
    return "\n  ".join([f"starts from {source.where}", *lines])


def listed_names(names: Iterable[str], parts: int = 2) -> str:
    """Return the modules of tensors for a message, such as `decoder_blocks, cls.predictions`, at most `parts` deep."""
    modules = (".".join(name.split(".")[:parts]) for name in names)
    return ", ".join(dict.fromkeys(re.sub(r"\.(\d+|weight|bias)$", "", module) for module in modules))


@contextmanager
def reading(where: str, hint: str = "") -> Iterator[None]:
    """Refuse files that cannot be read, and tensors of another model. `where`: flag and file; `hint`: what to do about
    other tensors."""
    try:
        yield
    except RefusedError:
        raise
    except Exception as error:  # broken pickles raise many types
        text = shorten(str(error), 1000)
        if isinstance(error, OtherTensorsError):
            text = f"not the weights of this model ({text}){hint}"
        elif not isinstance(error, ValueError):
            text = f"damaged, or not the weights of this model ({error_text(error)})"
        raise RefusedError(f"{where}: {text}") from error
