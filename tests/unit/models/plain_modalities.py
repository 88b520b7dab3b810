"""The multi-modal masked autoencoder again, as plainly as it can be written: the reference for the fast one.

One image and one token at a time; sequences are as long as they happen to be, and attention is written out.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from tests.unit.models.plain_autoencoder import blocks
from trp_scale.models.positions import Perturbation, sine_cosine
from trp_scale.pretraining.mm_mae.model import MultimodalMaskedAutoencoder, TaskDecoder

Seen = dict[tuple[str, int], Tensor]
"""Visible tokens by modality and place."""


def plain_forward(model: MultimodalMaskedAutoencoder, patches: dict[str, Tensor], visible: Tensor) -> list[Tensor]:
    """[R, N, P] predictions of each task."""
    rows = [
        one_image(model, {name: values[row] for name, values in patches.items()}, visible[row].tolist())
        for row in range(len(visible))
    ]
    return [torch.stack(task) for task in zip(*rows, strict=True)]


def one_image(model: MultimodalMaskedAutoencoder, patches: dict[str, Tensor], visible: list[int]) -> list[Tensor]:
    count, width = model.grid**2, len(model.cls_token)
    names = [(model.inputs[number // count], number % count) for number in visible]
    positions = sine_cosine(model.grid, width, model.position_order)
    tokens = [token(model.tokenisers[name], patches[name][place]) + positions[place] for name, place in names]
    encoded = whole_blocks(model.blocks, torch.stack([model.cls_token, *tokens]))
    encoded = model.norm(encoded)
    own = sine_cosine(model.grid, len(model.decoders[model.outputs[0]].mask_token), model.position_order)  # type: ignore[arg-type]
    return [decode(decoder, encoded, names, own) for decoder in model.decoders.values()]  # type: ignore[arg-type]


def token(tokeniser: nn.Module, patch: Tensor) -> Tensor:
    """[D] one patch's token, without its position."""
    if isinstance(tokeniser, nn.Linear):
        return tokeniser.weight @ patch.to(tokeniser.weight.dtype) + tokeniser.bias
    vectors = tokeniser.class_embedding.reshape(tokeniser.classes + 1, -1)
    found = [vectors[-1] if label == 255 else vectors[label] for label in patch.tolist()]
    return tokeniser.projection.weight @ torch.cat(found) + tokeniser.projection.bias


def whole_blocks(modules: nn.ModuleList, tokens: Tensor) -> Tensor:
    return blocks(modules, tokens, [], set(), "", Perturbation())


def decode(decoder: TaskDecoder, encoded: Tensor, names: list[tuple[str, int]], positions: Tensor) -> Tensor:
    """[N, P]."""
    entered = [decoder.embed.weight @ one + decoder.embed.bias for one in encoded]
    seen: Seen = {}
    for (modality, place), one in zip(names, entered[1:], strict=True):
        seen[modality, place] = one + positions[place] + getattr(decoder, f"{modality}_embedding")
    unseen = decoder.mask_token + getattr(decoder, f"{decoder.predicted}_embedding")
    queries = [seen.get((decoder.predicted, place), unseen + positions[place]) for place in range(len(positions))]
    context = torch.stack([entered[0], *seen.values()])
    found = cross_attention(decoder, torch.stack(queries), context)
    found = found + decoder.mlp.fc2(nn.functional.gelu(decoder.mlp.fc1(decoder.norm(found))))
    return whole_blocks(decoder.blocks, found) @ decoder.prediction.weight.T + decoder.prediction.bias


def cross_attention(decoder: TaskDecoder, queries: Tensor, context: Tensor) -> Tensor:
    """[N, d]."""
    layer, width = decoder.cross_attention, queries.shape[-1]
    size = width // layer.heads
    q = layer.query(decoder.query_norm(queries))
    k, v = layer.key_value(decoder.context_norm(context)).split(width, dim=-1)
    found = []
    for head in range(layer.heads):
        part = slice(head * size, (head + 1) * size)
        shares = (q[:, part] @ k[:, part].T / math.sqrt(size)).softmax(-1)
        found.append(shares @ v[:, part])
    return layer.proj(torch.cat(found, dim=-1))  # type: ignore[no-any-return]
