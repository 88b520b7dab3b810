"""The engine: who holds parameters, shards, precision and the optimizer. The loop and the hooks know only this.

An engine receives losses whose gradients *add up* to the gradient of the global batch: every micro-batch's loss is
already divided by the global counts. Whatever the library behind it divides by (ranks, accumulation steps), the engine
multiplies back, so that the same losses give the same step on every engine (design.md, invariant 1).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from trp_scale.config import RefusedError
from trp_scale.distributed.groups import Group

if TYPE_CHECKING:
    from trp_scale.engines.shards import Shards

STATE_NAMES = ("exp_avg", "exp_avg_sq")
"""Optimizer moments that are part of a checkpoint, beside the weights."""


class EngineError(RefusedError):
    """The engine cannot do what is asked; the message says what to change."""


@dataclass(kw_only=True)
class Piece:
    """The part of one parameter that this rank holds: a range of the parameter, flattened row by row.

    Attributes:
        name: parameter name without any wrapper's prefix.
        shape: shape of the whole parameter.
        start: first element of the range in the flattened parameter.
        tensors: "weight" and, once the optimizer has state, "exp_avg" and "exp_avg_sq": flat fp32 views of what the
            engine itself uses, [stop - start]; writing into them changes the engine.
        owner: exactly one rank owns each element; pieces that are replicas of another rank's have owner False.
    """

    name: str
    shape: tuple[int, ...]
    start: int
    tensors: dict[str, Tensor]
    owner: bool = True

    @property
    def stop(self) -> int:
        return self.start + int(self.tensors["weight"].numel())


class Engine(Protocol):
    """What a training step needs. All ranks call every method together."""

    name: str
    """plain, fsdp or deepspeed."""
    zero_stage: int | None
    """ZeRO stage, None where the word does not apply."""
    device: torch.device
    data_group: Group
    """Ranks that split the batch."""

    @property
    def module(self) -> nn.Module:
        """The model, as this engine wraps it; call the engine itself for a forward pass."""
        ...

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Forward pass in the run's precision."""
        ...

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Add the gradient of `loss` (this micro-batch's share of the global loss). `last`: the window ends here."""
        ...

    def check_gradients(self) -> Tensor:
        """Norm of the global gradient, reduced and unscaled, 0-dimensional, the same on all ranks.

        Called after the last backward. Not finite: the step must be skipped. It stays on the device; the loop reads it
        together with the loss.
        """
        ...

    def step(self, lr: float) -> None:
        """Clip, update with learning rate `lr`, clear gradients."""
        ...

    def reduce_hook_gradient(self, gradient: Tensor) -> Tensor:
        """The global batch's gradient of a hook's own tensor, from what backward() left in its `.grad` on each rank.

        Summed over the data ranks; what the engine multiplied the loss by (ranks, loss scale) is divided out.
        """
        ...

    def discard_gradients(self) -> None:
        """Drop the gradients and leave everything else as it is, a loss scaler too."""
        ...

    def clear_unused_gradients(self) -> None:
        """Before a window in whose first micro-batch some parameters take no part: what is left of older gradients must
        not be added to theirs. ZeRO-3 and offloaded optimizers keep such; where nothing is kept this does nothing."""
        ...

    def skip(self) -> bool:
        """Drop the gradients; weights and moments stay.

        Returns:
            True when this was a loss scaler's ordinary search: the next step is tried with a lower scale.
        """
        ...

    def train(self, mode: bool) -> None:
        """Dropout on or off."""
        ...

    def pieces(self) -> Iterator[Piece]:
        """This rank's part of the weights and moments, in the same order on every call."""
        ...

    def publish_weights(self) -> None:
        """Carry what was written into pieces() between steps into what the next forward reads."""
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
        """Small state of the engine's own, e.g. a loss scale; empty where there is none."""
        ...

    def load_extra_state(self, state: Mapping[str, float]) -> None: ...

    def gradient_of(self, losses: Sequence[Callable[[], Tensor]]) -> Shards:
        """Gradient of any loss between steps, leaving no trace; see shards.ShardOperations for this and the next two.

        Each function is one micro-batch's forward pass and gives its share of the global loss.
        """
        ...

    def weights(self) -> Shards:
        """A copy of the weights."""
        ...

    def perturbed(
        self, direction: Shards, scale: float | Tensor, *, base: Shards | None = None
    ) -> AbstractContextManager[None]:
        """Forwards read weights (or base) + scale x direction; restored bit for bit."""
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

    def full_weights(self) -> dict[str, Tensor]:
        """All weights, whole, on the CPU in fp32, on rank 0 (empty elsewhere). For comparison, not for speed."""
        ...

    def close(self) -> None:
        """Release what the library holds. Process groups are destroyed by the environment that made them."""
        ...
