"""Weights and sizes in a directory of transformers or timm. Errors name the file that is damaged or missing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from trp_scale.config import RefusedError
from trp_scale.models.given_weights import FILE


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
