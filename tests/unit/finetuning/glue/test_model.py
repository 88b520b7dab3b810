"""The sentence classifier against transformers' BertForSequenceClassification."""

from __future__ import annotations

from typing import Literal

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordPiece
from transformers import BertForSequenceClassification

from trp_scale.config import TextModelConfig
from trp_scale.core.batch import Batch
from trp_scale.data.plan import Addresses
from trp_scale.engines.optimizer import Layered, layer_scales
from trp_scale.finetuning.glue.batch import GlueBatchBuilder, PairTokenizer, TokenTable
from trp_scale.finetuning.glue.model import BertClassifier, SentenceClassification
from trp_scale.finetuning.glue.settings import GlueDownstreamConfig, GlueTaskConfig
from trp_scale.pretraining.pos_bert.model import bert_config

VOCABULARY = 64


def settings(classes: int) -> GlueTaskConfig:
    model = TextModelConfig(layers=3, hidden_size=32, heads=4, intermediate_size=64, max_positions=24, dropout=0.0)
    return GlueTaskConfig(model=model, downstream=GlueDownstreamConfig(classes=classes, dropout=0.0))


LENGTHS = (5, 16, 9, 3)


def table(classes: int) -> TokenTable:
    """Four rows of random pieces, the second half of each its second sentence."""
    generator = np.random.default_rng(1)
    ends = np.concatenate([[0], np.cumsum(LENGTHS)])
    return TokenTable(
        keys=[str(row) for row in range(4)],
        identities=np.arange(4, dtype=np.uint64),
        rows=np.ones(4, dtype=np.int64),
        pieces=generator.integers(1, VOCABULARY, ends[-1]).astype(np.uint16),
        ends=ends,
        second=np.array(LENGTHS) // 2,
        labels=np.array([0.0, 1.0, classes - 1, 0.0] if classes > 1 else [0.0, 2.5, 5.0, 1.0]),
    )


def rows(classes: int, padding: Literal["none", "length"] = "none") -> Batch:
    """The last of the four only fills the batch."""
    tokenizer = PairTokenizer(backend=Tokenizer(WordPiece()), pad=0, vocabulary=VOCABULARY)
    builder = GlueBatchBuilder([table(classes)], tokenizer, length=24, padding=padding, scores=classes == 1)
    zeros, places = np.zeros(4, dtype=np.int64), np.arange(4)
    addresses = Addresses(member=zeros, block=places, row=zeros, epoch=zeros, keys=places, present=places < 3)
    return builder.build(addresses, start=0)


def peers_rows(classes: int) -> dict[str, torch.Tensor]:
    """The first three as transformers takes them."""
    stored = table(classes)
    place = torch.arange(max(LENGTHS))
    attended = place < torch.tensor(LENGTHS[:3])[:, None]  # [3, 16]
    tokens = torch.zeros(attended.shape, dtype=torch.int64)
    tokens[attended] = torch.from_numpy(stored.pieces[: stored.ends[3]].astype(np.int64))
    types = (attended & (place >= torch.from_numpy(stored.second[:3])[:, None])).long()
    return {"input_ids": tokens, "token_type_ids": types, "attention_mask": attended.long()}


@pytest.mark.parametrize("classes", [3, 1])
def test_losses_and_gradients_are_those_of_transformers(classes: int) -> None:
    config = settings(classes)
    ours = BertClassifier(config, vocabulary=VOCABULARY).double()
    theirs = BertForSequenceClassification(
        bert_config(config.model, VOCABULARY, num_labels=classes, attn_implementation="eager")
    ).double()
    theirs.load_state_dict(ours.state_dict())  # the same names
    batch = rows(classes)
    objective = SentenceClassification("task", classes)
    losses = objective(ours, batch)
    assert losses.counts.tolist() == [3.0] and losses.sums.dtype == torch.float64
    (losses.sums / losses.counts).sum().backward()
    labels = torch.from_numpy(table(classes).labels[:3])
    expected = theirs(**peers_rows(classes), labels=labels.long() if classes > 1 else labels)
    expected.loss.backward()
    assert torch.allclose(objective.logits(ours, batch)[:3], expected.logits, atol=1e-10)
    # The objective computes its losses in fp32 whatever the model is in.
    mean = losses.sums.detach() / losses.counts
    assert mean.item() == pytest.approx(expected.loss.item(), rel=1e-6)
    gradients = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    for name, parameter in ours.named_parameters():
        assert parameter.grad is not None and torch.allclose(parameter.grad, gradients[name], atol=1e-6), name
    assert objective.regression == ((0,) if classes == 1 else ())


def test_where_a_row_lies_changes_nothing() -> None:
    model = BertClassifier(settings(3), vocabulary=VOCABULARY).double()
    objective = SentenceClassification("task", 3)
    packed, padded = rows(3), rows(3, "length")
    assert packed["tokens"].shape == (2, 24) and padded["tokens"].shape == (4, 24)
    assert torch.allclose(objective.logits(model, packed), objective.logits(model, padded), atol=1e-12)


def test_depths_of_layer_decay() -> None:
    model = BertClassifier(settings(3), vocabulary=VOCABULARY)
    assert isinstance(model, Layered)
    scale = layer_scales(model, 0.5)
    depths = {name: scale(name) for name, _ in model.named_parameters()}
    assert depths["bert.embeddings.word_embeddings.weight"] == depths["bert.embeddings.LayerNorm.bias"] == 0.5**4
    assert [depths[f"bert.encoder.layer.{n}.output.dense.weight"] for n in range(3)] == [0.5**3, 0.5**2, 0.5]
    assert depths["bert.pooler.dense.weight"] == depths["classifier.bias"] == 1.0
    assert set(depths.values()) == {0.5**n for n in range(5)}
