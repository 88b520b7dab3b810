"""Weights in a directory of another library: initial ones in place of the seed's (continued pre-training), and the
reading of such files, whose errors name what is damaged or missing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol, runtime_checkable

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from trp_scale.config import RefusedError

FILE = "model.safetensors"
"""What transformers' save_pretrained and timm's hub directories call it."""


@runtime_checkable
class FromTransformers(Protocol):
    """A model that takes the state dict of transformers' model of the same kind."""

    def load_transformers(self, state: dict[str, Tensor]) -> None: ...


def load_given_weights(model: nn.Module, path: str) -> None:
    """Take the weights at `path` where it is given: transformers' BertForPreTraining for BERT; transformers'
    ViTMAEForPreTraining, or the encoder alone of a timm ViT, for a masked autoencoder; MultiMAE's for one of several
    modalities.

    Args:
        path: a directory with model.safetensors, or a .safetensors file; empty: the model stays as the seed made it.

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
        state = load_file(file)
        take(model, state)
    except (ValueError, SafetensorError) as error:
        raise RefusedError(f"--model.weights {file}: {error}") from error


def take(model: nn.Module, state: dict[str, Tensor]) -> None:
    """Fill the model by its kind, and by whose names the tensors have.

    Raises:
        ValueError: see `load_given_weights`.
    """
    if isinstance(model, FromTransformers):
        model.load_transformers(state)
        return
    from trp_scale.upstreams.mae.model import MaskedAutoencoder  # imports timm: only image runs pay for it
    from trp_scale.upstreams.mae.weights import load_timm, load_vitmae
    from trp_scale.upstreams.mm_mae.model import MultimodalMaskedAutoencoder
    from trp_scale.upstreams.mm_mae.weights import load_multimae

    if isinstance(model, MultimodalMaskedAutoencoder):
        load_multimae(model, state)
        return
    assert isinstance(model, MaskedAutoencoder)
    load = load_vitmae if any(name.startswith("vit.") for name in state) else load_timm
    load(model, state)


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
