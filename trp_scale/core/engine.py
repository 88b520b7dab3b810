"""The engine: owner of parameters, sharding, precision and optimizer. The loop and the hooks use only this interface.

It has three protocols:

- `Trains`: forward, backward, step; for the loop and validation.
- `Stores`: pieces and small state; for checkpoints.
- `Probes`: gradients and forwards with other weights, between steps; for learned masks and the weight average.

The gradients of the losses that an engine receives *add up* to the gradient of the global batch: each micro-batch's
loss is already divided by the global counts. The engine undoes divisions of its library (by ranks or accumulation
steps), so that the same losses give the same step on every engine.

All methods are collective.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from trp_scale.core.batch import Batch, TaskLosses
from trp_scale.core.pieces import Piece, Shards
from trp_scale.distributed.groups import Group
from trp_scale.errors import RefusedError

if TYPE_CHECKING:
    from trp_scale.core.run import Objective

MoveTo = Callable[[float | Tensor], None]
"""Sets another scale of the perturbation."""


class EngineError(RefusedError):
    """The engine does not support a setting; the message says what to change."""


class CompiledGraphs(Protocol):
    """Compiled graphs of an engine's model.

    Attributes:
        made: number of graphs so far.
        surplus: descriptions of the graphs that no mode of the run needed, oldest first.
    """

    made: int
    surplus: list[str]

    def losses(self, objective: Objective, forward: Callable[..., Any], batch: Batch) -> TaskLosses:
        """Compute the losses of a batch, in one graph with the forward pass if engine and objective allow it.

        Args:
            forward: the engine.
        """
        ...

    def seconds(self) -> float:
        """Return the seconds of compilation in this process since the engine was built."""
        ...

    def found(self) -> int:
        """Return the number of graphs from the cache directory of an earlier start."""
        ...


class CapturedGraphs(Protocol):
    """Captured micro-batches of an engine (`training.capture`).

    Attributes:
        replays: micro-batches of steps that ran as graphs.
        uncaptured: micro-batches of steps that ran without.
        notices: lines for the log, oldest first.
    """

    replays: int
    uncaptured: int
    notices: list[str]

    def losses(self, objective: Objective, batch: Batch) -> TaskLosses:
        """Compute the losses of a micro-batch. If they have gradients, the engine's `backward` must follow."""
        ...

    def capturing(self) -> AbstractContextManager[None]:
        """Context of passes over windows of every shape, which capture their graphs."""
        ...

    def give_up(self, reason: str) -> None:
        """Drop the graphs, and run all micro-batches without."""
        ...


class Trains(Protocol):
    """Operations of a training step.

    Attributes:
        device: device of the computation.
        data_group: ranks that split the batch.
        decides_on_host: `step` ignores `applied`: the loop waits for the decision and calls `skip`.
    """

    device: torch.device
    data_group: Group
    decides_on_host: bool

    @property
    def graphs(self) -> CompiledGraphs | None:
        """Graphs of the compiled model; `None` without compilation."""
        ...

    @property
    def captured_graphs(self) -> CapturedGraphs | None:
        """Captured micro-batches; `None` if they are not captured."""
        ...

    @property
    def module(self) -> nn.Module:
        """The wrapped model; call the engine for a forward pass."""
        ...

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Forward pass in the run's precision."""
        ...

    def train(self, mode: bool) -> None:
        """Set training mode (dropout)."""
        ...

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Add the gradient of `loss` (this micro-batch's share of the global loss). `last`: last of the window."""
        ...

    def check_gradients(self) -> Tensor:
        """Return the norm of the global gradient, reduced and unscaled, 0-dimensional on the device, equal on all
        ranks.

        Call it after the last backward. If it is not finite, the step must be skipped.
        """
        ...

    def step(self, lr: float, applied: Tensor | None = None) -> None:
        """Clip, update with learning rate `lr`, clear gradients.

        Args:
            applied: 0-dimensional bool on the device; False keeps weights, moments and the number of steps. None =
                True. Ignored with `decides_on_host`.
        """
        ...

    def skip(self) -> bool:
        """Drop the gradients; weights and moments stay.

        Returns:
            True if it was part of a loss scaler's search: the next step has a lower scale.
        """
        ...

    def discard_gradients(self) -> None:
        """Drop the gradients; all other state stays, including a loss scale."""
        ...

    def clear_unused_gradients(self) -> None:
        """Clear the last gradients of parameters that the next backward pass does not use.

        ZeRO-3 and offloaded optimizers keep the last gradient of an unused parameter. Call this before a window whose
        first micro-batch does not use all parameters. Other engines do nothing.
        """
        ...

    def reduce_hook_gradient(self, gradient: Tensor) -> Tensor:
        """Return the global batch's gradient of a hook's tensor, from its `.grad` on each rank after backward().

        Summed over the data ranks and divided by the engine's factor of the loss (ranks, loss scale).
        """
        ...

    def close(self) -> None:
        """Release the library's resources. The environment destroys process groups."""
        ...


class Stores(Protocol):
    """Operations of a checkpoint.

    Attributes:
        name: plain, ddp, fsdp, megatron or deepspeed.
        zero_stage: ZeRO stage, None for other engines.
    """

    name: str
    zero_stage: int | None

    def pieces(self) -> Iterator[Piece]:
        """Yield this rank's part of the weights and moments, always in the same order."""
        ...

    def create_optimizer_state(self) -> None:
        """Create the optimizer's moments (zeros) before the first step, so that pieces() contains them."""
        ...

    def after_load(self, optimizer_steps: int) -> None:
        """Publish weights written into pieces() to the forward pass, and set the number of steps."""
        ...

    def optimizer_steps(self) -> int:
        """Return the number of applied updates."""
        ...

    def extra_state(self) -> Mapping[str, float]:
        """Return small state such as a loss scale; may be empty."""
        ...

    def load_extra_state(self, state: Mapping[str, float]) -> None:
        """Restore `extra_state()` of this engine or of another kind."""
        ...


class Probes(Protocol):
    """Operations between steps: after `step`, `skip` or `discard_gradients`, before the next backward.

    Except `publish_weights`, they leave weights, moments and gradients unchanged.

    Attributes:
        shard_group: ranks that together have all parameters.
    """

    @property
    def shard_group(self) -> Group: ...

    def compute_gradient(self, losses: Sequence[Callable[[], Tensor]]) -> Shards:
        """Return the gradient of a sum of losses, summed over ranks.

        Args:
            losses: a function for each micro-batch of this rank, equally many on every rank. It runs the forward pass
                and returns the micro-batch's share of the global loss, as for `backward`.
        """
        ...

    def weights(self) -> Shards:
        """Return a copy of the weights."""
        ...

    def perturb_weights(
        self, direction: Shards, scale: float | Tensor, *, base: Shards | None = None
    ) -> AbstractContextManager[MoveTo]:
        """Context in which forwards read weights (or base) + scale x direction; yields a function that sets another
        scale. The weights are restored bit for bit."""
        ...

    def exchange_weights(self, other: Shards) -> AbstractContextManager[None]:
        """Context that swaps the weights with `other`; both are restored bit for bit."""
        ...

    def watch_micro_batches(self) -> None:
        """Record the norm of each micro-batch's gradient in later backward passes, which raise EngineError if the
        library does not expose it."""
        ...

    def micro_batch_squares(self) -> Tensor:
        """Return the sum of the squared gradient norms of the window's micro-batches on all ranks, of the losses given
        to `backward`; 0-dimensional float64. Call it after the last backward and before the step."""
        ...

    def step_response(self, direction: Shards, *, lr: float, grad_norm: float) -> Shards:
        """Return direction times d(-step) / d(gradient) of the last step, elementwise: lr for SGD, and for AdamW
        lr (1 - beta1) / (1 - beta1^t) / (sqrt(v_hat) + eps) with a constant second moment; both times the clipping
        factor.

        Args:
            lr: learning rate of the step.
            grad_norm: norm of its gradient before clipping.
        """
        ...

    def exact_forwards(self) -> AbstractContextManager[None]:
        """Context in which forwards compute in the precision of the parameters, without autocast."""
        ...

    @property
    def rounds_weights(self) -> bool:
        """Whether forwards read half-precision weights, which lose a small perturbation."""
        ...

    def publish_weights(self) -> None:
        """Copy weights written into pieces() between steps to the weights of the next forward."""
        ...

    def full_weights(self) -> dict[str, Tensor]:
        """Return all weights whole, on the CPU in fp32, on rank 0 (empty elsewhere). Slow, for comparisons."""
        ...


class Engine(Trains, Stores, Probes, Protocol):
    """Engine of a run: the three protocols."""
