"""Balancers: task losses -> weights. One file each; `build_balancer` is the only place that knows their names."""

from __future__ import annotations

from trp_scale.balancing.base import TaskBalancer
from trp_scale.balancing.dwa import Dwa
from trp_scale.balancing.gradnorm import GradNorm
from trp_scale.balancing.group_dro import GroupDro
from trp_scale.balancing.minimax import Minimax
from trp_scale.balancing.proportional import Proportional
from trp_scale.balancing.uncertainty import Uncertainty
from trp_scale.balancing.uniform import Uniform
from trp_scale.core.run import RunContext

BALANCERS: dict[str, type[TaskBalancer]] = {
    "uniform": Uniform,
    "proportional": Proportional,
    "minimax": Minimax,
    "group_dro": GroupDro,
    "uncertainty": Uncertainty,
    "gradnorm": GradNorm,
    "dwa": Dwa,
}


def build_balancer(run: RunContext) -> TaskBalancer:
    """The balancer named by `balancer.kind`.

    Raises:
        RefusedError: a method that cannot balance these tasks; names the flag to change.
    """
    settings = run.config.balancer
    return BALANCERS[settings.kind](settings, run)
