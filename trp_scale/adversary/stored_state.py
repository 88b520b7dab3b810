"""The adversary in a checkpoint: its tensors, and what they are of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from trp_scale.config import AdversaryConfig, RefusedError
from trp_scale.models.perturbation import PerturbationShape


def _description(settings: AdversaryConfig, shape: PerturbationShape) -> dict[str, Any]:
    """What must be the same for the tensors to be taken over, by the setting that decides it."""
    return {
        "kind": settings.kind,
        "ascent": settings.ascent,
        "encoder": list(shape.encoder),
        "decoder": list(shape.decoder) if shape.decoder is not None else None,
    }


SETTINGS = {
    "kind": "--adversary.kind",
    "ascent": "--adversary.ascent",
    "encoder": "the encoder's part of the perturbation (--adversary.scope, --model.layers, --model.hidden_size)",
    "decoder": "the decoder's part of the perturbation (--adversary.where, --vision.decoder_layers)",
}


def described(settings: AdversaryConfig, shape: PerturbationShape, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """State for the checkpoint: copies of the tensors on the host, and their description."""
    copies = {name: tensor.detach().clone().cpu() for name, tensor in tensors.items()}
    return {**_description(settings, shape), "tensors": copies}


def load_tensors(
    state: Mapping[str, Any], settings: AdversaryConfig, shape: PerturbationShape, expected: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """The stored tensors, each on the device of the expected one.

    Raises:
        RefusedError: the checkpoint's adversary is another one; names each setting that differs.
    """
    differing = [
        f"{SETTINGS[name]}: checkpoint {state.get(name)}, now {value}"
        for name, value in _description(settings, shape).items()
        if state.get(name) != value
    ]
    if differing:
        listed = "; ".join(differing)
        raise RefusedError(
            f"the checkpoint's adversary does not fit: {listed}. Set these back, or start a new run (--run_dir)"
        )
    stored: Mapping[str, Tensor] = state["tensors"]
    return {name: torch.clone(stored[name]).to(tensor.device) for name, tensor in expected.items()}
