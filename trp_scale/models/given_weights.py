"""Weights in a directory of another library: initial ones in place of the seed's (continued pre-training), and the
reading of such files, whose errors name what is damaged or missing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from trp_scale.config import RefusedError

FILE = "model.safetensors"
"""What transformers' save_pretrained and timm's hub directories call it."""


Model = TypeVar("Model", bound=nn.Module)

Load = Callable[[Model, dict[str, Tensor]], None]
"""Takes the state dict of another library's model of the same kind. Raises ValueError where its tensors are not this
model's; names what is missing, unexpected or of another shape."""


def load_given_weights(model: Model, path: str, load: Load[Model]) -> None:
    """Take the weights at `path` where it is given.

    Args:
        model: takes them.
        path: a directory with model.safetensors, or a .safetensors file; empty: the model stays as the seed made it.
        load: knows the other library's names.

    Raises:
        RefusedError: no such file, or its tensors are not this model's; names what is missing, unexpected or of
            another shape.
    """
    if not path:
        return
    file = Path(path) / FILE if Path(path).is_dir() else Path(path)
    if file.suffix != ".safetensors" or not file.is_file():
        raise RefusedError(
            f"--model.weights {path}: a directory with {FILE} or a .safetensors file expected (nothing is unpickled)"
        )
    try:
        load(model, load_file(file))
    except (ValueError, SafetensorError) as error:
        raise RefusedError(f"--model.weights {file}: {error}") from error


@contextmanager
def reading(path: str, what: str) -> Iterator[None]:
    """While a file of the directory is read.

    Args:
        path: of the directory, as --from names it.
        what: the file.

    Raises:
        RefusedError: it cannot be read, or lacks a name that was asked of it.
    """
    try:
        yield
    except (SafetensorError, OSError) as error:
        raise RefusedError(f"--from {path}: {what} cannot be read ({error}); copy it again") from error
    except KeyError as error:
        raise RefusedError(f"--from {path}: {what} has no {error.args[0]}") from error


def stored_weights(path: str) -> dict[str, Tensor]:
    """Every tensor of the directory's model.safetensors, in fp32.

    Raises:
        RefusedError: the file is damaged.
    """
    with reading(path, FILE):
        return {name: tensor.float() for name, tensor in load_file(Path(path) / FILE).items()}
