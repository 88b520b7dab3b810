"""Operations of every engine on its pieces: gradient norms of a window and of each micro-batch; between steps,
gradients of any loss and forward passes with perturbed weights."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from trp_scale.core.engine import MoveTo
from trp_scale.core.pieces import Piece, Shards, copy_parts, foreach_chunks, scale_parts
from trp_scale.distributed.groups import Group
from trp_scale.engines.captured import Captured

ADDED_IN_FP32 = 1 << 16
"""Maximum number of elements whose squares a CPU sums in fp32."""


def parts(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """Split tensors into parts with accurate fp32 norms. A CPU adds squares sequentially: over the 23 M elements of
    BERT-base's embedding the norm is 1e-3 too small, by an error that depends on the sharding."""
    for tensor in tensors:
        if tensor.device.type == "cpu" and tensor.numel() > ADDED_IN_FP32:
            yield from torch.split(tensor.reshape(-1), ADDED_IN_FP32)
        else:
            yield tensor


def sum_of_squares(gradients: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return the sum of the squares of all elements, 0-dimensional float64 on `device`; 0 without gradients.

    Norms are computed in fp32 at least: in fp16 the norm of a scaled gradient exceeds 65504, and all steps would be
    skipped.
    """
    if not gradients:
        return torch.zeros((), dtype=torch.float64, device=device)
    wide = torch.promote_types(gradients[0].dtype, torch.float32)
    norms = torch._foreach_norm([*parts(gradients)], 2, wide)
    return torch.stack(norms).double().square().sum().to(device)


def assign_to_least_loaded(sizes: Sequence[int], places: int) -> list[int]:
    """Assign each size in turn to the place with the smallest sum."""
    held, owners = [0] * places, []
    for size in sizes:
        owners.append(owner := held.index(min(held)))
        held[owner] += size
    return owners


class MicroBatchSquares:
    """Sum of the squared norms of the micro-batches' gradients, computed during the backward passes.

    A hook on each parameter receives the whole gradient of the micro-batch before it is accumulated or reduced, so this
    needs no further pass, no copy and no wait for the device.
    """

    def __init__(self) -> None:
        self._watched: set[int] = set()
        self._norms: list[Tensor] = []

    def watch(self, parameters: Iterable[Tensor]) -> None:
        """Add leaves, from the next backward pass on."""
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
        """Return the sum over this rank's backward passes since the last `clear`, 0-dimensional float64."""
        if not self._norms:
            return torch.zeros((), dtype=torch.float64, device=device)
        return torch.stack(self._norms).double().square().sum().to(device)


class ShardOperations(ABC):
    """Operations of every engine on `Shards`, built on its pieces and its backward pass.

    Call them between steps: after `step`, `skip` or `discard_gradients`, and before the next backward.
    """

    device: torch.device
    data_group: Group
    unpublished: bool = False
    micro_batches: MicroBatchSquares | None = None
    captured_graphs: Captured | None = None

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
        """Parameters of the forward pass, for which a backward pass computes whole gradients."""

    @abstractmethod
    def loss_factor(self) -> float:
        """Return the factor of the losses in a rank's gradient (ranks, loss scale)."""

    @abstractmethod
    def piece_gradients(self) -> list[Tensor]:
        """Return the reduced, unscaled gradient after the last backward, a flat tensor for each of `pieces()`; zero for
        unused parameters. May be views of tensors that the engine clears later."""

    @abstractmethod
    def clear_unused_gradients(self) -> None:
        """Clear earlier gradients of parameters that the next backward pass does not use."""

    @abstractmethod
    def publish_weights(self) -> None:
        """Copy the weights in `pieces()` to the weights of the next forward, on all ranks."""

    def reduce_hook_gradient(self, gradient: Tensor) -> Tensor:
        return self.data_group.sum(gradient) / self.loss_factor()

    def watch_micro_batches(self) -> None:
        self.micro_batches = MicroBatchSquares()

    def watch_backward(self) -> None:
        """Prepare a backward pass for `watch_micro_batches`; call it before each."""
        if self.micro_batches is not None:
            self.micro_batches.watch(self.leaves())

    def micro_batch_squares(self) -> Tensor:
        assert self.micro_batches is not None, "watch_micro_batches() comes first"
        return self.data_group.sum(self.micro_batches.total(self.device)) / self.loss_factor() ** 2

    def forget_micro_batches(self) -> None:
        """Clear the norms of the window's micro-batches."""
        if self.micro_batches is not None:
            self.micro_batches.clear()

    def compute_gradient(self, losses: Sequence[Callable[[], Tensor]]) -> Shards:
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
        """Context in which forwards read weights (or base) + scale x direction; it yields a function that sets another
        scale. On exit the weights are restored bit for bit.

        After an error too. Publishing is a collective and the other ranks may be elsewhere, so the next forward
        publishes the restored weights.

        Args:
            base: swapped with the weights inside the context, to avoid a third copy; restored up to rounding.
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
        """Context that swaps the weights with `other`. Both are restored bit for bit, also after an error; see
        `perturb_weights`."""
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
        """Publish the weights that `perturb_weights` restored after an error; call it before a forward."""
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
        """Return each piece's weights, after running forwards have read them."""
        weights = [piece.tensors["weight"] for piece in self.pieces()]
        if any(weight.device.type != self.device.type for weight in weights):
            torch.accelerator.synchronize(self.device)  # it copies them from host memory asynchronously
        return weights

    def _shards(self, parts: list[Tensor]) -> Shards:
        return Shards(parts=parts, owned=[piece.owner for piece in self.pieces()], group=self.shard_group)
