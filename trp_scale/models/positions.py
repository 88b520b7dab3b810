"""Positions of patches: fixed sine-cosine positions (He et al., after Vaswani et al.), relative positions (Wu et al.),
and their perturbation by an adversary (AdPE 4)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trp_scale.config import ModelConfig
from trp_scale.config.images import DecodedVisionConfig, RelativeVisionConfig
from trp_scale.core.batch import Extra
from trp_scale.models.tensor_plan import WHOLE, Cut

TEMPERATURE = 10000.0

PositionOrder = Literal["column_row", "row_column"]
"""Coordinates of the first and second half of the width."""


def frequencies(width: int, *, dtype: torch.dtype, device: torch.device | None = None) -> Tensor:
    """Return the angles per patch, from 1 down to almost 1 / TEMPERATURE, [width / 4]."""
    quarter = width // 4
    return TEMPERATURE ** (-torch.arange(quarter, dtype=dtype, device=device) / quarter)


def sine_cosine(grid: int, width: int, order: PositionOrder = "column_row") -> Tensor:
    """Return the positions of a square grid's patches, row by row, [grid^2, width] float64.

    One half of the width encodes the column, the other the row, each as sines and then cosines.

    Args:
        order: column_row as in He et al.'s published weights, row_column as in MoCo v3 and MultiMAE.

    Raises:
        ValueError: width is not a multiple of 4.
    """
    if width % 4:
        raise ValueError(f"sine-cosine positions have width {width}; allowed: multiples of 4")
    places = torch.arange(grid, dtype=torch.float64)
    angles = places[:, None] * frequencies(width, dtype=torch.float64)  # [G, width / 4]
    axis = torch.cat([angles.sin(), angles.cos()], dim=-1)  # [G, width / 2]
    columns = axis.repeat(grid, 1)  # [G^2, width / 2]
    rows = axis.repeat_interleave(grid, dim=0)
    return torch.cat([columns, rows] if order == "column_row" else [rows, columns], dim=-1)


def shift_positions(positions: Tensor, shift: Tensor, order: PositionOrder = "column_row") -> Tensor:
    """Return positions at (row, column) + shift (AdPE 4.1.2), in fp32 or fp64.

    A shift rotates each pair of sine and cosine by shift x frequency, so no sine is computed per position, and a zero
    shift changes nothing.

    Args:
        positions: [..., D] from `sine_cosine`, with the same order.
        shift: [2] row and column, in patches; differentiable.
    """
    dtype = torch.promote_types(positions.dtype, torch.float32)
    width = positions.shape[-1]
    halves = positions.to(dtype).reshape(
        *positions.shape[:-1], 2, 2, width // 4
    )  # [..., coordinate, sine | cosine, D / 4]
    sine, cosine = halves.unbind(-2)  # [..., 2, D / 4]
    along = shift.to(dtype) if order == "row_column" else shift.to(dtype).flip(0)  # [2], in the order of the halves
    turn = along[:, None] * frequencies(width, dtype=dtype, device=positions.device)  # [2, D / 4]
    turned = (sine * turn.cos() + cosine * turn.sin(), cosine * turn.cos() - sine * turn.sin())
    return torch.stack(turned, dim=-2).flatten(-3)


class IndexRows(torch.autograd.Function):
    """Index a small table with many indices. The table's gradient is one matrix product with one-hot indices; torch's
    indexing would sort them."""

    @staticmethod
    def forward(ctx: Any, table: Tensor, places: Tensor) -> Tensor:
        """[N, D] and [...] int64 -> [..., D]."""
        ctx.save_for_backward(places)
        ctx.rows = len(table)
        return table[places]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        (places,) = ctx.saved_tensors
        one_hot = places.flatten().unsqueeze(1) == torch.arange(ctx.rows, device=places.device)  # [..., N]
        return one_hot.to(gradient.dtype).T @ gradient.flatten(0, -2), None


def gather_positions(positions: Tensor, places: Tensor) -> Tensor:
    """Return the positions of patches, [N, D] and [...] int64 -> [..., D], also of a trained table."""
    if positions.requires_grad:
        return IndexRows.apply(positions, places)  # type: ignore[no-any-return, no-untyped-call]
    return positions[places]


def interpolate(positions: Tensor, grid: int) -> Tensor:
    """Interpolate positions to another grid, bicubic and antialiased as in timm: [1 + H^2, D] -> [1 + grid^2, D]. Those
    of the class token stay."""
    old = round((len(positions) - 1) ** 0.5)
    if old == grid:
        return positions
    patches = positions[1:].float().view(1, old, old, -1).permute(0, 3, 1, 2)  # [1, D, H, H]
    patches = F.interpolate(patches, size=(grid, grid), mode="bicubic", antialias=True)
    return torch.cat([positions[:1], patches.permute(0, 2, 3, 1).flatten(0, 2).to(positions.dtype)])


ALPHA, BETA, GAMMA = 1.9, 3.8, 15.2
"""The index of an offset equals it up to ALPHA, then grows with its logarithm, up to BETA at GAMMA (ratio 1.9)."""

REACH = 3
"""The table has indices from -REACH to REACH on each axis: floor(BETA)."""

NODES = 2 * REACH + 1

BUCKETS = NODES**2 + 1
"""Rows of the table. Entry (row, column) is NODES (row + REACH) + column + REACH; the last is for the class token."""

SETTLED = 7
"""Integer offsets of this length or more have the last index, also with half a patch of shift: `relaxed_index` reaches
REACH at 6.33."""

IndexKind = Literal["rounded", "relaxed", "straight_through"]
RelativeMode = Literal["contextual", "bias"]


class RelativeInputs(NamedTuple):
    """Inputs of a block's relative positions, without its queries. Tokens are [class, visible, masked], T = 1 + K.

    Attributes:
        pairs: [B, T, T] int64, vector number of each pair of query and key.
        weights: [R, 50], weights of the table's rows in each vector; or [2R, 50] with separate vectors for masked
            queries in the second half.
        masked: M, number of masked queries, which are the last ones.
        moved: whether masked queries have separate vectors.
        masked_pairs: [B, M, T] int64, replaces the rows of masked queries in `pairs`.
        masked_table: [50, D / H] or [1, D / H], added to the table for masked queries.
    """

    pairs: Tensor
    weights: Tensor
    masked: int
    moved: bool = False
    masked_pairs: Tensor | None = None
    masked_table: Tensor | None = None


def relaxed_index(offset: Tensor) -> Tensor:
    """Return g~ of AdPE 4.2.3: the offset up to ALPHA, then growing with its logarithm, up to BETA."""
    beyond = offset.abs().clamp(min=ALPHA)  # clamped against infinite gradients in the unused branch
    grown = ALPHA + (beyond / ALPHA).log() * ((BETA - ALPHA) / math.log(GAMMA / ALPHA))
    return torch.where(offset.abs() <= ALPHA, offset, offset.sign() * grown.clamp(max=BETA))


def node_weights(offset: Tensor, index: IndexKind) -> Tensor:
    """Return the weights of the 7 indices of an axis, -3..3, for an offset; at most two are nonzero.

    rounded: the nearest index. relaxed: linear between the two nearest indices; the gradient is zero beyond the table.
    straight_through: the nearest index, with the gradient of relaxed.

    Args:
        offset: [...] in patches, fp32 or fp64; differentiable except for rounded.
    Returns:
        [..., 7], which sum to one.
    """
    clamped = relaxed_index(offset).clamp(-REACH, REACH).unsqueeze(-1)  # [..., 1]
    nodes = torch.arange(-REACH, REACH + 1, device=offset.device)
    nearest = (clamped.round() == nodes).to(offset.dtype)
    if index == "rounded":
        return nearest
    lower = clamped.floor().clamp(max=REACH - 1)  # the last interval includes REACH, so that lower + 1 exists
    upper_share = clamped - lower
    relaxed = torch.where(nodes == lower, 1 - upper_share, torch.where(nodes == lower + 1, upper_share, 0.0))
    return relaxed if index == "relaxed" else nearest + (relaxed - relaxed.detach())


class Offsets(NamedTuple):
    """Vectors of a grid's offsets.

    Attributes:
        weights: [..., R, 50], weights of the table's rows in each vector, times 1 / sqrt(D / H).
        numbers: [..., (2G-1)^2 + 2] int64, vector number of each pair number of `pair_numbers`.
    """

    weights: Tensor
    numbers: Tensor


def axis_offsets(grid: int, index: IndexKind, shift: Tensor) -> tuple[Tensor, Tensor]:
    """Group the shifted offsets -(G-1)..G-1 of an axis into P offsets with different weights.

    With a rounded index these are the 7 indices. Otherwise all offsets beyond SETTLED on a side are one.

    Args:
        shift: [...] in patches; the gradient of the weights is exact.
    Returns:
        [..., 2G-1] int64, number of each offset among the P, and their `node_weights` [..., P, 7].
    """
    offsets = torch.arange(1 - grid, grid, device=shift.device)
    shift = shift.unsqueeze(-1)  # [..., 1]
    if index == "rounded":
        nearest = relaxed_index(offsets + shift).clamp(-REACH, REACH).round().long() + REACH
        return nearest, torch.eye(NODES, dtype=shift.dtype, device=shift.device).expand(*shift.shape[:-1], -1, -1)
    if grid <= SETTLED + 1:
        return (offsets + grid - 1).expand(*shift.shape[:-1], -1), node_weights(offsets + shift, index)
    whole = shift.detach().round()
    ends = torch.arange(-SETTLED, SETTLED + 1, device=shift.device)
    return (offsets + whole.long()).clamp(-SETTLED, SETTLED) + SETTLED, node_weights(ends + (shift - whole), index)


def grid_offsets(grid: int, index: IndexKind, shift: Tensor, head_size: int, *, class_queries: bool = False) -> Offsets:
    """Return the vectors of a grid shifted by `shift` [..., 2] patches: pairs of offsets, the class token as a key and
    as a query (zero unless `class_queries`), then zero vectors up to a multiple of 8, for fast matrix products."""
    places, nodes = axis_offsets(grid, index, shift)  # [..., 2, 2G-1], [..., 2, P, 7]
    (rows, columns), count = places.unbind(-2), nodes.shape[-2]
    numbers = (rows.unsqueeze(-1) * count + columns.unsqueeze(-2)).flatten(-2)  # [..., (2G-1)^2]
    others = torch.arange(count**2, count**2 + 2, device=shift.device).expand(*numbers.shape[:-1], -1)
    down, across = nodes.unbind(-3)  # [..., P, 7]
    weights = torch.einsum("...pi,...qj->...pqij", down * head_size**-0.5, across)
    weights = weights.flatten(-4, -3).flatten(-2)  # [..., P^2, 49]
    weights = F.pad(weights, (0, 1, 0, (count**2 + 2 + 7) // 8 * 8 - count**2))  # [..., R, 50]
    constant = torch.zeros(weights.shape[-2:], dtype=shift.dtype, device=shift.device)
    constant[count**2 : count**2 + 1 + class_queries, -1].fill_(head_size**-0.5)
    return Offsets(weights + constant, torch.cat([numbers, others], dim=-1))


def pair_numbers(patches: Tensor, grid: int) -> Tensor:
    """Return the pair numbers of the class token and patches: [B, K] patch numbers -> [B, 1 + K, 1 + K] int64.

    A number is that of the offset x_i - x_j, rows first; (2G-1)^2 for the class token as a key; (2G-1)^2 + 1 for it as
    a query, whose constant bias would cancel in the softmax."""
    span = 2 * grid - 1
    rows, columns = patches // grid, patches % grid  # [B, K]
    cell = rows * span + columns
    between = cell.unsqueeze(2) - cell.unsqueeze(1) + (grid - 1) * (span + 1)  # [B, K, K]
    return F.pad(F.pad(between, (1, 0), value=span**2), (0, 0, 1, 0), value=span**2 + 1)


def relative_inputs(
    patches: Tensor,
    grid: int,
    index: IndexKind,
    head_size: int,
    *,
    dtype: torch.dtype,
    blocks: int,
    masked: int = 0,
    shifts: Tensor | None = None,
    tables: Tensor | None = None,
    values: bool = False,
) -> list[RelativeInputs]:
    """Return the inputs of each block's relative positions; blocks share equal tensors.

    Args:
        patches: [B, K] numbers of the patches after the class token; the last `masked` of them are masked.
        head_size: D / H.
        dtype: fp32 or fp64, of the interpolation.
        shifts: [L, 2] added to row and column offset of masked queries.
        tables: [L, 50, D / H] or [L, 1, D / H] added to the table for masked queries; in the bias mode [L, 50 or 1, 1].
        values: whether blocks have `RelativeValues`, where the class token as a query has an entry, as in iRPE.
    """
    numbers = pair_numbers(patches, grid)  # [B, T, T]
    shift = torch.zeros(1, 2, dtype=dtype, device=patches.device)
    if shifts is None or not masked:
        offsets = grid_offsets(grid, index, shift[0], head_size, class_queries=values)
        inputs = [RelativeInputs(offsets.numbers[numbers], offsets.weights, masked)] * blocks
        if tables is not None and masked:
            inputs = [clean._replace(masked_table=table) for clean, table in zip(inputs, tables.unbind(0), strict=True)]
        return inputs
    all_shifts = torch.cat([shift, shifts.to(dtype)])  # [1 + L, 2]
    offsets = grid_offsets(grid, index, all_shifts, head_size, class_queries=values)
    pairs = offsets.numbers[0][numbers]
    clean = offsets.weights[:1].expand(blocks, -1, -1)
    weights = torch.cat([clean, offsets.weights[1:]], dim=1)  # [L, 2R, 50]
    masked_pairs: list[Tensor | None] = [None] * blocks
    if index == "rounded" or grid > SETTLED + 1:  # the shift changes the vector number of a pair
        masked_pairs = list(offsets.numbers[1:, numbers[:, -masked:]].unbind(0))  # L of [B, M, T]
    return [
        RelativeInputs(pairs, block_weights, masked, True, block_pairs)
        for block_weights, block_pairs in zip(weights.unbind(0), masked_pairs, strict=True)
    ]


class RelativeTable(nn.Module):
    """Table of relative positions of one block, AdPE 4.2.1: 49 entries, 7 per axis, and one entry for the class token.

    It is zero at the start, and the block's heads share it. It is first interpolated to one vector per different
    offset. The vector numbers of pairs are equal in all blocks. A perturbed coordinate changes only the interpolation,
    which is cheap.

    Args:
        width: of an entry.
    """

    cut: Cut = WHOLE

    def __init__(self, width: int) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(BUCKETS, width))

    def forward(self, rows: Tensor, relative: RelativeInputs) -> Tensor:
        """Return `look_up` [B, H, Q, ...] for the last Q tokens as queries: all T, or the masked ones.

        Args:
            rows: [B, H, Q, ...], a row per query.
        """
        count, masked = rows.shape[2], relative.masked
        vectors = self.vectors(relative, rows.dtype)
        pairs = relative.pairs[:, -count:]
        if len(vectors) == 1:
            return self.look_up(rows, vectors[0], pairs)
        others = pairs[:, -masked:] if relative.masked_pairs is None else relative.masked_pairs
        if count == masked:
            return self.look_up(rows, vectors[1], others)
        clean, moved = torch.split(rows, [count - masked, masked], dim=2)  # the gradient of split is one copy
        return torch.cat(
            [self.look_up(clean, vectors[0], pairs[:, :-masked]), self.look_up(moved, vectors[1], others)], dim=2
        )

    def look_up(self, rows: Tensor, vectors: Tensor, pairs: Tensor) -> Tensor:
        """Combine rows [B, H, Q, ...] with vectors [R, width] at pairs [B, Q, T]."""
        raise NotImplementedError

    def vectors(self, relative: RelativeInputs, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """Return the vectors [R, width] / sqrt(D / H) of all queries, or of unmasked and of masked queries."""
        table: Tensor = self.table
        weights = relative.weights
        if relative.masked_table is not None:
            table = torch.cat([table, table + relative.masked_table], dim=-1)  # [50, 2 width]
        table = table.to(weights.dtype)
        if dtype == weights.dtype:
            vectors = weights @ table
        else:
            with torch.autocast(table.device.type, enabled=False):
                vectors = (weights @ table).to(dtype)
        vectors = self.cut.share_input(vectors)
        if relative.masked_table is not None:
            return vectors.chunk(2, dim=1)
        return vectors.chunk(2) if relative.moved else (vectors,)


class RelativePositions(RelativeTable):
    """Bias of attention scores by relative positions, on keys: iRPE (Wu et al.), with AdPE's relaxed index.

    The score of query i and key j gets b_ij / sqrt(D / H). With the contextual product b_ij = q_i . r[x_i - x_j]:
    queries are multiplied with the vectors, and each pair looks up its product. In the bias mode b_ij = r[x_i - x_j], a
    number.

    Args:
        head_size: D / H.
        mode: vision.relative_mode.
    """

    def __init__(self, head_size: int, mode: RelativeMode = "contextual") -> None:
        super().__init__(head_size if mode == "contextual" else 1)
        self.mode = mode

    def look_up(self, rows: Tensor, vectors: Tensor, pairs: Tensor) -> Tensor:
        """Return the bias [B, H, Q, T] of queries [B, H, Q, D / H], or [B, 1, Q, T] in the bias mode."""
        if self.mode == "contextual":
            products = F.linear(rows, vectors)  # [B, H, Q, R]
        else:
            products = vectors.T[None, None].expand(len(pairs), 1, pairs.shape[1], -1)  # [B, 1, Q, R]
        return products.gather(-1, pairs.unsqueeze(1).expand(-1, products.shape[1], -1, -1))


class RelativeValues(RelativeTable):
    """Relative positions on values, r^V of AdPE 4.2.1: z_i = sum_j a_ij (v_j + r^V[x_i - x_j]) for attention a. A shift
    of coordinates moves these offsets too; a perturbation of the bias's table leaves this one."""

    def look_up(self, rows: Tensor, vectors: Tensor, pairs: Tensor) -> Tensor:
        """Return sum_j a_ij r^V_ij [B, H, Q, D / H] for attention [B, H, Q, T]."""
        sums = rows.new_zeros(*rows.shape[:3], len(vectors))  # [B, H, Q, R]
        return sums.scatter_add(-1, pairs.unsqueeze(1).expand_as(rows), rows) @ vectors

    def vectors(self, relative: RelativeInputs, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """Return the vectors [R, D / H] of all queries, or of unmasked and of masked queries."""
        vectors = super().vectors(relative._replace(masked_table=None), dtype)
        return tuple(part * self.table.shape[1] ** 0.5 for part in vectors)


class PositionBias(nn.Module):
    """Learned bias of one block's attention scores, by head and offset of two patches (BEiT, Bao et al. 2022).

    The table has a row for each offset, then one each for the class token as a key, as a query, and as both; it is zero
    at the start.
    """

    def __init__(self, grid: int, heads: int) -> None:
        super().__init__()
        self.grid = grid
        self.table = nn.Parameter(torch.zeros((2 * grid - 1) ** 2 + 3, heads))

    def forward(self, dtype: torch.dtype) -> Tensor:
        """Return the bias [1, H, T, T] of the class token and the patches, T = 1 + G^2."""
        places = torch.arange(self.grid**2, device=self.table.device)
        numbers = pair_numbers(places[None], self.grid)[0]  # [T, T]
        numbers[0, 0] += 1
        return F.embedding(numbers, self.table).to(dtype).permute(2, 0, 1)[None]


PERTURBATION = Extra("perturbation")
"""[numel], the flat perturbation."""
PIXEL_SHIFT = Extra("pixel_shift")
"""[R, 3, S, S], or [R, k, 3, S, S] for several crops, added to pixels in [0, 1]."""


@dataclass(frozen=True, kw_only=True)
class PerturbationShape:
    """Shapes of the encoder's and decoder's part of a perturbation, which is one flat vector. The first dimension is
    the block; the norm of the last dimension is bounded.

    A perturbation applies to masked patches only; all of them in all images share it. With relative positions, each
    block has its own.

    absolute_embedding: (1, D). absolute_coordinate: (1, 2), row and column in patches. relative_embedding: (L, 50,
    D / H) with one vector per entry of the table, else (L, D / H); 1 instead of D / H for a bias table.
    relative_coordinate: (L, 2), added to row and column of x_i - x_j.

    Attributes:
        kind: kind of the adversary.
        encoder, decoder: shapes; `decoder` is `None` if it is not perturbed.
    """

    kind: str
    encoder: tuple[int, ...]
    decoder: tuple[int, ...] | None = None

    @property
    def numel(self) -> int:
        """Length of the flat vector."""
        return math.prod(self.encoder) + (0 if self.decoder is None else math.prod(self.decoder))

    def split(self, flat: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return views of the encoder's and the decoder's part of a flat vector [numel]."""
        encoder = math.prod(self.encoder)
        decoder = None if self.decoder is None else flat[encoder:].view(self.decoder)
        return flat[:encoder].view(self.encoder), decoder


def perturbation_shape(model: ModelConfig, vision: DecodedVisionConfig, adversary: Any) -> PerturbationShape | None:
    """Return the shape for these settings; `None` if no position is perturbed (kinds none and pixels)."""
    if adversary.kind in ("none", "pixels"):
        return None
    bias = isinstance(vision, RelativeVisionConfig) and vision.relative_mode == "bias"
    encoder = _part(adversary, model.layers, model.hidden_size, model.heads, bias)
    if adversary.where == "encoder":
        return PerturbationShape(kind=adversary.kind, encoder=encoder)
    decoder = _part(adversary, vision.decoder_layers, vision.decoder_hidden_size, vision.decoder_heads, bias)
    return PerturbationShape(kind=adversary.kind, encoder=encoder, decoder=decoder)


def _part(adversary: Any, layers: int, width: int, heads: int, bias: bool) -> tuple[int, ...]:
    scope = adversary.scope if adversary.kind == "relative_embedding" else ""
    entry = 1 if bias and scope != "value" else width // heads
    return {
        "absolute_embedding": (1, width),
        "absolute_coordinate": (1, 2),
        "relative_embedding": (layers, BUCKETS, entry) if scope == "per_bucket" else (layers, entry),
        "relative_coordinate": (layers, 2),
    }[adversary.kind]


class Perturbation(NamedTuple):
    """Perturbation of the encoder or of the decoder; at most one attribute is not `None`.

    Attributes:
        embedding: [D], added to the position embedding of masked patches (AdPE 4.1.1).
        coordinate: [2], added to row and column of masked patches (AdPE 4.1.2).
        tables: [L, 50 or 1, D / H or 1], added to the relative table for masked queries (AdPE 4.2.2).
        values: [L, D / H], added to r^V of AdPE 4.2.1 for masked queries. Shares of attention sum to 1, so it is added
            to the attention output of each head.
        offsets: [L, 2], added to the offsets of masked queries (AdPE 4.2.3).
    """

    embedding: Tensor | None = None
    coordinate: Tensor | None = None
    tables: Tensor | None = None
    values: Tensor | None = None
    offsets: Tensor | None = None


def to_perturbation(part: Tensor | None, adversary: Any) -> Perturbation:
    """Return a part of a perturbation as the attribute that it perturbs."""
    if part is None:
        return Perturbation()
    if adversary.kind == "absolute_embedding":
        return Perturbation(embedding=part[0])
    if adversary.kind == "absolute_coordinate":
        return Perturbation(coordinate=part[0])
    if adversary.kind == "relative_coordinate":
        return Perturbation(offsets=part)
    if adversary.scope == "value":
        return Perturbation(values=part)
    return Perturbation(tables=part if adversary.scope == "per_bucket" else part.unsqueeze(1))
