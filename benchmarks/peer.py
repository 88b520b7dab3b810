"""A training step of one of transformers' models, and whether it does the same work as ours."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from trp_scale.config import Config
from trp_scale.core.engine import Engine
from trp_scale.engines.optimizer import build_optimizer

SAME_LOSS = 1e-3
"""Relative gap of the first losses up to which two sides do the same work."""


def peer_step_of(
    peer: nn.Module, inputs: Mapping[str, Tensor], config: Config, device: torch.device
) -> Callable[[], Tensor]:
    """As transformers' documentation has it, with our precision and optimizer; returns the loss."""
    peer.to(device)
    optimizer = build_optimizer(peer, config.optimizer)
    forward = torch.compile(peer) if config.training.compile == "whole" else peer
    here = {name: value.to(device) for name, value in inputs.items()}

    def step() -> Tensor:
        with torch.autocast(device.type, torch.bfloat16, enabled=config.training.precision == "bf16"):
            loss: Tensor = forward(**here).loss
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def set_training(training: bool, engine: Engine, peer: nn.Module) -> None:
    """Dropout and the like, on or off on both sides."""
    engine.train(training)
    peer.train(training)


def relative_gap(ours: float, peer: float) -> float:
    """How far two losses are apart."""
    return abs(ours - peer) / abs(peer)


def print_same_work(ours: float, peer: float) -> None:
    """The first losses.

    Raises:
        AssertionError: they differ.
    """
    assert relative_gap(ours, peer) < SAME_LOSS, f"the losses differ: ours {ours}, peer {peer}"
    print(f"first loss {ours:.5f} and {peer:.5f}")
