"""The sentence classifier against transformers' BertForSequenceClassification."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from transformers import BertForSequenceClassification

from trp_scale.batch import Batch
from trp_scale.config import ModelConfig
from trp_scale.config.downstream import DownstreamConfig
from trp_scale.config.finetuning import FinetuneConfig
from trp_scale.engines.optimizer import Layered, layer_scales
from trp_scale.models.bert import bert_config
from trp_scale.models.bert_classifier import BertClassifier
from trp_scale.objectives.sentence_classification import SentenceClassification

VOCABULARY = 64


def settings(classes: int) -> FinetuneConfig:
    model = ModelConfig(layers=3, hidden_size=32, heads=4, intermediate_size=64, max_positions=24, dropout=0.0)
    return FinetuneConfig(model=model, downstream=DownstreamConfig(classes=classes, dropout=0.0))


def rows(classes: int, width: int = 16) -> Batch:
    generator = torch.Generator().manual_seed(1)
    lengths = torch.tensor([5, 16, 9, 3])
    attended = torch.arange(width) < lengths[:, None]
    labels = torch.tensor([0, 1, classes - 1, 0]) if classes > 1 else torch.tensor([0.0, 2.5, 5.0, 1.0])
    fields = {
        "tokens": torch.randint(1, VOCABULARY, (4, 16), generator=generator),
        "token_types": torch.randint(0, 2, (4, 16), generator=generator),
    }
    fields = {name: F.pad(value, (0, width - 16)) * attended for name, value in fields.items()}
    fields |= {"attention_mask": attended, "labels": labels, "row_weights": torch.tensor([1.0, 1.0, 1.0, 0.0])}
    return Batch(fields=fields, keys=torch.arange(4), start=0)


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
    there = slice(0, 3)  # the last row only fills the batch
    labels = batch["labels"][there] if classes > 1 else batch["labels"][there].double()
    expected = theirs(
        input_ids=batch["tokens"][there],
        token_type_ids=batch["token_types"][there],
        attention_mask=batch["attention_mask"][there].long(),
        labels=labels,
    )
    expected.loss.backward()
    assert torch.allclose(objective.logits(ours, batch)[there], expected.logits, atol=1e-10)
    # The objective computes its losses in fp32 whatever the model is in.
    mean = losses.sums.detach() / losses.counts
    assert mean.item() == pytest.approx(expected.loss.item(), rel=1e-6)
    gradients = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    for name, parameter in ours.named_parameters():
        assert parameter.grad is not None and torch.allclose(parameter.grad, gradients[name], atol=1e-6), name
    assert objective.regression == ((0,) if classes == 1 else ())


def test_padding_changes_nothing() -> None:
    model = BertClassifier(settings(3), vocabulary=VOCABULARY).double()
    objective = SentenceClassification("task", 3)
    assert torch.allclose(objective.logits(model, rows(3)), objective.logits(model, rows(3, width=24)), atol=1e-12)


def test_depths_of_layer_decay() -> None:
    model = BertClassifier(settings(3), vocabulary=VOCABULARY)
    assert isinstance(model, Layered)
    scale = layer_scales(model, 0.5)
    depths = {name: scale(name) for name, _ in model.named_parameters()}
    assert depths["bert.embeddings.word_embeddings.weight"] == depths["bert.embeddings.LayerNorm.bias"] == 0.5**4
    assert [depths[f"bert.encoder.layer.{n}.output.dense.weight"] for n in range(3)] == [0.5**3, 0.5**2, 0.5]
    assert depths["bert.pooler.dense.weight"] == depths["classifier.bias"] == 1.0
    assert set(depths.values()) == {0.5**n for n in range(5)}
