"""GLUE's figures: by hand, with ties, and where they are undefined."""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import BPE, WordPiece
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.processors import TemplateProcessing
from tokenizers.trainers import BpeTrainer
from torch import nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    ModernBertForSequenceClassification,
    ModernBertModel,
    PreTrainedTokenizerFast,
)

from tests.runs import Refused, flags, lines, pretrain_here
from tests.unit.finetuning.glue.small_data import FILES, finetune_here, glue_flags, write_cola, write_glue
from tests.unit.pretraining.pos_bert.test_modern import MODERN, wide_rotation
from tests.unit.pretraining.pos_bert.test_packed_rows import segment_by_segment
from trp_scale.checkpoint.export import export
from trp_scale.checkpoint.format import read_full_state
from trp_scale.config import TextModelConfig
from trp_scale.core.batch import Batch
from trp_scale.data.plan import Addresses
from trp_scale.distributed.environment import Environment
from trp_scale.distributed.groups import ALONE
from trp_scale.engines.optimizer import Layered, layer_scales
from trp_scale.finetuning.arguments import parse_finetune
from trp_scale.finetuning.encoders import open_encoder
from trp_scale.finetuning.glue.batch import GlueBatchBuilder, PairTokenizer, TokenTable
from trp_scale.finetuning.glue.model import CLASSIFIERS, BertClassifier
from trp_scale.finetuning.glue.settings import GlueDownstreamConfig, GlueTaskConfig
from trp_scale.finetuning.glue.task import (
    GlueMetrics,
    GlueTask,
    SentenceClassification,
    accuracy,
    f1,
    matthews,
    pearson,
    spearman,
)
from trp_scale.models import attention
from trp_scale.pretraining.pos_bert import modern
from trp_scale.pretraining.pos_bert.model import bert_config
from trp_scale.pretraining.pos_bert.modern import ModernBertForMaskedPositions
from trp_scale.reporting.results import read_results
from trp_scale.sharding.text.shard import ShardTextConfig, shard_text

PREDICTED = np.array([1, 1, 0, 0, 1, 0])
LABELS = np.array([1, 0, 1, 0, 1, 0])
"""TP 2, FP 1, FN 1, TN 2."""


def test_counts_by_hand() -> None:
    assert accuracy(PREDICTED, LABELS) == pytest.approx(4 / 6)
    assert f1(PREDICTED, LABELS) == pytest.approx(2 * 2 / (2 * 2 + 1 + 1))
    assert matthews(PREDICTED, LABELS) == pytest.approx((2 * 2 - 1 * 1) / math.sqrt(3 * 3 * 3 * 3))
    assert matthews(1 - LABELS, LABELS) == pytest.approx(-1)
    # F1 is that of label 1, not symmetric.
    assert f1(np.array([0, 0, 0, 1]), np.array([0, 0, 1, 1])) == pytest.approx(2 / 3)
    assert f1(np.array([0, 0]), np.array([1, 0])) == 0.0


def test_spearman_shares_ranks_among_ties() -> None:
    predicted, scores = np.array([0.1, 0.4, 0.4, 0.9, 0.2]), np.array([1.0, 3.0, 2.0, 2.0, 0.0])
    ranks = np.array([1, 3.5, 3.5, 5, 2]), np.array([2, 5, 3.5, 3.5, 1])
    assert spearman(predicted, scores) == pytest.approx(np.corrcoef(*ranks)[0, 1], abs=1e-12)
    assert pearson(predicted, scores) == pytest.approx(np.corrcoef(predicted, scores)[0, 1], abs=1e-12)
    assert spearman(np.exp(predicted), scores) == pytest.approx(spearman(predicted, scores), abs=1e-12)


@pytest.mark.parametrize("figure", [matthews, pearson, spearman])
@pytest.mark.parametrize(
    ("predicted", "labels", "reason"),
    [
        ([1.0, 1.0, 1.0], [0.0, 1.0, 1.0], "predictions are all 1"),
        ([0.0, 1.0, 1.0], [0.0, 0.0, 0.0], "labels are all 0"),
        ([math.nan, 1.0, 2.0], [0.0, 1.0, 2.0], "predictions are all nan or not finite"),
    ],
)
def test_undefined_figures_are_zero_with_a_warning(
    caplog: pytest.LogCaptureFixture,
    figure: Callable[..., float],
    predicted: list[float],
    labels: list[float],
    reason: str,
) -> None:
    with caplog.at_level(logging.WARNING):
        assert figure(np.array(predicted), np.array(labels)) == 0.0
    assert reason in caplog.text and "0 is reported" in caplog.text


def batch(start: int, labels: list[int], measured_set: list[int], weights: list[int]) -> Batch:
    fields = {
        "labels": torch.tensor(labels),
        "measured_set": torch.tensor(measured_set),
        "row_weights": torch.tensor(weights).float(),
    }
    return Batch(fields=fields, keys=torch.arange(len(labels)), start=start)


def test_both_sets_of_mnli_without_rows_that_fill_a_batch() -> None:
    found = GlueMetrics("mnli", ["matched", "mismatched"])
    logits = torch.eye(3)
    # In any order of batches; the last row is not there, and would be right.
    found.add(logits[[2, 0]], batch(2, [2, 0], [1, 1], [1, 0]))
    found.add(logits[[0, 1]], batch(0, [0, 2], [0, 0], [1, 1]))
    figures = found.finish(ALONE)
    detail = figures.pop("detail")
    assert figures == {"accuracy_matched": 0.5, "accuracy_mismatched": 1.0}
    assert detail["matched"]["rows"] == 2 and detail["mismatched"]["rows"] == 1
    assert detail["matched"]["entailment"] == {"rows": 1, "predicted": 1, "right": 1}
    assert detail["matched"]["neutral"] == {"rows": 0, "predicted": 1, "right": 0}
    assert detail["matched"]["contradiction"] == {"rows": 1, "predicted": 0, "right": 0}


def test_a_constant_prediction_is_the_best_of_the_training_rows() -> None:
    """By hand. Measured rows have other labels most often, which nobody may look at."""
    learned = np.array([0.0] * 6 + [1.0] * 4)
    measured = [1, 1, 1, 0]
    for task, expected in (
        ("cola", {"matthews": 0.0, "accuracy": 0.25}),
        ("sst2", {"accuracy": 0.25}),
        ("mrpc", {"f1": 2 * 3 / (2 * 3 + 1), "accuracy": 0.25}),  # label 1 for all: 3 right, 1 wrong
    ):
        found = GlueMetrics(task, [""], learned)
        found.add(torch.eye(2)[measured], batch(0, measured, [0] * 4, [1] * 4))
        figures = found.finish(ALONE)
        for figure, value in expected.items():
            assert figures[f"constant_{figure}"] == pytest.approx(value), (task, figure)
    mnli = GlueMetrics("mnli", ["matched", "mismatched"], np.array([2.0, 2.0, 0.0]))
    mnli.add(torch.eye(3), batch(0, [2, 0, 2], [0, 0, 1], [1, 1, 1]))
    figures = mnli.finish(ALONE)
    assert (figures["constant_accuracy_matched"], figures["constant_accuracy_mismatched"]) == (0.5, 1.0)
    scores = GlueMetrics("stsb", [""], np.array([1.0, 4.0]))
    one = batch(0, [0, 0], [0, 0], [1, 1])
    one.fields["labels"] = torch.tensor([1.0, 2.0])
    scores.add(torch.tensor([[1.0], [3.0]]), one)
    assert scores.finish(ALONE)["constant_spearman"] == 0.0


VOCABULARY = 64
Kind = Literal["bert", "modern"]
Pooling = Literal["class", "mean"]


def settings(classes: int, kind: Kind = "bert", pooling: Pooling = "class") -> GlueTaskConfig:
    """The window of modern, 4 on each side, is shorter than the longest rows; layers 0 and 3 attend everywhere."""
    model = TextModelConfig(
        kind=kind,
        layers=3 if kind == "bert" else 4,
        hidden_size=32,
        heads=4,
        intermediate_size=64,
        max_positions=24,
        dropout=0.0,
        local_attention=8,
        layer_norm_eps=1e-5,
        initializer_range=0.02 if kind == "bert" else 0.3,
    )
    return GlueTaskConfig(model=model, downstream=GlueDownstreamConfig(classes=classes, dropout=0.0, pooling=pooling))


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
    zeros, positions = np.zeros(4, dtype=np.int64), np.arange(4)
    addresses = Addresses(member=zeros, block=positions, row=zeros, epoch=zeros, keys=positions, present=positions < 3)
    return builder.build(addresses, start=0)


def transformers_inputs(classes: int, kind: Kind) -> dict[str, torch.Tensor]:
    """The first three as transformers takes them."""
    stored = table(classes)
    place = torch.arange(max(LENGTHS))
    attended = place < torch.tensor(LENGTHS[:3])[:, None]  # [3, 16]
    tokens = torch.zeros(attended.shape, dtype=torch.int64)
    tokens[attended] = torch.from_numpy(stored.pieces[: stored.ends[3]].astype(np.int64))
    inputs = {"input_ids": tokens, "attention_mask": attended.long()}
    if kind == "bert":
        inputs["token_type_ids"] = (attended & (place >= torch.from_numpy(stored.second[:3])[:, None])).long()
    return inputs


def transformers_classifier(config: GlueTaskConfig) -> nn.Module:
    classes, pooling = config.downstream.classes, config.downstream.pooling
    if config.model.kind == "bert":
        return BertForSequenceClassification(
            bert_config(config.model, VOCABULARY, num_labels=classes, attn_implementation="eager")
        )
    special = {"pad": 0, "cls": 2, "sep": 3}
    described = ModernBertForMaskedPositions.transformers_model(config.model, VOCABULARY, special).config
    described.num_labels, described.classifier_pooling = classes, pooling.replace("class", "cls")
    return ModernBertForSequenceClassification(described)


CASES: list[tuple[Kind, Pooling]] = [("bert", "class"), ("modern", "class"), ("modern", "mean")]


@pytest.mark.parametrize("classes", [3, 1])
@pytest.mark.parametrize(("kind", "pooling"), CASES)
def test_losses_and_gradients_are_those_of_transformers(
    monkeypatch: pytest.MonkeyPatch, classes: int, kind: Kind, pooling: Pooling
) -> None:
    config = settings(classes, kind, pooling)
    ours = CLASSIFIERS[kind](config, vocabulary=VOCABULARY).double()
    theirs = transformers_classifier(config).double()
    theirs.load_state_dict(ours.state_dict())  # the same names
    batch = rows(classes)
    objective = SentenceClassification("task", classes)
    losses = objective(ours, batch)
    assert losses.counts.tolist() == [3.0] and losses.sums.dtype == torch.float64
    (losses.sums / losses.counts).sum().backward()
    labels = torch.from_numpy(table(classes).labels[:3])
    with wide_rotation(monkeypatch):
        expected = theirs(**transformers_inputs(classes, kind), labels=labels.long() if classes > 1 else labels)
        expected.loss.backward()
    assert float(expected.logits.detach().std()) > 1e-3
    assert torch.allclose(objective.logits(ours, batch)[:3], expected.logits, atol=1e-10)
    # The objective computes its losses in fp32 whatever the model is in.
    mean = losses.sums.detach() / losses.counts
    assert mean.item() == pytest.approx(expected.loss.item(), rel=1e-6)
    gradients = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    for name, parameter in ours.named_parameters():
        assert parameter.grad is not None and torch.allclose(parameter.grad, gradients[name], atol=1e-6), name
    assert objective.regression == ((0,) if classes == 1 else ())


@pytest.mark.parametrize(("kind", "pooling"), CASES)
def test_packing_does_not_change_logits_and_gradients(kind: Kind, pooling: Pooling) -> None:
    model = CLASSIFIERS[kind](settings(3, kind, pooling), vocabulary=VOCABULARY).double()
    objective = SentenceClassification("task", 3)
    packed, padded = rows(3), rows(3, "length")
    assert packed["tokens"].shape == (2, 24) and padded["tokens"].shape == (4, 24)
    assert torch.allclose(objective.logits(model, packed), objective.logits(model, padded), atol=1e-12)
    gradients = []
    for batch in (packed, padded):
        model.zero_grad()
        objective(model, batch).sums.sum().backward()
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradient, gradients[1][name], rtol=1e-6, atol=1e-8, msg=name)


@pytest.mark.parametrize("pooling", ["class", "mean"])
def test_the_kernel_for_segments_does_not_change_logits(monkeypatch: pytest.MonkeyPatch, pooling: Pooling) -> None:
    model = CLASSIFIERS["modern"](settings(3, "modern", pooling), vocabulary=VOCABULARY).double()
    objective = SentenceClassification("task", 3)
    expected = objective.logits(model, rows(3))
    monkeypatch.setattr(modern, "has_segment_kernel", lambda hidden: True)
    monkeypatch.setattr(attention, "varlen_attn", segment_by_segment)
    torch.testing.assert_close(objective.logits(model, rows(3)), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("padding", ["none", "length"])
@pytest.mark.parametrize(("kind", "pooling"), CASES)
def test_logits_in_fp32_are_those_of_transformers(kind: Kind, pooling: Pooling, padding: Any) -> None:
    config = settings(3, kind, pooling)
    ours = CLASSIFIERS[kind](config, vocabulary=VOCABULARY)
    theirs = transformers_classifier(config).eval()
    theirs.load_state_dict(ours.state_dict())
    with torch.no_grad():
        found = SentenceClassification("task", 3).logits(ours, rows(3, padding))[:3]
        expected = theirs(**transformers_inputs(3, kind)).logits
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_depths_of_layer_decay() -> None:
    model = BertClassifier(settings(3), vocabulary=VOCABULARY)
    assert isinstance(model, Layered)
    scale = layer_scales(model, 0.5)
    depths = {name: scale(name) for name, _ in model.named_parameters()}
    assert depths["bert.embeddings.word_embeddings.weight"] == depths["bert.embeddings.LayerNorm.bias"] == 0.5**4
    assert [depths[f"bert.encoder.layer.{n}.output.dense.weight"] for n in range(3)] == [0.5**3, 0.5**2, 0.5]
    assert depths["bert.pooler.dense.weight"] == depths["classifier.bias"] == 1.0
    assert set(depths.values()) == {0.5**n for n in range(5)}
    model = CLASSIFIERS["modern"](settings(3, "modern"), vocabulary=VOCABULARY)
    scale = layer_scales(model, 0.5)
    depths = {name: scale(name) for name, _ in model.named_parameters()}
    assert depths["model.embeddings.tok_embeddings.weight"] == depths["model.embeddings.norm.weight"] == 0.5**5
    assert [depths[f"model.layers.{n}.mlp.Wo.weight"] for n in range(4)] == [0.5**4, 0.5**3, 0.5**2, 0.5]
    assert depths["model.final_norm.weight"] == depths["head.dense.weight"] == depths["classifier.bias"] == 1.0


@pytest.mark.exhaustive
def test_two_hundred_sentences_with_random_labels_are_fitted(tmp_path: Path, text_dataset: Path) -> None:
    root = write_cola(tmp_path / "glue", 200, 0)
    changes = {
        "downstream.tokenizer": text_dataset / "tokenizer",
        "downstream.epochs": 0,
        "training.steps": 250,
        "downstream.dropout": 0.0,
        "model.dropout": 0.0,
        "model.hidden_size": 64,
        "batch.global_size": 20,
        "batch.micro_size": 20,
        "optimizer.lr": 1e-3,
        "logging.every": 50,
    }
    assert finetune_here(glue_flags(root, tmp_path / "run", "cola", "scratch", **changes)) == 0
    (task,) = read_results(tmp_path / "run").tasks
    assert task.metric == "matthews" and task.values[0] > 0.9
    assert task.metrics["accuracy"][0] > 0.95


def test_a_pos_bert_tiny_beats_the_majority_on_sst2(tmp_path: Path) -> None:
    """Minutes: the corpus, both recipes as they are, three seeds."""
    if not (published := os.environ.get("TRP_SCALE_GLUE")):
        pytest.skip("TRP_SCALE_GLUE is not set: the directory of the published GLUE files")
    corpus, source, tuned = tmp_path / "corpus", tmp_path / "source", tmp_path / "tuned"
    shard_text(ShardTextConfig(embedded=True, output=corpus, length=128, vocab_size=8192, rows_per_block=64))
    assert pretrain_here(["--recipe", "pos_bert_tiny", "--data.path", str(corpus), "--run_dir", str(source)]) == 0
    words = ["--recipe", "glue_tiny", "--from", str(source), "--data.path", published, "--run_dir", str(tuned)]
    assert finetune_here([*words, "--seeds", "3"]) == 0
    (task,) = read_results(tuned).tasks
    assert len(task.values) == 3 and min(task.values) > 0.509 + 0.1, "444 of the 872 sentences are of one class"


@pytest.mark.exhaustive
def test_every_task_from_a_run_of_ours_and_on_from_what_that_learned(text_dataset: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    pretrain_here(flags(text_dataset, source, training__steps=1))
    root = write_glue(tmp_path / "glue")
    run_dir = tmp_path / "tuned"
    changes = {"downstream__epochs": 0, "training__steps": 1}
    assert finetune_here(glue_flags(root, run_dir, "all", str(source), **changes)) == 0
    results = read_results(run_dir)
    assert [(task.task, task.metric) for task in results.tasks] == [
        ("cola", "matthews"),
        ("sst2", "accuracy"),
        ("mrpc", "f1"),
        ("stsb", "spearman"),
        ("qqp", "f1"),
        ("mnli", "accuracy_matched"),
        ("qnli", "accuracy"),
        ("rte", "accuracy"),
    ]
    assert all(task.split == "dev" for task in results.tasks)
    mnli = results.tasks[5]
    figures = {"accuracy_matched", "accuracy_mismatched"}
    assert set(mnli.metrics) == figures | {f"constant_{name}" for name in figures}
    assert (mnli.detail[0]["matched"]["rows"], mnli.detail[0]["mismatched"]["rows"]) == (3, 2)
    # What MNLI has left is an encoder again, tokenizer included: the usual start of RTE, STS-B and MRPC.
    mnli_run = str(run_dir / "mnli" / "seed_0")
    assert finetune_here(glue_flags(root, tmp_path / "again", "rte", mnli_run, **changes)) == 0


def task_of(root: Path, tmp_path: Path, source: str, **changes: object) -> GlueTask:
    arguments = parse_finetune(glue_flags(root, tmp_path / "x", "cola", source, **changes))
    assert isinstance(arguments.config, GlueTaskConfig)
    arguments.config.downstream.task = "cola"
    with Environment() as environment:
        return GlueTask(arguments.config, environment)


def test_the_encoder_s_weights_are_taken_with_their_padded_vocabulary(text_dataset: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    pretrain_here(flags(text_dataset, source, training__steps=1))
    task = task_of(write_glue(tmp_path / "glue"), tmp_path, str(source))
    weights = dict(task.model().named_parameters())
    stored = read_full_state(next((source / "checkpoints").iterdir()))
    taken = [name for name in weights if name.startswith("bert.")]
    assert len(taken) > 30 and all(torch.equal(weights[name], stored[name]) for name in taken)
    assert len(weights["bert.embeddings.word_embeddings.weight"]) == 1024  # 1000 pieces, padded to a multiple of 64
    assert weights["classifier.weight"].shape == (2, 32) and weights["classifier.weight"].std() > 0


def test_published_berts_differ_in_names_and_poolers(text_dataset: Path, tmp_path: Path) -> None:
    """Published weights of BERT call norms gamma and beta and keep position_ids; those of a masked language model have
    no pooler."""
    directory = tmp_path / "published"
    config = BertConfig(
        vocab_size=1000,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=64,
    )
    BertModel(config, add_pooling_layer=False).save_pretrained(directory)
    for path in (text_dataset / "tokenizer").iterdir():
        (directory / path.name).write_bytes(path.read_bytes())
    stored = load_file(directory / "model.safetensors")
    old = {
        "bert." + name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): value
        for name, value in stored.items()
    }
    old["bert.embeddings.position_ids"] = torch.arange(64)[None]
    save_file(old, directory / "model.safetensors")
    assert set(open_encoder(str(directory)).read()) == set(stored)
    task = task_of(write_glue(tmp_path / "glue"), tmp_path, str(directory))
    weights = dict(task.model().named_parameters())
    assert all(torch.equal(weights[f"bert.{name}"], value) for name, value in stored.items())
    assert weights["bert.pooler.dense.weight"].std() > 0


def test_a_modern_run_and_its_export_give_equal_results(text_dataset: Path, tmp_path: Path) -> None:
    """The head of masked words is the start of the classification head; the encoder has no dropout."""
    source, exported = tmp_path / "source", tmp_path / "exported"
    pretrain_here(flags(text_dataset, source, **MODERN))
    export(source, exported)
    root = write_glue(tmp_path / "glue")
    task = task_of(root, tmp_path, str(source))
    weights, stored = dict(task.model().named_parameters()), read_full_state(next((source / "checkpoints").iterdir()))
    taken = [name for name in weights if not name.startswith("classifier.")]
    assert set(taken) == set(stored) - {"decoder.bias"} and all(torch.equal(weights[n], stored[n]) for n in taken)
    assert (task.config.model.dropout, task.config.model.layer_norm_eps) == (0.0, 1e-5)
    changes = {"downstream__epochs": 0, "training__steps": 2}
    seen = []
    for encoder, name in ((source, "of_run"), (exported, "of_export")):
        assert finetune_here(glue_flags(root, tmp_path / name, "cola", str(encoder), **changes)) == 0
        seen.append([line["loss"] for line in lines(tmp_path / name / "cola" / "seed_0")])
    assert len(seen[0]) == 2 and seen[0] == seen[1]
    # What it learned is an encoder again.
    tuned = str(tmp_path / "of_run" / "cola" / "seed_0")
    assert open_encoder(tuned).settings == open_encoder(str(source)).settings
    assert set(open_encoder(tuned).read()) == set(open_encoder(str(source)).read())


def test_a_modernbert_of_transformers_is_fine_tuned_with_its_tokenizer(tmp_path: Path) -> None:
    """Pieces are bytes, pairs have no token types, and there is no head to start from."""
    root, directory = write_glue(tmp_path / "glue"), tmp_path / "published"
    special = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", "[MASK]"]
    backend = Tokenizer(BPE(unk_token="[UNK]"))
    backend.pre_tokenizer = ByteLevel(add_prefix_space=False)
    alphabet = ByteLevel.alphabet()
    backend.train_from_iterator(
        FILES.values(), BpeTrainer(vocab_size=400, special_tokens=special, initial_alphabet=alphabet)
    )
    backend.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    names = {f"{name.strip('[]').lower()}_token": name for name in special}
    PreTrainedTokenizerFast(tokenizer_object=backend, **names).save_pretrained(directory)
    described = ModernBertForMaskedPositions.transformers_model(
        settings(2, "modern").model, 400, {"pad": 0, "cls": 1, "sep": 2}
    ).config
    theirs = ModernBertModel(described)
    theirs.save_pretrained(directory)
    changes = {"downstream__epochs": 0, "training__steps": 1, "downstream__max_length": 24}
    assert finetune_here(glue_flags(root, tmp_path / "run", "mrpc", str(directory), **changes)) == 0
    weights = dict(task_of(root, tmp_path, str(directory), **changes).model().named_parameters())
    assert all(torch.equal(weights[f"model.{name}"], value) for name, value in theirs.named_parameters())
    assert weights["head.dense.weight"].std() > 0 and weights["head.norm.weight"].min() == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model__kind": "modern", "downstream__tokenizer": "DATASET/tokenizer"}, "--model.dropout is 0.1"),
        ({}, "--downstream.tokenizer DIR"),
        ({"task": "cola,sst"}, "--task 'cola,sst': allowed: all"),
        ({"task": "cola,rte,cola"}, "--task 'cola,rte,cola': a task is repeated"),
        ({"task": "all"}, "no folder QNLI for the task qnli"),
        ({"downstream__max_length": 65}, "--downstream.max_length is 65, allowed: from 8 to the encoder's 64"),
        ({"downstream__tokenizer": "DATASET/tokenizer", "downstream__split": "test"}, "--predictions DIR"),
        ({"data__path": "nowhere"}, "--data.path nowhere: no such directory"),
    ],
    ids=["dropout", "tokenizer", "task", "twice", "folder", "length", "test", "path"],
)
def test_invalid_flags_are_refused_by_name(
    text_dataset: Path, tmp_path: Path, refused: Refused, changes: dict[str, object], message: str
) -> None:
    root = write_glue(tmp_path / "glue", {name: text for name, text in FILES.items() if not name.startswith("QNLI")})
    changes = {name: str(value).replace("DATASET", str(text_dataset)) for name, value in changes.items()}
    assert message in refused("finetune", *glue_flags(root, tmp_path / "x", "cola", "scratch", **changes))
    assert not list((tmp_path / "x").rglob("metrics.jsonl"))


def test_skipped_lines_and_missing_sets_are_reported(
    text_dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = write_glue(tmp_path / "glue", {name: text for name, text in FILES.items() if "mismatched" not in name})
    path = root / "MNLI" / "train.tsv"
    path.write_text(path.read_text(encoding="utf-8") + "broken\n", encoding="utf-8")
    changes = {"downstream__tokenizer": text_dataset / "tokenizer", "downstream__epochs": 0, "training__steps": 1}
    assert finetune_here(glue_flags(root, tmp_path / "x", "mnli", "scratch", **changes)) == 0
    told = capsys.readouterr().out
    assert "train.tsv:6: 1 columns found, 12 expected" in told and "no dev_mismatched" in told
    (line,) = (tmp_path / "x" / "mnli" / "seed_0" / "metrics.jsonl").read_text().splitlines()
    assert json.loads(line)["tasks"]["mnli"]["count"] == 8
