"""Parts of every adversary: how it climbs (gradient -> next perturbation), the balls that it stays in, one for each
vector along the last dimension (AdPE 4.1.1, footnote 2), its metrics, and a warning where it does nothing.

Each rule is a pure function of the vector, its gradient and the rule's own state, so that a step can be taken back or
withheld on the device. Nothing here waits for the device: the step count of AdamW lives there too.
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
    """Norms of vectors [..., D] -> [...] float64; in fp32 the squares of large or tiny numbers leave its range."""
    order = 2.0 if norm == "l2" else float("inf")
    return torch.linalg.vector_norm(vectors, order, dim=-1, dtype=torch.float64)  # type: ignore[no-any-return]


def project(vectors: Tensor, norm: Norm, eps: float) -> Tensor:
    """Vectors [..., D] put into the ball: v min(eps, ||v||) / ||v|| for l2 (zero stays zero), clamped for linf."""
    if norm == "linf":
        return vectors.clamp(-eps, eps)
    # eps / 0 is infinite and is clamped to 1: there is nothing to divide by in a zero vector.
    factor = (eps / size(vectors, norm)).clamp(max=1.0)  # [...]
    return (vectors * factor.unsqueeze(-1)).to(vectors.dtype)


def steepest(gradients: Tensor, norm: Norm, eps: float) -> Tensor:
    """The one-step rule from zero: eps g / ||g|| for l2, eps sign(g) for linf (AdPE, footnote 2); zero stays zero.

    Gradients [..., D] -> perturbations [..., D].
    """
    if norm == "linf":
        return eps * gradients.sign()
    sizes = size(gradients, norm).unsqueeze(-1)  # [..., 1]
    return torch.where(sizes > 0, eps * (gradients / sizes), 0.0).to(gradients.dtype)


@dataclass(frozen=True)
class Balls:
    """All balls of one perturbation, which travels as one flat vector [numel].

    Attributes:
        shape: how the flat vector falls into views whose last dimension is one ball's.
        norm: of every ball.
        eps: radius of every ball.
    """

    shape: PerturbationShape
    norm: Norm
    eps: float

    def views(self, flat: Tensor) -> list[Tensor]:
        """[numel] -> the encoder's view and, where there is one, the decoder's, each [blocks, ..., D]."""
        return [view for view in self.shape.split(flat) if view is not None]

    def _on_views(self, flat: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
        return torch.cat([function(view).flatten() for view in self.views(flat)])

    def project(self, flat: Tensor) -> Tensor:
        """[numel] -> [numel], each ball's vector inside it."""
        return self._on_views(flat, lambda view: project(view, self.norm, self.eps))

    def steepest(self, gradient: Tensor) -> Tensor:
        """[numel] -> [numel], the one-step rule in each ball."""
        return self._on_views(gradient, lambda view: steepest(view, self.norm, self.eps))

    def sizes(self, flat: Tensor) -> Tensor:
        """[balls] float64, the norm of each ball's vector."""
        return self._on_views(flat, lambda view: size(view, self.norm))

    def reach(self, gradient: Tensor) -> Tensor:
        """0-dimensional float64: the most the loss can change, to first order, from one end of the balls to the other.

        2 eps times the dual norm of the gradient: l1 for linf, the sum of the balls' l2 norms for l2.
        """
        if self.norm == "linf":
            return 2 * self.eps * gradient.double().abs().sum()
        return 2 * self.eps * self._on_views(gradient, lambda view: size(view, "l2")).sum()


State: TypeAlias = dict[str, Tensor]
"""What a rule remembers, on the device; part of the checkpoint."""


class Ascent:
    """The rule that `adversary.ascent` names.

    adamw: AdamW uphill without decay, at the weights' learning rate, or at its own on the weights' schedule. sgd:
    a + lr g (AdPE 4.1.1), and sign: a + lr sign(g), at the adversary's own rate. linear: the linearised loss's maximum
    over the ball, one step from zero, whose gradient it needs (AdPE, footnote 2).

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
        if self.settings.ascent != "adamw":
            return {}
        return {
            "steps": torch.zeros((), dtype=torch.int64, device=vector.device),
            "exp_avg": torch.zeros_like(vector),
            "exp_avg_sq": torch.zeros_like(vector),
        }

    def origin(self, vector: Tensor) -> Tensor:
        """[numel] where the gradient is taken in a pass of its own: at the present perturbation, or zero for linear."""
        return torch.zeros_like(vector) if self.settings.ascent == "linear" else vector

    def step(self, vector: Tensor, gradient: Tensor, state: State, lr: float) -> tuple[Tensor, State]:
        """Return the next vector [numel], not yet projected, and the next state.

        Args:
            vector: [numel] fp32 present perturbation.
            gradient: [numel] fp32 of the global batch's loss.
            state: as `start` or the last `step` gave it; not changed.
            lr: the weights' learning rate of this step.
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
        climbed = vector + lr / mean_share * (mean / root)
        return climbed, {"steps": steps, "exp_avg": mean, "exp_avg_sq": square}


def run_own_pass(ctx: StepContext) -> None:
    """Forward and backward over this rank's window. Only the gradients of the hooks' own leaves remain.

    The loss is what the balancer makes of this pass's own task losses: minimax exact takes the weights at the
    perturbation that the pass sees. The engine's gradients are dropped. Its loss scale stays: where this pass
    overflows, the leaf's gradient is not finite and the adversary stays where it is. Micro-batches that were joined to
    the window are not perturbed and take no part.
    """
    # A context of its own: the weights and sums that the balancer writes here are not those of the step.
    own_ctx = ctx.separate_context(ctx.own_window)
    own_ctx.balancer.before_step(own_ctx)
    for number, micro in enumerate(own_ctx.window):
        loss = own_ctx.balancer.total(own_ctx, own_ctx.compute_losses(micro))
        ctx.engine.backward(loss, last=number == len(own_ctx.window) - 1)
    ctx.engine.discard_gradients()


logger = logging.getLogger(__name__)

IDLE_STEPS = 100
"""Steps in a row without effect after which a warning is due."""
NEGLIGIBLE = 1e-6
"""Share of the loss: an adversary that cannot change it by more, to first order, has no effect in fp32. Measured on a
small MAE+ with eps 20: 5e-8 for the shared relative embedding, which is inert, and 0.8 to 20 for the others. Under bf16
rounding gives the inert one 1e-3, so that only its settings tell (settings.py)."""


QUARTER = 4
"""An adversary that has hardly acted for this part of the run is warned of, while the run can still be begun again."""
SMALL_SHARE = 0.05
SMALL_EFFECT = 0.002
"""Share of eps, and of the loss, below which an adversary hardly acts. Measured on adpe_tiny: absolute coordinates at
the weights' learning rate end at 0.03 and stay below 0.0012; those that act get to 0.2 to 1, and 0.006 to 0.1
(docs/experiments.md)."""


class EffectWatch:
    """Counts the steps in a row without effect, on the device; they are read with the metrics. Beside them it looks at
    the logged values: whether the adversary hardly acts, for a quarter of the run and at least IDLE_STEPS.

    The latter is found on the rank that logs. A run that goes on looks anew, from there.

    Args:
        run: on whose device the counter lives, and whose steps are watched.
    """

    def __init__(self, run: RunContext) -> None:
        self.idle = torch.zeros((), dtype=torch.int64, device=run.device)
        self.patience = max(IDLE_STEPS, run.config.training.steps // QUARTER)
        self.steps = 0
        self._still_since: int | None = None
        self._warned = ""

    def note(self, ctx: StepContext, effective: Tensor) -> None:
        """Take note of a step, where it was applied. effective: 0-dimensional bool, on the device."""
        self.idle = ctx.commit(torch.where(effective, 0, self.idle + 1), self.idle)
        self.steps = ctx.step + 1

    def notice(self, settings: AdversarySettings, idle: int, share_of_eps: float, effect: float | None) -> str:
        """Describe an adversary with little or no effect; "" if it acts. It is logged as a warning once, and again
        after the adversary has been back at work.

        Args:
            idle, share_of_eps, effect: as read from the device and logged.
        """
        still = effect is not None and share_of_eps < SMALL_SHARE and abs(effect) < SMALL_EFFECT
        self._still_since = (self._still_since or self.steps) if still else None
        words, kind = "", settings.kind
        if idle >= IDLE_STEPS:
            words = "idle"
            notice = (
                f"the adversary {kind} had no effect for {idle} steps in a row: its gradient is zero, not finite or "
                "too small for its ball to change the loss, or its steps are too small to move it; look at "
                "sensitivity, norm and saturated in metrics.jsonl, and at --adversary.lr, --adversary.eps and "
                "--adversary.on_saturation"
            )
        elif self._still_since is not None and self.steps - self._still_since >= self.patience:
            words = "still"
            notice = (
                f"the adversary {kind} hardly acts, since step {self._still_since}: it stands at {share_of_eps:.2g} of "
                f"eps, and makes {abs(effect or 0.0):.1g} of the loss; {_remedy(settings)}"
            )
        if words and words != self._warned:
            logger.warning("%s", notice)
        self._warned = words
        return notice if words else ""


def _remedy(settings: AdversarySettings) -> str:
    """Name the setting that makes it act."""
    lr, ascent = getattr(settings, "lr", 0.0), getattr(settings, "ascent", "")
    if ascent == "adamw" and lr == 0.0:
        return (
            "AdamW moves it by the weights' learning rate a step at most: give it its own, --adversary.lr (in the "
            "units of eps), or a smaller --adversary.eps"
        )
    return f"try a larger --adversary.lr than {lr:g}, or a smaller --adversary.eps than {settings.eps:g}"


def log_line(
    settings: AdversarySettings, watch: EffectWatch, *, sizes: Tensor, sensitivity: Tensor, **shares: Tensor
) -> dict[str, Any]:
    """The values, in one read of the device; warns when a warning of no effect is due.

    Args:
        sizes: norm of each ball's perturbation.
        sensitivity: 0-dimensional |dL/da|.
        shares: further 0-dimensional values, by the name they are logged under.
    Returns:
        kind; norm and largest_norm: mean and largest of the sizes; eps; share_of_eps: the mean over eps; sensitivity;
        the shares; and, while it does nothing or hardly anything, the notice of it.
    """
    values = [sizes.mean(), sizes.max(), sensitivity, watch.idle, *shares.values()]
    mean, largest, slope, idle, *rest = torch.stack([value.double() for value in values]).tolist()  # the one read
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
