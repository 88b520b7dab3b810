"""The masked autoencoder again, as plainly as it can be written: the reference for the fast one.

One image at a time, all tokens in the order of the grid and through whole blocks, attention written out, and the
relative position of every pair looked up by itself from the paper's formulas.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from tests.unit.models.small_images import GRID, Crops
from trp_scale.models.positions import Perturbation, PositionOrder
from trp_scale.pretraining.mae.model import MaskedAutoencoder

CLASS = -1
"""Stands for the class token among patch numbers."""


def sign(x: float) -> int:
    return (x > 0) - (x < 0)


def wu_index(x: float) -> int:
    """Wu et al.'s piecewise index with alpha 1.9, beta 3.8, gamma 15.2, cut to a whole number as their table is."""
    if abs(x) <= 1.9:
        return round(x)
    far = round(1.9 + math.log(abs(x) / 1.9) / math.log(15.2 / 1.9) * (3.8 - 1.9))
    return sign(x) * int(min(3.8, far))


def real_index(x: Tensor) -> Tensor:
    """g~ of AdPE 4.2.3, clamped to the table."""
    if abs(x) <= 1.9:
        return x
    return sign(float(x.detach())) * (1.9 + (x.abs() / 1.9).log() / math.log(15.2 / 1.9) * (3.8 - 1.9)).clamp(max=3.0)


def entry(table: Tensor, row: Tensor, column: Tensor, index: str) -> Tensor:
    """[d] the embedding of one offset: the four nearest nodes of 4.2.3, or the rounded one."""
    nodes = table[:49].reshape(7, 7, -1)
    if index != "relaxed":
        return nodes[wu_index(float(row.detach())) + 3, wu_index(float(column.detach())) + 3]
    x, y = real_index(row) + 3, real_index(column) + 3
    k, m = math.floor(x.detach()), math.floor(y.detach())
    found = torch.zeros_like(table[0])
    for i, in_x in ((k, 1 - (x - k)), (k + 1, x - k)):
        for j, in_y in ((m, 1 - (y - m)), (m + 1, y - m)):
            if in_x * in_y != 0:
                found = found + in_x * in_y * nodes[i, j]
    return found


def relative_vectors(
    table: Tensor, places: list[int], masked: set[int], index: str, shift: Tensor | None, added: Tensor | None
) -> Tensor:
    """[T, T, d] r_ij of all pairs of tokens; pairs with equal offsets have one vector."""
    vectors: dict[tuple[bool, int, int], Tensor] = {}

    def vector(i: int, j: int) -> Tensor:
        hidden = i in masked
        own = table + added if hidden and added is not None else table
        if CLASS in (i, j):
            return own[49]
        down, across = i // GRID - j // GRID, i % GRID - j % GRID
        if (hidden, down, across) not in vectors:
            dr, dc = shift if hidden and shift is not None else torch.zeros(2, dtype=torch.float64)
            vectors[hidden, down, across] = entry(own, down + dr, across + dc, index)
        return vectors[hidden, down, across]

    return torch.stack([torch.stack([vector(i, j) for j in places]) for i in places])


def position(place: int, width: int, shift: Tensor | None, order: PositionOrder) -> Tensor:
    """[width] sine-cosine position: sines and cosines of one coordinate, then of the other."""
    if place == CLASS:
        return torch.zeros(width, dtype=torch.float64)
    dr, dc = torch.zeros(2, dtype=torch.float64) if shift is None else shift
    values: list[Tensor] = []
    row, column = place // GRID + dr, place % GRID + dc
    for coordinate in (column, row) if order == "column_row" else (row, column):
        angles = [coordinate / 10000 ** (j / (width // 4)) for j in range(width // 4)]
        values += [angle.sin() for angle in angles] + [angle.cos() for angle in angles]
    return torch.stack(values)


def blocks(
    modules: Iterable[nn.Module],
    tokens: Tensor,
    places: list[int],
    masked: set[int],
    index: str,
    acting: Perturbation,
) -> Tensor:
    """[T, D] through whole blocks."""
    for number, block in enumerate(modules):
        width, heads = tokens.shape[-1], block.attn.num_heads
        size = width // heads
        projected = block.attn.qkv(block.norm1(tokens))  # [T, 3 D]
        q, k, v = (part.reshape(-1, heads, size).transpose(0, 1) for part in projected.split(width, dim=-1))
        scores = q @ k.transpose(1, 2)  # [H, T, T]
        shift = None if acting.offsets is None else acting.offsets[number]
        if block.relative_positions is not None:
            added = None if acting.tables is None else acting.tables[number]
            r = relative_vectors(block.relative_positions.table, places, masked, index, shift, added)
            scores = scores + (r[..., 0] if r.shape[-1] == 1 else torch.einsum("hid,ijd->hij", q, r))  # b_ij of 4.2.1
        shares = (scores / math.sqrt(size)).softmax(-1)  # [H, T, T]
        context = shares @ v  # [H, T, d]
        if block.relative_values is not None:
            on_values = relative_vectors(block.relative_values.table, places, masked, index, shift, None)
            context = torch.einsum("hij,hijd->hid", shares, v[:, None] + on_values)
        if acting.values is not None:
            hidden = torch.tensor([float(place in masked) for place in places], dtype=torch.float64)
            context = context + hidden[:, None] * acting.values[number]
        tokens = tokens + block.attn.proj(context.transpose(0, 1).reshape(-1, width))
        normed = block.norm2(tokens)
        tokens = tokens + block.mlp.fc2(nn.functional.gelu(block.mlp.fc1(normed)))
    return tokens


def plain_forward(
    model: MaskedAutoencoder,
    batch: Crops,
    encoder: Perturbation | None = None,
    decoder: Perturbation | None = None,
) -> Tensor:
    """[B, M, P] predictions."""
    everything = zip(batch.patches, batch.visible.tolist(), batch.masked.tolist(), strict=True)
    return torch.stack(
        [one_image(model, *image, encoder or Perturbation(), decoder or Perturbation()) for image in everything]
    )


def one_image(
    model: MaskedAutoencoder,
    patches: Tensor,
    visible: list[int],
    masked_list: list[int],
    encoder: Perturbation,
    decoder: Perturbation,
) -> Tensor:
    """[M, P]."""
    masked, index = set(masked_list), model.index

    def positioned(token: Tensor, place: int, acting: Perturbation) -> Tensor:
        hidden = place in masked
        shift = acting.coordinate if hidden else None
        found = token + position(place, len(token), shift, model.vision.position_order)
        return found + acting.embedding if hidden and acting.embedding is not None else found

    everywhere = [CLASS, *range(GRID**2)]
    seen = everywhere if model.vision.tokens == "all" else [CLASS, *sorted(visible)]
    embedded = model.patch_embed(patches)
    tokens = torch.stack(
        [
            positioned(
                model.cls_token if place == CLASS else model.mask_token if place in masked else embedded[place],
                place,
                encoder,
            )
            for place in seen
        ]
    )
    tokens = model.norm(blocks(model.blocks, tokens, seen, masked, index, encoder))
    if model.vision.decoder == "transformer":
        narrow = dict(zip(seen, model.decoder_embed(tokens), strict=True))
        tokens = torch.stack([positioned(narrow.get(p, model.mask_token), p, decoder) for p in everywhere])
        tokens = model.decoder_norm(blocks(model.decoder_blocks, tokens, everywhere, masked, index, decoder))
    predicted = dict(zip(everywhere, model.prediction(tokens), strict=True))
    return torch.stack([predicted[place] for place in masked_list])
