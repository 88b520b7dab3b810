"""Import and export of BERT: transformers' `BertForPreTraining`.

Names are equal. Our vocabulary is padded, and transformers has two names for tied tensors.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import BertForPreTraining

from trp_scale.checkpoint.document import DOCUMENT_NAME
from trp_scale.checkpoint.export import Export
from trp_scale.checkpoint.run_directory import TOKENIZER
from trp_scale.config import RefusedError
from trp_scale.config.loader import from_dict
from trp_scale.errors import CheckpointError
from trp_scale.models.initialise import check_names, check_shapes, parameters_as_shapes
from trp_scale.models.weight_names import Pair, WeightLayout, WeightNames
from trp_scale.pretraining.pos_bert.model import BertForMaskedPositions, bert_config, padded_vocabulary
from trp_scale.pretraining.pos_bert.settings import PosBertConfig

PADDED_PARAMETERS = ("bert.embeddings.word_embeddings.weight", "cls.predictions.bias")
"""Parameters whose first dimension is the padded vocabulary."""

TIED_PARAMETERS = {
    "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
    "cls.predictions.decoder.bias": "cls.predictions.bias",
}
"""Second names of tied tensors in transformers."""


def weight_names(vocab_size: int) -> WeightNames:
    """Return the table of names; padding rows of the vocabulary, which transformers lacks, become zero."""
    rows = padded_vocabulary(vocab_size) - vocab_size
    padded = WeightLayout(
        lambda tensor: F.pad(tensor, (0, 0) * (tensor.ndim - 1) + (0, rows)), lambda tensor: tensor[:vocab_size]
    )
    return WeightNames(*(Pair(name, name, padded) for name in PADDED_PARAMETERS), Pair("*", "*"))


def load_bert(model: BertForMaskedPositions, state: Mapping[str, Tensor]) -> None:
    """Import the state dict of a transformers `BertForPreTraining`; padding rows become zero.

    Raises:
        ValueError: names are missing, unexpected or of another shape, or the output layer is not tied.
    """
    parameters, vocab_size = dict(model.named_parameters()), model.config.vocab_size
    ignored = {*TIED_PARAMETERS, "bert.embeddings.position_ids"}
    tensors = {name: tensor for name, tensor in state.items() if name not in ignored}
    check_names(parameters, tensors)
    unpadded = {name: parameters[name][:vocab_size] for name in PADDED_PARAMETERS}
    check_shapes(unpadded, {name: tuple(tensors[name].shape) for name in PADDED_PARAMETERS})
    for copy, name in TIED_PARAMETERS.items():
        if copy in state and not torch.equal(state[copy], tensors[name]):
            raise ValueError(
                f"{copy} differs from {name}: this model uses one tensor for both, so weights trained with "
                "tie_word_embeddings=False cannot be imported"
            )
    weight_names(vocab_size).import_weights(model, tensors)


def to_transformers(weights: Mapping[str, Tensor], vocab_size: int) -> dict[str, Tensor]:
    """Return the state dict of transformers' `BertForPreTraining`: no padding, both names of tied tensors."""
    state = weight_names(vocab_size).export_weights(weights)
    return state | {copy: state[name] for copy, name in TIED_PARAMETERS.items()}


def write_bert(export: Export) -> None:
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
    with parameters_as_shapes():
        shapes = BertForMaskedPositions(config.model, vocab_size=vocab_size, seed=0)
    weights = export.read_weights(shapes)
    model = BertForPreTraining(bert_config(config.model, vocab_size, architectures=["BertForPreTraining"]))
    model.load_state_dict(to_transformers(weights, vocab_size))
    for path in sorted(tokenizer.iterdir()):
        if path.is_file():
            shutil.copyfile(path, export.directory / path.name)
    model.save_pretrained(export.directory)
