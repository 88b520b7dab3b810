"""A masked autoencoder's weights from and to timm's `VisionTransformer` and transformers' `ViTMAEForPreTraining`.

Both have the patch embedding as a convolution and the fixed positions as a stored tensor. transformers' names are those
of its published files, which every version reads; newer versions name a model's own tensors differently.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import get_args

import torch
from torch import Tensor

from trp_scale.models.initialise import check_names, take
from trp_scale.models.positions import PositionOrder, sine_cosine
from trp_scale.pretraining.mae.model import CHANNELS, MaskedAutoencoder

TIMM_POSITIONS = "pos_embed"
TABLE, TIMM_TABLE = "relative_positions.table", "attn.relative_table"
"""A block's table of relative positions, by our name and by that of relative_vit.py, which is timm's model with it."""
VITMAE_POSITIONS = "vit.embeddings.position_embeddings"
VITMAE_DECODER_POSITIONS = "decoder.decoder_pos_embed"

POSITION_TOLERANCE = 1e-4
"""Stored positions may differ from ours by as much: they were rounded, some of them to half precision."""

VITMAE_NAMES = {
    "cls_token": "vit.embeddings.cls_token",
    "patch_embed": "vit.embeddings.patch_embeddings.projection",
    "blocks": "vit.encoder.layer",
    "norm": "vit.layernorm",
    "decoder_embed": "decoder.decoder_embed",
    "mask_token": "decoder.mask_token",
    "decoder_blocks": "decoder.decoder_layers",
    "decoder_norm": "decoder.decoder_norm",
    "prediction": "decoder.decoder_pred",
}

VITMAE_BLOCK_NAMES = {
    "norm1": ("layernorm_before",),
    "attn.qkv": ("attention.attention.query", "attention.attention.key", "attention.attention.value"),
    "attn.proj": ("attention.output.dense",),
    "norm2": ("layernorm_after",),
    "mlp.fc1": ("intermediate.dense",),
    "mlp.fc2": ("output.dense",),
}

VITMAE_NEWER_NAMES = (
    (r"^vit\.layers\.", "vit.encoder.layer."),
    (r"^decoder\.decoder_encoder\.layer\.", "decoder.decoder_layers."),  # transformers 5.23's save_pretrained
    (r"\.attention\.q_proj\.", ".attention.attention.query."),
    (r"\.attention\.k_proj\.", ".attention.attention.key."),
    (r"\.attention\.v_proj\.", ".attention.attention.value."),
    (r"\.attention\.o_proj\.", ".attention.output.dense."),
    (r"\.mlp\.fc1\.", ".intermediate.dense."),
    (r"\.mlp\.fc2\.", ".output.dense."),
)


def to_timm(
    weights: Mapping[str, Tensor], *, patch_size: int, image_size: int, order: PositionOrder = "column_row"
) -> dict[str, Tensor]:
    """State dict of timm's ViT without a head, for images of this side: the encoder, with positions of that grid."""
    encoder = {name: tensor for name, tensor in weights.items() if is_encoder(name)}
    state = {timm_name(name): theirs(name, tensor, patch_size) for name, tensor in encoder.items()}
    state[TIMM_POSITIONS] = stored_positions(image_size // patch_size, weights["cls_token"].shape[-1], order)
    return state


def load_timm(model: MaskedAutoencoder, state: Mapping[str, Tensor]) -> None:
    """Take the encoder from a timm ViT's state dict; the head is left out, the decoder stays, and so do relative tables
    where it has none.

    Raises:
        ValueError: names that are missing, unexpected or of another shape, or positions that are not sine-cosine.
    """
    tensors = {name: tensor for name, tensor in state.items() if not name.startswith(("head.", "fc_norm."))}
    tables = any(name.endswith(TIMM_TABLE) for name in tensors)
    wanted = [name for name, _ in model.named_parameters() if is_encoder(name) and (tables or not is_table(name))]
    class_position = take_positions(tensors, TIMM_POSITIONS, model.vision.position_order)
    fill(model, {name: (timm_name(name),) for name in wanted}, tensors, class_position)


def to_vitmae(
    weights: Mapping[str, Tensor], *, patch_size: int, grid: int, order: PositionOrder = "column_row"
) -> dict[str, Tensor]:
    """State dict of transformers' ViTMAE, for images of `grid` patches a side."""
    state: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        names = vitmae_names(name)
        state |= zip(names, theirs(name, tensor, patch_size).chunk(len(names)), strict=True)
    state[VITMAE_POSITIONS] = stored_positions(grid, weights["cls_token"].shape[-1], order)
    state[VITMAE_DECODER_POSITIONS] = stored_positions(grid, weights["mask_token"].shape[-1], order)
    return state


def load_vitmae(model: MaskedAutoencoder, state: Mapping[str, Tensor]) -> None:
    """Take all weights from a `ViTMAEForPreTraining`'s state dict, or from a file of it; relative tables stay.

    Raises:
        ValueError: names that are missing, unexpected or of another shape, or positions that are not sine-cosine.
    """
    tensors = {published_name(name): tensor for name, tensor in state.items()}
    wanted = [name for name, _ in model.named_parameters() if not is_table(name)]
    take_positions(tensors, VITMAE_DECODER_POSITIONS, model.vision.position_order)
    class_position = take_positions(tensors, VITMAE_POSITIONS, model.vision.position_order)
    fill(model, {name: vitmae_names(name) for name in wanted}, tensors, class_position)


def load_given(model: MaskedAutoencoder, state: Mapping[str, Tensor]) -> None:
    """Take ViTMAE's weights, or the encoder alone of a timm ViT; by whose names the tensors have."""
    load = load_vitmae if any(name.startswith("vit.") for name in state) else load_timm
    load(model, state)


def is_encoder(name: str) -> bool:
    return name.split(".")[0] in ("patch_embed", "cls_token", "blocks", "norm")


def is_table(name: str) -> bool:
    """Whether this is a table of relative positions, which neither library's own model has."""
    return name.endswith(TABLE)


def timm_name(name: str) -> str:
    return name.replace("patch_embed.", "patch_embed.proj.").replace(TABLE, TIMM_TABLE)


def vitmae_names(name: str) -> tuple[str, ...]:
    """transformers' names for one of our parameters: three for queries, keys and values, which are one matrix here."""
    first, _, rest = name.partition(".")
    if not first.endswith("blocks"):
        return (f"{VITMAE_NAMES[first]}{'.' if rest else ''}{rest}",)
    number, _, rest = rest.partition(".")
    part, _, kind = rest.rpartition(".")
    return tuple(f"{VITMAE_NAMES[first]}.{number}.{theirs}.{kind}" for theirs in VITMAE_BLOCK_NAMES[part])


def published_name(name: str) -> str:
    """A name in a newer transformers' model as in its published files."""
    for pattern, replacement in VITMAE_NEWER_NAMES:
        name = re.sub(pattern, replacement, name)
    return name


def theirs(name: str, tensor: Tensor, patch_size: int) -> Tensor:
    """Our tensor in the shape of theirs: the patch embedding a convolution, tokens [1, 1, D]."""
    if name == "patch_embed.weight":  # [D, (row, column, channel)] -> [D, channel, row, column]
        return tensor.reshape(-1, patch_size, patch_size, CHANNELS).permute(0, 3, 1, 2).contiguous()
    return tensor.reshape(1, 1, -1) if name.endswith("_token") else tensor


def ours(name: str, tensor: Tensor) -> Tensor:
    """The inverse of `theirs`."""
    if name == "patch_embed.weight" and tensor.ndim == 4:
        return tensor.permute(0, 2, 3, 1).flatten(1)
    return tensor.flatten() if name.endswith("_token") else tensor


def stored_positions(grid: int, width: int, order: PositionOrder = "column_row") -> Tensor:
    """[1, 1 + grid^2, width]: the class token's, which are zero, and the patches'."""
    return torch.cat([torch.zeros(1, width), sine_cosine(grid, width, order).float()]).unsqueeze(0)


def order_of(positions: Tensor) -> PositionOrder | None:
    """Return the order of fixed sine-cosine positions of a square grid [N, D]; `None` for other positions."""
    grid, width = round(len(positions) ** 0.5), positions.shape[-1]
    if grid**2 != len(positions) or width % 4:
        return None
    for order in get_args(PositionOrder):
        if (positions - sine_cosine(grid, width, order)).abs().max() <= POSITION_TOLERANCE:
            return order  # type: ignore[no-any-return]
    return None


def take_positions(tensors: dict[str, Tensor], name: str, order: PositionOrder) -> Tensor:
    """Remove stored positions and return the class token's, [D].

    Raises:
        ValueError: they are missing, or not the fixed positions that this model has.
    """
    if name not in tensors:
        raise ValueError(f"{name} is missing")
    positions = tensors.pop(name).float().squeeze(0)  # [1 + N, D]
    grid, width = round((len(positions) - 1) ** 0.5), positions.shape[-1]
    if grid**2 != len(positions) - 1:
        raise ValueError(
            f"{name}: {len(positions)} positions given; expected a square grid of patches and a class token"
        )
    stored = order_of(positions[1:])
    if stored is not None and stored != order:
        raise ValueError(f"{name}: positions in the order {stored}; set --vision.position_order {stored} for them")
    if stored is None and not positions.any():
        raise ValueError(f"{name}: all zeros, as of a model that was made and never trained; give trained weights")
    if stored is None:
        off = float((positions[1:] - sine_cosine(grid, width, order)).abs().max())
        raise ValueError(
            f"{name}: differs from fixed sine-cosine positions by up to {off:.2g}, allowed: {POSITION_TOLERANCE:g}; "
            "a model with learned positions cannot be taken over"
        )
    return positions[0]


def fill(
    model: MaskedAutoencoder, sources: Mapping[str, Iterable[str]], state: Mapping[str, Tensor], class_position: Tensor
) -> None:
    """Copy `state` into the model's parameters, each made of the named sources, one below the other.

    Raises:
        ValueError: names that are missing, unexpected or of another shape; then nothing has been written.
    """
    check_names({name for several in sources.values() for name in several}, state)

    def made(name: str, several: Sequence[Tensor]) -> Tensor:
        value = ours(name, torch.cat(list(several)))
        if name == "cls_token" and value.shape == class_position.shape and not value.is_meta:
            return value + class_position  # ours has none of its own
        return value

    take(model, {name: tuple(several) for name, several in sources.items()}, state, made)
