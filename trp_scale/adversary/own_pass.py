"""A pass over the window for the adversary alone, before the one that trains the weights."""

from __future__ import annotations

from trp_scale.core.hooks import StepContext


def run_own_pass(ctx: StepContext) -> None:
    """Forward and backward over this rank's window. Only the gradients of the hooks' own leaves remain.

    The loss is what the balancer makes of this pass's own task losses: minimax exact takes the weights at the
    perturbation that the pass sees. The engine's gradients are dropped. Its loss scale stays: where this pass
    overflows, the leaf's gradient is not finite and the adversary stays where it is. Micro-batches that were joined to
    the window are not perturbed and take no part.
    """
    # A context of its own: the weights and sums that the balancer writes here are not those of the step.
    own = ctx.apart(ctx.own_window)
    own.balancer.before_step(own)
    for number, micro in enumerate(own.window):
        loss = own.balancer.total(own, own.losses_of(micro))
        ctx.engine.backward(loss, last=number == len(own.window) - 1)
    ctx.engine.discard_gradients()
