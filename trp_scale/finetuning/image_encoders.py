"""Pre-trained image encoders as `EncoderSource`: runs, transformers' ViTMAE, and timm's plain ViT."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from torch import Tensor

from trp_scale.checkpoint.initial_weights import GivenWeights, listed_names, reading
from trp_scale.config import Config, RefusedError
from trp_scale.config.finetuning import ImageTaskConfig
from trp_scale.config.images import ImagePretrainConfig, RelativeVisionConfig
from trp_scale.errors import quote
from trp_scale.finetuning.encoders import EncoderSource, sizes_from_model
from trp_scale.pretraining.mae.image_weights import RELATIVE_ARCHITECTURE, is_encoder, read_image_weights
from trp_scale.pretraining.mm_mae.settings import MmMaeConfig
from trp_scale.pretraining.mm_mae.weights import image_encoder_weights


def image_encoder_from_run(
    config: Config, path: str, stored: Callable[[], dict[str, Tensor]], checkpoint: Path | None
) -> EncoderSource:
    if not isinstance(config, (ImagePretrainConfig, ImageTaskConfig)):
        raise RefusedError(f"--from {path}: the run's encoder reads neither images nor text; allowed: a run on either")
    if isinstance(config, MmMaeConfig) and "rgb" not in config.modalities.inputs:
        raise RefusedError(
            f"--from {path}: the run's modalities.inputs are {', '.join(config.modalities.inputs)}; allowed: a run "
            "with the input rgb"
        )

    def read() -> dict[str, Tensor]:
        whole = {name.removeprefix("encoder."): tensor for name, tensor in stored().items()}
        named = image_encoder_weights(whole) if isinstance(config, MmMaeConfig) else whole
        weights = {name: tensor for name, tensor in named.items() if is_encoder(name) or name == "pos_embed"}
        # With mean pooling a classifier's last norm is fc_norm.
        of_mean = {f"norm.{kind}": f"fc_norm.{kind}" for kind in ("weight", "bias")}
        return weights | {name: named[stored_as] for name, stored_as in of_mean.items() if stored_as in named}

    grid, learned, index = config.crops.size // config.vision.patch_size, False, ""
    if isinstance(config, ImageTaskConfig):
        learned = config.trains_positions
        if not learned and config.downstream.positions == "interpolated":  # the positions of pre-training
            grid = config.downstream.pretraining_grid or grid
    else:
        learned = config.vision.learned_positions
    if isinstance(config, ImagePretrainConfig) and config.adversary.kind == "relative_coordinate":
        # A coordinate adversary shifts this index, so it is the index without a shift.
        index = "relaxed" if config.adversary.index == "relaxed" else "rounded"
    settings = sizes_from_model(config.model) | {
        ("vision", "patch_size"): config.vision.patch_size,
        ("vision", "positions"): "absolute",
        ("vision", "position_order"): config.vision.position_order,
        ("downstream", "pretraining_grid"): grid,
        ("downstream", "learned_positions"): learned,
    }
    if isinstance(config.vision, RelativeVisionConfig):
        settings |= {("vision", name): getattr(config.vision, name) for name in RELATIVE_SETTINGS}
        settings["vision", "index"] = index or config.vision.index
    return EncoderSource(path=path, text=False, settings=settings, read=read, checkpoint=checkpoint)


def encoder_from_files(path: str, source: GivenWeights) -> EncoderSource:
    """Return transformers' ViTMAE, timm's vision transformer, or an export with relative positions. Sine-cosine
    positions stay fixed, others become weights."""
    fields = source.fields
    index = ""
    if fields.document.get("architecture") == RELATIVE_ARCHITECTURE:  # an export: timm's plain ViT with position tables
        index = fields.text("relative_index")
        if index not in ("relaxed", "rounded"):
            raise fields.refusal(f"relative_index is {quote(index)}, allowed: relaxed, rounded")
    if fields.text("hidden_act", "gelu") != "gelu" or not fields.take("qkv_bias", bool, True):
        raise RefusedError(f"--from {path}: allowed: hidden_act gelu, and biases of queries, keys and values")
    with reading(source.where):
        weights = read_image_weights(source.tensors, fields)
    other = [name for name in weights.tensors if not is_encoder(name) and not name.startswith(OF_MAE)]
    if differences := [*weights.differences, *([f"weights of {listed_names(other)}"] if other else [])]:
        raise RefusedError(
            f"--from {path}: {'; '.join(differences)}; allowed: a plain vision transformer with a class token, such as "
            "vit_base_patch16_224"
        )
    sizes = {key: value for key, value in weights.sizes.items() if key[0] == "model" or key[1] == "patch_size"}
    settings = sizes | {
        ("vision", "positions"): "relative" if index else "absolute",
        ("vision", "position_order"): weights.order or "column_row",
        ("downstream", "pretraining_grid"): weights.grid,
        ("downstream", "learned_positions"): weights.order is None,
    }
    if index:
        settings["vision", "index"] = index
    tensors = {name: tensor for name, tensor in weights.tensors.items() if is_encoder(name)}
    learned = {} if weights.order else {"pos_embed": weights.positions}
    return EncoderSource(path=path, text=False, settings=settings, read=lambda: tensors | learned)


RELATIVE_SETTINGS = ("positions", "relative_mode", "relative_values")
"""Settings of `vision` that the encoder's weights fix, in addition to the index."""

OF_MAE = ("decoder", "prediction.", "mask_token")
"""Names of the parts of an autoencoder that fine-tuning does not need."""
