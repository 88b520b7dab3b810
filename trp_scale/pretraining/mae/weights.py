"""Import and export of masked autoencoders: timm's `VisionTransformer` and transformers' `ViTMAEForPreTraining`.

Both store the patch embedding as a convolution and the fixed positions as a tensor. The names for transformers are
those of its published files, which every version reads; newer versions use other names in memory.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, get_args

import torch
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor

from trp_scale.checkpoint.export import PATCHES, TOKEN, Export, Pair, WeightNames
from trp_scale.config import RefusedError
from trp_scale.config.images import ImagePretrainConfig
from trp_scale.config.loader import from_dict
from trp_scale.models.patches import CHANNEL_DEVIATION, CHANNEL_MEAN
from trp_scale.models.positions import PositionOrder, sine_cosine
from trp_scale.models.vit import feed_forward_ratio
from trp_scale.pretraining.mae import relative_vit
from trp_scale.pretraining.mae.model import MaskedAutoencoder
from trp_scale.pretraining.mae.settings import MaeConfig

if TYPE_CHECKING:
    from transformers import ViTMAEConfig

TABLE = "relative_positions.table"
"""Table of relative positions of a block; the models of both libraries lack it."""

TIMM = WeightNames(
    Pair("cls_token", "cls_token", TOKEN),
    Pair("patch_embed.*", "patch_embed.proj.*", PATCHES),
    Pair(f"blocks.*.{TABLE}", "blocks.*.attn.relative_table"),  # relative_vit.py
    Pair("blocks.*", "blocks.*"),
    Pair("norm.*", "norm.*"),
)
"""The encoder."""

TIMM_POSITIONS = "pos_embed"

_ATTENTION = "attention.attention"
VITMAE = WeightNames(
    Pair("cls_token", "vit.embeddings.cls_token", TOKEN),
    Pair("patch_embed.*", "vit.embeddings.patch_embeddings.projection.*", PATCHES),
    Pair("norm.*", "vit.layernorm.*"),
    Pair("decoder_embed.*", "decoder.decoder_embed.*"),
    Pair("mask_token", "decoder.mask_token", TOKEN),
    Pair("decoder_norm.*", "decoder.decoder_norm.*"),
    Pair("prediction.*", "decoder.decoder_pred.*"),
    *(
        Pair(f"{ours}.*.{part}.*", tuple(f"{theirs}.*.{name}.*" for name in names))
        for ours, theirs in (("blocks", "vit.encoder.layer"), ("decoder_blocks", "decoder.decoder_layers"))
        for part, names in (
            ("norm1", ("layernorm_before",)),
            ("attn.qkv", (f"{_ATTENTION}.query", f"{_ATTENTION}.key", f"{_ATTENTION}.value")),  # joined in our model
            ("attn.proj", ("attention.output.dense",)),
            ("norm2", ("layernorm_after",)),
            ("mlp.fc1", ("intermediate.dense",)),
            ("mlp.fc2", ("output.dense",)),
        )
    ),
)
"""The whole autoencoder."""

VITMAE_POSITIONS = "vit.embeddings.position_embeddings"
VITMAE_DECODER_POSITIONS = "decoder.decoder_pos_embed"

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

POSITION_TOLERANCE = 1e-4
"""Largest difference between stored positions, some in half precision, and ours."""

TIMM_ARCHITECTURE = "vit_base_patch16_224"
"""timm's name of a plain vision transformer; the file's arguments set the sizes."""

RELATIVE_ARCHITECTURE = "vision_transformer_irpe"
"""Name of the model of relative_vit.py, with relative positions; timm has no such model."""

HUB_FILE = "hubconf.py"
"""File that torch.hub loads from a local directory."""

TIMM_EPS = 1e-6
"""Epsilon of the layer norms in timm's vision transformers; no argument changes it."""


def is_encoder(name: str) -> bool:
    return TIMM.has(name)


def is_table(name: str) -> bool:
    return name.endswith(TABLE)


def published_name(name: str) -> str:
    """Return the name in published files for a name in a newer transformers model."""
    for pattern, replacement in VITMAE_NEWER_NAMES:
        name = re.sub(pattern, replacement, name)
    return name


def load_weights(model: MaskedAutoencoder, state: Mapping[str, Tensor]) -> None:
    """Import all weights of a `ViTMAEForPreTraining`, or the encoder of a timm ViT; the names tell which.

    A head is ignored. A decoder or relative tables that the state dict lacks keep their initial weights.

    Raises:
        ValueError: names are missing, unexpected or of another shape, or positions are not sine-cosine.
    """
    order, parameters = model.vision.position_order, dict(model.named_parameters())
    if any(name.startswith("vit.") for name in state):
        names, positions = VITMAE, VITMAE_POSITIONS
        tensors = {published_name(name): tensor for name, tensor in state.items()}
        kept = {name for name in parameters if is_table(name)}
        pop_positions(tensors, VITMAE_DECODER_POSITIONS, order)
    else:
        names, positions = TIMM, TIMM_POSITIONS
        tensors = {name: tensor for name, tensor in state.items() if not name.startswith(("head.", "fc_norm."))}
        has_tables = any(is_table(names.our_name(name) or "") for name in tensors)
        kept = {name for name in parameters if not is_encoder(name) or (is_table(name) and not has_tables)}
    class_position = pop_positions(tensors, positions, order)  # [D], added to our class token
    (class_token,) = names.sources("cls_token")
    if class_token in tensors and tensors[class_token].shape[-1:] == class_position.shape:
        tensors[class_token] = tensors[class_token] + class_position
    names.import_weights(model, tensors, kept=kept)


def to_timm(
    weights: Mapping[str, Tensor], *, patch_size: int, image_size: int, order: PositionOrder = "column_row"
) -> dict[str, Tensor]:
    """Return the state dict of timm's ViT without a head, with positions for images of `image_size` pixels a side."""
    state = TIMM.export_weights({name: tensor for name, tensor in weights.items() if is_encoder(name)})
    state[TIMM_POSITIONS] = stored_positions(image_size // patch_size, weights["cls_token"].shape[-1], order)
    return state


def to_vitmae(weights: Mapping[str, Tensor], *, grid: int, order: PositionOrder = "column_row") -> dict[str, Tensor]:
    """Return the state dict of transformers' ViTMAE, for images of `grid` patches a side."""
    state = VITMAE.export_weights(weights)
    state[VITMAE_POSITIONS] = stored_positions(grid, weights["cls_token"].shape[-1], order)
    state[VITMAE_DECODER_POSITIONS] = stored_positions(grid, weights["mask_token"].shape[-1], order)
    return state


def stored_positions(grid: int, width: int, order: PositionOrder = "column_row") -> Tensor:
    """Return the positions [1, 1 + grid^2, width] of the class token, which are zero, and of the patches."""
    return torch.cat([torch.zeros(1, width), sine_cosine(grid, width, order).float()]).unsqueeze(0)


def position_order(positions: Tensor) -> PositionOrder | None:
    """Return the order of the sine-cosine positions [N, D] of a square grid; `None` for other positions."""
    grid, width = round(len(positions) ** 0.5), positions.shape[-1]
    if grid**2 != len(positions) or width % 4:
        return None
    for order in get_args(PositionOrder):
        if (positions - sine_cosine(grid, width, order)).abs().max() <= POSITION_TOLERANCE:
            return order  # type: ignore[no-any-return]
    return None


def pop_positions(tensors: dict[str, Tensor], name: str, order: PositionOrder) -> Tensor:
    """Remove the positions `name` from the tensors and return those of the class token, [D].

    Raises ValueError if they are missing or differ from the model's fixed positions.
    """
    if name not in tensors:
        raise ValueError(f"{name} is missing")
    positions = tensors.pop(name).float().squeeze(0)  # [1 + N, D]
    check_positions(name, positions[1:], order)
    return positions[0]


def check_positions(name: str, positions: Tensor, order: PositionOrder) -> None:
    """Raise ValueError if positions [N, D] are not sine-cosine positions of a square grid in this order."""
    stored = position_order(positions)
    if stored is None:
        raise ValueError(f"{name}: not fixed sine-cosine positions of a square grid; others cannot be imported")
    if stored != order:
        raise ValueError(f"{name}: positions in the order {stored}; set --vision.position_order {stored}")


def write_timm(export: Export) -> None:
    """Write the encoder without a head for `timm.create_model("local-dir:DIRECTORY", pretrained=True)`. With relative
    positions, write it with its code for `torch.hub.load("DIRECTORY", "encoder", source="local")`.

    Raises:
        RefusedError: timm has no such model.
        CheckpointError: the checkpoint is damaged, or is not of a masked autoencoder.
    """
    config = from_dict(export.document.config, source=str(export.checkpoint))
    assert isinstance(config, MaeConfig)
    check_timm(config, export.image_size)
    model, relative = MaskedAutoencoder(config), ""
    if config.vision.positions == "relative":
        relative = "relaxed" if model.index == "relaxed" else "rounded"  # straight_through rounds in the forward pass
    weights = export.read_weights(model)
    write_encoder(export, config, weights, relative=relative)


def check_timm(config: ImagePretrainConfig, image_size: int) -> None:
    """Raise RefusedError for settings that timm's vision transformer does not support."""
    model, patch_size = config.model, config.vision.patch_size
    if model.layer_norm_eps != TIMM_EPS:
        raise RefusedError(
            f"--to timm: the run's model.layer_norm_eps is {model.layer_norm_eps:g}, timm's models use {TIMM_EPS:g}"
        )
    if image_size < patch_size or image_size % patch_size:
        raise RefusedError(
            f"--image_size is {image_size}, allowed: multiples of the run's vision.patch_size {patch_size}"
        )


def write_encoder(
    export: Export, config: ImagePretrainConfig, weights: Mapping[str, Tensor], *, relative: str = ""
) -> None:
    """Write timm's files of an encoder.

    Args:
        weights: weights by their names in `MaskedAutoencoder`.
        relative: index of relative positions, relaxed or rounded; empty without them.
    """
    model, patch_size = config.model, config.vision.patch_size
    directory, image_size = export.directory, export.image_size
    state = to_timm(weights, patch_size=patch_size, image_size=image_size, order=config.vision.position_order)
    arguments = {
        "img_size": image_size,
        "patch_size": patch_size,
        "embed_dim": model.hidden_size,
        "depth": model.layers,
        "num_heads": model.heads,
        "mlp_ratio": feed_forward_ratio(model.hidden_size, model.intermediate_size),
    }
    relative_settings = {"relative_index": relative, "hub_entry": relative_vit.encoder.__name__} if relative else {}
    description: dict[str, Any] = {
        "architecture": RELATIVE_ARCHITECTURE if relative else TIMM_ARCHITECTURE,
        **relative_settings,
        "num_classes": 0,
        "num_features": model.hidden_size,
        "global_pool": "token",
        "model_args": arguments,
        "pretrained_cfg": {
            "input_size": [3, image_size, image_size],
            "fixed_input_size": True,
            "interpolation": config.crops.interpolation,
            "mean": list(CHANNEL_MEAN),
            "std": list(CHANNEL_DEVIATION),
            "num_classes": 0,
            "first_conv": "patch_embed.proj",
            "classifier": "head",
        },
    }
    (directory / "config.json").write_text(json.dumps(description, indent=2) + "\n", encoding="utf-8")
    save_file(state, directory / "model.safetensors", metadata={"format": "pt"})
    if relative:
        (directory / HUB_FILE).write_text(inspect.getsource(relative_vit), encoding="utf-8")


def write_vitmae(export: Export) -> None:
    """Write the autoencoder and its image processor for `ViTMAEForPreTraining.from_pretrained`.

    Raises:
        RefusedError: ViTMAE has no such model.
        CheckpointError: the checkpoint is damaged, or is not of a masked autoencoder.
    """
    from transformers import ViTImageProcessor

    config = from_dict(export.document.config, source=str(export.checkpoint))
    assert isinstance(config, MaeConfig)
    vision = config.vision
    if vision.positions != "absolute":
        raise RefusedError(
            f"--to hf: the run's vision.positions is {vision.positions}, transformers' ViTMAE has only absolute "
            "positions; allowed: --to timm (the encoder)"
        )
    if vision.tokens != "visible" or vision.decoder != "transformer":
        raise RefusedError(
            f"--to hf: the run's vision.tokens is {vision.tokens} and vision.decoder {vision.decoder}, transformers' "
            "ViTMAE has only a transformer decoder with mask tokens; allowed: --to timm (the encoder)"
        )
    grid = config.crops.size // vision.patch_size
    stored = export.read_weights(MaskedAutoencoder(config))
    weights = to_vitmae(stored, grid=grid, order=vision.position_order)
    vitmae_config(config).save_pretrained(export.directory)
    ViTImageProcessor(
        size={"height": config.crops.size, "width": config.crops.size},
        resample=Image.Resampling[config.crops.interpolation.upper()],
        image_mean=list(CHANNEL_MEAN),
        image_std=list(CHANNEL_DEVIATION),
    ).save_pretrained(export.directory)
    # The model's save_pretrained in transformers 5.23 writes names of decoder layers that older versions reject.
    save_file(weights, export.directory / "model.safetensors", metadata={"format": "pt"})


def vitmae_config(config: MaeConfig) -> ViTMAEConfig:
    """Return transformers' configuration of a masked autoencoder."""
    from transformers import ViTMAEConfig

    model, vision = config.model, config.vision
    return ViTMAEConfig(
        architectures=["ViTMAEForPreTraining"],
        hidden_size=model.hidden_size,
        num_hidden_layers=model.layers,
        num_attention_heads=model.heads,
        intermediate_size=model.intermediate_size,
        initializer_range=model.initializer_range,
        layer_norm_eps=model.layer_norm_eps,
        image_size=config.crops.size,
        patch_size=vision.patch_size,
        decoder_hidden_size=vision.decoder_hidden_size,
        decoder_num_hidden_layers=vision.decoder_layers,
        decoder_num_attention_heads=vision.decoder_heads,
        decoder_intermediate_size=4 * vision.decoder_hidden_size,
        mask_ratio=config.masking.ratio,
        norm_pix_loss=config.objective.target == "normalised",
    )
