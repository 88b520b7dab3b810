"""PoS-BERT's objective against a loop over single positions in float64, and the initial output bias."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.runs import flags
from tests.unit.data.loaded import table_of
from tests.unit.methods.balancing.toy import balancer, take_step
from tests.unit.models.masked_rows import VOCABULARY, changed, masked_rows, slots, small_model
from trp_scale.config.run_flags import parse
from trp_scale.core.batch import Batch
from trp_scale.data.plan import held_out
from trp_scale.data.tar_reader import ArrayReader
from trp_scale.data.text.dataset import GROUPS, OTHER
from trp_scale.distributed.environment import Environment
from trp_scale.pretraining.pos_bert.model import BertForMaskedPositions
from trp_scale.pretraining.pos_bert.settings import PosBertObjectiveConfig
from trp_scale.pretraining.pos_bert.upstream import PosMaskedLanguageModelling, TextUpstream, piece_counts

BIAS = "cls.predictions.bias"


def upstream(dataset: Path, run_dir: Path, **changes: Any) -> TextUpstream:
    config = parse(flags(dataset, run_dir, **changes)).config
    return TextUpstream(config, Environment())


def test_piece_counts_equal_stored_rows(text_dataset: Path, tmp_path: Path) -> None:
    """All training rows, whole: without pairs of sentences a row is used once."""
    task = upstream(text_dataset, tmp_path, objective__next_sentence="off")
    table, blocks = table_of(text_dataset)
    reader, stored = ArrayReader(table, blocks, verify=False), np.zeros(task.meta.vocab_size, dtype=np.int64)
    for block in np.flatnonzero(~held_out(blocks.identities, 0.1, where="")):
        tokens, _, ends = reader.arrays(int(block))
        inside = np.arange(tokens.shape[1]) < ends[:, -1:].astype(np.int64)
        stored += np.bincount(tokens[inside], minlength=len(stored))
    counts = piece_counts(task.source.first_rows(task.source.rows), task.meta)
    assert counts.tolist() == stored.tolist() and stored.sum() > 10_000


def test_output_bias_changes_only_the_bias(text_dataset: Path, tmp_path: Path) -> None:
    ours, zero = (upstream(text_dataset, tmp_path, objective__output_bias=kind) for kind in ("frequency", "zero"))
    mine, theirs = (dict(task.model().named_parameters()) for task in (ours, zero))
    assert [name for name in theirs if not torch.equal(mine[name], theirs[name])] == [BIAS]
    vocabulary = ours.meta.vocab_size
    torch.testing.assert_close(mine[BIAS][:vocabulary].exp().sum(), torch.tensor(1.0))
    assert not mine[BIAS][vocabulary:].any() and not theirs[BIAS].any()
    counts = piece_counts(ours.source.first_rows(min(2048, ours.source.rows)), ours.meta)
    assert mine[BIAS][:vocabulary].argmax() == counts.argmax()
    assert ours.source.cursor == 0
    windows = [task.source.next_window() for task in (ours, zero)]
    assert all(torch.equal(one["tokens"], other["tokens"]) for one, other in zip(*windows, strict=True))


def test_imported_weights_replace_the_output_bias(
    text_dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = upstream(text_dataset, tmp_path, objective__output_bias="frequency")
    task.config.model.weights = "elsewhere"

    def give(model: torch.nn.Module, settings: object, load: object) -> str:
        with torch.no_grad():
            model.get_parameter(BIAS).fill_(7.0)
        return ""

    monkeypatch.setattr("trp_scale.pretraining.base.give_weights", give)
    assert (task.model().get_parameter(BIAS) == 7.0).all()


TASKS = (*GROUPS, "next_sentence")
NEXT_SENTENCE = len(GROUPS)
NINE = range(len(GROUPS) - 1)
ADVERB = GROUPS.index("adverb")
OTHERS = ["outside", "exclude", "unmasked", "task"]
NEXT_SENTENCES = ["outside", "inside", "off"]


def objective_of(**settings: Any) -> PosMaskedLanguageModelling:
    return PosMaskedLanguageModelling(PosBertObjectiveConfig(**settings), GROUPS, hidden_size=8)


def surprise(logits: Tensor, label: Tensor) -> float:
    """-log softmax(logits)[label] in float64."""
    values: list[float] = logits.double().tolist()
    top = max(values)
    return top + math.log(sum(math.exp(value - top) for value in values)) - values[int(label)]


def by_hand(
    model: BertForMaskedPositions, batch: Batch, next_sentence: str = "outside"
) -> tuple[list[float], list[int]]:
    """Sums and counts of all tasks, one position at a time."""
    with torch.no_grad():
        out = model(batch["tokens"], batch["token_types"], batch["attention_mask"], batch["masked_positions"])
    sums, counts = [0.0] * len(TASKS), [0] * len(TASKS)
    for r, m in slots(batch):
        group = int(batch["label_groups"][r, m])
        sums[group] += surprise(out.prediction_logits[r, m, :VOCABULARY], batch["labels"][r, m])
        counts[group] += 1
    if next_sentence != "off":
        for r in range(batch.rows):
            if batch["row_weights"][r]:
                sums[NEXT_SENTENCE] += surprise(out.next_sentence_logits[r], batch["next_sentence"][r])
                counts[NEXT_SENTENCE] += 1
    return sums, counts


def with_absent_row(batch: Batch, row: int) -> Batch:
    """Return the batch with an unreadable row, which has no elements."""
    label_weights, row_weights = batch["label_weights"].clone(), batch["row_weights"].clone()
    label_weights[row] = 0.0
    row_weights[row] = 0.0
    return changed(batch, label_weights=label_weights, row_weights=row_weights)


@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("next_sentence", NEXT_SENTENCES)
def test_sums_and_counts_are_those_of_single_positions(other: str, next_sentence: str) -> None:
    model = small_model()
    without = (ADVERB, OTHER) if other == "unmasked" else (ADVERB,)
    batch = with_absent_row(masked_rows(12, without=without), 7)
    objective = objective_of(other=other, next_sentence=next_sentence)
    losses = objective(model, batch)
    sums, counts = by_hand(model, batch, next_sentence)
    assert objective.tasks == TASKS
    assert losses.counts.dtype == losses.sums.dtype == torch.float64
    assert losses.counts.tolist() == objective.count(batch).tolist() == counts
    assert losses.sums.tolist() == pytest.approx(sums, rel=1e-6, abs=0.0)
    assert counts[ADVERB] == 0 and len({count for count in counts[:OTHER] if count}) >= 4, "groups must be uneven"
    assert counts[NEXT_SENTENCE] == (0 if next_sentence == "off" else 11)


@pytest.mark.parametrize("next_sentence", ["outside", "off"])
def test_hits_are_counted_in_evaluation(next_sentence: str) -> None:
    """Labels equal the model's predictions in even rows, and differ in odd rows."""
    model, objective = small_model().eval(), objective_of(next_sentence=next_sentence)
    batch = with_absent_row(masked_rows(12), 7)
    with torch.no_grad():
        out = model(batch["tokens"], batch["token_types"], batch["attention_mask"], batch["masked_positions"])
    named, even = out.prediction_logits.argmax(-1), torch.arange(12) % 2 == 0
    pairs = out.next_sentence_logits.argmax(-1)
    batch = changed(
        batch,
        labels=torch.where(even[:, None], named, (named + 1) % VOCABULARY),
        next_sentence=torch.where(even, pairs, 1 - pairs),
    )
    expected = [0] * len(TASKS)
    for r, m in slots(batch):
        expected[int(batch["label_groups"][r, m])] += int(even[r])
    expected[NEXT_SENTENCE] = 0 if next_sentence == "off" else 6
    hits = objective(model, batch).hits
    assert (
        hits is not None and hits.tolist() == expected and 0 < sum(expected[:NEXT_SENTENCE]) < len(list(slots(batch)))
    )
    assert objective(model.train(), batch).hits is None


def test_a_group_that_is_absent_has_no_count_no_sum_and_gives_no_gradient() -> None:
    model, objective = small_model(), objective_of()
    losses = objective(model, masked_rows(6, without=(ADVERB,)))
    assert losses.counts[ADVERB] == 0 and losses.sums[ADVERB] == 0
    losses.sums[ADVERB].backward()  # type: ignore[no-untyped-call]
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())


def test_a_micro_batch_without_any_element_has_finite_gradients_of_zero() -> None:
    model, batch = small_model(), masked_rows(2)
    empty = with_absent_row(with_absent_row(batch, 0), 1)
    objective = objective_of()
    for kind in ("uniform", "proportional", "minimax"):
        step = take_step(balancer(objective, kind), objective, model, [empty])
        assert sum(step.totals) == 0.0 and not any(step.ctx.counts)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, f"{name} must take part: ZeRO-3 keeps the last gradient of one that does not"
        assert torch.equal(parameter.grad, torch.zeros_like(parameter.grad)), name


@pytest.mark.parametrize("next_sentence", NEXT_SENTENCES)
@pytest.mark.parametrize("other", OTHERS)
def test_every_parameter_takes_part_in_every_micro_batch(other: str, next_sentence: str) -> None:
    model, objective = small_model(), objective_of(other=other, next_sentence=next_sentence)
    objective(model, masked_rows(2)).sums.sum().backward()  # type: ignore[no-untyped-call]
    assert [name for name, parameter in model.named_parameters() if parameter.grad is None] == []


def test_next_sentence_off_trains_no_next_sentence_head() -> None:
    for next_sentence, trained in (("off", False), ("outside", True)):
        model, objective = small_model(), objective_of(next_sentence=next_sentence)
        take_step(balancer(objective), objective, model, [masked_rows(4)])
        gradient = model.cls.seq_relationship.weight.grad
        assert gradient is not None and bool(gradient.any()) == trained


@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("next_sentence", NEXT_SENTENCES)
def test_balanced_tasks_and_outside_weights(other: str, next_sentence: str) -> None:
    objective = objective_of(other=other, next_sentence=next_sentence, next_sentence_weight=0.6)
    expected = (
        {*NINE} | ({OTHER} if other == "task" else set()) | ({NEXT_SENTENCE} if next_sentence == "inside" else set())
    )
    assert set(objective.balanced) == expected
    counts = torch.tensor([10.0, 20, 0, 5, 5, 0, 10, 0, 1, 9, 16], dtype=torch.float64)
    weights = objective.outside_weights(counts).tolist()
    share = 9 / 60 if other == "outside" else 0.0  # of the masked words, `other` included, sentences not
    own = 0.6 if next_sentence == "outside" else 0.0
    assert weights == pytest.approx([0.0] * len(NINE) + [share, own], abs=1e-15)


def test_counts_need_no_forward_pass_and_no_labels_but_groups_and_weights() -> None:
    batch = masked_rows(5)
    needed = {name: batch[name] for name in ("label_groups", "label_weights", "row_weights")}
    only = Batch(fields=needed, keys=batch.keys, start=0)
    assert objective_of().count(only).tolist() == objective_of().count(batch).tolist()
