"""Parameters in pieces: what a rank holds of each, and vectors over all of them that lie as the pieces do.

Every engine splits parameters over the ranks in its own way. Hooks, checkpoints and the engines meet in these types.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trp_scale.distributed.groups import Group

Integers = NDArray[np.int64]

STATE_NAMES = ("exp_avg", "exp_avg_sq")
"""Optimizer moments that are part of a checkpoint, beside the weights."""

WEIGHT_AVERAGE = "weight_average"
"""The state of a parameter that can stand in for its weight, where a hook keeps one (methods/weight_average.py)."""


@dataclass(frozen=True)
class Runs:
    """Runs of equal length in a flattened tensor.

    Attributes:
        starts: [R] int64, ascending, first element of each run; runs do not touch each other.
        length: elements of one run. The piece stores run after run: run i begins at element i * length of the piece.
    """

    starts: Integers
    length: int


@dataclass(frozen=True)
class FlatRange:
    """Elements [start, stop) of the tensor flattened row by row."""

    start: int
    stop: int

    def __str__(self) -> str:
        return f"@{self.start}:{self.stop}"

    @property
    def size(self) -> int:
        return self.stop - self.start

    def fits(self, shape: Sequence[int]) -> bool:
        """Whether the range lies inside a tensor of this shape and is not empty."""
        return 0 <= self.start < self.stop <= prod(shape)

    def of(self, whole: Tensor) -> Tensor:
        """View of these elements of a contiguous whole tensor, [size]."""
        return whole.view(-1)[self.start : self.stop]

    def runs(self, shape: Sequence[int]) -> Runs:
        """One run, whatever the shape."""
        return Runs(np.array([self.start], dtype=np.int64), self.size)


@dataclass(frozen=True)
class Box:
    """Elements of the tensor with start <= index < stop in every dimension, stored row by row."""

    bounds: tuple[tuple[int, int], ...]

    def __str__(self) -> str:
        return "#[" + ",".join(f"{start}:{stop}" for start, stop in self.bounds) + "]"

    @property
    def size(self) -> int:
        return prod(stop - start for start, stop in self.bounds)

    def fits(self, shape: Sequence[int]) -> bool:
        """Whether the box lies inside a tensor of this shape and is not empty."""
        if len(self.bounds) != len(shape):
            return False
        return all(0 <= start < stop <= length for (start, stop), length in zip(self.bounds, shape, strict=True))

    def of(self, whole: Tensor) -> Tensor:
        """View of these elements of a whole tensor, in the box's shape."""
        return whole[tuple(slice(start, stop) for start, stop in self.bounds)]

    def runs(self, shape: Sequence[int]) -> Runs:
        """Trailing dimensions that are whole join the last one that is cut: a box of whole rows is one run."""
        last = len(shape) - 1
        while last > 0 and self.bounds[last] == (0, shape[last]):
            last -= 1
        stride = prod(shape[last + 1 :])
        start, stop = self.bounds[last]
        length = (stop - start) * stride
        starts = np.array([start * stride], dtype=np.int64)  # [1]
        for dimension in range(last - 1, -1, -1):
            stride *= shape[dimension + 1]
            outer = np.arange(*self.bounds[dimension], dtype=np.int64) * stride
            starts = (outer[:, None] + starts[None, :]).reshape(-1)  # [indices of this dimension x runs so far]
        return Runs(starts, length)


Region = FlatRange | Box
"""Which elements of a parameter a piece holds: ZeRO cuts the flattened parameter, FSDP2 its rows (also a flat range),
tensor parallelism its columns too (a box)."""


@dataclass(kw_only=True)
class Piece:
    """The part of one parameter that this rank holds. Checkpoints write and fill the same objects.

    Attributes:
        name: parameter name without any wrapper's prefix.
        shape: shape of the whole parameter.
        region: which of its elements.
        tensors: "weight" and, once the optimizer has state, "exp_avg" and "exp_avg_sq": flat fp32 views of what the
            engine itself uses, [region.size], in the order of the region's runs; writing into them changes the engine.
        owner: exactly one rank owns each element; pieces that are replicas of another rank's have owner False.
    """

    name: str
    shape: tuple[int, ...]
    region: Region
    tensors: dict[str, Tensor]
    owner: bool = True


def foreach_chunk_bytes(device: torch.device) -> int:
    """Bytes of tensors to pass to one `torch._foreach` call. On a CPU intermediate results should stay in the cache:
    lists of 16 MiB took 1.2 to 2.5 times as long. On a GPU few kernel launches matter more."""
    return 1 << 20 if device.type == "cpu" else 32 << 20


def foreach_chunks(*vectors: Sequence[Tensor]) -> Iterator[tuple[list[Tensor], ...]]:
    """Split vectors of the same layout into lists of neighbouring parts, at least one part per list."""
    held: list[tuple[Tensor, ...]] = []
    size = 0
    for parts in zip(*vectors, strict=True):
        size += parts[0].nbytes
        if held and size > foreach_chunk_bytes(parts[0].device):
            yield tuple(list(tensors) for tensors in zip(*held, strict=True))
            held, size = [], parts[0].nbytes
        held.append(parts)
    if held:
        yield tuple(list(tensors) for tensors in zip(*held, strict=True))


def copy_parts(parts: Sequence[Tensor]) -> list[Tensor]:
    """A copy of each, contiguous."""
    copies = [torch.empty_like(part, memory_format=torch.contiguous_format) for part in parts]
    for to, chunk in foreach_chunks(copies, parts):
        torch._foreach_copy_(to, chunk)
    return copies


def scale_parts(parts: Sequence[Tensor], factor: float | Tensor) -> list[Tensor]:
    """factor x each part. A factor on a device is not waited for."""
    factor = factor.to(parts[0]) if parts and isinstance(factor, Tensor) else factor
    return [part for (chunk,) in foreach_chunks(parts) for part in torch._foreach_mul(chunk, factor)]


def shares(size: int, world: int) -> list[tuple[int, int]]:
    """The range of `size` elements that each of `world` ranks owns; the last ones may be empty."""
    share = -(-size // world)
    return [(min(owner * share, size), min((owner + 1) * share, size)) for owner in range(world)]


def owned_ranges(
    name: str, shape: tuple[int, ...], tensors: Mapping[str, Tensor], *, rank: int, world: int
) -> Iterator[Piece]:
    """A parameter that every rank holds whole, as one piece for each rank of `world`; this rank owns the one."""
    flat = {key: tensor.detach().reshape(-1) for key, tensor in tensors.items()}
    for owner, (start, stop) in enumerate(shares(prod(shape), world)):
        yield Piece(
            name=name,
            shape=shape,
            region=FlatRange(start, stop),
            tensors={key: tensor[start:stop] for key, tensor in flat.items()},
            owner=owner == rank,
        )


def whole_tensors(pieces: Iterable[Piece], parts: Iterable[Tensor], group: Group) -> dict[str, Tensor]:
    """A vector over all parameters as one whole tensor for each, on the CPU of every rank; slow, for looking at it.

    Args:
        pieces: an engine's.
        parts: this rank's part of the vector for each of the pieces.
        group: the ranks that hold it together.
    """
    mine = [
        (piece.name, piece.shape, piece.region, part.detach().cpu())
        for piece, part in zip(pieces, parts, strict=True)
        if piece.owner
    ]
    tensors: dict[str, Tensor] = {}
    for name, shape, region, part in (entry for rank in group.gather_objects(mine) for entry in rank):
        target = region.of(tensors.setdefault(name, part.new_empty(shape)))
        target.copy_(part.view(target.shape))
    return tensors


@dataclass(frozen=True, kw_only=True)
class Shards:
    """A vector over all parameters of an engine.

    Attributes:
        parts: this rank's part, flat and in fp32 (float64 if the weights are), one for each of the engine's pieces, in
            their order.
        owned: whether this rank speaks for the part: the owned parts of all ranks hold every element once.
        group: the ranks that hold it together.
    """

    parts: list[Tensor]
    owned: list[bool]
    group: Group

    def norm(self) -> Tensor:
        """0-dimensional float64: l2, over all ranks."""
        ours = [part for part, owned in zip(self.parts, self.owned, strict=True) if owned]
        norms = [norm for (chunk,) in foreach_chunks(ours) for norm in torch._foreach_norm(chunk, 2, torch.float64)]
        device = self.parts[0].device if self.parts else torch.device("cpu")
        local = torch.stack(norms).square().sum() if norms else torch.zeros((), dtype=torch.float64, device=device)
        return self.group.sum(local).sqrt()

    def plus(self, other: Shards, factor: float | Tensor = 1.0) -> Shards:
        """self + factor x other."""
        parts = other.times(factor).parts
        for chunk, mine in foreach_chunks(parts, self.parts):
            torch._foreach_add_(chunk, mine)
        return replace(self, parts=parts)

    def shift(self, by: float) -> Shards:
        """self + by, in every element."""
        return replace(
            self, parts=[part for (chunk,) in foreach_chunks(self.parts) for part in torch._foreach_add(chunk, by)]
        )

    def times(self, factor: float | Tensor) -> Shards:
        """factor x self."""
        return replace(self, parts=scale_parts(self.parts, factor))
