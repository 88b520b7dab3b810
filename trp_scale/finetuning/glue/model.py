"""BERT with a linear head on the pooled first token: what sentence tasks fine-tune (Devlin et al. 2019, 4.1).

Its loss is the cross-entropy of a sentence's label, or the square error of its score.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import BertModel

from trp_scale.core.batch import Batch, TaskLosses
from trp_scale.finetuning.glue.settings import GlueTaskConfig
from trp_scale.finetuning.task import TaskObjective
from trp_scale.models.initialise import initialise
from trp_scale.pretraining.pos_bert.model import LastLayer, bert_config


class BertClassifier(nn.Module):
    """transformers' encoder, called block by block as in pretraining/pos_bert/model.py; the last block is computed at
    [CLS] alone, unless the head reads the mean of all pieces. Short rows share sequences (finetuning/glue/batch.py):
    most of a padded batch would be padding.

    Parameter names are those of transformers' `BertForSequenceClassification`.

    Args:
        config: sizes, `downstream.classes` and dropout, and the seed of the initial weights.
        vocabulary: rows of the word embeddings, padding included.
    """

    def __init__(self, config: GlueTaskConfig, *, vocabulary: int) -> None:
        super().__init__()
        settings = bert_config(config.model, vocabulary, attn_implementation="sdpa")
        self.bert = BertModel(settings)
        self.bert.encoder.layer[-1] = LastLayer(settings, layer_idx=config.model.layers - 1)
        self.mean = config.downstream.pooling == "mean"
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

    def parameter_depth(self, name: str) -> int:
        """See engines/optimizer.py, `Layered`."""
        parts = name.split(".")
        if parts[:2] == ["bert", "embeddings"]:
            return 0
        if parts[:3] == ["bert", "encoder", "layer"]:
            return 1 + int(parts[3])
        return self.depth

    def forward(
        self, tokens: Tensor, token_types: Tensor, places: Tensor, owners: Tensor, first_places: Tensor, slots: Tensor
    ) -> Tensor:
        """Logits of R rows that share Q sequences: a row attends to itself alone, and its places count from 0.

        Args:
            tokens, token_types, places: [Q, W] int64; places are those of a piece in its row.
            owners: [Q, W] int64, the row that has the place; what no row has has an owner of its own.
            first_places: [Q, S] int64, where the rows of a sequence begin; unused slots may hold any place.
            slots: [R] int64, of each row in the flattened first_places.

        Returns:
            [R, C] logits, or one score for each row.
        """
        same_row = owners[:, :, None] == owners[:, None, :]  # [Q, W, W]
        hidden = self.bert.embeddings(input_ids=tokens, token_type_ids=token_types, position_ids=places)  # [Q, W, D]
        *layers, last = self.layers
        for layer in layers:
            hidden = layer(hidden, same_row[:, None])
        if self.mean:
            everywhere = torch.arange(same_row.shape[2], device=same_row.device).expand(len(same_row), -1)  # [Q, W]
            ended = last(hidden, same_row[:, None], everywhere)  # [Q, W, D]
            rows = torch.arange(len(slots), device=same_row.device)[:, None]
            mine = (owners.flatten() == rows).to(ended.dtype)  # [R, Q W]
            read = mine @ ended.flatten(0, 1) / mine.sum(1, keepdim=True)  # [R, D]
        else:
            own_of_first = same_row.gather(1, first_places[:, :, None].expand(-1, -1, same_row.shape[2]))  # [Q, S, W]
            read = last(hidden, own_of_first[:, None], first_places).flatten(0, 1)[slots]  # [R, D]
        pooled = self.bert.pooler(read[:, None])  # [R, D]
        return self.classifier(self.dropout(pooled))  # type: ignore[no-any-return]


INPUTS = ("tokens", "token_types", "places", "owners", "first_places", "slots")
"""What the model reads of a batch, in its order."""


class SentenceClassification(TaskObjective):
    """The mean over rows of the cross-entropy of their label; with one class, of the square error of their score.

    Args:
        task: name of the loss.
        classes: C, width of the head.
    """

    def __init__(self, task: str, classes: int) -> None:
        self.tasks: tuple[str, ...] = (task,)
        self.regression = (0,) if classes == 1 else ()
        self._errors = _square_errors if classes == 1 else _cross_entropies

    def logits(self, forward: Callable[..., Tensor], batch: Batch) -> Tensor:
        """[R, C]."""
        return forward(*(batch[name] for name in INPUTS))

    def __call__(self, forward: Callable[..., Tensor], batch: Batch) -> TaskLosses:
        """Sums over rows, in float64 like every task's sum."""
        errors = self._errors(self.logits(forward, batch).float(), batch["labels"])  # [R]
        total = errors.double() @ batch["row_weights"].double()
        return TaskLosses(sums=total.reshape(1), counts=self.count(batch))


def _cross_entropies(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits, labels, reduction="none")


def _square_errors(logits: Tensor, scores: Tensor) -> Tensor:
    return (logits.squeeze(1) - scores).square()
