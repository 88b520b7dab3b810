"""An image run's checkpoint as a directory that timm or transformers' `ViTMAEForPreTraining.from_pretrained` loads."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from PIL import Image
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import ViTImageProcessor, ViTMAEConfig

from trp_scale.checkpoint.export import Export
from trp_scale.checkpoint.format import read_full_state
from trp_scale.config import RefusedError
from trp_scale.config.images import ImagePretrainConfig
from trp_scale.config.loader import from_dict
from trp_scale.errors import CheckpointError
from trp_scale.models.patches import CHANNEL_DEVIATION, CHANNEL_MEAN
from trp_scale.models.vit import feed_forward_ratio
from trp_scale.pretraining.mae import relative_vit
from trp_scale.pretraining.mae.model import MaskedAutoencoder
from trp_scale.pretraining.mae.settings import MaeConfig
from trp_scale.pretraining.mae.weights import to_timm, to_vitmae

TIMM_ARCHITECTURE = "vit_base_patch16_224"
"""timm's name of a plain vision transformer; sizes that are not ViT-B's are given as its arguments."""

RELATIVE_ARCHITECTURE = "vision_transformer_irpe"
"""Of a model with relative positions, which timm does not know: relative_vit.py has it."""

HUB_FILE = "hubconf.py"
"""What torch.hub reads of a local directory."""

TIMM_EPS = 1e-6
"""Epsilon of the layer norms of timm's vision transformers, which no argument changes."""


def write_timm(asked: Export) -> None:
    """Write the encoder for `timm.create_model("local-dir:DIRECTORY", pretrained=True)`, without a head. With relative
    positions it is for `torch.hub.load("DIRECTORY", "encoder", source="local")`, and brings its module along.

    Raises:
        RefusedError: timm has no such model.
        CheckpointError: the checkpoint is damaged, or is not of a masked autoencoder.
    """
    config = from_dict(asked.document.config, source=str(asked.checkpoint))
    assert isinstance(config, MaeConfig)
    check_timm(config, asked.image_size)
    model, relative = MaskedAutoencoder(config), ""
    if config.vision.positions == "relative":
        relative = "relaxed" if model.index == "relaxed" else "rounded"  # straight_through is rounded, going forward
    weights = read_weights(asked.checkpoint, model, asked.state)
    write_encoder(asked.directory, config, weights, asked.image_size, relative=relative)


def check_timm(config: ImagePretrainConfig, image_size: int) -> None:
    """Refuse what timm's vision transformer does not compute.

    Raises:
        RefusedError: naming the setting.
    """
    model, patch_size = config.model, config.vision.patch_size
    if model.layer_norm_eps != TIMM_EPS:
        raise RefusedError(
            f"--to timm: the run's model.layer_norm_eps is {model.layer_norm_eps:g}, timm's models have {TIMM_EPS:g}"
        )
    if image_size < patch_size or image_size % patch_size:
        raise RefusedError(
            f"--image_size is {image_size}, allowed: multiples of the run's vision.patch_size {patch_size}"
        )


def write_encoder(
    directory: Path,
    config: ImagePretrainConfig,
    weights: Mapping[str, Tensor],
    image_size: int,
    *,
    relative: str = "",
) -> None:
    """Write timm's files of an encoder with a masked autoencoder's names (pretraining/mae/weights.py).

    Args:
        relative: of an encoder with relative positions, how offsets find their entries: relaxed or rounded.
    """
    model, patch_size = config.model, config.vision.patch_size
    order = config.vision.position_order
    state = to_timm(weights, patch_size=patch_size, image_size=image_size, order=order)
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


def write_vitmae(asked: Export) -> None:
    """Write the whole autoencoder for `ViTMAEForPreTraining.from_pretrained`, and its image processor.

    Raises:
        RefusedError: ViTMAE has no such model.
        CheckpointError: the checkpoint is damaged, or is not of a masked autoencoder.
    """
    config = from_dict(asked.document.config, source=str(asked.checkpoint))
    assert isinstance(config, MaeConfig)
    vision = config.vision
    _refuse_relative_positions(config)
    if vision.tokens != "visible" or vision.decoder != "transformer":
        raise RefusedError(
            f"--to hf: the run's vision.tokens is {vision.tokens} and vision.decoder {vision.decoder}; transformers' "
            "ViTMAE has mask tokens in a transformer decoder only; allowed: --to timm (the encoder)"
        )
    grid = config.crops.size // vision.patch_size
    stored = read_weights(asked.checkpoint, MaskedAutoencoder(config), asked.state)
    weights = to_vitmae(stored, patch_size=vision.patch_size, grid=grid, order=vision.position_order)
    vitmae_config(config).save_pretrained(asked.directory)
    ViTImageProcessor(
        size={"height": config.crops.size, "width": config.crops.size},
        resample=Image.Resampling[config.crops.interpolation.upper()],
        image_mean=list(CHANNEL_MEAN),
        image_std=list(CHANNEL_DEVIATION),
    ).save_pretrained(asked.directory)
    # Not the model's save_pretrained: what transformers 5.23 calls the decoder's layers in a file, older ones reject.
    save_file(weights, asked.directory / "model.safetensors", metadata={"format": "pt"})


def vitmae_config(config: MaeConfig) -> ViTMAEConfig:
    """transformers' configuration of a masked autoencoder."""
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


def _refuse_relative_positions(config: MaeConfig) -> None:
    if config.vision.positions != "absolute":
        raise RefusedError(
            f"--to hf: the run's vision.positions is {config.vision.positions}, and transformers' ViTMAE has absolute "
            "positions only: without its relative tables it would compute something else; allowed: --to timm (the "
            "encoder)"
        )


def read_weights(checkpoint: Path, model: nn.Module, state: str) -> dict[str, Tensor]:
    """All weights of the checkpoint, which must be those of `model`, made from the checkpoint's settings.

    Raises:
        CheckpointError: they are not.
    """
    weights = {name: tensor.float() for name, tensor in read_full_state(checkpoint, state).items()}
    expected = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    shapes = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    wrong = sorted(name for name in expected.keys() | shapes.keys() if expected.get(name) != shapes.get(name))
    if wrong:
        listed = ", ".join(
            f"{name} {shapes.get(name, 'missing')} (expected {expected.get(name, 'none')})" for name in wrong
        )
        raise CheckpointError(f"{checkpoint} is not of the model that its settings describe: {listed}")
    return weights
