"""Masks learned from a downstream task by three-level optimisation (MLO-MAE; docs/algorithms.md).

masks.py: eq. 1, the masks and the outer step (eq. 8). head.py: eq. 2, 3, 7, 11. hypergradient.py: eq. 9 after committed
steps. finite_difference.py: eq. 10 and 12. unrolled.py: eq. 6 as printed. joint.py: eq. 5. fine_tuning.py: eq. 13.
hook.py: Algorithm 1. exact.py: the check.
"""

from __future__ import annotations

import copy

import torch

from trp_scale.config import Config, RefusedError
from trp_scale.core.engine import Engine
from trp_scale.core.hooks import Hook
from trp_scale.core.objective import PatchObjective
from trp_scale.core.run import MakeEngine, RunContext
from trp_scale.masks.fine_tuning import FineTunedValidationLoss, second_encoder
from trp_scale.masks.finite_difference import HardMaskDerivative, MaskDerivative, SoftMaskDerivative
from trp_scale.masks.head import Head, HeadLevel
from trp_scale.masks.hook import LearnedMasks, LevelClock
from trp_scale.masks.hypergradient import Clock, OuterObjective, RaisedReconstruction, ValidationLoss
from trp_scale.masks.joint import JointObjective, JointValidationLoss
from trp_scale.masks.masking_network import NETWORKS
from trp_scale.masks.masks import Masker, network_eps
from trp_scale.masks.unrolled import UnrolledValidationLoss


def build_multilevel(run: RunContext) -> Hook | None:
    """The hook for these settings, or None where masks are drawn at random.

    Raises:
        RefusedError: forwards read weights in which the moves that masks are learned by are lost.
    """
    config = run.config
    if config.masking.network == "none":
        return None
    _refuse_rounded_weights(config, run.engine)
    objective: PatchObjective = run.objective  # type: ignore[assignment]  # checked with the settings
    assert run.make_engine is not None, "masks are learned in a run that can make a second engine"
    network = run.make_engine(NETWORKS[config.masking.network](config), network_config(config))
    masker = Masker(config, network, objective)
    clock = LevelClock(run.device)
    hard = config.masking.selection == "hard"
    derivative = (HardMaskDerivative if hard else SoftMaskDerivative)(objective)
    outer = _outer_objective(run, objective, run.make_engine, derivative, clock)
    return LearnedMasks(config, masker, outer, clock)


def _refuse_rounded_weights(config: Config, engine: Engine) -> None:
    """Measured on a small model: the cosine with the exact gradient is 0.5 to 0.7, and 0.9997 with autocast."""
    settings = config.multilevel
    if settings.feedback == "reconstruction" or settings.exact_every > 0 or not engine.rounds_weights:
        return
    raise RefusedError(
        f"--masking.network {config.masking.network} learns from losses at weights that are moved by "
        f"{settings.difference:g} in all (--multilevel.difference), and the weights that forwards read here are in "
        "half precision, where rounding is larger than that; allowed: --training.precision bf16 with torch_autocast "
        "instead of bf16 in --ds_config, --training.precision fp32, --multilevel.feedback reconstruction, or "
        "--multilevel.exact_every N to see by how much it is wrong"
    )


def _outer_objective(
    run: RunContext, objective: PatchObjective, make_engine: MakeEngine, derivative: MaskDerivative, clock: Clock
) -> OuterObjective:
    config, sources, engine = run.config, run.sources, run.engine
    downstream = sources.downstream
    if downstream is None:
        return RaisedReconstruction(config, derivative, clock)
    if isinstance(objective, JointObjective):
        return JointValidationLoss(config, derivative, clock, level=objective.level, sources=downstream)
    wide = torch.promote_types(next(engine.module.parameters()).dtype, torch.float32)
    level = HeadLevel(config, objective, Head(config, downstream.classes, engine.device, wide))
    if config.multilevel.mode == "look_ahead":
        return UnrolledValidationLoss(
            config, derivative, clock, level=level, sources=downstream, upcoming=sources.train
        )
    if config.multilevel.second_level == "fine_tuning":
        tuned = second_encoder(config, engine, make_engine)
        return FineTunedValidationLoss(config, derivative, clock, level=level, sources=downstream, tuned=tuned)
    return ValidationLoss(config, derivative, clock, level=level, sources=downstream)


def network_config(config: Config) -> Config:
    """The run's settings with the masking network's optimizer. A hypergradient carries the inner learning rate as a
    factor. AdamW's eps carries the same factor: without it nothing moves."""
    own, settings = copy.deepcopy(config), config.multilevel
    own.optimizer.kind, own.optimizer.clipping = "adamw", 0.0
    own.optimizer.lr, own.optimizer.weight_decay = settings.lr, settings.weight_decay
    own.optimizer.eps = network_eps(config)
    own.training.compile = False
    return own
