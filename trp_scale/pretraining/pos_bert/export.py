"""A text run's checkpoint as a directory that transformers' `BertForPreTraining.from_pretrained` loads."""

from __future__ import annotations

import shutil
from dataclasses import fields
from pathlib import Path

from transformers import BertForPreTraining

from trp_scale.checkpoint.document import DOCUMENT_NAME, CheckpointDocument
from trp_scale.checkpoint.export import Export
from trp_scale.checkpoint.format import read_full_state
from trp_scale.checkpoint.run_directory import TOKENIZER
from trp_scale.config import RefusedError, TextModelConfig
from trp_scale.errors import CheckpointError
from trp_scale.pretraining.pos_bert.model import PADDED_PARAMETERS, bert_config, to_transformers


def write_bert(asked: Export) -> None:
    """Write the model and its tokenizer.

    Raises:
        RefusedError: there is no tokenizer.
        CheckpointError: the checkpoint is damaged, or is not of a BERT.
    """
    tokenizer = find_tokenizer(asked.checkpoint, asked.document)
    model = assemble(asked.checkpoint, asked.document, asked.state)
    for path in sorted(tokenizer.iterdir()):
        if path.is_file():
            shutil.copyfile(path, asked.directory / path.name)
    model.save_pretrained(asked.directory)


def find_tokenizer(checkpoint: Path, document: CheckpointDocument) -> Path:
    """RUN/tokenizer, else the directory named when the checkpoint was written (a run directory may have been moved)."""
    candidates = [checkpoint.resolve().parent.parent / TOKENIZER]
    if named := document.extra.get("data_tokenizer"):
        candidates.append(checkpoint.resolve().parent.parent / str(named))  # an absolute path stands for itself
    for candidate in candidates:
        if candidate.is_dir():
            return candidate
    tried = " or ".join(str(candidate) for candidate in candidates)
    raise RefusedError(f"{checkpoint}: no tokenizer at {tried}; copy the data set's tokenizer to {candidates[0]}")


def assemble(checkpoint: Path, document: CheckpointDocument, state: str) -> BertForPreTraining:
    """transformers' model with the checkpoint's weights, the padding rows of the vocabulary cut off.

    Raises:
        CheckpointError: sizes or names are not those of a BERT.
    """
    vocab_size = document.extra.get("vocab_size")
    if not isinstance(vocab_size, int):
        where = checkpoint / DOCUMENT_NAME
        raise CheckpointError(f"{where}: extra.vocab_size is {vocab_size!r}; the vocabulary's true size is needed")
    known = {field.name for field in fields(TextModelConfig)}
    settings = {name: value for name, value in document.config.get("model", {}).items() if name in known}
    config = bert_config(TextModelConfig(**settings), vocab_size, architectures=["BertForPreTraining"])
    weights = read_full_state(checkpoint, state)
    if missing := [name for name in PADDED_PARAMETERS if name not in weights]:
        raise CheckpointError(f"{checkpoint} is not a BertForPreTraining: {missing} are missing")
    model = BertForPreTraining(config)
    try:
        model.load_state_dict(to_transformers(weights, vocab_size))
    except RuntimeError as error:  # torch lists every missing, unexpected and misshapen tensor
        raise CheckpointError(f"{checkpoint} is not a BertForPreTraining: {error}") from error
    return model
