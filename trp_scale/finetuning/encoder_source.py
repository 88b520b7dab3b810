"""Where a pre-trained encoder comes from: a run of ours, a directory of transformers, or one of timm."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from trp_scale.checkpoint.document import DOCUMENT_NAME, read_document
from trp_scale.checkpoint.export import find_checkpoint
from trp_scale.checkpoint.format import named_weights, read_full_state
from trp_scale.checkpoint.initial_weights import FILE, stored_weights
from trp_scale.checkpoint.run_directory import name_seed_runs
from trp_scale.config import Config, ModelConfig, RefusedError, TextModelConfig
from trp_scale.config.finetuning import FinetuneConfig, ImageTaskConfig
from trp_scale.config.json_files import read_object
from trp_scale.config.loader import from_dict
from trp_scale.config.schema import Fields
from trp_scale.config.upstream import AVERAGE
from trp_scale.errors import quote
from trp_scale.finetuning.arguments import SCRATCH
from trp_scale.models.positions import interpolated

POSITION_NUMBERS = "embeddings.position_ids"
"""0, 1, 2, ...: stored by earlier versions of transformers."""


@dataclass(frozen=True, kw_only=True)
class EncoderSource:
    """A pre-trained encoder that can be read.

    Attributes:
        path: as the user gave it.
        text: whether it reads word pieces; otherwise images.
        settings: (section, field) of FinetuneConfig -> value: the sizes and what else belongs to the weights.
        read: the weights by the names of `ImageEncoder`, or of transformers' `BertModel`; learned positions under
            "pos_embed", [1 + N, D].
        tokenizer: directory of the tokenizer; None for images.
        checkpoint: of a run: the one that was found, which stays the same while the run goes on.
    """

    path: str
    text: bool
    settings: dict[tuple[str, str], Any]
    read: Callable[[], dict[str, Tensor]]
    tokenizer: Path | None = None
    checkpoint: Path | None = None

    def adopt(self, config: FinetuneConfig) -> None:
        """Give `config` the encoder's own sizes, in place.

        Raises:
            RefusedError: the encoder reads text and the task is one of images, or the other way round.
        """
        if self.text is not (config.reads == "text"):
            raise RefusedError(
                f"--from {self.path}: an encoder of {'text' if self.text else 'images'}, but --downstream.kind "
                f"{config.downstream.kind} needs one of {'images' if self.text else 'text'}"
            )
        for (section, field), value in self.settings.items():
            setattr(getattr(config, section), field, value)
        average = AVERAGE if self.path.endswith(AVERAGE) else ""
        config.model.weights = self.path if self.checkpoint is None else f"{self.checkpoint}{average}"

    def image_weights(self, config: ImageTaskConfig) -> dict[str, Tensor]:
        """Weights of an `ImageEncoder` with these settings: learned positions are stretched to its grid; those that
        are to be learned begin at the stretched sine-cosine ones."""
        weights = self.read()
        if "pos_embed" in weights:
            weights["pos_embed"] = interpolated(weights["pos_embed"], config.grid)
        elif config.trains_positions:
            from trp_scale.models.image_encoder import sine_cosine_positions

            weights["pos_embed"] = sine_cosine_positions(config)
        return weights


def open_encoder(path: str) -> EncoderSource:
    """Look at what --from names; reads no weights yet.

    Args:
        path: a run directory of ours or a checkpoint in it, with "@average" behind it for the average of its weights; a
            directory of transformers (BERT, ViTMAE), or one of timm (a plain vision transformer), ours or saved by
            timm.

    Raises:
        RefusedError: nothing there that is known; says what was found and what is allowed.
    """
    named, state = named_weights(path)
    directory = Path(named)
    if (directory / "checkpoints").is_dir() or (directory / DOCUMENT_NAME).is_file():
        return _of_run(path, find_checkpoint(directory), state)
    if named != path:
        raise RefusedError(f"--weights average: {named} is no run of trp-scale; allowed: --weights last")
    description = directory / "config.json"
    if not description.is_file() or not (directory / FILE).is_file():
        raise RefusedError(
            f"--from {path}: allowed: a run directory (with checkpoints/), a checkpoint, a directory with config.json "
            f"and {FILE} (transformers' BERT or ViTMAE, timm's ViT), or the word {SCRATCH}; names on a "
            f"hub are not downloaded{name_seed_runs(directory)}"
        )
    where = f"--from {path}: config.json"
    document = read_object(description, source=where)
    if document.get("model_type") == "bert":
        return _of_bert(path, Fields(document, where))
    if document.get("model_type") == "vit_mae":
        from trp_scale.finetuning.image_sources import of_vitmae

        return of_vitmae(path, Fields(document, where))
    if "architecture" in document:
        from trp_scale.finetuning.image_sources import of_timm

        return of_timm(path, document, where)
    raise RefusedError(
        f"--from {path}: config.json has model_type {quote(document.get('model_type'))}; allowed: bert, vit_mae, or "
        "timm's config.json (with architecture)"
    )


def _of_run(path: str, checkpoint: Path, state: str) -> EncoderSource:
    config = from_dict(read_document(checkpoint).config, source=str(checkpoint))
    tokenizer = checkpoint.parent.parent / "tokenizer"
    return encoder_from_run(config, path, lambda: read_full_state(checkpoint, state), tokenizer, checkpoint)


def encoder_from_run(
    config: Config,
    path: str,
    stored: Callable[[], dict[str, Tensor]],
    tokenizer: Path | None = None,
    checkpoint: Path | None = None,
) -> EncoderSource:
    """The encoder of a run of ours.

    Args:
        config: settings of the run.
        path: what messages call it.
        stored: reads the weights of the whole model, by its names.
        tokenizer: of a run on text: its directory.
        checkpoint: where the weights lie, if they do.

    Raises:
        RefusedError: its encoder reads neither text nor images.
    """
    if config.reads == "text":
        return EncoderSource(
            path=path,
            text=True,
            settings=sizes_from_model(config.model),
            read=lambda: {
                name.removeprefix("bert."): tensor for name, tensor in stored().items() if name.startswith("bert.")
            },
            tokenizer=tokenizer,
            checkpoint=checkpoint,
        )
    from trp_scale.finetuning.image_sources import of_run

    return of_run(config, path, stored, checkpoint)


def sizes_from_model(model: ModelConfig) -> dict[tuple[str, str], Any]:
    """Sizes of an encoder, as settings of a fine-tuning."""
    names = ("layers", "hidden_size", "heads", "intermediate_size", "layer_norm_eps")
    sizes = {("model", name): getattr(model, name) for name in names}
    if isinstance(model, TextModelConfig):
        sizes["model", "max_positions"] = model.max_positions
    return sizes


def _of_bert(path: str, fields: Fields) -> EncoderSource:
    kinds = [fields.text("hidden_act", "gelu"), fields.text("position_embedding_type", "absolute")]
    if kinds != ["gelu", "absolute"]:
        raise RefusedError(f"--from {path}: hidden_act gelu and absolute positions are supported, {quote(kinds)} found")

    def read() -> dict[str, Tensor]:
        stored = stored_weights(path)
        named = {_present_name(name.removeprefix("bert.")): tensor for name, tensor in stored.items()}
        parts = ("embeddings.", "encoder.", "pooler.")
        return {name: tensor for name, tensor in named.items() if name.startswith(parts) and name != POSITION_NUMBERS}

    settings = {
        ("model", "layers"): fields.whole("num_hidden_layers", least=1),
        ("model", "hidden_size"): fields.whole("hidden_size", least=1),
        ("model", "heads"): fields.whole("num_attention_heads", least=1),
        ("model", "intermediate_size"): fields.whole("intermediate_size", least=1),
        ("model", "max_positions"): fields.whole("max_position_embeddings", least=1),
        ("model", "layer_norm_eps"): fields.take("layer_norm_eps", float, 1e-12),
    }
    return EncoderSource(path=path, text=True, settings=settings, read=read, tokenizer=Path(path))


def _present_name(name: str) -> str:
    """The published BERTs come from TensorFlow, and call the norms' weights as that did."""
    return name.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias")
