"""`trp-scale finetune` on GLUE: what it learns, where its encoder comes from, what it leaves and refuses."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import BertConfig, BertModel

from tests.runs import flags, pretrain_here
from tests.unit.finetuning.glue.small_data import finetune_here, glue_flags, write_cola
from tests.unit.finetuning.glue.standard_files import FILES, write_glue
from trp_scale.checkpoint.format import read_full_state
from trp_scale.cli import main as cli
from trp_scale.distributed.environment import Environment
from trp_scale.finetuning.arguments import parse_finetune
from trp_scale.finetuning.encoders import open_encoder
from trp_scale.finetuning.glue.settings import GlueTaskConfig
from trp_scale.finetuning.glue.task import GlueTask
from trp_scale.reporting.results import read_results
from trp_scale.sharding.text.shard import ShardTextConfig, shard_text


def first_cola(root: Path, published: Path, count: int) -> Path:
    """The first sentences of the published CoLA, to train and to measure on."""
    lines = (published / "CoLA" / "train.tsv").read_text(encoding="utf-8").split("\n")[:count]
    return write_glue(root, {f"CoLA/{name}.tsv": "\n".join(lines) + "\n" for name in ("train", "dev")})


@pytest.mark.exhaustive
@pytest.mark.parametrize("sentences", ["labelled at random", "published"])
def test_two_hundred_cola_sentences_are_fitted(tmp_path: Path, text_dataset: Path, sentences: str) -> None:
    if sentences == "published":
        if not (published := os.environ.get("TRP_SCALE_GLUE")):
            pytest.skip("TRP_SCALE_GLUE is not set: the directory of the published GLUE files")
        root = first_cola(tmp_path / "glue", Path(published), 200)
    else:
        root = write_cola(tmp_path / "glue", 200, 0)
    changes = {
        "downstream.tokenizer": text_dataset / "tokenizer",
        "downstream.epochs": 25,
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
    assert set(mnli.metrics) == {"accuracy_matched", "accuracy_mismatched"}
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


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, "--from scratch brings no tokenizer; give --downstream.tokenizer DIR"),
        ({"task": "cola,sst"}, "--task 'cola,sst': allowed: all, or of cola, sst2"),
        ({"task": "cola,rte,cola"}, "--task 'cola,rte,cola': a task is given twice"),
        ({"task": "all"}, "no folder QNLI for the task qnli"),
        ({"downstream__max_length": 65}, "--downstream.max_length is 65, allowed: from 8 to the encoder's 64"),
        ({"downstream__tokenizer": "DATASET/tokenizer", "downstream__split": "test"}, "keeps the labels of its test"),
        ({"data__path": "nowhere"}, "--data.path nowhere: no such directory"),
    ],
    ids=["tokenizer", "task", "twice", "folder", "length", "test", "path"],
)
def test_what_cannot_be_is_refused_by_its_flag(
    text_dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, object], message: str
) -> None:
    root = write_glue(tmp_path / "glue", {name: text for name, text in FILES.items() if not name.startswith("QNLI")})
    changes = {name: str(value).replace("DATASET", str(text_dataset)) for name, value in changes.items()}
    assert cli.main(["finetune", *glue_flags(root, tmp_path / "x", "cola", "scratch", **changes)]) == 2
    assert message in capsys.readouterr().err
    assert not list((tmp_path / "x").rglob("metrics.jsonl"))


def test_lines_left_out_and_sets_that_are_missing_are_told(
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
