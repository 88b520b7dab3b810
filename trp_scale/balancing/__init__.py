"""Balancers: task losses -> weights. One file each; `build_balancer` is the only place that knows their names."""

from __future__ import annotations

import torch

from trp_scale.balancing.base import TaskBalancer
from trp_scale.balancing.dwa import Dwa
from trp_scale.balancing.gradnorm import GradNorm
from trp_scale.balancing.group_dro import GroupDro
from trp_scale.balancing.minimax import Minimax
from trp_scale.balancing.proportional import Proportional
from trp_scale.balancing.uncertainty import Uncertainty
from trp_scale.balancing.uniform import Uniform
from trp_scale.config import BalancerConfig
from trp_scale.core.objective import Objective

BALANCERS: dict[str, type[TaskBalancer]] = {
    "uniform": Uniform,
    "proportional": Proportional,
    "minimax": Minimax,
    "group_dro": GroupDro,
    "uncertainty": Uncertainty,
    "gradnorm": GradNorm,
    "dwa": Dwa,
}


def build_balancer(
    config: BalancerConfig, objective: Objective, device: torch.device, *, steps_per_epoch: int = 0
) -> TaskBalancer:
    """The balancer named by `balancer.kind`.

    Args:
        config: settings.
        objective: the tasks.
        device: where [T] vectors live.
        steps_per_epoch: global batches that the training rows make, rounded up; 0 = not known.

    Raises:
        RefusedError: a method that cannot balance these tasks; names the flag to change.
    """
    return BALANCERS[config.kind](config, objective, device, steps_per_epoch=steps_per_epoch)
