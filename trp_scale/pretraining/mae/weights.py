"""Import and export of masked autoencoders: timm's `VisionTransformer` and transformers' `ViTMAEForPreTraining`.

Both store the patch embedding as a convolution and the fixed positions as a tensor. The names for transformers are
those of its published files, which every version reads; newer versions use other names in memory.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor, nn

from trp_scale.checkpoint.export import Export
from trp_scale.checkpoint.initial_weights import NO_FIELDS, listed_names
from trp_scale.config import RefusedError
from trp_scale.config.images import ImagePretrainConfig
from trp_scale.config.loader import from_dict
from trp_scale.config.schema import Fields
from trp_scale.models.initialise import check_names, check_shapes, set_value
from trp_scale.models.patches import CHANNEL_DEVIATION, CHANNEL_MEAN
from trp_scale.models.positions import PositionOrder, interpolate, sine_cosine
from trp_scale.models.vit import feed_forward_ratio
from trp_scale.pretraining.mae import relative_vit
from trp_scale.pretraining.mae.image_weights import (
    DECODER_POSITIONS,
    RELATIVE_ARCHITECTURE,
    TIMM,
    TIMM_ARCHITECTURE,
    TIMM_POSITIONS,
    VITMAE,
    VITMAE_DECODER_POSITIONS,
    VITMAE_POSITIONS,
    ImageWeights,
    is_encoder,
    is_table,
    position_order,
    read_image_weights,
)
from trp_scale.pretraining.mae.model import MaskedAutoencoder
from trp_scale.pretraining.mae.settings import MaeConfig

if TYPE_CHECKING:
    from transformers import ViTMAEConfig

TIMM_EPS = 1e-6
"""Epsilon of the layer norms in timm's vision transformers; no argument changes it."""


def load_weights(model: MaskedAutoencoder, state: Mapping[str, Tensor], fields: Fields = NO_FIELDS) -> list[str]:
    """Import the weights that `read_image_weights` reads. Return a line on each difference.

    A decoder, a class token, a last norm or relative tables that the state dict lacks keep their initial weights, as
    does a decoder of another kind.

    Raises:
        ValueError: names are missing, unexpected or of another shape, or positions are of another kind.
    """
    return import_encoder(model, read_image_weights(state, fields), model.vision.position_order)


def import_encoder(
    model: nn.Module, weights: ImageWeights, order: PositionOrder, patch_embed: str = "patch_embed."
) -> list[str]:
    """Set the parameters of a model that has this encoder, and its positions; return a line on each difference.

    Args:
        order: of the model's sine-cosine positions.
        patch_embed: name of the model's patch embedding.
    """
    parameters = dict(model.named_parameters())
    trained, grid = parameters.pop("pos_embed", None), cast(int, model.grid)
    tensors = {name.replace("patch_embed.", patch_embed): tensor for name, tensor in weights.tensors.items()}
    if weights.order is None and trained is None:
        raise ValueError("pos_embed: positions that were learned; set --vision.learned_positions True")
    if weights.order not in (None, order):
        raise ValueError(f"pos_embed: the order is {weights.order}; set --vision.position_order {weights.order}")
    ours = {find_part(name) for name in parameters} - (
        {"decoder", MASK} if "decoder_embed.weight" not in parameters else set()
    )
    left_out = [name for name in tensors if find_part(name) in OPTIONAL - ours]
    width = weights.positions.shape[-1]
    if MASK in ours & tensors.keys() and tensors[MASK].shape != parameters[MASK].shape == (width,):
        left_out.append(MASK)  # this model's enters the encoder
    for name in DECODER_POSITIONS:
        if name in tensors and name not in left_out:
            check_positions(name, tensors.pop(name).float().squeeze(0)[1:], order)
    tensors = {name: tensor for name, tensor in tensors.items() if name not in left_out}
    required = {"blocks", find_part(patch_embed)} | {find_part(name) for name in tensors}
    kept = [name for name in parameters if find_part(name) not in required]
    check_names(parameters.keys() - kept, tensors)
    check_shapes(parameters, {name: tuple(tensor.shape) for name, tensor in tensors.items()})
    for name, tensor in tensors.items():
        set_value(parameters[name], partial(Tensor.detach, tensor))
    if trained is not None:
        sine_cosine = stored_positions(grid, trained.shape[-1], order).squeeze(0)
        set_value(trained, partial(interpolate, sine_cosine if weights.order else weights.positions, grid))
    lines = {
        "left out": listed_names([*weights.heads, *left_out], 1),
        "left at their start": listed_names(map(find_part, kept)),
        f"positions of {weights.grid} x {weights.grid} patches": ""
        if weights.grid == grid
        else f"{'computed for' if weights.order else 'interpolated to'} {grid} x {grid}",
    }
    return [*weights.differences, *(f"{what}: {line}" for what, line in lines.items() if line)]


MASK = "mask_token"

OPTIONAL = {"decoder", MASK, "norm"}
"""Parts of a file that a model may lack."""


def find_part(name: str) -> str:
    """Return the part of a model to which a parameter belongs. A part that a file lacks is left at its start."""
    if is_table(name):
        return "relative tables" if is_encoder(name) else "relative tables of the decoder"
    if name.startswith(("decoder_", "decoder.", "prediction.")):
        return "decoder"
    return ".".join(name.split(".")[: 2 if name.startswith(("decoders.", "tokenisers.")) else 1])


def to_timm(
    weights: Mapping[str, Tensor], *, patch_size: int, image_size: int, order: PositionOrder = "column_row"
) -> dict[str, Tensor]:
    """Return the state dict of timm's ViT without a head, with positions for images of `image_size` pixels a side."""
    state = TIMM.export_weights({name: tensor for name, tensor in weights.items() if is_encoder(name)})
    state[TIMM_POSITIONS] = encoder_positions(weights, image_size // patch_size, order)
    return state


def to_vitmae(weights: Mapping[str, Tensor], *, grid: int, order: PositionOrder = "column_row") -> dict[str, Tensor]:
    """Return the state dict of transformers' ViTMAE, for images of `grid` patches a side."""
    state = VITMAE.export_weights({name: tensor for name, tensor in weights.items() if name != "pos_embed"})
    state[VITMAE_POSITIONS] = encoder_positions(weights, grid, order)
    state[VITMAE_DECODER_POSITIONS] = stored_positions(grid, weights["mask_token"].shape[-1], order)
    return state


def stored_positions(grid: int, width: int, order: PositionOrder = "column_row") -> Tensor:
    """Return the positions [1, 1 + grid^2, width] of the class token, which are zero, and of the patches."""
    return torch.cat([torch.zeros(1, width), sine_cosine(grid, width, order).float()]).unsqueeze(0)


def encoder_positions(weights: Mapping[str, Tensor], grid: int, order: PositionOrder) -> Tensor:
    """Return an encoder's positions [1, 1 + grid^2, D]: trained ones, interpolated to this grid, or sine-cosine."""
    if "pos_embed" in weights:
        return interpolate(weights["pos_embed"], grid).unsqueeze(0)
    return stored_positions(grid, weights["cls_token"].shape[-1], order)


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
    if config.vision.relative_mode != "contextual" or config.vision.relative_values:
        raise RefusedError(
            f"--to timm: the run's vision.relative_mode is {config.vision.relative_mode} and vision.relative_values "
            f"{config.vision.relative_values}; exports have contextual and False. Fine-tune the run itself by --from"
        )
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
        # torch.hub loads this file from a local directory.
        (directory / "hubconf.py").write_text(inspect.getsource(relative_vit), encoding="utf-8")


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
