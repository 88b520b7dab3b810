"""The engine: who holds parameters, shards, precision and the optimizer. The loop and the hooks know only this.

What an engine does is said in three protocols, so that each part of the program asks for no more than it needs:

- `Trains`: forward, backward, step. The loop and validation need it.
- `Stores`: its pieces and the small state beside them. Checkpoints need it.
- `Probes`: gradients and forwards at other weights, between steps. Learned masks and the weight average need it.

An engine receives losses whose gradients *add up* to the gradient of the global batch: every micro-batch's loss is
already divided by the global counts. Whatever the library behind it divides by (ranks, accumulation steps), the engine
multiplies back, so that the same losses give the same step on every engine.

All ranks call every method together.
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
    from trp_scale.core.objective import Objective

MoveTo = Callable[[float | Tensor], None]
"""Has forwards read the weights at another scale x direction."""


class EngineError(RefusedError):
    """The engine cannot do what is asked; the message says what to change."""


class CompiledGraphs(Protocol):
    """Compiled graphs of an engine's model.

    Attributes:
        made: graphs that the calls so far have led to.
        surplus: those that no mode of the run needed, in words, oldest first.
    """

    made: int
    surplus: list[str]

    def losses(self, objective: Objective, forward: Callable[..., Any], batch: Batch) -> TaskLosses:
        """The objective's losses of a batch, in one graph with the forward pass where engine and objective allow it.

        Args:
            forward: the engine.
        """
        ...

    def seconds(self) -> float:
        """Spent on compiling, in this process since the engine was made."""
        ...

    def found(self) -> int:
        """Return the number of graphs found in the cache directory of an earlier start."""
        ...


class Trains(Protocol):
    """Operations of a training step.

    Attributes:
        device: where it computes.
        data_group: ranks that split the batch.
        decides_on_host: `step` cannot leave a step out by itself: the loop waits for the decision, and calls `skip`.
    """

    device: torch.device
    data_group: Group
    decides_on_host: bool

    @property
    def graphs(self) -> CompiledGraphs | None:
        """Graphs of the compiled model; `None` without compilation."""
        ...

    @property
    def module(self) -> nn.Module:
        """The model, as this engine wraps it; call the engine itself for a forward pass."""
        ...

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Forward pass in the run's precision."""
        ...

    def train(self, mode: bool) -> None:
        """Dropout on or off."""
        ...

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Add the gradient of `loss` (this micro-batch's share of the global loss). `last`: the window ends here."""
        ...

    def check_gradients(self) -> Tensor:
        """Norm of the global gradient, reduced and unscaled, 0-dimensional, the same on all ranks.

        Called after the last backward. Not finite: the step must be skipped. It stays on the device.
        """
        ...

    def step(self, lr: float, applied: Tensor | None = None) -> None:
        """Clip, update with learning rate `lr`, clear gradients.

        Args:
            applied: 0-dimensional bool on the device. Where it is False, weights, moments and the number of steps stay.
                None = True; with `decides_on_host` it is not asked.
        """
        ...

    def skip(self) -> bool:
        """Drop the gradients; weights and moments stay.

        Returns:
            True when this was a loss scaler's ordinary search: the next step is tried with a lower scale.
        """
        ...

    def discard_gradients(self) -> None:
        """Drop the gradients and leave everything else as it is, a loss scaler too."""
        ...

    def clear_unused_gradients(self) -> None:
        """Clear the last gradients of parameters that take no part in the next backward pass.

        ZeRO-3 and offloaded optimizers keep the last gradient of an unused parameter. Call this before a window in
        whose first micro-batch some parameters are unused. The other engines keep nothing, and do nothing here.
        """
        ...

    def reduce_hook_gradient(self, gradient: Tensor) -> Tensor:
        """The global batch's gradient of a hook's own tensor, from what backward() left in its `.grad` on each rank.

        Summed over the data ranks; what the engine multiplied the loss by (ranks, loss scale) is divided out.
        """
        ...

    def close(self) -> None:
        """Release what the library holds. Process groups are destroyed by the environment that made them."""
        ...


class Stores(Protocol):
    """Operations of a checkpoint.

    Attributes:
        name: plain, ddp, fsdp, megatron or deepspeed.
        zero_stage: ZeRO stage, None where the word does not apply.
    """

    name: str
    zero_stage: int | None

    def pieces(self) -> Iterator[Piece]:
        """This rank's part of the weights and moments, in the same order on every call."""
        ...

    def create_optimizer_state(self) -> None:
        """Make the optimizer's moments exist (zeros) before the first step, so that pieces() can be written into."""
        ...

    def after_load(self, optimizer_steps: int) -> None:
        """Call after writing into pieces(): carry master weights into what the forward reads, set the steps done."""
        ...

    def optimizer_steps(self) -> int:
        """Updates applied so far (skipped steps do not count)."""
        ...

    def extra_state(self) -> Mapping[str, float]:
        """Small state of the engine's own, such as a loss scale; may be empty."""
        ...

    def load_extra_state(self, state: Mapping[str, float]) -> None:
        """Take back what extra_state gave, of this engine or of another kind."""
        ...


class Probes(Protocol):
    """Operations on an engine between steps: after `step`, `skip` or `discard_gradients`, before the next backward.

    None of it leaves a trace in weights, moments or gradients, `publish_weights` left out.

    Attributes:
        shard_group: ranks that hold the parameters together.
    """

    @property
    def shard_group(self) -> Group: ...

    def compute_gradient(self, losses: Sequence[Callable[[], Tensor]]) -> Shards:
        """Gradient of a sum of losses, summed over ranks.

        Args:
            losses: one function for each micro-batch of this rank, which runs its forward pass; as many on every rank.
                Each gives this micro-batch's share of the global loss, as for `backward`.
        """
        ...

    def weights(self) -> Shards:
        """A copy of the weights."""
        ...

    def perturb_weights(
        self, direction: Shards, scale: float | Tensor, *, base: Shards | None = None
    ) -> AbstractContextManager[MoveTo]:
        """Forwards read weights (or base) + scale x direction; what the context gives moves on to another scale.
        Restored bit for bit."""
        ...

    def exchange_weights(self, other: Shards) -> AbstractContextManager[None]:
        """Forwards read `other`, which holds the weights for that time; both come back bit for bit."""
        ...

    def watch_micro_batches(self) -> None:
        """Record the norm of each micro-batch's own gradient in later backward passes; these raise EngineError if the
        library does not expose it."""
        ...

    def micro_batch_squares(self) -> Tensor:
        """Sum over the window's micro-batches on all ranks of the squared norm of the gradient of each one's loss, as
        given to `backward`; 0-dimensional float64. Asked for after the last backward and before the step."""
        ...

    def step_response(self, direction: Shards, *, lr: float, grad_norm: float) -> Shards:
        """direction times d(-step) / d(gradient) of the last step, element by element: a step of gradient descent gives
        lr, AdamW lr (1 - beta1) / (1 - beta1^t) / (sqrt(v_hat) + eps) with its second moment held; both times the
        factor that clipping gave.

        Args:
            lr: of that step.
            grad_norm: of its gradient, before clipping.
        """
        ...

    def exact_forwards(self) -> AbstractContextManager[None]:
        """Forwards in the precision of the parameters: autocast is off."""
        ...

    @property
    def rounds_weights(self) -> bool:
        """Whether forwards read the weights rounded to half precision, so that a small perturbation is lost."""
        ...

    def publish_weights(self) -> None:
        """Carry what was written into pieces() between steps over to the weights that the next forward reads."""
        ...

    def full_weights(self) -> dict[str, Tensor]:
        """All weights, whole, on the CPU in fp32, on rank 0 (empty elsewhere). For comparison, not for speed."""
        ...


class Engine(Trains, Stores, Probes, Protocol):
    """The three together: the engine of a run."""
