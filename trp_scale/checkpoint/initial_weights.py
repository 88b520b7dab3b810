"""Where a run's first weights come from, beside the seed: another run's checkpoint, or another library's model."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from trp_scale.checkpoint.document import DOCUMENT_NAME
from trp_scale.checkpoint.export import find_checkpoint
from trp_scale.checkpoint.format import named_weights, read_full_state
from trp_scale.config import RefusedError
from trp_scale.models.given_weights import Load, Model, load_given_weights


def give_weights(model: Model, path: str, load: Load[Model]) -> None:
    """Fill a model with the weights at `model.weights`; empty: it stays as the seed made it.

    A run directory of ours, or a checkpoint in one, gives its weights and nothing else: no moments, no cursor, no step;
    with "@average" behind its path, the average that its run kept of them.
    What other engines of that run held, such as a masking network, is left where it is.

    Args:
        model: takes them.
        path: of the weights.
        load: takes those of another library.

    Raises:
        RefusedError: nothing to read there, or its tensors are not this model's; names what is missing, unexpected or
            of another shape.
    """
    named, state = named_weights(path)
    place = Path(named)
    if path and ((place / "checkpoints").is_dir() or (place / DOCUMENT_NAME).is_file()):
        take_checkpoint(model, find_checkpoint(place), state)
    else:
        load_given_weights(model, path, load)


@torch.no_grad()
def take_checkpoint(model: nn.Module, checkpoint: Path, state: str) -> None:
    """Copy a checkpoint's weights, or what stands in for them, by name."""
    stored, own = read_full_state(checkpoint, state), dict(model.named_parameters())
    missing = sorted(set(own) - set(stored))
    other = [
        f"{name} {tuple(stored[name].shape)}, here {tuple(parameter.shape)}"
        for name, parameter in own.items()
        if name in stored and stored[name].shape != parameter.shape
    ]
    unexpected = sorted(set(stored) - set(own))
    if missing or other or unexpected:
        listed = "; ".join(
            f"{what}: {', '.join(names[:5])}{', ...' if names[5:] else ''}"
            for what, names in (("missing", missing), ("of another shape", other), ("unexpected", unexpected))
            if names
        )
        raise RefusedError(
            f"--model.weights {checkpoint}: not the weights of this model ({listed}); give the same --model and "
            "--vision settings as that run's"
        )
    for name, parameter in own.items():
        parameter.copy_(stored[name])
