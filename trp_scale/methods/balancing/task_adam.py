"""Adam for a balancer's own numbers, one for each task (Kingma & Ba, Algorithm 1)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

BETAS = (0.9, 0.999)
EPS = 1e-8


class TaskAdam:
    """Adam of torch.optim.Adam with one 0-dimensional parameter per task, without decay.

    torch's own leaves a parameter alone only if the host knows that it has no gradient; which tasks are absent is known
    on the device, and the host would have to wait for it. An absent task's moments and step count stay as they are.

    Args:
        like: [T] float64 zeros on the device.
        lr: learning rate.
    """

    def __init__(self, like: Tensor, lr: float) -> None:
        self.lr = lr
        self.steps, self.first_moments, self.second_moments = (torch.zeros_like(like) for _ in range(3))

    def step(self, values: Tensor, gradient: Tensor, moving: Tensor) -> Tensor:
        """[T] values a step down their gradient [T] where `moving` [T] bool; the others as they are."""
        beta1, beta2 = BETAS
        self.steps = self.steps + moving
        mean = torch.lerp(self.first_moments, gradient, 1 - beta1)
        square = beta2 * self.second_moments + (1 - beta2) * gradient.square()
        self.first_moments = torch.where(moving, mean, self.first_moments)
        self.second_moments = torch.where(moving, square, self.second_moments)
        root = square.sqrt() / (1 - beta2**self.steps).sqrt() + EPS
        return torch.where(moving, values - self.lr / (1 - beta1**self.steps) * mean / root, values)

    def state_dict(self) -> dict[str, Any]:
        return {
            "steps": self.steps.cpu(),
            "first_moments": self.first_moments.cpu(),
            "second_moments": self.second_moments.cpu(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        device = self.steps.device
        self.steps, self.first_moments, self.second_moments = (
            state[name].to(device) for name in ("steps", "first_moments", "second_moments")
        )
