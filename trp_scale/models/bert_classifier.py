"""BERT with a linear head on the pooled first token: what sentence tasks fine-tune (Devlin et al. 2019, 4.1)."""

from __future__ import annotations

from torch import Tensor, nn
from transformers import BertModel

from trp_scale.config.finetuning import FinetuneConfig
from trp_scale.models.bert import LastLayer, bert_config
from trp_scale.models.initialise import initialise


class BertClassifier(nn.Module):
    """transformers' encoder, called block by block as in models/bert.py; the last block is computed at [CLS] alone.

    Parameter names are those of transformers' `BertForSequenceClassification`.

    Args:
        config: sizes, `downstream.classes` and dropout, and the seed of the initial weights.
        vocabulary: rows of the word embeddings, padding included.
    """

    def __init__(self, config: FinetuneConfig, *, vocabulary: int) -> None:
        super().__init__()
        settings = bert_config(config.model, vocabulary, attn_implementation="sdpa")
        self.bert = BertModel(settings)
        self.bert.encoder.layer[-1] = LastLayer(settings, layer_idx=config.model.layers - 1)
        self.dropout = nn.Dropout(config.downstream.dropout)
        self.classifier = nn.Linear(config.model.hidden_size, config.downstream.classes)
        initialise(self, seed=config.training.seed, std=config.model.initializer_range)

    @property
    def layers(self) -> nn.ModuleList:
        """The repeated blocks, each a unit of sharding."""
        return self.bert.encoder.layer  # type: ignore[no-any-return]

    @property
    def depth(self) -> int:
        """The head's, and the pooler's."""
        return len(self.layers) + 1

    def depth_of(self, name: str) -> int:
        """See engines/optimizer.py, `Layered`."""
        parts = name.split(".")
        if parts[:2] == ["bert", "embeddings"]:
            return 0
        if parts[:3] == ["bert", "encoder", "layer"]:
            return 1 + int(parts[3])
        return self.depth

    def forward(self, tokens: Tensor, token_types: Tensor, attention_mask: Tensor) -> Tensor:
        """[R, W] int64, [R, W] int64 and [R, W] bool -> [R, C] logits, or one score for each row."""
        mask = attention_mask[:, None, None, :]  # [R, 1, 1, W]
        hidden = self.bert.embeddings(input_ids=tokens, token_type_ids=token_types)  # [R, W, D]
        *layers, last = self.layers
        for layer in layers:
            hidden = layer(hidden, mask)
        first = tokens.new_zeros(len(tokens), 1)
        pooled = self.bert.pooler(last(hidden, mask, first))  # [R, D]
        return self.classifier(self.dropout(pooled))  # type: ignore[no-any-return]
