"""The encoder of a vision transformer that timm has saved (`timm.models.save_for_hf`), or that we exported for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from trp_scale.checkpoint.initial_weights import FILE, reading, stored_weights
from trp_scale.config import RefusedError
from trp_scale.models.patches import CHANNEL_DEVIATION, CHANNEL_MEAN
from trp_scale.upstreams.mae.weights import TIMM_POSITIONS, is_encoder, order_of, ours

CONVOLUTION = "patch_embed.proj."
HEADS = ("head", "head_dist", "fc_norm", "pre_logits", TIMM_POSITIONS)
"""What is not the encoder's own."""


@dataclass(frozen=True, kw_only=True)
class TimmEncoder:
    """Attributes:
    sizes: by the names of encoder_source's settings.
    read: the weights, by the names of `ImageEncoder`.
    """

    sizes: dict[str, Any]
    read: Callable[[], dict[str, Tensor]]


def open_timm(path: str, found: dict[str, Any]) -> TimmEncoder:
    """Look at a directory of timm; reads its positions alone.

    Fixed sine-cosine positions stay fixed, others are weights. Mean and deviation that the model wants of its pixels
    are folded into the patch embedding, so that it computes the same of ours.

    Args:
        path: the directory.
        found: its config.json.

    Raises:
        RefusedError: timm does not know the architecture, or it computes what `ImageEncoder` does not.
    """
    import timm

    arguments = dict(found.get("model_args") or {})
    pooling = {"global_pool": found["global_pool"]} if found.get("global_pool") else {}
    try:
        with torch.device("meta"):
            model = timm.create_model(
                found["architecture"], pretrained=False, **{**pooling, **arguments, "num_classes": 0}
            )
    except (RuntimeError, TypeError, ValueError) as error:
        raise RefusedError(f"--from {path}: timm cannot make {found['architecture']} {arguments}: {error}") from error
    if differences := list(_differences(model)):
        raise RefusedError(
            f"--from {path}: {found['architecture']} has {', '.join(differences)}; allowed: a plain vision transformer "
            "with a class token, such as vit_base_patch16_224"
        )
    block, (grid, _) = model.blocks[0], model.patch_embed.grid_size
    patch_size = model.patch_embed.patch_size[0]
    positions = _positions(path)
    order = order_of(positions[1:]) if len(positions) == 1 + grid**2 else None
    learned = order is None

    def read() -> dict[str, Tensor]:
        stored = stored_weights(path)
        with reading(path, FILE):
            weights = _encoder(path, stored, patch_size, _statistics(found))
        if not learned:
            del weights["pos_embed"]
        return weights

    sizes = {
        "layers": len(model.blocks),
        "width": model.embed_dim,
        "heads": block.attn.num_heads,
        "intermediate": block.mlp.fc1.out_features,
        "eps": block.norm1.eps,
        "patch_size": patch_size,
        "grid": grid,
        "learned_positions": learned,
        "position_order": order or "column_row",
    }
    return TimmEncoder(sizes=sizes, read=read)


def _differences(model: nn.Module) -> list[str]:
    """What the model has that `ImageEncoder` has not, in words."""
    if type(model).__name__ != "VisionTransformer":
        return [f"class {type(model).__name__}"]
    block: Any = model.blocks[0]  # type: ignore[index]
    vit: Any = model
    odd = {
        "no class token, or registers": vit.num_prefix_tokens != 1,
        "no positions, or none of the class token": vit.pos_embed is None or vit.no_embed_class,
        "a norm before the blocks": not isinstance(vit.norm_pre, nn.Identity),
        "a norm in the patch embedding": not isinstance(vit.patch_embed.norm, nn.Identity),
        "no last norm": isinstance(vit.norm, nn.Identity) and isinstance(vit.fc_norm, nn.Identity),
        "attention pooling": vit.attn_pool is not None,
        f"blocks of class {type(block).__name__}": type(block).__name__ != "Block",
        "a grid that is not square": len({*vit.patch_embed.grid_size}) != 1 or len({*vit.patch_embed.patch_size}) != 1,
    }
    if type(block).__name__ == "Block":
        odd |= {
            "layer scale": not isinstance(block.ls1, nn.Identity),
            "normalised queries": not isinstance(block.attn.q_norm, nn.Identity),
            "no bias of queries, keys and values": block.attn.qkv.bias is None,
            f"feed-forward layers of class {type(block.mlp).__name__}": type(block.mlp).__name__ != "Mlp",
            f"activation {type(block.mlp.act).__name__}": type(block.mlp.act) is not nn.GELU,
        }
    return [words for words, there in odd.items() if there]


def _positions(path: str) -> Tensor:
    """[1 + N, D] as stored."""
    with reading(path, FILE), safe_open(Path(path) / FILE, framework="pt") as file:
        if TIMM_POSITIONS not in file.keys():  # noqa: SIM118 - not a mapping
            raise RefusedError(f"--from {path}: {FILE} has no {TIMM_POSITIONS}; allowed: weights of the whole model")
        positions: Tensor = file.get_tensor(TIMM_POSITIONS)
    return positions.float().squeeze(0)


def _statistics(found: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """[3] mean and deviation that the model wants taken out of pixels in [0, 1]."""
    described = found.get("pretrained_cfg") or found
    return torch.tensor(described.get("mean", CHANNEL_MEAN)), torch.tensor(described.get("std", CHANNEL_DEVIATION))


def _encoder(
    path: str, stored: dict[str, Tensor], patch_size: int, statistics: tuple[Tensor, Tensor]
) -> dict[str, Tensor]:
    """By our names; learned positions under pos_embed, the class token's own in the class token."""
    if other := sorted({name.split(".")[0] for name in stored if not is_encoder(name)} - set(HEADS)):
        raise RefusedError(f"--from {path}: {FILE} has weights of {', '.join(other)}, which this encoder has not")
    named = {name.replace(CONVOLUTION, "patch_embed."): tensor for name, tensor in stored.items()}
    weights = {name: ours(name, tensor) for name, tensor in named.items() if is_encoder(name)}
    if "norm.weight" not in weights:  # that of the mean of the tokens is the only one there is
        weights |= {f"norm.{kind}": named[f"fc_norm.{kind}"] for kind in ("weight", "bias")}
    positions = stored[TIMM_POSITIONS].squeeze(0)
    weights["cls_token"] = weights["cls_token"] + positions[0]
    weights["pos_embed"] = torch.cat([torch.zeros_like(positions[:1]), positions[1:]])
    # theirs = (pixel - mean) / deviation, ours = (pixel - m) / d: theirs = ours d / deviation + (m - mean) / deviation.
    mean, deviation = statistics
    scale = torch.tensor(CHANNEL_DEVIATION) / deviation
    offset = (torch.tensor(CHANNEL_MEAN) - mean) / deviation
    kernel = weights["patch_embed.weight"].view(-1, patch_size**2, 3)  # [D, row and column, channel]
    weights["patch_embed.bias"] = weights["patch_embed.bias"] + (kernel * offset).sum((1, 2))
    weights["patch_embed.weight"] = (kernel * scale).flatten(1)
    return weights
