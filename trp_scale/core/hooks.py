"""The hook: a method plugged into the loop. The loop calls these points, in this order, and knows no method by name.

- hooks.before_step(ctx): counts of the global batch are known; nothing has run yet
- for each micro-batch of the window:
  batch = hooks.batch(ctx, micro): a hook may change what the model sees;
  losses = objective(engine, batch);
  engine.backward(hooks.total(ctx, losses))
- hooks.gradients(ctx): reduced, unscaled, unclipped; hooks only read
- ctx.decide(norm): whether the step is applied, on the device
- engine.step: the update, or none
- hooks.after_step(ctx): hooks commit here, by ctx.commit, only if ctx.applied
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trp_scale.config.registry import find
from trp_scale.config.settings import Settings
from trp_scale.core.batch import Batch, LateStats, StepStats, TaskLosses
from trp_scale.core.engine import Engine
from trp_scale.core.objective import task_losses
from trp_scale.core.pieces import STATE_NAMES, Shards
from trp_scale.core.run import RunContext
from trp_scale.distributed.groups import Group
from trp_scale.errors import RefusedError


@dataclass(kw_only=True)
class StepContext:
    """State of one step. A context may outlive its step in a hook, for metrics; its batches do not: see `release`.

    Attributes:
        run: what stays the same from step to step.
        hooks: of the run.
        step: number of the step, from 0.
        window: this rank's micro-batches.
        counts: [T] float64, elements of each task in the global batch, on the engine's device.
        lr: learning rate of the weights in this step.
        trains: these passes train the weights; False for a pass that a hook makes of its own.
        weights: [T] float64, weight of each task's mean loss in this step; None until the balancer weighs.
        sums: [T] float64, loss sums of the global batch; None until they are gathered.
        applied: 0-dimensional bool, on the device, the same on all ranks: False where the step is skipped because its
            loss or gradient is not finite. None until that is decided, which is after the last backward; so are
        grad_norm: 0-dimensional, norm of the gradient of the whole model before clipping, and
        loss: 0-dimensional float64, total loss of the global batch.
        late: the same on their way to the host.
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
        """Turns the task losses of a micro-batch into the one loss."""
        return self.hooks.balancer

    @property
    def own_window(self) -> list[Batch]:
        """The window without the micro-batches that were joined to it from another source."""
        return [micro for micro in self.window if not micro.joined]

    def apply_hooks(self, micro: Batch) -> Batch:
        """Return the micro-batch that the model sees, after all hooks."""
        return self.hooks.batch(self, micro)

    def compute_losses(self, micro: Batch) -> TaskLosses:
        """The objective's losses of one micro-batch; the same call twice gives the same losses, bit for bit, since
        dropout is reseeded from (seed, step, position of the first row)."""
        return task_losses(self.run.objective, self.run.engine, self.prepare_batch(micro))

    def prepare_batch(self, micro: Batch) -> Batch:
        """Reseed dropout for this micro-batch and return what the model sees."""
        self.run.reseed(f"dropout/{self.step}/{micro.start}")
        return self.apply_hooks(micro)

    def means(self, sums: Tensor) -> Tensor:
        """[T] loss of each task over the global batch; 0 where the task is absent (never used there)."""
        return torch.where(self.counts > 0, sums / self.counts.clamp(min=1), torch.zeros_like(sums))

    @property
    def losses(self) -> Tensor:
        """[T] the step's loss of each task over the global batch, once the loss sums are gathered."""
        assert self.sums is not None, "gathered when the last micro-batch is through"
        return self.means(self.sums)

    def gather_sums(self, sums: Tensor) -> Tensor:
        """[T] loss sums of the global batch, from those of this rank; a step gathers them once, and the first to call
        this does it."""
        if self.sums is None:
            self.sums = self.data_group.sum(sums)
        return self.sums

    def recount(self, counts: Tensor) -> None:
        """Replace the [T] counts of the global batch: a hook has changed what is predicted."""
        self.counts = counts

    def reduced_gradient(self, leaf: Tensor) -> Tensor:
        """The global batch's gradient of a hook's leaf, taken out of its `.grad`; zero where no loss depends on it."""
        local, leaf.grad = leaf.grad, None
        return self.engine.reduce_hook_gradient(torch.zeros_like(leaf) if local is None else local).detach()

    def weigh(self, weights: Tensor) -> None:
        """Fix the [T] float64 weights of this step; only the balancer calls it."""
        self.weights = weights

    def decide(self, grad_norm: Tensor, limits: Tensor | None = None) -> None:
        """Apply the step where its loss and its gradient are finite, and skip it otherwise, on all ranks alike: both
        are of the global batch. Only the loop calls it; the device decides and no one waits.

        Args:
            grad_norm: 0-dimensional, of the engine.
            limits: [2 + T] float64, the most that loss, gradient norm and the tasks' losses may be; None: no limits.
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
        """`new` where the step is applied, `old` where it is skipped: the device chooses, and no one waits for it."""
        assert self.applied is not None, "decided before the hooks' after_step"
        return torch.where(self.applied, new, old)

    def stats(self) -> StepStats:
        """Statistics of the step, on the host; waits for the device. For hooks that decide on the host. It waits for
        the device: for hooks that the host must decide in."""
        assert self.late is not None, "decided before the hooks' after_step"
        return self.late.read()

    def separate_context(self, window: Sequence[Batch], counts: Tensor | None = None) -> StepContext:
        """A context of the same step for a pass of a hook's own: what the balancer writes there is not the step's.

        Args:
            window: what the pass goes over.
            counts: [T] of it over all ranks; None = those of the step.
        """
        counts = self.counts if counts is None else counts
        return replace(
            self, window=window, counts=counts, trains=False, weights=None, sums=None, applied=None, late=None
        )

    def release(self) -> None:
        """Let go of the batches: the step is over. Those of past steps would hold open files and device memory."""
        self.window = ()


class Hook:
    """Base of all hooks: every point does nothing."""

    name: str = ""
    """What its metrics and its state are called by; a hook that `hooks` lists has the name that it is listed by."""

    figures: tuple[str, ...] = ()
    """Names of what `measured` gives."""

    shown: tuple[str, ...] = ()
    """Names of those of its metrics that the display shows, numbers."""

    def before_step(self, ctx: StepContext) -> None:
        """Before any forward pass of the step."""

    def batch(self, ctx: StepContext, micro: Batch) -> Batch:
        """Return the batch that the model sees in place of `micro`; must be the same for the same call."""
        return micro

    def gradients(self, ctx: StepContext) -> None:
        """After the last backward: gradients may be read, not changed."""

    def after_step(self, ctx: StepContext) -> None:
        """After the update or the skip; commit the hook's own state only where ctx.applied: see ctx.commit."""

    def after_checkpoint(self, path: Path) -> None:
        """A checkpoint of this run has become whole, on all ranks alike and between two steps; it is written behind the
        steps, so that it may be of an earlier one."""

    def engines(self) -> Mapping[str, Engine]:
        """Engines that the hook trains beside the run's own, by name; the checkpoint holds them too."""
        return {}

    def validation(self) -> AbstractContextManager[None]:
        """Around a validation. The hook may change the engine inside, and must put it back afterwards."""
        return nullcontext()

    def measured(self) -> Mapping[str, float]:
        """Figures of the weights after this step, by those names, where more is better and the hook has measured them
        now; the same on every rank. A checkpoint may be kept for the best (checkpoint.best)."""
        return {}

    def metrics(self) -> Mapping[str, Any]:
        """JSON values for this step's line in metrics.jsonl, under the hook's name. Asked for on logged steps only,
        and on rank 0 alone: no collective in here. A sentence under `notice` is repeated by the report while the last
        line has one."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """State for the checkpoint: nested dicts of JSON values and tensors, the same on every rank."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what state_dict gave."""

    def sharded_state(self) -> Mapping[str, Shards]:
        """The hook's vectors over all parameters that lie as the engine's pieces do, such as an average of the weights.

        The checkpoint stores them by name in pieces, beside the weights and moments, so that any engine on any number
        of ranks reads them back; loading writes into their parts. They exist from the start of the run.
        """
        return {}


class Balancer(Hook):
    """The hook that turns task losses into the one loss: exactly one per run.

    Its before_step and total may be called with further contexts of the same step, when another hook runs a pass of
    its own in before_step; each before_step starts afresh.
    """

    def total(self, ctx: StepContext, losses: TaskLosses) -> Tensor:
        """sum_t w_t * S_t / n_t of one micro-batch, n_t of the global batch."""
        raise NotImplementedError(f"{type(self).__name__} does not say how it totals task losses")


def build_hooks(run: RunContext, others: Sequence[Hook] = ()) -> Hooks:
    """The hooks of a run: those that `hooks` lists, in its order, those of the upstream, and the balancer.

    Args:
        run: whose settings are checked.
        others: what the upstream's own methods need.

    Raises:
        RefusedError: a method that cannot act in this run; names the flag to change.
    """
    listed = [_build_component(run, "hook", name, getattr(run.config, name, None)) for name in run.config.hooks]
    return Hooks(built(run, "balancer"), [*others, *listed])


def built(run: RunContext, role: str) -> Any:
    """Build the component that the section of a role names; `None` if the method is off."""
    settings = getattr(run.config, role)
    return _build_component(run, role, settings.kind, settings)


def _build_component(run: RunContext, role: str, name: str, settings: Settings | None) -> Any:
    """The component of this name in this run. A hook goes by the name that it is listed by."""
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
    """All hooks of a run, called in order; one of them is the balancer, the last: the losses that its weights come
    from must see what the other hooks change."""

    def __init__(self, balancer: Balancer, others: Sequence[Hook] = ()) -> None:
        self.balancer = balancer
        self.all: tuple[Hook, ...] = (*others, balancer)
        names = [hook.name for hook in self.all]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise RefusedError(f"hooks: {', '.join(twice)} is the name of two hooks of this run; give one another name")

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
        """Names of each hook's metrics that the display shows."""
        return {hook.name: hook.shown for hook in self.all if hook.shown}

    def figures(self) -> list[str]:
        """Names of all that may be measured, HOOK.FIGURE."""
        return [f"{hook.name}.{figure}" for hook in self.all for figure in hook.figures]

    def measured(self) -> dict[str, float]:
        """Return the measurements after this step, by those names."""
        return {f"{hook.name}.{figure}": value for hook in self.all for figure, value in hook.measured().items()}

    def metrics(self) -> dict[str, Mapping[str, Any]]:
        return {hook.name: values for hook in self.all if (values := hook.metrics())}

    def state_dict(self) -> dict[str, Any]:
        return {hook.name: hook.state_dict() for hook in self.all}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if set(state) != {hook.name for hook in self.all}:
            names = sorted(hook.name for hook in self.all)
            raise ValueError(f"checkpoint holds the hooks {sorted(state)}, this run has {names}")
        for hook in self.all:
            hook.load_state_dict(state[hook.name])

    def sharded_state(self) -> dict[str, Shards]:
        """All hooks' vectors, by name.

        Raises:
            RefusedError: two hooks, or a hook and the engine, give the same name.
        """
        vectors: dict[str, Shards] = {}
        for hook in self.all:
            for name, vector in hook.sharded_state().items():
                if name in vectors or name in ("weight", *STATE_NAMES):
                    raise RefusedError(f"hook {hook.name}: its sharded state {name!r} has a name that is already taken")
                vectors[name] = vector
        return vectors
