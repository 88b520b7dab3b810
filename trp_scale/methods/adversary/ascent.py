"""Parts shared by all adversaries: the ascent rules (gradient -> next perturbation), the balls that bound each vector
along the last dimension (AdPE 4.1.1, footnote 2), the metrics, and a warning about an adversary without effect.

An ascent rule is a pure function of the vector, its gradient and its state, so a step can be undone or skipped on the
device. No function waits for the device; the step count of AdamW is stored there too.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from trp_scale.config import OptimizerConfig
from trp_scale.core.hooks import StepContext
from trp_scale.core.run import RunContext
from trp_scale.methods.adversary.settings import AdversarySettings, PositionAdversarySettings
from trp_scale.models.positions import PerturbationShape

Norm = Literal["l2", "linf"]


def size(vectors: Tensor, norm: Norm) -> Tensor:
    """Return the norms [...] of vectors [..., D], in float64: squares can overflow or underflow fp32."""
    order = 2.0 if norm == "l2" else float("inf")
    return torch.linalg.vector_norm(vectors, order, dim=-1, dtype=torch.float64)  # type: ignore[no-any-return]


def project(vectors: Tensor, norm: Norm, eps: float) -> Tensor:
    """Project vectors [..., D] into the ball: v min(eps, ||v||) / ||v|| for l2 (zero stays zero), clamp for linf."""
    if norm == "linf":
        return vectors.clamp(-eps, eps)
    # For a zero vector eps / 0 is infinite and is clamped to 1.
    factor = (eps / size(vectors, norm)).clamp(max=1.0)  # [...]
    return (vectors * factor.unsqueeze(-1)).to(vectors.dtype)


def steepest(gradients: Tensor, norm: Norm, eps: float) -> Tensor:
    """Return perturbations [..., D] by the one-step rule from zero (AdPE, footnote 2): eps g / ||g|| for l2, eps
    sign(g) for linf; zero stays zero."""
    if norm == "linf":
        return eps * gradients.sign()
    sizes = size(gradients, norm).unsqueeze(-1)  # [..., 1]
    return torch.where(sizes > 0, eps * (gradients / sizes), 0.0).to(gradients.dtype)


@dataclass(frozen=True)
class Balls:
    """Balls of one perturbation, which is stored as one flat vector [numel].

    Attributes:
        shape: splits the flat vector into views whose last dimension is one ball.
        norm: norm of all balls.
        eps: radius of all balls.
    """

    shape: PerturbationShape
    norm: Norm
    eps: float

    def views(self, flat: Tensor) -> list[Tensor]:
        """Return the view of the encoder and, if any, of the decoder, each [blocks, ..., D]."""
        return [view for view in self.shape.split(flat) if view is not None]

    def _on_views(self, flat: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
        return torch.cat([function(view).flatten() for view in self.views(flat)])

    def project(self, flat: Tensor) -> Tensor:
        """Project each vector into its ball, [numel]."""
        return self._on_views(flat, lambda view: project(view, self.norm, self.eps))

    def steepest(self, gradient: Tensor) -> Tensor:
        """Apply the one-step rule in each ball, [numel]."""
        return self._on_views(gradient, lambda view: steepest(view, self.norm, self.eps))

    def sizes(self, flat: Tensor) -> Tensor:
        """Return the norm of each vector, [balls] float64."""
        return self._on_views(flat, lambda view: size(view, self.norm))

    def reach(self, gradient: Tensor) -> Tensor:
        """Return the largest first-order change of the loss between two points of the balls, 0-dimensional float64.

        This is 2 eps times the dual norm of the gradient: l1 for linf, the sum of the balls' l2 norms for l2.
        """
        if self.norm == "linf":
            return 2 * self.eps * gradient.double().abs().sum()
        return 2 * self.eps * self._on_views(gradient, lambda view: size(view, "l2")).sum()


State: TypeAlias = dict[str, Tensor]
"""State of an ascent rule, on the device; stored in the checkpoint."""


class Ascent:
    """Ascent rule of `adversary.ascent`.

    adamw: AdamW ascent without decay, at the learning rate of the weights or at `adversary.lr` on the same schedule.
    sgd: a + lr g (AdPE 4.1.1). sign: a + lr sign(g). linear: the maximum of the linearised loss over the ball, one step
    from zero; it needs the gradient at zero (AdPE, footnote 2).

    Args:
        optimizer: optimizer of the weights; AdamW uses its betas and eps.
    """

    def __init__(self, settings: PositionAdversarySettings, optimizer: OptimizerConfig, balls: Balls) -> None:
        self.settings = settings
        self.optimizer = optimizer
        self.balls = balls

    def start(self, vector: Tensor) -> State:
        """Return the state before the first step; empty for rules without state."""
        if self.settings.ascent != "adamw":
            return {}
        return {
            "steps": torch.zeros((), dtype=torch.int64, device=vector.device),
            "exp_avg": torch.zeros_like(vector),
            "exp_avg_sq": torch.zeros_like(vector),
        }

    def origin(self, vector: Tensor) -> Tensor:
        """Return the point [numel] of the gradient in sequential updates: zero for linear, else the perturbation."""
        return torch.zeros_like(vector) if self.settings.ascent == "linear" else vector

    def step(self, vector: Tensor, gradient: Tensor, state: State, lr: float) -> tuple[Tensor, State]:
        """Return the next vector [numel], before projection, and the next state.

        Args:
            vector: current perturbation, [numel] fp32.
            gradient: gradient of the global batch's loss, [numel] fp32.
            state: result of `start` or of the previous `step`; not modified.
            lr: learning rate of the weights in this step.
        """
        match self.settings.ascent:
            case "adamw":
                return self._adamw_step(vector, gradient, state, lr)
            case "sgd":
                return vector + self.settings.lr * gradient, state
            case "sign":
                return vector + self.settings.lr * gradient.sign(), state
            case "linear":
                return self.balls.steepest(gradient), state

    def _adamw_step(self, vector: Tensor, gradient: Tensor, state: State, lr: float) -> tuple[Tensor, State]:
        beta1, beta2 = self.optimizer.beta1, self.optimizer.beta2
        steps = state["steps"] + 1
        mean = torch.lerp(state["exp_avg"], gradient, 1 - beta1)
        square = beta2 * state["exp_avg_sq"] + (1 - beta2) * gradient.square()
        mean_share = 1 - beta1 ** steps.double()
        square_share = 1 - beta2 ** steps.double()
        root = square.sqrt() / square_share.sqrt() + self.optimizer.eps
        if self.settings.lr > 0.0:
            lr = self.settings.lr * lr / self.optimizer.lr
        ascended = vector + lr / mean_share * (mean / root)
        return ascended, {"steps": steps, "exp_avg": mean, "exp_avg_sq": square}


def run_own_pass(ctx: StepContext) -> None:
    """Run forward and backward over this rank's window, and keep only the gradients of the hooks' leaves.

    The balancer weighs the task losses of this pass, so minimax exact computes weights at this perturbation. The
    engine's gradients are discarded and its loss scale does not change: if this pass overflows, the gradient of the
    leaf is not finite and the adversary does not move. Joined micro-batches are not perturbed and are skipped.
    """
    # A separate context, because the balancer writes weights and sums that are not those of the step.
    own_ctx = ctx.separate_context(ctx.own_window)
    own_ctx.balancer.before_step(own_ctx)
    for number, micro in enumerate(own_ctx.window):
        loss = own_ctx.balancer.total(own_ctx, own_ctx.compute_losses(micro))
        ctx.engine.backward(loss, last=number == len(own_ctx.window) - 1)
    ctx.engine.discard_gradients()


logger = logging.getLogger(__name__)

IDLE_STEPS = 100
"""Consecutive steps without effect before a warning."""
NEGLIGIBLE = 1e-6
"""Relative change of the loss, to first order, below which an adversary has no effect in fp32. Measured on a small MAE+
with eps 20: 5e-8 for the shared relative embedding, which has no effect, and 0.8 to 20 for the others. In bf16 rounding
raises the former to 1e-3, so a caution in settings.py covers it."""


QUARTER = 4
"""Warn if the adversary hardly acts for 1 / QUARTER of the run, early enough to restart the run."""


class EffectWatch:
    """Detects an adversary without effect.

    Consecutive steps without effect are counted on the device and read with the metrics. The logged values show an
    adversary that hardly acts for a quarter of the run, and for at least IDLE_STEPS. Only the rank that logs checks
    them; the check restarts when a run resumes.
    """

    def __init__(self, run: RunContext) -> None:
        self.idle = torch.zeros((), dtype=torch.int64, device=run.device)
        self.patience = max(IDLE_STEPS, run.config.training.steps // QUARTER)
        self.steps = 0
        self._still_since: int | None = None
        self._warned = ""

    def count_step(self, ctx: StepContext, effective: Tensor) -> None:
        """Count a step if it was applied. `effective`: 0-dimensional bool, on the device."""
        self.idle = ctx.commit(torch.where(effective, 0, self.idle + 1), self.idle)
        self.steps = ctx.step + 1

    def notice(self, settings: AdversarySettings, idle: int, share_of_eps: float, effect: float | None) -> str:
        """Describe an adversary with little or no effect; "" if it acts. Each period without effect is logged as a
        warning once."""
        # An adversary hardly acts below these. Measured on adpe_tiny: absolute coordinates at the weights' learning
        # rate end at 0.03 and stay below 0.0012; effective adversaries reach 0.2 to 1, and 0.006 to 0.1.
        still = effect is not None and share_of_eps < 0.05 and abs(effect) < 0.002
        self._still_since = (self._still_since or self.steps) if still else None
        reason, kind = "", settings.kind
        if idle >= IDLE_STEPS:
            reason = "idle"
            notice = (
                f"the adversary {kind} had no effect for {idle} consecutive steps: its gradient is zero, not finite or "
                "too small to change the loss within its ball, or its steps are too small; check sensitivity, norm and "
                "saturated in metrics.jsonl, and --adversary.lr, --adversary.eps and --adversary.on_saturation"
            )
        elif self._still_since is not None and self.steps - self._still_since >= self.patience:
            reason, lr, ascent = "still", getattr(settings, "lr", 0.0), getattr(settings, "ascent", "")
            remedy = f"try a larger --adversary.lr than {lr:g}, or a smaller --adversary.eps than {settings.eps:g}"
            if ascent == "adamw" and lr == 0.0:
                remedy = (
                    "AdamW moves it by at most the weights' learning rate per step: set --adversary.lr (in units of "
                    "eps), or a smaller --adversary.eps"
                )
            notice = (
                f"the adversary {kind} hardly acts (since step {self._still_since}): its norm is {share_of_eps:.2g} "
                f"of eps, and its effect {abs(effect or 0.0):.1g} of the loss; {remedy}"
            )
        if reason and reason != self._warned:
            logger.warning("%s", notice)
        self._warned = reason
        return notice if reason else ""


def log_line(
    settings: AdversarySettings, watch: EffectWatch, *, sizes: Tensor, sensitivity: Tensor, **shares: Tensor
) -> dict[str, Any]:
    """Return the metrics with one device synchronisation, and warn about an adversary without effect.

    Args:
        sizes: norm of the perturbation in each ball.
        sensitivity: |dL/da|, 0-dimensional.
        shares: further 0-dimensional values, by metric name.
    Returns:
        kind; norm and largest_norm: mean and maximum of `sizes`; eps; share_of_eps: norm / eps; sensitivity; `shares`;
        and `notice` if the adversary has little or no effect.
    """
    values = [sizes.mean(), sizes.max(), sensitivity, watch.idle, *shares.values()]
    mean, largest, slope, idle, *rest = torch.stack([value.double() for value in values]).tolist()  # synchronises
    measured = dict(zip(shares, rest, strict=True))
    notice = watch.notice(settings, int(idle), mean / settings.eps, measured.get("effect"))
    return {
        "kind": settings.kind,
        "norm": mean,
        "largest_norm": largest,
        "eps": settings.eps,
        "share_of_eps": mean / settings.eps,
        "sensitivity": slope,
        **measured,
        **({"notice": notice} if notice else {}),
    }
