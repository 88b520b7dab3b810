"""Padding rows of the vocabulary have no influence."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.unit.models.masked_rows import VOCABULARY, masked_rows, small_model, small_sizes
from trp_scale.data.text.dataset import GROUPS
from trp_scale.models.initialise import build_with_initialisers, initialisers
from trp_scale.pretraining.pos_bert.model import BertForMaskedPositions
from trp_scale.pretraining.pos_bert.settings import PosBertObjectiveConfig
from trp_scale.pretraining.pos_bert.upstream import PosMaskedLanguageModelling

OBJECTIVE = PosMaskedLanguageModelling(PosBertObjectiveConfig(), GROUPS, hidden_size=32)
BATCH = masked_rows(7)


def padded(model: BertForMaskedPositions) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in model.named_parameters() if name in model.padded_parameters}


def gradients(model: BertForMaskedPositions) -> dict[str, torch.Tensor]:
    model.zero_grad()
    OBJECTIVE(model, BATCH).sums.sum().backward()  # type: ignore[no-untyped-call]
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def test_padding_has_probability_zero() -> None:
    model = small_model()
    with torch.no_grad():
        out = model(BATCH["tokens"], BATCH["token_types"], BATCH["attention_mask"], BATCH["masked_positions"])
    probability = out.prediction_logits.softmax(-1)
    assert not probability[..., VOCABULARY:].any()
    assert probability[..., :VOCABULARY].sum(-1).numpy() == pytest.approx(1.0, abs=1e-6)
    assert (probability[..., :VOCABULARY] > 0).all()


def test_the_output_bias_is_whole_after_a_cut_over_ranks() -> None:
    """An engine asks for the values when it has cut the parameters."""
    bias, logits = "cls.predictions.bias", torch.randn(VOCABULARY)

    def with_bias() -> BertForMaskedPositions:
        model = BertForMaskedPositions(small_sizes(), vocab_size=VOCABULARY, seed=0)
        model.set_output_bias(logits)
        return model

    whole, model = with_bias().get_parameter(bias), build_with_initialisers(with_bias)
    value = initialisers(model)[bias]
    model.tensor_plan.cut_first_dimension(model, ranks=2, rank=1)
    assert len(model.get_parameter(bias)) == len(whole) // 2
    assert torch.equal(value(), whole)


def test_padding_weights_do_not_change_loss_or_gradients() -> None:
    model = small_model()
    before, losses = gradients(model), OBJECTIVE(model, BATCH).sums
    with torch.no_grad():
        for parameter in padded(model).values():
            parameter[VOCABULARY:] = 1e3
    assert torch.equal(OBJECTIVE(model, BATCH).sums, losses)
    after = gradients(model)
    assert [name for name in before if not torch.equal(before[name], after[name])] == []
