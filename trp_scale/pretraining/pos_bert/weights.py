"""Import and export of text encoders: transformers' `BertForPreTraining` and `ModernBertForMaskedLM`.

Names are those of transformers, but our vocabulary is padded, and transformers has two names for tied tensors.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from trp_scale.checkpoint.document import DOCUMENT_NAME
from trp_scale.checkpoint.export import Export, Pair, WeightLayout, WeightNames
from trp_scale.checkpoint.initial_weights import NO_FIELDS, listed_names
from trp_scale.checkpoint.run_directory import TOKENIZER
from trp_scale.config import RefusedError
from trp_scale.config.loader import from_dict
from trp_scale.config.schema import Fields
from trp_scale.data.text.tokenizer import open_tokenizer
from trp_scale.errors import CheckpointError, quote
from trp_scale.models.initialise import check_names, check_shapes, parameters_as_shapes
from trp_scale.pretraining.pos_bert.model import BertForMaskedPositions, padded_vocabulary
from trp_scale.pretraining.pos_bert.modern import ModernBertForMaskedPositions
from trp_scale.pretraining.pos_bert.settings import PosBertConfig

TextModel = BertForMaskedPositions | ModernBertForMaskedPositions

MODELS: dict[str, type[TextModel]] = {"bert": BertForMaskedPositions, "modern": ModernBertForMaskedPositions}
"""Model by `model.kind`."""


def weight_names(kind: type[TextModel], vocab_size: int) -> WeightNames:
    """Return the table of names; padding rows of the vocabulary, which transformers lacks, become zero."""
    rows = padded_vocabulary(vocab_size) - vocab_size
    padded = WeightLayout(
        lambda tensor: F.pad(tensor, (0, 0) * (tensor.ndim - 1) + (0, rows)), lambda tensor: tensor[:vocab_size]
    )
    return WeightNames(*(Pair(name, name, padded) for name in kind.padded_parameters), Pair("*", "*"))


NAMES = (
    (r"\bLayerNorm\.gamma$", "LayerNorm.weight"),  # TensorFlow's, as in the published BERT
    (r"\bLayerNorm\.beta$", "LayerNorm.bias"),
    (r"^(?=embeddings\.(?:word|position|token_type|LayerNorm)|encoder\.|pooler\.)", "bert."),
    (r"^(?=embeddings\.(?:tok_|norm)|layers\.|final_norm\.)", "model."),
)
"""Names in other files, as of `BertModel` and `ModernBertModel`, and those in `BertForPreTraining` and
`ModernBertForMaskedLM`."""

HEADS = ("bert.pooler.", "cls.predictions.", "cls.seq_relationship.", "head.", "decoder.")
"""Parts that stay at their start if a file has none of their tensors."""

TASKS = ("classifier.", "qa_outputs.")
"""Heads of other models."""

KIND_OF = {"bert": "bert", "modernbert": "modern"}
"""`model.kind` by transformers' model_type."""


def full_name(name: str) -> str:
    """Return the name in the model with heads."""
    for pattern, replacement in NAMES:
        name = re.sub(pattern, replacement, name)
    return name


def load_transformers(model: TextModel, state: Mapping[str, Tensor], fields: Fields = NO_FIELDS) -> list[str]:
    """Import the state dict of transformers' model of the same kind, with or without heads; padding rows become zero.
    Return a line on each difference.

    Raises:
        ValueError: names are missing, unexpected or of another shape, or the output layer is not tied.
    """
    parameters, tied = dict(model.named_parameters()), model.tied_parameters
    named = {full_name(name): tensor for name, tensor in state.items()}
    other = [name for name in named if name.startswith(TASKS)]
    ignored = {*tied, *other, "bert.embeddings.position_ids"}
    tensors = {name: tensor for name, tensor in named.items() if name not in ignored}
    absent = tuple(head for head in HEADS if not any(name.startswith(head) for name in tensors))
    kept = [name for name in parameters if name.startswith(absent)]
    check_names(parameters.keys() - kept, tensors)
    unpadded = {name: parameters[name][: model.vocab_size] for name in model.padded_parameters}
    check_shapes(unpadded, {name: tuple(tensors[name].shape) for name in unpadded if name in tensors})
    for copy, name in tied.items():
        if copy in named and name in tensors and not torch.equal(named[copy], tensors[name]):
            raise ValueError(
                f"{copy} differs from {name}: this model uses one tensor for both, so weights trained with "
                "tie_word_embeddings=False cannot be imported"
            )
    weight_names(type(model), model.vocab_size).import_weights(model, tensors, kept=kept)
    lines = {"left out": listed_names(other), "left at their start": listed_names(kept)}
    return [f"{what}: {names}" for what, names in lines.items() if names]


def sizes_from_weights(fields: Fields, kind: str) -> dict[tuple[str, str], Any]:
    """Return the settings in transformers' config.json of a model of this `model.kind`. Raises RefusedError: a model of
    another kind."""
    if KIND_OF.get(theirs := fields.text("model_type")) != kind:
        raise fields.refusal(
            f"model_type is {theirs} and --model.kind {kind}; allowed: a recipe with the same kind, or weights of "
            f"{' or '.join(name for name, ours in KIND_OF.items() if ours == kind)}"
        )
    sizes: dict[tuple[str, str], Any] = {
        ("model", "layers"): fields.whole("num_hidden_layers", least=1),
        ("model", "hidden_size"): fields.whole("hidden_size", least=1),
        ("model", "heads"): fields.whole("num_attention_heads", least=1),
        ("model", "intermediate_size"): fields.whole("intermediate_size", least=1),
    }
    if kind == "modern":
        return sizes | _modern_settings(fields)
    kinds = [fields.text("hidden_act", "gelu"), fields.text("position_embedding_type", "absolute")]
    if kinds != ["gelu", "absolute"]:
        raise fields.refusal(f"{quote(kinds)} found; allowed: hidden_act gelu and absolute positions")
    return sizes | {
        ("model", "max_positions"): fields.whole("max_position_embeddings", least=1),
        ("model", "layer_norm_eps"): fields.take("layer_norm_eps", float, 1e-12),
    }


def _modern_settings(fields: Fields) -> dict[tuple[str, str], Any]:
    """Return the settings of transformers' ModernBERT besides its sizes, from the config.json of any version. Raises
    RefusedError: a variant that differs from ours."""
    kinds = fields.texts("layer_types", [])
    is_global = [kind == "full_attention" for kind in kinds]
    every = is_global.index(True, 1) if any(is_global[1:]) else max(1, len(kinds))
    biases = ("norm_bias", "attention_bias", "mlp_bias", "classifier_bias")
    other = [f"{name} true" for name in biases if fields.take(name, bool, False)]
    activations = ("hidden_activation", "classifier_activation")
    other += [f"{name} not gelu" for name in activations if fields.text(name, "gelu") != "gelu"]
    if is_global != [number % every == 0 for number in range(len(kinds))]:
        other.append("other layer_types")
    rotary = [fields.section("rope_parameters").section(f"{kind}_attention") for kind in ("full", "sliding")]
    types = {part.text("rope_type", "default") for part in rotary}
    other += [f"rope_type {quote(name)}" for name in sorted(types - {"default"})]
    if fields.document.get("rope_scaling") is not None:
        other.append("rope_scaling")
    if other:
        raise fields.refusal(
            f"{', '.join(other)} found; allowed: no biases, gelu, rope_type default, and full_attention in every N-th "
            "layer from the first on"
        )
    bases = [fields.take("global_rope_theta", float, 160_000.0), fields.take("local_rope_theta", float, 10_000.0)]
    return {
        ("model", "global_every"): every if kinds else fields.whole("global_attn_every_n_layers", least=1, default=3),
        ("model", "local_attention"): fields.whole("local_attention", least=2, default=128),
        ("model", "global_rotary_base"): rotary[0].take("rope_theta", float, bases[0]),
        ("model", "local_rotary_base"): rotary[1].take("rope_theta", float, bases[1]),
        ("model", "layer_norm_eps"): fields.take("norm_eps", float, 1e-5),
    }


def to_transformers(
    weights: Mapping[str, Tensor], vocab_size: int, kind: type[TextModel] = BertForMaskedPositions
) -> dict[str, Tensor]:
    """Return the state dict of transformers' model: no padding, both names of tied tensors."""
    state = weight_names(kind, vocab_size).export_weights(weights)
    return state | {copy: state[name] for copy, name in kind.tied_parameters.items()}


def write_transformers(export: Export) -> None:
    """Write the model and its tokenizer.

    Raises:
        RefusedError: the tokenizer is missing.
        CheckpointError: the checkpoint is damaged.
    """
    tokenizer = export.checkpoint.resolve().parent.parent / TOKENIZER
    if not tokenizer.is_dir():
        raise RefusedError(f"{export.checkpoint}: no tokenizer at {tokenizer}; copy the data set's tokenizer there")
    config = from_dict(export.document.config, source=str(export.checkpoint))
    assert isinstance(config, PosBertConfig)
    vocab_size = export.document.extra.get("vocab_size")
    if not isinstance(vocab_size, int):
        where = export.checkpoint / DOCUMENT_NAME
        raise CheckpointError(f"{where}: extra.vocab_size is {vocab_size!r}; expected the size of the vocabulary")
    kind = MODELS[config.model.kind]
    with parameters_as_shapes():
        shapes = kind(config.model, vocab_size=vocab_size, seed=0)
    weights = export.read_weights(shapes)
    pieces = open_tokenizer(tokenizer, flag="--run")
    special = {name: getattr(pieces, f"{name}_token_id") for name in ("pad", "cls", "sep")}
    model = kind.transformers_model(config.model, vocab_size, special)
    model.load_state_dict(to_transformers(weights, vocab_size, kind))
    for path in sorted(tokenizer.iterdir()):
        if path.is_file():
            shutil.copyfile(path, export.directory / path.name)
    model.save_pretrained(export.directory)
