"""Balancers: task losses -> weights. One file each; `build_balancer` is the only place that knows their names."""

from __future__ import annotations

import torch

from trp_scale.config import BalancerConfig
from trp_scale.hooks.balancing.base import TaskBalancer
from trp_scale.hooks.balancing.minimax import Minimax
from trp_scale.hooks.balancing.proportional import Proportional
from trp_scale.hooks.balancing.uniform import Uniform
from trp_scale.objectives.base import Objective

BALANCERS: dict[str, type[TaskBalancer]] = {"uniform": Uniform, "proportional": Proportional, "minimax": Minimax}


def build_balancer(config: BalancerConfig, objective: Objective, device: torch.device) -> TaskBalancer:
    """The balancer named by `balancer.kind`."""
    return BALANCERS[config.kind](config, objective, device)
