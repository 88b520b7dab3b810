"""Parameters in pieces: what a rank holds of each, and vectors over all of them that lie as the pieces do.

Every engine splits parameters over the ranks in its own way. Hooks, checkpoints and the engines meet in these types.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from trp_scale.distributed.groups import Group

STATE_NAMES = ("exp_avg", "exp_avg_sq")
"""Optimizer moments that are part of a checkpoint, beside the weights."""


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

    def dot(self, other: Shards) -> Tensor:
        """0-dimensional float64: the inner product over all ranks."""
        own = [
            (mine.double() @ theirs.double()).reshape(1)
            for mine, theirs, owned in zip(self.parts, other.parts, self.owned, strict=True)
            if owned
        ]
        device = self.parts[0].device if self.parts else torch.device("cpu")
        local = torch.cat(own).sum() if own else torch.zeros((), dtype=torch.float64, device=device)
        return self.group.sum(local)

    def norm(self) -> Tensor:
        """0-dimensional float64: l2, over all ranks."""
        return self.dot(self).sqrt()

    def plus(self, other: Shards, factor: float | Tensor = 1.0) -> Shards:
        """self + factor x other."""
        pairs = zip(self.parts, other.parts, strict=True)
        return replace(self, parts=[mine + factor * theirs for mine, theirs in pairs])

    def shifted(self, by: float) -> Shards:
        """self + by, in every element."""
        return replace(self, parts=[part + by for part in self.parts])

    def times(self, factor: float | Tensor) -> Shards:
        """factor x self."""
        return replace(self, parts=[factor * part for part in self.parts])
