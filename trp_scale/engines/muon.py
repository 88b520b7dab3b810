"""Muon (Jordan et al. 2024): the update of each matrix of the blocks is the nearest semi-orthogonal matrix of its
momentum. All other parameters are updated by AdamW.

Momentum is sharded like the weights. Before the orthogonalisation the parts of a matrix are sent to one rank, its
owner; afterwards the result is sent to the ranks that have parts. So each matrix is orthogonalised once, and replicas
get the same bits.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from operator import itemgetter
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trp_scale.core.pieces import STATE_NAMES
from trp_scale.distributed.groups import Group
from trp_scale.engines.optimizer import MatrixOptimizer, empty_state
from trp_scale.engines.shards import assign_to_least_loaded

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the quintic Newton-Schulz iteration, whose singular values converge to between 0.7 and 1.2."""
ITERATIONS = 5
SMALLEST_NORM = 1e-7
RMS = 0.2
"""Root mean square of an update, that of AdamW's updates: one learning rate and weight decay fit both (Liu et al. 2025,
arXiv 2502.16982)."""
STACKED = 1 << 26
"""Maximum number of elements of the matrices that are orthogonalised together."""


def orthogonalize(matrices: Tensor) -> Tensor:
    """Return the approximate orthogonal factors of the polar decompositions, times the scale of the update.

    Args:
        matrices: [K, M, N], of the precision of the iteration.
    """
    rows, columns = matrices.shape[-2:]
    x = matrices.mT if rows > columns else matrices  # [K, min, max]
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=SMALLEST_NORM)
    a, b, c = COEFFICIENTS
    for _ in range(ITERATIONS):
        gram = x @ x.mT  # [K, min, min]
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    result: Tensor = (x.mT if rows > columns else x) * (RMS * max(rows, columns) ** 0.5)
    return result


@dataclass(frozen=True)
class MatrixPart:
    """Elements [start, stop) of the flattened matrix `number` on `rank`."""

    rank: int
    number: int
    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start


def covering_parts(parts: Sequence[MatrixPart], size: int, owner: int) -> list[MatrixPart]:
    """Return parts that contain each of `size` elements once, in order; those of `owner` are preferred."""
    chosen: list[MatrixPart] = []
    position = 0
    while position < size:
        usable = [part for part in parts if part.start <= position < part.stop]
        best = max(usable, key=lambda part: (part.rank == owner, part.stop, -part.rank))
        chosen.append(MatrixPart(best.rank, best.number, position, best.stop))
        position = best.stop
    return chosen


def orthogonalize_all(matrices: Mapping[int, Tensor], dtype: torch.dtype) -> dict[int, Tensor]:
    """Apply `orthogonalize` in precision `dtype` to matrices by number, together to those of the same shape."""
    by_shape: dict[torch.Size, list[int]] = defaultdict(list)
    for number, matrix in matrices.items():
        by_shape[matrix.shape].append(number)
    results: dict[int, Tensor] = {}
    for shape, numbers in by_shape.items():
        at_once = max(1, STACKED // shape.numel())
        for first in range(0, len(numbers), at_once):
            chunk = numbers[first : first + at_once]
            stack = torch.stack([matrices[number] for number in chunk]).to(dtype)  # [K, M, N]
            results.update(zip(chunk, orthogonalize(stack), strict=True))
    return results


class MatrixExchange:
    """Sends the parts of matrices to one owner each, and whole matrices back to all ranks that have parts.

    Args:
        parts: parts of this rank.
        shapes: shapes of all parameters, by number.
        dtype: type of what is sent.
    """

    def __init__(
        self,
        parts: Sequence[MatrixPart],
        shapes: Sequence[Sequence[int]],
        group: Group,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.group, self.shapes, self.parts, self.dtype, self.device = group, shapes, parts, dtype, device
        everywhere = [part for of_rank in group.gather_objects(list(parts)) for part in of_rank]
        numbers = sorted({part.number for part in everywhere})
        costs = [prod(shapes[number]) * min(shapes[number]) for number in numbers]
        owners = dict(zip(numbers, assign_to_least_loaded(costs, group.size), strict=True))
        of_number = {number: [part for part in everywhere if part.number == number] for number in numbers}
        ranks = range(group.size)
        collected = [part for n in numbers for part in covering_parts(of_number[n], prod(shapes[n]), owners[n])]
        self.own = [number for number in numbers if owners[number] == group.rank]

        def select(parts: Sequence[MatrixPart], holder: int, owner: int) -> list[MatrixPart]:
            return [part for part in parts if part.rank == holder and owners[part.number] == owner]

        # By destination and by source, in the same order on both sides.
        self._to_owners = [select(collected, group.rank, rank) for rank in ranks]
        self._from_parts = [select(collected, rank, group.rank) for rank in ranks]
        self._to_parts = [select(everywhere, rank, group.rank) for rank in ranks]
        self._from_owners = [select(parts, group.rank, rank) for rank in ranks]

    def collect(self, values: Sequence[Tensor]) -> dict[int, Tensor]:
        """Return the whole matrices that this rank owns, by number.

        Args:
            values: a flat tensor for each of this rank's parts.
        """
        starts = {part.number: part.start for part in self.parts}
        by_number = {part.number: value for part, value in zip(self.parts, values, strict=True)}

        def cut(part: MatrixPart) -> Tensor:
            first = starts[part.number]
            return by_number[part.number][part.start - first : part.stop - first]

        pieces: dict[int, list[tuple[int, Tensor]]] = defaultdict(list)
        for part, value in self._send(self._to_owners, self._from_parts, cut):
            pieces[part.number].append((part.start, value))
        ordered = {number: [value for _, value in sorted(pieces[number], key=itemgetter(0))] for number in self.own}
        return {number: torch.cat(parts).view(*self.shapes[number]) for number, parts in ordered.items()}

    def distribute(self, matrices: dict[int, Tensor]) -> list[Tensor]:
        """Return the flat results of this rank's parts."""
        flat = {number: matrix.reshape(-1) for number, matrix in matrices.items()}

        def cut(part: MatrixPart) -> Tensor:
            return flat[part.number][part.start : part.stop]

        results = {part.number: value for part, value in self._send(self._to_parts, self._from_owners, cut)}
        return [results[part.number] for part in self.parts]

    def _send(
        self,
        outgoing: list[list[MatrixPart]],
        incoming: list[list[MatrixPart]],
        value_of: Callable[[MatrixPart], Tensor],
    ) -> list[tuple[MatrixPart, Tensor]]:
        """Send parts by destination; return the received parts by source."""
        if self.group.size == 1:
            return [(part, value_of(part)) for part in outgoing[0]]
        nothing = torch.empty(0, dtype=self.dtype, device=self.device)
        sent = torch.cat([value_of(part) for parts in outgoing for part in parts] or [nothing]).to(self.dtype)
        out_sizes, in_sizes = ([sum(p.size for p in parts) for parts in lists] for lists in (outgoing, incoming))
        received = nothing.new_empty(sum(in_sizes))
        dist.all_to_all_single(received, sent, in_sizes, out_sizes, group=self.group.handle)
        parts = [part for of_rank in incoming for part in of_rank]
        return list(zip(parts, torch.split(received, [part.size for part in parts]), strict=True))


class Muon(MatrixOptimizer):
    """Muon with Nesterov momentum for the groups with `hidden`, fused AdamW for the others.

    m = momentum m + (1 - momentum) g; w = w - lr decay w - lr 0.2 sqrt(max(rows, columns)) orthogonal(momentum m +
    (1 - momentum) g). These are torch.optim.Muon's formulas with `adjust_lr_fn="match_rms_adamw"`, which rounds the
    iteration to bf16. Fused SGD updates momentum and weights; it reads `found_inf`. Nothing waits for the device.

    Args:
        momentum: decay rate.
        dtype: precision of the iteration and of what is sent.
    """

    shares_work = True

    def __init__(
        self,
        groups: list[dict[str, Any]],
        parameters: Iterable[tuple[str, nn.Parameter]],
        *,
        momentum: float,
        dtype: torch.dtype,
        **settings: Any,
    ) -> None:
        self.momentum, self.dtype = momentum, dtype
        named = list(parameters)
        hidden = {id(tensor) for group in groups if group["hidden"] for tensor in group["params"]}
        self._hidden = {number for number, (_, parameter) in enumerate(named) if id(parameter) in hidden}
        self._exchanges: dict[tuple[int, ...], MatrixExchange] = {}
        super().__init__(groups, named, **settings)

    def moments(self, tensor: Tensor) -> tuple[str, ...]:
        is_hidden = any(extent.number in self._hidden for extent in self.extents[id(tensor)])
        return STATE_NAMES[:1] if is_hidden else STATE_NAMES

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update moments and weights. DeepSpeed's stage 3 calls it for a part of the tensors at a time."""
        groups = self.param_groups
        self.param_groups = [group for group in groups if not group["hidden"]]
        super().step()
        self.param_groups = groups
        held = [(tensor, group) for group in groups if group["hidden"] for tensor in group["params"]]
        held = [(tensor, group) for tensor, group in held if tensor.grad is not None]
        if not held:
            return
        for tensor, _ in held:
            if not self.state[tensor]:
                self.state[tensor] = empty_state(self, tensor)
        tensors = [tensor for tensor, _ in held]
        weights = [self.local(tensor).view(-1) for tensor in tensors]
        updates = self._orthogonal(tensors, self._directions(tensors, weights))
        by_rate: dict[tuple[float, float], tuple[list[Tensor], list[Tensor]]] = defaultdict(lambda: ([], []))
        for (_, group), weight, update in zip(held, weights, updates, strict=True):
            for values, value in zip(by_rate[group["lr"], group["weight_decay"]], (weight, update), strict=True):
                values.append(value)
        for (lr, decay), (moved, by) in by_rate.items():
            self._descend(moved, by, [], lr=lr, weight_decay=decay)

    def _descend(
        self,
        weights: list[Tensor],
        gradients: list[Tensor],
        momenta: list[Tensor],
        *,
        lr: float,
        weight_decay: float = 0.0,
    ) -> None:
        torch._fused_sgd_(
            weights,
            gradients,
            momenta,
            weight_decay=weight_decay,
            momentum=self.momentum if momenta else 0.0,
            lr=lr,
            dampening=self.momentum if momenta else 0.0,
            nesterov=False,
            maximize=False,
            is_first_step=False,
            found_inf=self.found_inf,
        )

    def _directions(self, tensors: list[Tensor], weights: list[Tensor]) -> list[Tensor]:
        """Update the momenta; return momentum m + (1 - momentum) g, flat."""
        momenta = [self.local(self.state[tensor]["exp_avg"]).view(-1) for tensor in tensors]
        pairs = zip(tensors, momenta, strict=True)
        gradients = [self.local(cast(Tensor, tensor.grad)).view(-1).to(m.dtype) for tensor, m in pairs]
        self._descend(weights, gradients, momenta, lr=0.0)
        return list(torch._foreach_lerp(gradients, momenta, self.momentum))

    def _orthogonal(self, tensors: list[Tensor], directions: list[Tensor]) -> list[Tensor]:
        """Return the updates of the tensors, flat; 0 for elements without a parameter."""
        extents = [(row, extent) for row, tensor in enumerate(tensors) for extent in self.extents[id(tensor)]]
        values = [directions[row][extent.position] for row, extent in extents]
        key = tuple(map(id, tensors))
        if key not in self._exchanges:
            parts = [
                MatrixPart(self.group.rank, extent.number, extent.start, extent.start + value.numel())
                for (_, extent), value in zip(extents, values, strict=True)
            ]
            self._exchanges[key] = MatrixExchange(parts, self.shapes, self.group, self.dtype, directions[0].device)
        exchange = self._exchanges[key]
        results = exchange.distribute(orthogonalize_all(exchange.collect(values), self.dtype))
        updates = [torch.zeros_like(direction) for direction in directions]
        if extents:
            torch._foreach_copy_([updates[row][extent.position] for row, extent in extents], results)
        return updates
