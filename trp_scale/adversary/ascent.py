"""How the adversary climbs: gradient -> next perturbation, before projection (AdPE 4.1.1, footnote 2).

Each rule is a pure function of the vector, its gradient and the rule's own state, so that a step can be taken back or
withheld on the device. Nothing here waits for the device: the step count of AdamW lives there too.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TypeAlias

import torch
from torch import Tensor

from trp_scale.adversary.projection import Balls
from trp_scale.adversary.settings import PositionAdversarySettings
from trp_scale.config import OptimizerConfig

State: TypeAlias = dict[str, Tensor]
"""What a rule remembers, on the device; part of the checkpoint."""


class Ascent(ABC):
    """One rule.

    Args:
        settings: of the adversary.
        optimizer: the weights', whose betas and eps AdamW takes.
        balls: where the perturbation lives.
    """

    def __init__(self, settings: PositionAdversarySettings, optimizer: OptimizerConfig, balls: Balls) -> None:
        self.settings = settings
        self.optimizer = optimizer
        self.balls = balls

    def start(self, vector: Tensor) -> State:
        """State before the first step; nothing where the rule remembers nothing."""
        return {}

    def origin(self, vector: Tensor) -> Tensor:
        """[numel] where the gradient is taken in a pass of its own: at the present perturbation."""
        return vector

    @abstractmethod
    def step(self, vector: Tensor, gradient: Tensor, state: State, lr: float) -> tuple[Tensor, State]:
        """The next vector [numel], not yet projected, and the next state.

        Args:
            vector: [numel] fp32 present perturbation.
            gradient: [numel] fp32 of the global batch's loss.
            state: as `start` or the last `step` gave it; not changed.
            lr: the weights' learning rate of this step.
        """


class AdamW(Ascent):
    """AdamW uphill without decay, at the weights' learning rate."""

    def start(self, vector: Tensor) -> State:
        return {
            "steps": torch.zeros((), dtype=torch.int64, device=vector.device),
            "exp_avg": torch.zeros_like(vector),
            "exp_avg_sq": torch.zeros_like(vector),
        }

    def step(self, vector: Tensor, gradient: Tensor, state: State, lr: float) -> tuple[Tensor, State]:
        beta1, beta2 = self.optimizer.beta1, self.optimizer.beta2
        steps = state["steps"] + 1
        mean = torch.lerp(state["exp_avg"], gradient, 1 - beta1)
        square = beta2 * state["exp_avg_sq"] + (1 - beta2) * gradient.square()
        mean_share = 1 - beta1 ** steps.double()
        square_share = 1 - beta2 ** steps.double()
        root = square.sqrt() / square_share.sqrt() + self.optimizer.eps
        climbed = vector + lr / mean_share * (mean / root)
        return climbed, {"steps": steps, "exp_avg": mean, "exp_avg_sq": square}


class Sgd(Ascent):
    """a + lr g (AdPE 4.1.1), at the adversary's own rate."""

    def step(self, vector: Tensor, gradient: Tensor, state: State, lr: float) -> tuple[Tensor, State]:
        return vector + self.settings.lr * gradient, state


class Sign(Ascent):
    """a + lr sign(g), at the adversary's own rate."""

    def step(self, vector: Tensor, gradient: Tensor, state: State, lr: float) -> tuple[Tensor, State]:
        return vector + self.settings.lr * gradient.sign(), state


class Linear(Ascent):
    """The linearised loss's maximum over the ball: one step from zero, whose gradient it needs (AdPE, footnote 2)."""

    def origin(self, vector: Tensor) -> Tensor:
        return torch.zeros_like(vector)

    def step(self, vector: Tensor, gradient: Tensor, state: State, lr: float) -> tuple[Tensor, State]:
        return self.balls.steepest(gradient), state


ASCENTS: dict[str, type[Ascent]] = {"adamw": AdamW, "sgd": Sgd, "sign": Sign, "linear": Linear}
