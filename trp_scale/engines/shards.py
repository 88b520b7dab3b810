"""Operations of every engine on its pieces: gradient norms of a window and of each micro-batch; and, between steps,
gradients of any loss and forward passes at weights moved along a direction."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from trp_scale.core.engine import MoveTo
from trp_scale.core.pieces import Piece, Shards, copy_parts, foreach_chunks, scale_parts
from trp_scale.distributed.groups import Group

ADDED_IN_FP32 = 1 << 16
"""Elements whose squares a CPU adds in fp32."""


def parts(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield the elements in tensors whose norms are exact enough in fp32. A CPU adds squares one after another: over
    the 23 M elements of BERT-base's embedding the norm comes out 1e-3 too small, and another one for each sharding."""
    for tensor in tensors:
        if tensor.device.type == "cpu" and tensor.numel() > ADDED_IN_FP32:
            yield from torch.split(tensor.reshape(-1), ADDED_IN_FP32)
        else:
            yield tensor


def sum_of_squares(gradients: Sequence[Tensor], device: torch.device) -> Tensor:
    """Sum of the squares of all elements, 0-dimensional float64 on `device`; 0 where there are no gradients.

    Norms are taken in fp32 at least: in fp16 the norm of a scaled gradient passes 65504, and no step would be applied.
    """
    if not gradients:
        return torch.zeros((), dtype=torch.float64, device=device)
    wide = torch.promote_types(gradients[0].dtype, torch.float32)
    norms = torch._foreach_norm([*parts(gradients)], 2, wide)
    return torch.stack(norms).double().square().sum().to(device)


class MicroBatchSquares:
    """Sums the squared norms of the micro-batches' own gradients while the backward passes compute them.

    A backward pass hands each parameter the whole gradient of its micro-batch, before libraries add it to the window's
    or reduce it. A hook on the parameter takes its norm there: no further pass, no copy, no wait for the device.
    """

    def __init__(self) -> None:
        self._watched: set[int] = set()
        self._norms: list[Tensor] = []

    def watch(self, parameters: Iterable[Tensor]) -> None:
        """Watch these leaves too, from the next backward pass on."""
        for parameter in parameters:
            if parameter.requires_grad and id(parameter) not in self._watched:
                self._watched.add(id(parameter))
                parameter.register_hook(self._note)  # type: ignore[no-untyped-call]

    def _note(self, gradient: Tensor) -> None:
        wide = torch.promote_types(gradient.dtype, torch.float32)
        self._norms += [torch.linalg.vector_norm(part, dtype=wide) for part in parts([gradient.detach()])]

    def clear(self) -> None:
        self._norms.clear()

    def total(self, device: torch.device) -> Tensor:
        """0-dimensional float64: the sum over this rank's backward passes since the last `clear`."""
        if not self._norms:
            return torch.zeros((), dtype=torch.float64, device=device)
        return torch.stack(self._norms).double().square().sum().to(device)


class ShardOperations(ABC):
    """Operations of every engine on `Shards`, by its pieces and its own backward pass.

    All of it is for the time between steps: after `step`, `skip` or `discard_gradients`, and before the next backward.
    """

    device: torch.device
    data_group: Group
    unpublished: bool = False
    micro_batches: MicroBatchSquares | None = None

    @property
    def shard_group(self) -> Group:
        return self.data_group

    @abstractmethod
    def pieces(self) -> Iterator[Piece]: ...

    @abstractmethod
    def backward(self, loss: Tensor, *, last: bool) -> None: ...

    @abstractmethod
    def discard_gradients(self) -> None: ...

    @abstractmethod
    def leaves(self) -> Iterator[Tensor]:
        """The parameters as forwards read them: where a backward pass leaves whole gradients."""

    @abstractmethod
    def loss_factor(self) -> float:
        """Return the factor of this window's losses before a rank's gradient."""

    @abstractmethod
    def piece_gradients(self) -> list[Tensor]:
        """The reduced, unscaled gradient after the last backward, one flat tensor for each of `pieces()`; zero for a
        parameter that took no part. May be views of what the engine will clear."""

    @abstractmethod
    def clear_unused_gradients(self) -> None:
        """Before a backward pass in which some parameters take no part: let them have no gradient of an earlier one."""

    @abstractmethod
    def publish_weights(self) -> None:
        """Carry what was written into `pieces()` over to the weights that the next forward reads, on all ranks."""

    def reduce_hook_gradient(self, gradient: Tensor) -> Tensor:
        return self.data_group.sum(gradient) / self.loss_factor()

    def watch_micro_batches(self) -> None:
        self.micro_batches = MicroBatchSquares()

    def watch_backward(self) -> None:
        """Before each backward pass."""
        if self.micro_batches is not None:
            self.micro_batches.watch(self.leaves())

    def micro_batch_squares(self) -> Tensor:
        """See core/engine.py: Probes."""
        assert self.micro_batches is not None, "watch_micro_batches() comes first"
        return self.data_group.sum(self.micro_batches.total(self.device)) / self.loss_factor() ** 2

    def forget_micro_batches(self) -> None:
        """The window is over: what was noted of its micro-batches goes."""
        if self.micro_batches is not None:
            self.micro_batches.clear()

    def compute_gradient(self, losses: Sequence[Callable[[], Tensor]]) -> Shards:
        """Gradient of a sum of losses, summed over ranks; leaves no trace in weights, moments or gradients.

        Args:
            losses: one function for each micro-batch of this rank, which runs its forward pass; as many on every rank.
                Each gives this micro-batch's share of the global loss, as for `backward`.
        """
        self.clear_unused_gradients()
        try:
            for number, loss in enumerate(losses):
                self.backward(loss(), last=number == len(losses) - 1)
            return self._shards(copy_parts(self.piece_gradients()))
        finally:
            self.discard_gradients()

    def weights(self) -> Shards:
        return self._shards(copy_parts([piece.tensors["weight"] for piece in self.pieces()]))

    @contextmanager
    def perturb_weights(
        self, direction: Shards, scale: float | Tensor, *, base: Shards | None = None
    ) -> Iterator[MoveTo]:
        """Forwards read weights + scale x direction, or base + scale x direction; what this gives moves on to another
        scale. Afterwards the weights are what they were, bit for bit.

        The same holds when a forward raises. Publishing is a collective, and other ranks may then be anywhere: the next
        forward publishes what was put back.

        Args:
            base: changes places with the weights inside, so that no third copy is needed. It comes back with its own
                values up to rounding.
        """
        saved = self.weights() if base is None else base
        if base is not None:
            self._exchange(base)
        at: float | Tensor = 0.0

        def move_to(other: float | Tensor) -> None:
            nonlocal at
            self._move(direction, other - at)
            at = other
            self.publish_weights()

        try:
            move_to(scale)
            yield move_to
        except BaseException:
            self._restore(saved, direction, at, base=base)
            self.unpublished = True
            raise
        self._restore(saved, direction, at, base=base)
        self.publish_weights()

    @contextmanager
    def exchange_weights(self, other: Shards) -> Iterator[None]:
        """Forwards read `other`, which holds the weights for that time; afterwards both are what they were, bit for
        bit. Also when the forward raises; see `perturbed`."""
        self._exchange(other)
        self.publish_weights()
        try:
            yield
        except BaseException:
            self._exchange(other)
            self.unpublished = True
            raise
        self._exchange(other)
        self.publish_weights()

    @torch.no_grad()
    def _exchange(self, other: Shards) -> None:
        for weights, parts in foreach_chunks(self._weights_to_write(), other.parts):
            before = copy_parts(weights)
            torch._foreach_copy_(weights, parts)
            torch._foreach_copy_(parts, before)

    def publish_restored(self) -> None:
        """Before a forward: publish the weights that an interrupted `perturbed` has put back."""
        if self.unpublished:
            self.publish_weights()
            self.unpublished = False

    @torch.no_grad()
    def _move(self, direction: Shards, distance: float | Tensor) -> None:
        for weights, way in foreach_chunks(self._weights_to_write(), direction.parts):
            torch._foreach_add_(weights, scale_parts(way, distance))

    @torch.no_grad()
    def _restore(self, saved: Shards, direction: Shards, scale: float | Tensor, *, base: Shards | None) -> None:
        if base is not None:
            self._exchange(saved)
            for parts, way in foreach_chunks(saved.parts, direction.parts):
                torch._foreach_sub_(parts, scale_parts(way, scale))
            return
        for weights, parts in foreach_chunks(self._weights_to_write(), saved.parts):
            torch._foreach_copy_(weights, parts)

    def _weights_to_write(self) -> list[Tensor]:
        """Each piece's weights, once no forward that is under way can still read them."""
        weights = [piece.tensors["weight"] for piece in self.pieces()]
        if any(weight.device.type != self.device.type for weight in weights):
            torch.accelerator.synchronize(self.device)  # the device copies them from host memory when it gets there
        return weights

    def _shards(self, parts: list[Tensor]) -> Shards:
        return Shards(parts=parts, owned=[piece.owner for piece in self.pieces()], group=self.shard_group)
