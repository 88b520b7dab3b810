"""Our model against transformers' BertForPreTraining with the same weights; padding of rows is not computed and that of
the vocabulary has no influence, with equal results."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import BertForPreTraining

from tests.unit.methods.balancing.toy import balancer, take_step
from tests.unit.models.masked_rows import (
    LENGTH,
    VOCABULARY,
    changed,
    masked_rows,
    part,
    slots,
    small_model,
    small_sizes,
    without,
)
from trp_scale.core.batch import Batch
from trp_scale.data.text.dataset import GROUPS
from trp_scale.models.initialise import build_with_initialisers, initialisers
from trp_scale.pretraining.pos_bert.batch import KEPT_LENGTHS, kept_positions
from trp_scale.pretraining.pos_bert.model import (
    BertForMaskedPositions,
    bert_config,
    padded_vocabulary,
)
from trp_scale.pretraining.pos_bert.settings import PosBertObjectiveConfig
from trp_scale.pretraining.pos_bert.upstream import PosMaskedLanguageModelling
from trp_scale.pretraining.pos_bert.weights import load_transformers, to_transformers

PADDED = 128


def reference_of(model: BertForMaskedPositions) -> BertForPreTraining:
    """transformers' model with our weights, in its own attention implementation without fused kernels."""
    reference = BertForPreTraining(bert_config(small_sizes(), VOCABULARY, attn_implementation="eager"))
    reference.load_state_dict(to_transformers(weights(model), VOCABULARY), strict=True)
    return reference.eval()


def weights(model: BertForMaskedPositions) -> dict[str, Tensor]:
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def random_reference() -> BertForPreTraining:
    """Return transformers' model without weights of exactly 0 or 1, which could match by accident."""
    torch.manual_seed(4)
    reference = BertForPreTraining(bert_config(small_sizes(), VOCABULARY))
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return reference.eval()


def labels_of(batch: Batch) -> Tensor:
    """[R, L] the original id at masked positions, -100 elsewhere."""
    labels = torch.full((batch.rows, LENGTH), -100)
    for r, m in slots(batch):
        labels[r, int(batch["masked_positions"][r, m])] = batch["labels"][r, m]
    return labels


def reference_output(reference: BertForPreTraining, batch: Batch, **labels: Tensor):  # type: ignore[no-untyped-def]
    return reference(
        input_ids=batch["tokens"],
        token_type_ids=batch["token_types"],
        attention_mask=batch["attention_mask"].long(),
        **labels,
    )


def our_output(model: BertForMaskedPositions, batch: Batch):  # type: ignore[no-untyped-def]
    return model(batch["tokens"], batch["token_types"], batch["attention_mask"], batch["masked_positions"])


def test_import_and_export_keep_transformers_weights() -> None:
    state = random_reference().state_dict()
    model = small_model()
    load_transformers(model, dict(state))
    load_transformers(model, to_transformers(weights(model), VOCABULARY))  # tensors that share memory with the model
    out = to_transformers(weights(model), VOCABULARY)
    assert set(out) == set(state)
    assert [name for name in state if not torch.equal(out[name], state[name])] == []
    padded = [tensor for tensor in weights(model).values() if tensor.shape[0] == PADDED]
    assert len(padded) == 2 and not any(tensor[VOCABULARY:].any() for tensor in padded)


def test_mismatched_weights_are_refused_by_name() -> None:
    state = to_transformers(weights(small_model()), VOCABULARY)
    name = "cls.predictions.transform.dense.weight"
    lacking = {key: tensor for key, tensor in state.items() if key != name}
    with pytest.raises(ValueError, match=name):
        load_transformers(small_model(), lacking)
    with pytest.raises(ValueError, match=r"bert.extra"):
        load_transformers(small_model(), state | {"bert.extra": torch.zeros(2)})
    with pytest.raises(ValueError, match=rf"{name} \(16, 15\)"):
        load_transformers(small_model(), state | {name: torch.zeros(16, 15)})
    embeddings = "bert.embeddings.word_embeddings.weight"
    for rows in (VOCABULARY - 1, VOCABULARY + 1, PADDED):  # a vocabulary of another size is never cut or filled up
        with pytest.raises(ValueError, match=rf"{embeddings} \({rows}, 16\)"):
            load_transformers(small_model(), state | {embeddings: torch.zeros(rows, 16)})


@pytest.mark.parametrize(
    ("copy_name", "name"),
    [
        ("cls.predictions.decoder.weight", "bert.embeddings.word_embeddings.weight"),
        ("cls.predictions.decoder.bias", "cls.predictions.bias"),
    ],
)
def test_an_output_layer_that_is_not_tied_is_refused(copy_name: str, name: str) -> None:
    state = to_transformers(weights(small_model(seed=1)), VOCABULARY)
    model = small_model()
    before = copy.deepcopy(weights(model))
    with pytest.raises(ValueError, match=copy_name):
        load_transformers(model, state | {copy_name: state[name] + 1e-6})
    assert all(torch.equal(tensor, before[key]) for key, tensor in weights(model).items())
    load_transformers(model, state | {copy_name: state[name].clone()})  # equal values in memory of its own are the same
    load_transformers(model, {key: tensor for key, tensor in state.items() if key != copy_name})  # nor need it be named


@pytest.mark.parametrize("training", [False, True])
def test_logits_agree_at_masked_positions_of_padded_rows(training: bool) -> None:
    """In training mode too: dropout is 0, and nothing else may differ."""
    model, batch = small_model().train(training), masked_rows(10)
    reference = reference_of(model).train(training)
    assert not bool(batch["attention_mask"].all()), "some rows must end in padding"
    with torch.no_grad():
        ours, theirs = our_output(model, batch), reference_output(reference, batch)
    assert ours.prediction_logits.shape == (10, batch["labels"].shape[1], PADDED)
    position = batch["masked_positions"].unsqueeze(-1).expand(-1, -1, VOCABULARY)
    expected = theirs.prediction_logits.gather(1, position)
    assert float(expected.std()) > 0.3, "logits that are all alike would agree by accident"
    torch.testing.assert_close(ours.prediction_logits[..., :VOCABULARY], expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(ours.next_sentence_logits, theirs.seq_relationship_logits, rtol=0, atol=1e-5)


def test_rows_without_padding_need_no_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch gets no mask either, because its flash attention refuses masks."""
    model, batch = small_model().double(), masked_rows(6)
    batch = changed(batch, attention_mask=torch.ones_like(batch["attention_mask"]))
    attention, masks = F.scaled_dot_product_attention, []

    def noting(*arguments: Any, **named: Any) -> Tensor:
        masks.append(named["attn_mask"])
        return attention(*arguments, **named)

    monkeypatch.setattr(F, "scaled_dot_product_attention", noting)
    found = [losses_and_gradients(model, given) for given in (batch, without(batch, "attention_mask"))]
    assert [mask is None for mask in masks] == [False, False, True, True]
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


@pytest.mark.parametrize("accumulation", [1, 3])
def test_transformers_own_loss_and_gradient_are_proportional_with_next_sentence(accumulation: int) -> None:
    """BERT: the mean over all masked positions + the mean over rows; with `other: task`, proportional is just that."""
    model, batch = small_model(), masked_rows(9)
    reference = reference_of(model)
    objective = PosMaskedLanguageModelling(PosBertObjectiveConfig(other="task"), GROUPS, hidden_size=32)
    window = [batch] if accumulation == 1 else [part(batch, 0, 2), part(batch, 2, 3), part(batch, 3, 9)]
    step = take_step(balancer(objective, "proportional"), objective, model, window)
    theirs = reference_output(reference, batch, labels=labels_of(batch), next_sentence_label=batch["next_sentence"])
    theirs.loss.backward()
    assert sum(step.totals) == pytest.approx(float(theirs.loss.detach()), abs=1e-5)
    named = dict(reference.named_parameters())
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and named[name].grad is not None, name
        rows = named[name].shape[0]
        torch.testing.assert_close(parameter.grad[:rows], named[name].grad, rtol=1e-4, atol=1e-6, msg=name)


def test_dropout_acts_in_training_only_and_follows_the_seed() -> None:
    model, batch = small_model(dropout=0.3), masked_rows(4)

    def logits(training: bool, seed: int) -> Tensor:
        model.train(training)
        torch.manual_seed(seed)
        with torch.no_grad():
            return our_output(model, batch).prediction_logits[..., :VOCABULARY]  # type: ignore[no-any-return]

    assert torch.equal(logits(False, 1), logits(False, 2))
    assert torch.equal(logits(True, 1), logits(True, 1))
    assert not torch.allclose(logits(True, 1), logits(True, 2), atol=1e-2)


@pytest.mark.parametrize(("size", "padded"), [(1, 64), (63, 64), (64, 64), (65, 128), (90, 128), (30522, 30528)])
def test_the_vocabulary_is_padded_to_a_multiple_of_64(size: int, padded: int) -> None:
    assert padded_vocabulary(size) == padded


ROWS = 11


def keeping(batch: Batch, places: Tensor | None = None) -> Batch:
    """The batch with the places that its builder keeps, or with these."""
    found = torch.from_numpy(kept_positions(batch["attention_mask"].numpy())) if places is None else places
    return replace(batch, fields={**batch.fields, "kept": found})


def task_sums(model: BertForMaskedPositions, batch: Batch) -> Tensor:
    return PosMaskedLanguageModelling(PosBertObjectiveConfig(), GROUPS, hidden_size=16)(model, batch).sums


def losses_and_gradients(model: BertForMaskedPositions, batch: Batch) -> list[Tensor]:
    model.zero_grad()
    sums = task_sums(model, batch)
    # Each task with a weight of its own, so that gradients cannot agree by a sum.
    (sums @ torch.linspace(0.5, 2.0, len(sums), dtype=sums.dtype)).backward()
    return [sums.detach(), *(parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None)]


@pytest.mark.parametrize("places", ["real", "of the builder", "all"])
def test_losses_and_gradients_are_those_of_padded_rows(places: str) -> None:
    model, batch = small_model().double().train(), masked_rows(ROWS)
    real = batch["attention_mask"].flatten()
    kept = {"real": real.nonzero().flatten(), "of the builder": None, "all": torch.arange(len(real))}[places]
    ours, padded = losses_and_gradients(model, keeping(batch, kept)), losses_and_gradients(model, batch)
    assert len(ours) == len(padded) == 1 + len(list(model.parameters()))
    for one, other in zip(ours, padded, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-10)


def test_only_kept_positions_are_computed() -> None:
    model, batch = small_model(), keeping(masked_rows(ROWS))
    kept, seen = len(batch["kept"]), []
    assert int(batch["attention_mask"].sum()) <= kept < ROWS * LENGTH
    for name, layer in model.named_modules():
        if isinstance(layer, torch.nn.Linear | torch.nn.LayerNorm) and name.startswith("bert.e"):
            layer.register_forward_hook(lambda layer, given, found, name=name: seen.append((name, found.shape[:-1])))
    task_sums(model, batch)
    last, read = "encoder.layer.1", (ROWS, 1 + batch["masked_positions"].shape[1])
    for name, shape in seen:
        chosen = last in name and not name.endswith((".key", ".value"))
        assert shape == (read if chosen else (1, kept) if "embeddings" in name else (kept,)), name
    assert len(seen) == 1 + 2 * (4 + 2 + 2)


@pytest.mark.parametrize(("rows", "length"), [(1, 8), (3, 24), (32, 128), (5, 77)])
def test_lists_have_few_lengths(rows: int, length: int) -> None:
    """Lists contain each real position, in order, and the first padding positions up to the next 64th."""
    generator, lengths = np.random.default_rng(0), set()
    for _ in range(200):
        real = np.arange(length) < generator.integers(3, length + 1, (rows, 1))
        kept, flat = kept_positions(real), real.ravel()
        part = -(-rows * length // KEPT_LENGTHS)
        assert (np.diff(kept) > 0).all() and flat[kept].sum() == flat.sum()
        assert flat.sum() <= len(kept) < flat.sum() + part and (len(kept) % part == 0 or len(kept) == rows * length)
        added = kept[~flat[kept]]
        assert (added == np.flatnonzero(~flat)[: len(added)]).all()
        lengths.add(len(kept))
    assert len(lengths) <= KEPT_LENGTHS + 1


def test_padding_has_probability_zero() -> None:
    with torch.no_grad():
        probability = our_output(small_model(), masked_rows(7)).prediction_logits.softmax(-1)
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
    model, batch = small_model(), masked_rows(7)
    before = losses_and_gradients(model, batch)
    with torch.no_grad():
        for name in model.padded_parameters:
            model.get_parameter(name)[VOCABULARY:] = 1e3
    after = losses_and_gradients(model, batch)
    assert len(after) > 1 and all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
