"""Pieces: each rank's part of the parameters, and vectors over all parameters with the same layout.

Every engine shards parameters differently. These types are common to hooks, checkpoints and engines.
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
"""Optimizer moments in a checkpoint."""

WEIGHT_AVERAGE = "weight_average"
"""Name of the averaged weights, if a hook keeps them (methods/weight_average.py)."""


@dataclass(frozen=True)
class Runs:
    """Contiguous runs of equal length in a flattened tensor.

    Attributes:
        starts: [R] int64, ascending, first element of each run; with gaps between runs.
        length: elements of a run. Run i starts at element i * length of the piece.
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
        """Return one run."""
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
        """Return the runs; complete trailing dimensions are joined, so a box of whole rows is one run."""
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
"""Elements of a parameter in a piece: ZeRO splits the flattened parameter, FSDP2 its rows (also a flat range), tensor
parallelism also its columns (a box)."""


@dataclass(kw_only=True)
class Piece:
    """This rank's part of a parameter. Checkpoints read and write its tensors.

    Attributes:
        name: parameter name without a wrapper's prefix.
        shape: shape of the whole parameter.
        region: elements of this part.
        tensors: "weight" and, once the optimizer has state, "exp_avg" and "exp_avg_sq": flat fp32 views of the engine's
            tensors, [region.size], in the order of the region's runs; writing into them changes the engine.
        owner: False for replicas; exactly one rank owns each element.
    """

    name: str
    shape: tuple[int, ...]
    region: Region
    tensors: dict[str, Tensor]
    owner: bool = True


def foreach_chunk_bytes(device: torch.device) -> int:
    """Return the bytes of tensors for one `torch._foreach` call. On a CPU intermediate results should stay in the
    cache: lists of 16 MiB took 1.2 to 2.5 times as long. On a GPU fewer kernel launches matter more."""
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
    """Return contiguous copies."""
    copies = [torch.empty_like(part, memory_format=torch.contiguous_format) for part in parts]
    for to, chunk in foreach_chunks(copies, parts):
        torch._foreach_copy_(to, chunk)
    return copies


def scale_parts(parts: Sequence[Tensor], factor: float | Tensor) -> list[Tensor]:
    """Return factor x each part, without a wait for a factor on a device."""
    factor = factor.to(parts[0]) if parts and isinstance(factor, Tensor) else factor
    return [part for (chunk,) in foreach_chunks(parts) for part in torch._foreach_mul(chunk, factor)]


def shares(size: int, world: int) -> list[tuple[int, int]]:
    """Return the range of `size` elements that each of `world` ranks owns; the last ranges may be empty."""
    share = -(-size // world)
    return [(min(owner * share, size), min((owner + 1) * share, size)) for owner in range(world)]


def owned_ranges(
    name: str, shape: tuple[int, ...], tensors: Mapping[str, Tensor], *, rank: int, world: int
) -> Iterator[Piece]:
    """Yield a replicated parameter as a piece for each rank of `world`; this rank owns its piece."""
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
    """Gather a vector over all parameters as whole tensors on the CPU of every rank. Slow, for inspection.

    Args:
        pieces: pieces of an engine.
        parts: this rank's part of the vector for each piece.
        group: ranks that together have the vector.
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
    """Vector over all parameters of an engine.

    Attributes:
        parts: this rank's parts, flat in fp32 (or float64 like the weights), for each of the engine's pieces in order.
        owned: whether this rank owns each part: the owned parts of all ranks have every element once.
        group: ranks that together have the vector.
    """

    parts: list[Tensor]
    owned: list[bool]
    group: Group

    def norm(self) -> Tensor:
        """Return the l2 norm over all ranks, 0-dimensional float64."""
        ours = [part for part, owned in zip(self.parts, self.owned, strict=True) if owned]
        norms = [norm for (chunk,) in foreach_chunks(ours) for norm in torch._foreach_norm(chunk, 2, torch.float64)]
        device = self.parts[0].device if self.parts else torch.device("cpu")
        local = torch.stack(norms).square().sum() if norms else torch.zeros((), dtype=torch.float64, device=device)
        return self.group.sum(local).sqrt()

    def plus(self, other: Shards, factor: float | Tensor = 1.0) -> Shards:
        """Return self + factor x other."""
        parts = other.times(factor).parts
        for chunk, mine in foreach_chunks(parts, self.parts):
            torch._foreach_add_(chunk, mine)
        return replace(self, parts=parts)

    def shift(self, by: float) -> Shards:
        """Return self + by, elementwise."""
        return replace(
            self, parts=[part for (chunk,) in foreach_chunks(self.parts) for part in torch._foreach_add(chunk, by)]
        )

    def times(self, factor: float | Tensor) -> Shards:
        """Return factor x self."""
        return replace(self, parts=scale_parts(self.parts, factor))
