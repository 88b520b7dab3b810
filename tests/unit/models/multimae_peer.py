"""MultiMAE (Bachmann et al.) written from its description, on whole images and under the names of its public code.

The network is a dictionary of tensors: one image at a time, attention written out, convolutions for the patches, and
predictions put together to images. The global token is the last one here.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

EPS = 1e-6


def random_weights(
    inputs: dict[str, int],
    outputs: dict[str, tuple[str, int]],
    *,
    patch: int,
    stride: int,
    width: int,
    feed_forward: int,
    layers: int,
    decoder: int,
    decoder_layers: int,
    grid: int,
    embedding: int,
) -> dict[str, Tensor]:
    """A network whose weights all matter, float64.

    Args:
        inputs: channels of each modality; classes for semseg.
        outputs: name of a decoder -> the modality whose places it predicts, and the channels of the prediction.
    """
    generator = torch.Generator().manual_seed(5)

    def draw(*shape: int) -> Tensor:
        return 0.25 * torch.randn(shape, generator=generator, dtype=torch.float64)

    state = {"global_tokens": draw(1, 1, width)}

    def linear(name: str, outs: int, ins: int) -> None:
        state[f"{name}.weight"], state[f"{name}.bias"] = draw(outs, ins), draw(outs)

    def norm(name: str, size: int) -> None:
        state[f"{name}.weight"], state[f"{name}.bias"] = 1.0 + draw(size), draw(size)

    def block(name: str, size: int, inner: int) -> None:
        norm(f"{name}.norm1", size)
        linear(f"{name}.attn.qkv", 3 * size, size)
        linear(f"{name}.attn.proj", size, size)
        norm(f"{name}.norm2", size)
        linear(f"{name}.mlp.fc1", inner, size)
        linear(f"{name}.mlp.fc2", size, inner)

    for modality, channels in inputs.items():
        name, side = f"input_adapters.{modality}", patch
        if modality == "semseg":
            state[f"{name}.class_emb.weight"] = draw(channels, embedding)
            channels, side = embedding, patch // stride
        state[f"{name}.proj.weight"], state[f"{name}.proj.bias"] = draw(width, channels, side, side), draw(width)
        state[f"{name}.pos_emb"] = positions(grid, width)
    for layer in range(layers):
        block(f"encoder.{layer}", width, feed_forward)
    for task, (modality, channels) in outputs.items():
        name, side = f"output_adapters.{task}", patch // (stride if modality == "semseg" else 1)
        state[f"{name}.mask_token"] = draw(1, 1, decoder)
        for one in inputs:
            state[f"{name}.task_embeddings.{one}"] = draw(1, 1, decoder)
        state[f"{name}.pos_emb"] = positions(grid, decoder)
        linear(f"{name}.proj_context", decoder, width)
        for each in ("query_norm", "context_norm", "out_norm"):
            norm(f"{name}.{each}", decoder)
        linear(f"{name}.decoder.q", decoder, decoder)
        linear(f"{name}.decoder.kv", 2 * decoder, decoder)
        linear(f"{name}.decoder.proj", decoder, decoder)
        linear(f"{name}.mlp.fc1", 4 * decoder, decoder)
        linear(f"{name}.mlp.fc2", decoder, 4 * decoder)
        for layer in range(decoder_layers):
            block(f"{name}.decoder_transformer.{layer}", decoder, 4 * decoder)
        linear(f"{name}.out_proj", channels * side**2, decoder)
    return state


def positions(grid: int, width: int) -> Tensor:
    """[1, D, G, G]: sine and cosine of the row, then of the column, each of D / 4 angles."""
    quarter = width // 4
    rates = 10000 ** -(torch.arange(quarter, dtype=torch.float64) / quarter)
    angles = rates[:, None] * torch.arange(grid)  # [D / 4, G]
    waves = torch.cat([angles.sin(), angles.cos()])  # [D / 2, G]
    return torch.cat([waves[:, :, None].expand(-1, -1, grid), waves[:, None].expand(-1, grid, -1)])[None]


def predict(
    state: dict[str, Tensor],
    images: dict[str, Tensor],
    visible: list[tuple[str, int]],
    *,
    outputs: dict[str, tuple[str, int]],
    heads: int,
    decoder_heads: int,
) -> dict[str, Tensor]:
    """[C, H, W] of each decoder, for one image.

    Args:
        images: [C, S, S] of each input modality; of semseg [S / stride, S / stride] class numbers.
        visible: modality and place, row by row, of each token that the encoder sees.
        outputs: see `random_weights`.
    """
    tokens = {name: _tokens(state, f"input_adapters.{name}", image) for name, image in images.items()}
    entered = torch.stack([*(tokens[name][place] for name, place in visible), state["global_tokens"][0, 0]])
    encoded = _blocks(state, "encoder", entered, heads)
    return {task: _decode(state, task, *of, encoded, visible, decoder_heads) for task, of in outputs.items()}


def _tokens(state: dict[str, Tensor], name: str, image: Tensor) -> Tensor:
    """[N, D] of all patches of one modality."""
    if f"{name}.class_emb.weight" in state:
        image = state[f"{name}.class_emb.weight"][image].movedim(-1, 0)  # [E, H, W]
    kernel = state[f"{name}.proj.weight"]
    found = F.conv2d(image[None], kernel, state[f"{name}.proj.bias"], stride=kernel.shape[-1])
    return (found + state[f"{name}.pos_emb"])[0].flatten(1).T


def _decode(
    state: dict[str, Tensor],
    task: str,
    owner: str,
    channels: int,
    encoded: Tensor,
    visible: list[tuple[str, int]],
    heads: int,
) -> Tensor:
    name = f"output_adapters.{task}"
    place = state[f"{name}.pos_emb"][0].flatten(1).T  # [N, d]

    def embedded(modality: str) -> Tensor:
        known = state.get(f"{name}.task_embeddings.{modality}")
        return place if known is None else place + known[0, 0]

    context = _linear(state, f"{name}.proj_context", encoded)
    seen = torch.stack([one + embedded(modality)[p] for one, (modality, p) in zip(context[:-1], visible, strict=True)])
    queries = state[f"{name}.mask_token"][0, 0] + embedded(owner)
    for one, (modality, p) in zip(seen, visible, strict=True):
        if modality == owner:
            queries[p] = one
    asked = _linear(state, f"{name}.decoder.q", _norm(state, f"{name}.query_norm", queries))
    keys, values = _linear(
        state, f"{name}.decoder.kv", _norm(state, f"{name}.context_norm", torch.cat([seen, context[-1:]]))
    ).chunk(2, dim=-1)
    found = _linear(state, f"{name}.decoder.proj", _attention(asked, keys, values, heads))
    found = found + _mlp(state, f"{name}.mlp", _norm(state, f"{name}.out_norm", found))
    out = _linear(state, f"{name}.out_proj", _blocks(state, f"{name}.decoder_transformer", found, heads))
    grid, side = math.isqrt(len(place)), math.isqrt(out.shape[1] // channels)
    picture = torch.empty(channels, grid * side, grid * side, dtype=out.dtype)
    for number, patch in enumerate(out):
        row, column = divmod(number, grid)
        picture[:, row * side : (row + 1) * side, column * side : (column + 1) * side] = patch.view(-1, side, side)
    return picture


def _blocks(state: dict[str, Tensor], name: str, tokens: Tensor, heads: int) -> Tensor:
    layer = 0
    while f"{name}.{layer}.attn.qkv.weight" in state:
        at = f"{name}.{layer}"
        parts = _linear(state, f"{at}.attn.qkv", _norm(state, f"{at}.norm1", tokens)).chunk(3, dim=-1)
        tokens = tokens + _linear(state, f"{at}.attn.proj", _attention(*parts, heads))
        tokens = tokens + _mlp(state, f"{at}.mlp", _norm(state, f"{at}.norm2", tokens))
        layer += 1
    return tokens


def _attention(queries: Tensor, keys: Tensor, values: Tensor, heads: int) -> Tensor:
    found = []
    for q, k, v in zip(*(each.chunk(heads, dim=-1) for each in (queries, keys, values)), strict=True):
        found.append((q @ k.T / math.sqrt(q.shape[-1])).softmax(-1) @ v)
    return torch.cat(found, dim=-1)


def _mlp(state: dict[str, Tensor], name: str, tokens: Tensor) -> Tensor:
    return _linear(state, f"{name}.fc2", F.gelu(_linear(state, f"{name}.fc1", tokens)))


def _linear(state: dict[str, Tensor], name: str, tokens: Tensor) -> Tensor:
    return tokens @ state[f"{name}.weight"].T + state[f"{name}.bias"]


def _norm(state: dict[str, Tensor], name: str, tokens: Tensor) -> Tensor:
    return F.layer_norm(tokens, tokens.shape[-1:], state[f"{name}.weight"], state[f"{name}.bias"], EPS)
