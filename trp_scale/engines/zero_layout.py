"""Where DeepSpeed keeps weights, moments and gradients at each ZeRO stage, seen as pieces of parameters.

DeepSpeed's public getters gather whole tensors, or exist only on stage 3, or only after the first step; a checkpoint
and a gradient norm need the local part, always. These classes read the fragment mapping (stages 1, 2) and the partition
tables (stage 3) directly. They were checked against deepspeed 0.19.8.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from trp_scale.core.pieces import Piece
from trp_scale.engines.optimizer import empty_adamw_state


class ZeroLayout(ABC):
    """One ZeRO stage's bookkeeping.

    Args:
        module: the model as given to DeepSpeed.
        optimizer: `engine.optimizer`: torch's own on stage 0, DeepSpeed's wrapper above.
        rank: place in the data group.
        world: size of the data group.
    """

    def __init__(self, module: nn.Module, optimizer: Any, *, rank: int, world: int) -> None:
        self.module = module
        self.optimizer = optimizer
        self.rank = rank
        self.world = world

    @property
    def torch_optimizer(self) -> torch.optim.Optimizer:
        """The optimizer that holds the moments."""
        return self.optimizer.optimizer  # type: ignore[no-any-return]

    @property
    def loss_scaler(self) -> Any:
        """What holds the loss scale and its search; with fp16 only."""
        return self.optimizer.loss_scaler

    def loss_factor(self) -> float:
        """What a loss must still be multiplied by before DeepSpeed's backward."""
        return 1.0

    @abstractmethod
    def flat_weights(self) -> list[Tensor]:
        """The tensors the torch optimizer updates."""

    @abstractmethod
    def pieces(self) -> Iterator[Piece]:
        """This rank's pieces; see Engine.pieces."""

    @abstractmethod
    def gradients(self) -> list[Tensor]:
        """This rank's part of the reduced gradient; the parts of all ranks are disjoint and together whole."""

    @abstractmethod
    def piece_gradients(self) -> list[Tensor]:
        """The reduced gradient in the order of `pieces`, flat, scaled as the losses were; zero for a parameter that
        took no part in the window."""

    @abstractmethod
    def clear_gradients(self) -> None:
        """Forget the window's gradients."""

    @abstractmethod
    def clear_unused_gradients(self) -> None:
        """Zero the gradients that DeepSpeed keeps from earlier windows. A parameter that takes no part in this window
        would have them again."""

    def last_backward(self) -> AbstractContextManager[None]:
        """Around the window's last backward pass."""
        return nullcontext()

    @abstractmethod
    def publish_weights(self) -> None:
        """Carry master weights into what the next forward reads, on all ranks."""

    def create_state(self) -> None:
        """Moments as AdamW makes them at its first step."""
        if isinstance(self.torch_optimizer, torch.optim.AdamW):
            for weights in self.flat_weights():
                self.torch_optimizer.state[weights] = empty_adamw_state(weights.detach())

    def set_steps(self, steps: int) -> None:
        """Step count of the bias correction."""
        for state in self.torch_optimizer.state.values():
            if "step" in state:
                state["step"].fill_(steps)
