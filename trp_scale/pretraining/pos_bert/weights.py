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
from trp_scale.checkpoint.initial_weights import NO_FIELDS, listed_names, transformers_sizes
from trp_scale.checkpoint.run_directory import TOKENIZER
from trp_scale.config import RefusedError
from trp_scale.config.loader import from_dict
from trp_scale.config.schema import Fields
from trp_scale.data.text.tokenizer import open_tokenizer
from trp_scale.errors import CheckpointError
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
    sizes = transformers_sizes(fields)
    if kind == "bert":
        return sizes | {("model", "max_positions"): fields.whole("max_position_embeddings", least=1)}
    bases = fields.section("rope_parameters")
    for ours, layers, base in (("global", "full", 160_000.0), ("local", "sliding", 10_000.0)):
        older = fields.take(f"{ours}_rope_theta", float, base)
        theta = bases.section(f"{layers}_attention").take("rope_theta", float, older)
        sizes["model", f"{ours}_rotary_base"] = theta
    return sizes | {
        ("model", "global_every"): fields.whole("global_attn_every_n_layers", least=1, default=3),
        ("model", "local_attention"): fields.whole("local_attention", least=2, default=128),
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
