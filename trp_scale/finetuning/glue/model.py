"""Classifiers of sentences on packed sequences (`GlueBatchBuilder`): BERT and ModernBERT with a head.

A row attends only to itself, and its positions start at 0. With pooling class the last block is computed only at [CLS].
"""

from __future__ import annotations

import re
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import BertModel

from trp_scale.finetuning.encoders import load_weights
from trp_scale.finetuning.glue.settings import GlueTaskConfig
from trp_scale.models.initialise import initialise, initialise_modern
from trp_scale.pretraining.pos_bert.model import LastLayer, bert_config
from trp_scale.pretraining.pos_bert.modern import ModernEncoder, ModernTransform, outside_flops


class ClassifierInputs(NamedTuple):
    """Fields of a batch that the model reads, R rows packed into Q sequences, in the order of its arguments.

    Attributes:
        tokens, token_types: [Q, W] int64.
        positions: [Q, W] int64, position of a token in its row.
        row_ids: [Q, W] int64, row of a token; -1 for padding.
        first_positions: [Q, S] int64, first position of each row of a sequence; 0 for unused slots.
        slots: [R] int64, index of each row in the flattened first_positions.
    """

    tokens: Tensor
    token_types: Tensor
    positions: Tensor
    row_ids: Tensor
    first_positions: Tensor
    slots: Tensor


INPUTS = ClassifierInputs._fields

BLOCK = re.compile(r"\w+\.(?:embeddings|(?:encoder\.layer|layers)\.(\d+))\.")
"""Start of the name of a parameter of the embeddings or of a block, with the block's number."""


class SentenceClassifier(nn.Module):
    """Encoder with a classification head; kinds add the encoder and the layer before the classifier.

    Args:
        vocabulary: rows of the word embeddings, with padding.
    """

    prefix: ClassVar[str]
    """Start of the names of the encoder's parameters."""
    pooled: ClassVar[str]
    """Start of the names of the parameters between encoder and classifier, which not every encoder brings."""

    def __init__(self, config: GlueTaskConfig, *, vocabulary: int) -> None:
        super().__init__()
        self.mean = config.downstream.pooling == "mean"
        self.dropout = nn.Dropout(config.downstream.dropout)
        self.classifier = nn.Linear(config.model.hidden_size, config.downstream.classes)

    @property
    def layers(self) -> nn.ModuleList:
        """Repeated blocks, the units of sharding."""
        raise NotImplementedError

    @property
    def depth(self) -> int:
        """Depth of the head and the pooler."""
        return len(self.layers) + 1

    def parameter_depth(self, name: str) -> int:
        """Return the depth of a parameter; see `Layered` (engines/optimizer.py)."""
        if (match := BLOCK.match(name)) is None:
            return self.depth
        return 0 if match[1] is None else 1 + int(match[1])

    def load_encoder(self, weights: dict[str, Tensor], where: str) -> None:
        """Load the weights of `EncoderSource.read`. The classifier keeps its initial values, and so does the layer
        before it if the encoder has none. Raises RefusedError: the weights are of another model."""
        names = {name if name.startswith(self.pooled) else f"{self.prefix}{name}": name for name in weights}
        kept = ("classifier.",) if any(name.startswith(self.pooled) for name in names) else ("classifier.", self.pooled)
        values = {name: value.detach() for name, value in self.named_parameters() if name.startswith(kept)}
        load_weights(self, values | {name: weights[source] for name, source in names.items()}, where)

    def forward(self, *inputs: Tensor) -> Tensor:
        """Compute logits [R, C], or scores [R, 1], of the fields of `ClassifierInputs`."""
        rows = ClassifierInputs(*inputs)
        everywhere = torch.arange(rows.tokens.shape[1], device=rows.tokens.device).expand_as(rows.tokens)  # [Q, W]
        hidden = self.encode(rows, everywhere if self.mean else rows.first_positions).flatten(0, 1)
        if self.mean:
            numbers = torch.arange(len(rows.slots), device=hidden.device)[:, None]
            mine = (rows.row_ids.flatten() == numbers).to(hidden.dtype)  # [R, Q W]
            read = mine @ hidden / mine.sum(1, keepdim=True)  # [R, D]
        else:
            read = hidden[rows.slots]  # [R, D]
        return self.classifier(self.dropout(self.pool(read)))  # type: ignore[no-any-return]

    def encode(self, rows: ClassifierInputs, chosen: Tensor) -> Tensor:
        """Return the encoder's hidden states at positions `chosen` [Q, S or W] of the sequences, [Q, S or W, D]."""
        raise NotImplementedError

    def pool(self, read: Tensor) -> Tensor:
        """Return the input of dropout and classifier, [R, D] -> [R, D]."""
        raise NotImplementedError

    @staticmethod
    def spared_flops(config: GlueTaskConfig, length: int) -> float:
        """Return the FLOPs of a forward pass over a row that dense attention has and this model's does not."""
        return 0.0


class BertClassifier(SentenceClassifier):
    """Transformers' BERT, its pooler and a classifier.

    Blocks are called one by one as in pretraining/pos_bert/model.py. Parameter names are those of transformers'
    `BertForSequenceClassification`.
    """

    prefix, pooled = "bert.", "bert.pooler."

    def __init__(self, config: GlueTaskConfig, *, vocabulary: int) -> None:
        super().__init__(config, vocabulary=vocabulary)
        settings = bert_config(config.model, vocabulary, attn_implementation="sdpa")
        self.bert = BertModel(settings)
        self.bert.encoder.layer[-1] = LastLayer(settings, layer_idx=config.model.layers - 1)
        initialise(self, seed=config.training.seed, std=config.model.initializer_range)

    @property
    def layers(self) -> nn.ModuleList:
        return self.bert.encoder.layer  # type: ignore[no-any-return]

    def encode(self, rows: ClassifierInputs, chosen: Tensor) -> Tensor:
        same_row = rows.row_ids[:, :, None] == rows.row_ids[:, None, :]  # [Q, W, W]
        hidden = self.bert.embeddings(
            input_ids=rows.tokens, token_type_ids=rows.token_types, position_ids=rows.positions
        )  # [Q, W, D]
        *layers, last = self.layers
        for layer in layers:
            hidden = layer(hidden, same_row[:, None])
        visible = same_row.gather(1, chosen[:, :, None].expand(-1, -1, same_row.shape[2]))  # [Q, S, W]
        return last(hidden, visible[:, None], chosen)  # type: ignore[no-any-return]

    def pool(self, read: Tensor) -> Tensor:
        return self.bert.pooler(read[:, None])  # type: ignore[no-any-return]


class ModernClassifier(SentenceClassifier):
    """ModernBERT with its classification head: matrix, GELU, norm, classifier.

    The head starts from that of masked words, as in transformers, if the encoder has one. Parameter names are those of
    transformers' `ModernBertForSequenceClassification`. Initial values are those of pre-training; transformers draws
    the classifier with a standard deviation of D^-1/2.
    """

    prefix, pooled = "model.", "head."

    def __init__(self, config: GlueTaskConfig, *, vocabulary: int) -> None:
        super().__init__(config, vocabulary=vocabulary)
        model = config.model
        self.model = ModernEncoder(model, vocabulary)
        self.head = ModernTransform(model)
        initialise_modern(self, seed=config.training.seed, std=model.initializer_range, layers=model.layers)

    @property
    def layers(self) -> nn.ModuleList:
        return self.model.layers

    def encode(self, rows: ClassifierInputs, chosen: Tensor) -> Tensor:
        following = F.pad(rows.first_positions[:, 1:], (0, 1))  # [Q, S]; rows of a sequence follow one another
        filled = (rows.row_ids >= 0).sum(1, keepdim=True)  # [Q, 1]
        return self.model.encode(rows.tokens, chosen, segment_ends=torch.where(following > 0, following, filled))

    def pool(self, read: Tensor) -> Tensor:
        return self.head(read)  # type: ignore[no-any-return]

    @staticmethod
    def spared_flops(config: GlueTaskConfig, length: int) -> float:
        queries = length if config.downstream.pooling == "mean" else 1
        return outside_flops(config.model, torch.tensor([length]), 1, length, last_queries=queries)


CLASSIFIERS: dict[str, type[SentenceClassifier]] = {"bert": BertClassifier, "modern": ModernClassifier}
"""Classifier by `model.kind`."""
