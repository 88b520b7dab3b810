"""Hooks: methods plugged into the loop. The loop calls these points in this order, and contains no method by name.

- hooks.before_step(ctx): the counts of the global batch are known; no forward pass has run
- for each micro-batch of the window:
  batch = hooks.batch(ctx, micro): a hook may change the model's inputs;
  losses = objective(engine, batch);
  engine.backward(hooks.total(ctx, losses))
- hooks.gradients(ctx): reduced, unscaled, unclipped; hooks only read
- ctx.decide(norm): whether the step is applied, on the device
- engine.step: the update, or none
- hooks.after_step(ctx): hooks commit state with ctx.commit, only if ctx.applied
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trp_scale.config.registry import Settings, find
from trp_scale.core.batch import Batch, LateStats, StepStats, TaskLosses
from trp_scale.core.engine import Engine
from trp_scale.core.pieces import STATE_NAMES, Shards
from trp_scale.core.run import RunContext, task_losses
from trp_scale.distributed.groups import Group
from trp_scale.errors import RefusedError


@dataclass(kw_only=True)
class StepContext:
    """State of a step. A hook may keep a context for metrics; its batches are released at the end of the step.

    Attributes:
        run: constants of the run.
        hooks: hooks of the run.
        step: number of the step, from 0.
        window: this rank's micro-batches.
        counts: [T] float64, elements of each task in the global batch, on the engine's device.
        lr: learning rate of the weights in this step.
        trains: these passes train the weights; False for extra passes of a hook.
        weights: [T] float64, weight of each task's mean loss in this step; None before the balancer sets them.
        sums: [T] float64, loss sums of the global batch; None before they are gathered.
        applied: 0-dimensional bool on the device, equal on all ranks: False if the step is skipped (loss or gradient
            not finite, or a spike). This and the next three are None before `decide`.
        grad_norm: 0-dimensional, norm of the whole model's gradient before clipping.
        loss: 0-dimensional float64, total loss of the global batch.
        late: the step's statistics, being copied to the host.
    """

    run: RunContext
    hooks: Hooks
    step: int
    window: Sequence[Batch]
    counts: Tensor
    lr: float
    trains: bool = True
    weights: Tensor | None = None
    sums: Tensor | None = None
    applied: Tensor | None = None
    grad_norm: Tensor | None = None
    loss: Tensor | None = None
    late: LateStats | None = None

    @property
    def engine(self) -> Engine:
        """The run's engine."""
        return self.run.engine

    @property
    def data_group(self) -> Group:
        """Ranks whose windows make up the global batch."""
        return self.run.engine.data_group

    @property
    def balancer(self) -> Balancer:
        """The run's balancer, which combines task losses."""
        return self.hooks.balancer

    @property
    def own_window(self) -> list[Batch]:
        """The window without micro-batches from other sources (`Batch.joined`)."""
        return [micro for micro in self.window if not micro.joined]

    def apply_hooks(self, micro: Batch) -> Batch:
        """Return the micro-batch after all hooks."""
        return self.hooks.batch(self, micro)

    def compute_losses(self, micro: Batch) -> TaskLosses:
        """Compute the losses of a micro-batch. Two calls give equal losses, bit for bit: dropout is reseeded from
        (seed, step, position of the first row)."""
        return task_losses(self.run.objective, self.run.engine, self.prepare_batch(micro))

    def prepare_batch(self, micro: Batch) -> Batch:
        """Reseed dropout for this micro-batch and return the model's inputs."""
        self.run.reseed(f"dropout/{self.step}/{micro.start}")
        return self.apply_hooks(micro)

    def means(self, sums: Tensor) -> Tensor:
        """Return the mean loss of each task over the global batch, [T]; 0 for absent tasks."""
        return torch.where(self.counts > 0, sums / self.counts.clamp(min=1), torch.zeros_like(sums))

    @property
    def losses(self) -> Tensor:
        """Mean loss of each task over the global batch, [T]; needs gathered sums."""
        assert self.sums is not None, "gathered when the last micro-batch is through"
        return self.means(self.sums)

    def gather_sums(self, sums: Tensor) -> Tensor:
        """Return the loss sums of the global batch, [T], from those of this rank. The first call of a step gathers
        them."""
        if self.sums is None:
            self.sums = self.data_group.sum(sums)
        return self.sums

    def recount(self, counts: Tensor) -> None:
        """Replace the [T] counts of the global batch after a hook has changed the targets."""
        self.counts = counts

    def reduced_gradient(self, leaf: Tensor) -> Tensor:
        """Return the global batch's gradient of a hook's leaf and clear its `.grad`; zero if no loss depends on it."""
        local, leaf.grad = leaf.grad, None
        return self.engine.reduce_hook_gradient(torch.zeros_like(leaf) if local is None else local).detach()

    def weigh(self, weights: Tensor) -> None:
        """Set the [T] float64 weights of this step; only the balancer calls it."""
        self.weights = weights

    def decide(self, grad_norm: Tensor, limits: Tensor | None = None) -> None:
        """Decide on the device whether the step is applied: loss and gradient norm of the global batch are finite and
        within limits. Equal on all ranks; nothing waits. Only the loop calls it.

        Args:
            grad_norm: 0-dimensional, from the engine.
            limits: [2 + T] float64, maximum of loss, gradient norm and the tasks' losses; None: no limits.
        """
        assert self.weights is not None, "the balancer sets the weights of every step"
        means = self.losses
        self.grad_norm, self.loss = grad_norm, (self.weights * means).sum()
        self.applied = self.grad_norm.isfinite() & self.loss.isfinite()
        if limits is not None:
            values = torch.cat([torch.stack([self.loss, self.grad_norm.to(torch.float64)]), means])
            self.applied = self.applied & (values <= limits.to(values.device, non_blocking=True)).all()
        self.late = LateStats(
            applied=self.applied,
            grad_norm=self.grad_norm,
            loss=self.loss,
            means=means,
            weights=self.weights,
            counts=self.counts,
            lr=self.lr,
        )

    def commit(self, new: Tensor, old: Tensor) -> Tensor:
        """Return `new` if the step is applied, else `old`; chosen on the device, without a wait."""
        assert self.applied is not None, "decided before the hooks' after_step"
        return torch.where(self.applied, new, old)

    def stats(self) -> StepStats:
        """Return the statistics of the step on the host. Waits for the device; for hooks that decide on the host."""
        assert self.late is not None, "decided before the hooks' after_step"
        return self.late.read()

    def separate_context(self, window: Sequence[Batch], counts: Tensor | None = None) -> StepContext:
        """Return a context of the same step for an extra pass of a hook, with its own weights.

        Args:
            window: micro-batches of the pass.
            counts: [T] counts over all ranks; None = those of the step.
        """
        counts = self.counts if counts is None else counts
        return replace(
            self, window=window, counts=counts, trains=False, weights=None, sums=None, applied=None, late=None
        )

    def release(self) -> None:
        """Release the batches at the end of the step: they keep files open and device memory allocated."""
        self.window = ()


class Hook:
    """Base of all hooks: every point does nothing."""

    name: str = ""
    """Name of the hook's metrics and state; for a hook in `hooks`, its name there."""

    figures: tuple[str, ...] = ()
    """Names of the figures that `measured` returns."""

    shown: tuple[str, ...] = ()
    """Names of the (numeric) metrics in the display."""

    def before_step(self, ctx: StepContext) -> None:
        """Run before any forward pass of the step."""

    def batch(self, ctx: StepContext, micro: Batch) -> Batch:
        """Return the batch that replaces `micro`; must be deterministic."""
        return micro

    def gradients(self, ctx: StepContext) -> None:
        """Run after the last backward: gradients may be read, not changed."""

    def after_step(self, ctx: StepContext) -> None:
        """Run after the update or the skip; commit the hook's state only if applied, with ctx.commit."""

    def after_checkpoint(self, path: Path) -> None:
        """Run when a checkpoint is complete, on all ranks and between two steps. Checkpoints are written
        asynchronously, so it may be of an earlier step."""

    def engines(self) -> Mapping[str, Engine]:
        """Return further engines that the hook trains, by name; the checkpoint contains them."""
        return {}

    def validation(self) -> AbstractContextManager[None]:
        """Context of a validation. The hook may change the engine inside, and must restore it."""
        return nullcontext()

    def measured(self) -> Mapping[str, float]:
        """Return the figures measured after this step, by name, equal on every rank; higher is better. A checkpoint may
        be kept for the best (checkpoint.best)."""
        return {}

    def metrics(self) -> Mapping[str, Any]:
        """Return JSON values for this step's line in metrics.jsonl, under the hook's name. Called on logged steps and
        on rank 0 only, so without collectives. The report repeats a `notice` of the last line."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Return the state for the checkpoint: nested dicts of JSON values and tensors, equal on every rank."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict()`."""

    def sharded_state(self) -> Mapping[str, Shards]:
        """Return the hook's vectors over all parameters with the layout of the engine's pieces, such as an average of
        the weights. They exist from the start of the run.

        The checkpoint stores them in pieces by name, like weights and moments, so that any engine on any number of
        ranks can load them; loading writes into their parts.
        """
        return {}


class Balancer(Hook):
    """Hook that combines task losses into the total loss; exactly one per run.

    before_step and total may be called with further contexts of the same step, for extra passes of other hooks; each
    before_step starts anew.
    """

    def total(self, ctx: StepContext, losses: TaskLosses) -> Tensor:
        """Return sum_t w_t * S_t / n_t of a micro-batch, with n_t of the global batch."""
        raise NotImplementedError(f"{type(self).__name__} does not implement total")


def build_hooks(run: RunContext, others: Sequence[Hook] = ()) -> Hooks:
    """Build the hooks of a run: those of the upstream (`others`), those of the setting `hooks` in order, the balancer.

    Raises:
        RefusedError: a method does not work in this run; names the flag to change.
    """
    listed = [_build_component(run, "hook", name, getattr(run.config, name, None)) for name in run.config.hooks]
    return Hooks(built(run, "balancer"), [*others, *listed])


def built(run: RunContext, role: str) -> Any:
    """Build the component selected in the section of a role; `None` if the method is off."""
    settings = getattr(run.config, role)
    return _build_component(run, role, settings.kind, settings)


def _build_component(run: RunContext, role: str, name: str, settings: Settings | None) -> Any:
    """Build the component of this name; a hook gets its name in `hooks`."""
    component = find(role, name)
    hook = component.load()(component.settings() if settings is None else settings, run)
    base: type[Any] = {"balancer": Balancer, "hook": Hook}.get(role, object)
    if not isinstance(hook, base):
        raise RefusedError(
            f"{component.module} registers {type(hook).__name__} as the {role} {name!r}; allowed: a class derived from "
            f"trp_scale.{base.__name__}"
        )
    if role == "hook":
        hook.name = name
    return hook


class Hooks:
    """All hooks of a run, called in order. The balancer is last: the losses for its weights need the changes of the
    other hooks."""

    def __init__(self, balancer: Balancer, others: Sequence[Hook] = ()) -> None:
        self.balancer = balancer
        self.all: tuple[Hook, ...] = (*others, balancer)
        names = [hook.name for hook in self.all]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise RefusedError(f"hooks: {', '.join(twice)} is the name of two hooks of this run; rename one")

    def before_step(self, ctx: StepContext) -> None:
        for hook in self.all:
            hook.before_step(ctx)

    def batch(self, ctx: StepContext, micro: Batch) -> Batch:
        for hook in self.all:
            micro = hook.batch(ctx, micro)
        return micro

    def total(self, ctx: StepContext, losses: TaskLosses) -> Tensor:
        return self.balancer.total(ctx, losses)

    def gradients(self, ctx: StepContext) -> None:
        for hook in self.all:
            hook.gradients(ctx)

    def after_step(self, ctx: StepContext) -> None:
        for hook in self.all:
            hook.after_step(ctx)

    def after_checkpoint(self, path: Path) -> None:
        for hook in self.all:
            hook.after_checkpoint(path)

    def engines(self) -> dict[str, Engine]:
        return {name: engine for hook in self.all for name, engine in hook.engines().items()}

    @contextmanager
    def validation(self) -> Iterator[None]:
        with ExitStack() as stack:
            for hook in self.all:
                stack.enter_context(hook.validation())
            yield

    def shown(self) -> dict[str, tuple[str, ...]]:
        """Return the names of each hook's metrics in the display."""
        return {hook.name: hook.shown for hook in self.all if hook.shown}

    def figures(self) -> list[str]:
        """Return the names of all figures, HOOK.FIGURE."""
        return [f"{hook.name}.{figure}" for hook in self.all for figure in hook.figures]

    def measured(self) -> dict[str, float]:
        """Return the figures measured after this step, by these names."""
        return {f"{hook.name}.{figure}": value for hook in self.all for figure, value in hook.measured().items()}

    def metrics(self) -> dict[str, Mapping[str, Any]]:
        return {hook.name: values for hook in self.all if (values := hook.metrics())}

    def state_dict(self) -> dict[str, Any]:
        return {hook.name: hook.state_dict() for hook in self.all}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if set(state) != {hook.name for hook in self.all}:
            names = sorted(hook.name for hook in self.all)
            raise ValueError(f"the checkpoint has the hooks {sorted(state)}, this run has {names}")
        for hook in self.all:
            hook.load_state_dict(state[hook.name])

    def sharded_state(self) -> dict[str, Shards]:
        """Return all hooks' vectors by name.

        Raises:
            RefusedError: two hooks, or a hook and the engine, use the same name.
        """
        vectors: dict[str, Shards] = {}
        for hook in self.all:
            for name, vector in hook.sharded_state().items():
                if name in vectors or name in ("weight", *STATE_NAMES):
                    raise RefusedError(f"hook {hook.name}: the name of its sharded state {name!r} is in use; rename it")
                vectors[name] = vector
        return vectors
