"""Load a pre-trained encoder from a run, or from a model directory of transformers (BERT, ModernBERT, ViTMAE) or timm
(ViT)."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trp_scale.checkpoint.document import read_document
from trp_scale.checkpoint.export import find_checkpoint
from trp_scale.checkpoint.format import named_weights, read_full_state
from trp_scale.checkpoint.initial_weights import FILES, GivenWeights, is_run, listed_names, read_given_weights, reading
from trp_scale.checkpoint.run_directory import name_seed_runs
from trp_scale.config import AVERAGE, Config, ModelConfig, RefusedError, TextModelConfig
from trp_scale.config.finetuning import FinetuneConfig, ImageTaskConfig
from trp_scale.config.images import ImagePretrainConfig, RelativeVisionConfig
from trp_scale.config.loader import from_dict
from trp_scale.config.run_flags import SIZES
from trp_scale.errors import quote
from trp_scale.finetuning.arguments import SCRATCH
from trp_scale.models.initialise import check_names, check_shapes
from trp_scale.models.positions import interpolate
from trp_scale.pretraining.mae.image_weights import RELATIVE_ARCHITECTURE, is_encoder, read_image_weights
from trp_scale.pretraining.mm_mae.settings import MmMaeConfig


@dataclass(frozen=True, kw_only=True)
class EncoderSource:
    """Settings and weights of a pre-trained encoder.

    Attributes:
        path: value of --from.
        text: text encoder; otherwise an image encoder.
        settings: (section, field) of FinetuneConfig -> value, for settings that the weights fix.
        read: returns the weights by the names of `ImageEncoder`, transformers' `BertModel` or `ModernBertModel`;
            learned positions under "pos_embed", [1 + N, D]; the head of ModernBERT under "head."
        tokenizer: directory of the tokenizer; `None` for images.
        checkpoint: of a run; later checkpoints of the same run do not change it.
    """

    path: str
    text: bool
    settings: dict[tuple[str, str], Any]
    read: Callable[[], dict[str, Tensor]]
    tokenizer: Path | None = None
    checkpoint: Path | None = None

    def adopt(self, config: FinetuneConfig) -> None:
        """Copy the encoder's settings into `config`.

        Raises:
            RefusedError: the encoder and the task are of different modalities.
        """
        if self.text is not (config.reads == "text"):
            raise RefusedError(
                f"--from {self.path}: an encoder of {'text' if self.text else 'images'}, but --downstream.kind "
                f"{config.downstream.kind} needs an encoder of {'images' if self.text else 'text'}"
            )
        for (section, field), value in self.settings.items():
            setattr(getattr(config, section), field, value)
        average = AVERAGE if self.path.endswith(AVERAGE) else ""
        config.model.weights = self.path if self.checkpoint is None else f"{self.checkpoint}{average}"

    def image_weights(self, config: ImageTaskConfig) -> dict[str, Tensor]:
        """Return the weights of an `ImageEncoder` with these settings, with learned positions interpolated to its grid.

        If positions become trainable, they start from interpolated sine-cosine positions.
        """
        weights = self.read()
        if "pos_embed" in weights:
            weights["pos_embed"] = interpolate(weights["pos_embed"], config.grid)
        elif config.trains_positions:
            from trp_scale.models.vit import sine_cosine_positions

            weights["pos_embed"] = sine_cosine_positions(config)
        return weights


def open_encoder(path: str) -> EncoderSource:
    """Read the settings of an encoder; `EncoderSource.read` reads its weights.

    Args:
        path: a run directory or checkpoint, with the suffix "@average" for its averaged weights; or a model directory
            of transformers (BERT, ModernBERT, ViTMAE) or timm (a plain vision transformer).

    Raises:
        RefusedError: the path contains no supported encoder.
    """
    named, state = named_weights(path)
    directory = Path(named)
    if is_run(directory):
        checkpoint = find_checkpoint(directory)
        config = from_dict(read_document(checkpoint).config, source=str(checkpoint))
        tokenizer = checkpoint.parent.parent / "tokenizer"
        return encoder_from_run(config, path, lambda: read_full_state(checkpoint, state), tokenizer, checkpoint)
    if named != path:
        raise RefusedError(f"--weights average: {named} is not a run of trp-scale; allowed: --weights last")
    description = directory / "config.json"
    if not description.is_file() or not any((directory / name).is_file() for name in FILES):
        raise RefusedError(
            f"--from {path}: allowed: a run directory (with checkpoints/), a checkpoint, a directory with config.json "
            f"and {FILES[0]} (transformers' BERT, ModernBERT or ViTMAE, timm's ViT), or the word {SCRATCH}; models of "
            f"a hub are not downloaded{name_seed_runs(directory)}"
        )
    source = read_given_weights(path, "--from")
    document = source.fields.document
    if document.get("model_type") in ("bert", "modernbert"):
        from trp_scale.pretraining.pos_bert.weights import KIND_OF, full_name, sizes_from_weights

        fields = source.fields
        kind = KIND_OF[fields.text("model_type")]
        settings = sizes_from_weights(fields, kind) | {
            ("model", "kind"): kind,
            ("model", "max_positions"): fields.whole("max_position_embeddings", least=1),
        }
        if kind == "modern":
            settings["model", "dropout"] = 0.0

        def read() -> dict[str, Tensor]:
            return select_encoder({full_name(name): tensor for name, tensor in source.tensors.items()})

        return EncoderSource(path=path, text=True, settings=settings, read=read, tokenizer=Path(path))
    if document.get("model_type") == "vit_mae" or "architecture" in document:
        return image_encoder_from_files(path, source)
    raise RefusedError(
        f"--from {path}: config.json has model_type {quote(document.get('model_type'))}; allowed: bert, modernbert, "
        "vit_mae, or timm's config.json (with architecture)"
    )


@torch.no_grad()
def load_weights(module: nn.Module, weights: dict[str, Tensor], where: str, hint: str = "") -> None:
    """Copy weights of the file or flag `where` into a module by name.

    Raises:
        RefusedError: names are missing or unexpected, or shapes differ; the message ends with `hint`.
    """
    parameters = dict(module.named_parameters())
    with reading(where, hint):
        check_names(parameters, weights)
        check_shapes(parameters, {name: tuple(tensor.shape) for name, tensor in weights.items()})
    for name, parameter in parameters.items():
        parameter.copy_(weights[name])


def encoder_from_run(
    config: Config,
    path: str,
    stored: Callable[[], dict[str, Tensor]],
    tokenizer: Path | None = None,
    checkpoint: Path | None = None,
) -> EncoderSource:
    """Return the encoder of a run; `stored` returns the weights of the whole model by name.

    Raises:
        RefusedError: the encoder reads neither text nor images.
    """
    settings = sizes_from_model(config.model)
    if config.reads == "text":
        return EncoderSource(
            path=path,
            text=True,
            settings=settings,
            read=lambda: select_encoder(stored()),
            tokenizer=tokenizer,
            checkpoint=checkpoint,
        )
    from trp_scale.pretraining.mm_mae.weights import image_encoder_weights  # with timm, which text goes without

    if not isinstance(config, (ImagePretrainConfig, ImageTaskConfig)):
        raise RefusedError(f"--from {path}: the run's encoder reads neither images nor text; allowed: a run on either")
    if isinstance(config, MmMaeConfig) and "rgb" not in config.modalities.inputs:
        raise RefusedError(
            f"--from {path}: the run's modalities.inputs are {', '.join(config.modalities.inputs)}; allowed: a run "
            "with the input rgb"
        )

    def read() -> dict[str, Tensor]:
        whole = {name.removeprefix("encoder."): tensor for name, tensor in stored().items()}
        return select_image_encoder(image_encoder_weights(whole) if isinstance(config, MmMaeConfig) else whole)

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
    settings |= {
        ("vision", "patch_size"): config.vision.patch_size,
        ("vision", "positions"): "absolute",
        ("vision", "position_order"): config.vision.position_order,
        ("downstream", "pretraining_grid"): grid,
        ("downstream", "learned_positions"): learned,
    }
    if isinstance(config.vision, RelativeVisionConfig):
        names = ("positions", "relative_mode", "relative_values")
        settings |= {("vision", name): getattr(config.vision, name) for name in names}
        settings["vision", "index"] = index or config.vision.index
    return EncoderSource(path=path, text=False, settings=settings, read=read, checkpoint=checkpoint)


def sizes_from_model(model: ModelConfig) -> dict[tuple[str, str], Any]:
    """Return the encoder's sizes, and the kind of text encoder, as settings of a fine-tuning run."""
    names = [name for name in ("kind", *SIZES["model"]) if hasattr(model, name)]
    sizes = {("model", name): getattr(model, name) for name in names}
    if isinstance(model, TextModelConfig) and model.kind == "modern":
        sizes["model", "dropout"] = 0.0  # recipes have BERT's
    return sizes


WORDS = {"bert": "embeddings.word_embeddings.weight", "modern": "embeddings.tok_embeddings.weight"}
"""Name of the word embeddings by `model.kind`."""


def select_encoder(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of a text encoder, and of ModernBERT's head; `weights` are of a model with or without heads,
    by our names, which are those of transformers."""
    named = {re.sub(r"^(bert|model)\.", "", name): tensor for name, tensor in weights.items()}
    parts = ("embeddings.", "encoder.", "pooler.", "layers.", "final_norm.", "head.")
    named.pop("embeddings.position_ids", None)  # buffer that earlier versions of transformers stored
    return {name: tensor for name, tensor in named.items() if name.startswith(parts)}


def select_image_encoder(named: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of an image encoder; with mean pooling a classifier's last norm is fc_norm."""
    weights = {name: tensor for name, tensor in named.items() if is_encoder(name) or name == "pos_embed"}
    of_mean = {f"norm.{kind}": f"fc_norm.{kind}" for kind in ("weight", "bias")}
    return weights | {name: named[stored_as] for name, stored_as in of_mean.items() if stored_as in named}


def image_encoder_from_files(path: str, source: GivenWeights) -> EncoderSource:
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
    unused = ("decoder", "prediction.", "mask_token")  # parts of an autoencoder that fine-tuning does not need
    other = [name for name in weights.tensors if not is_encoder(name) and not name.startswith(unused)]
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
