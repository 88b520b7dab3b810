"""Rows of GLUE: as transformers' tokenizer makes them, padded, and in an order that shuffles them whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from tests.unit.finetuning.glue.small_data import sentences, write_cola, write_glue
from trp_scale.config import RefusedError, TextModelConfig
from trp_scale.data.plan import Addresses
from trp_scale.finetuning.glue.batch import (
    GlueBatchBuilder,
    PairTokenizer,
    TokenTable,
    load_tokenizer,
    pack_rows,
    tokenize,
)
from trp_scale.finetuning.glue.folders import read_glue
from trp_scale.finetuning.glue.model import INPUTS, BertClassifier
from trp_scale.finetuning.glue.settings import GlueTaskConfig


def open_task(
    root: Path, dataset: Path, task: str, *, length: int, padding: Any = "none"
) -> tuple[list[TokenTable], GlueBatchBuilder, PairTokenizer]:
    """The measured sets of a task."""
    tokenizer = load_tokenizer(dataset / "tokenizer", length=length)
    data = read_glue(root, task, split="dev", max_bad_lines=0)
    tables = [tokenize(examples, tokenizer) for examples in data.measured.values()]
    builder = GlueBatchBuilder(tables, tokenizer, length=length, padding=padding, scores=task == "stsb")
    return tables, builder, tokenizer


def addresses(member: list[int], block: list[int], present: list[bool] | None = None) -> Addresses:
    zeros = np.zeros(len(block), dtype=np.int64)
    there = np.array(present or [True] * len(block))
    return Addresses(member=np.array(member), block=np.array(block), row=zeros, epoch=zeros, keys=zeros, present=there)


@pytest.mark.parametrize("length", [12, 64])
@pytest.mark.parametrize("task", ["cola", "mnli", "mrpc", "stsb", "rte"])
def test_rows_are_those_of_transformers_tokenizer(tmp_path: Path, text_dataset: Path, task: str, length: int) -> None:
    data = read_glue(write_glue(tmp_path), task, split="dev", max_bad_lines=0)
    tables, builder, _ = open_task(tmp_path, text_dataset, task, length=length)
    members = np.repeat(np.arange(len(tables)), [len(table.rows) for table in tables])[::-1]
    blocks = np.concatenate([np.arange(len(table.rows)) for table in tables])[::-1]
    batch = builder.build(addresses(members.tolist(), blocks.tolist()), start=0)
    texts = [
        [text for examples in data.measured.values() for text in examples.sentences[number]][::-1]
        for number in range(len(data.train.sentences))
    ]
    theirs = AutoTokenizer.from_pretrained(str(text_dataset / "tokenizer"), local_files_only=True)(
        *texts, truncation=True, max_length=length, padding="longest", return_tensors="pt"
    )
    assert batch["tokens"].shape[1] == min(length, 64)
    assert len(batch["tokens"]) < len(blocks) or length == 12 or len(blocks) == 1
    for number in range(len(blocks)):
        own = batch["row_ids"] == number
        count = int(theirs["attention_mask"][number].sum())
        assert batch["tokens"][own].tolist() == theirs["input_ids"][number, :count].tolist()
        assert batch["token_types"][own].tolist() == theirs["token_type_ids"][number, :count].tolist()
        assert batch["positions"][own].tolist() == list(range(count))
        slot = int(batch["slots"][number])
        sequence, first = slot // batch["first_positions"].shape[1], int(batch["first_positions"].flatten()[slot])
        assert own[sequence, first] and batch["positions"][sequence, first] == 0
    nobody = batch["row_ids"] == -1
    assert (batch["tokens"][nobody] == 0).all() and not batch["positions"][nobody].any()
    labels = np.concatenate([examples.labels for examples in data.measured.values()])[::-1]  # type: ignore[arg-type]
    assert batch["labels"].tolist() == pytest.approx(labels.tolist())
    assert batch["labels"].dtype == (torch.float32 if task == "stsb" else torch.int64)
    assert batch["measured_set"].tolist() == members.tolist()


def test_padding_to_a_length_and_rows_that_are_not_there(tmp_path: Path, text_dataset: Path) -> None:
    root = write_glue(tmp_path)
    for padding in ("length", "none"):
        _, builder, tokenizer = open_task(root, text_dataset, "cola", length=40, padding=padding)
        batch = builder.build(addresses([0, 0, 0], [1, 0, 1], [True, False, False]), start=8)
        assert batch["tokens"].shape == ((3, 40) if padding == "length" else (1, 40))
        assert batch["row_weights"].tolist() == [1, 0, 0] and batch["labels"].tolist() == [1, 0, 0]
        cls = tokenizer.backend.token_to_id("[CLS]")
        for row in (1, 2):
            assert batch["tokens"][batch["row_ids"] == row].tolist() == [cls]
        if padding == "length":
            assert batch["slots"].tolist() == [0, 1, 2] and not batch["first_positions"].any()
            assert all(set(row_ids) <= {row, -1} for row, row_ids in enumerate(batch["row_ids"].tolist()))


def test_digests_follow_labels(tmp_path: Path, text_dataset: Path) -> None:
    root = write_glue(tmp_path)
    before = [table.digest() for table in open_task(root, text_dataset, "mnli", length=64)[0]]
    assert before == [table.digest() for table in open_task(root, text_dataset, "mnli", length=64)[0]]
    path = root / "MNLI" / "dev_matched.tsv"
    path.write_text(path.read_text(encoding="utf-8").replace("\tneutral\n", "\tentailment\n"), encoding="utf-8")
    after = [table.digest() for table in open_task(root, text_dataset, "mnli", length=64)[0]]
    assert after[0] != before[0] and after[1] == before[1]


def test_many_examples_keep_their_order(text_dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trp_scale.finetuning.glue.batch.TOKENIZER_BATCH", 7)
    texts = sentences(30)
    table = tokenize(
        read_glue(write_cola(tmp_path, 20, 10), "cola", split="dev", max_bad_lines=0).measured[""],
        tokenizer := load_tokenizer(text_dataset / "tokenizer", length=64),
    )
    for number, text in enumerate(texts[20:]):
        stored = table.pieces[table.ends[number] : table.ends[number + 1]]
        assert stored.tolist() == tokenizer.backend.encode(text).ids


def test_text_that_spells_a_special_piece_stays_text(text_dataset: Path) -> None:
    tokenizer = load_tokenizer(text_dataset / "tokenizer", length=64)
    names = ["[CLS]", "[SEP]", "[MASK]", "[PAD]"]
    special = {tokenizer.backend.token_to_id(name) for name in names}
    ids = tokenizer.backend.encode(f"He wrote {' '.join(names)} there.").ids
    assert ids[0] in special and ids[-1] in special and not special & set(ids[1:-1])


def test_a_tokenizer_of_another_kind_is_refused(tmp_path: Path) -> None:
    (tmp_path / "nothing").mkdir()
    with pytest.raises(RefusedError, match=r"(?s)nothing: .*--downstream\.tokenizer DIR"):
        load_tokenizer(tmp_path / "nothing", length=16)
    with pytest.raises(RefusedError, match="nowhere"):
        load_tokenizer(tmp_path / "nowhere", length=16)
    bare = Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1, "b": 2, "[CLS]": 3, "[SEP]": 4, "[PAD]": 5}))
    named = {"cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[PAD]", "unk_token": "[UNK]"}
    PreTrainedTokenizerFast(tokenizer_object=bare, **named).save_pretrained(tmp_path / "bare")
    with pytest.raises(RefusedError, match=r"bare: a pair becomes a b; allowed: .*\[CLS\] A \[SEP\] B \[SEP\]"):
        load_tokenizer(tmp_path / "bare", length=16)


def test_the_mean_of_a_row_is_that_of_its_own_pieces(tmp_path: Path, text_dataset: Path) -> None:
    """Against transformers' encoder on the row alone."""
    _, builder, tokenizer = open_task(write_glue(tmp_path), text_dataset, "cola", length=40)
    config = GlueTaskConfig()
    config.model = TextModelConfig(
        layers=2, hidden_size=16, heads=2, intermediate_size=32, max_positions=64, dropout=0.0, initializer_range=0.3
    )
    config.downstream.classes, config.downstream.pooling, config.downstream.max_length = 2, "mean", 40
    model = BertClassifier(config, vocabulary=tokenizer.vocabulary).eval()
    batch = builder.build(addresses([0, 0], [1, 0]), start=0)
    seen: list[torch.Tensor] = []
    model.bert.pooler.register_forward_pre_hook(lambda module, given: seen.append(given[0][:, 0]))
    with torch.no_grad():
        model(*(batch[name] for name in INPUTS))
        for row, mean in enumerate(seen[0]):
            own = batch["row_ids"] == row
            hidden = model.bert.embeddings(
                input_ids=batch["tokens"][own][None], token_type_ids=batch["token_types"][own][None]
            )
            for layer in list(model.layers)[:-1]:
                hidden = layer(hidden, None)
            every = torch.arange(hidden.shape[1])[None]
            torch.testing.assert_close(model.layers[-1](hidden, None, every)[0].mean(0), mean)


@given(st.lists(st.integers(1, 64), min_size=1, max_size=40))
def test_packed_rows_do_not_overlap(lengths: list[int]) -> None:
    sizes = np.array(lengths)
    sequence, first, slot = pack_rows(sizes, 64)
    taken = np.zeros((sequence.max() + 1, 64), dtype=np.int64)
    for row, length in enumerate(lengths):
        assert first[row] + length <= 64
        taken[sequence[row], first[row] : first[row] + length] += 1
    assert taken.max() == 1 and taken.any(axis=1).all()
    for number in range(len(taken)):
        inside = np.flatnonzero(sequence == number)
        assert sorted(slot[inside].tolist()) == list(range(len(inside)))
    # No two sequences could be one: what first fit promises.
    assert len(taken) == 1 or taken.sum() * 2 > 64 * (len(taken) - 1)


def test_short_rows_fill_their_sequences() -> None:
    lengths = np.random.default_rng(0).integers(4, 40, size=64)
    assert int(pack_rows(lengths, 64).sequence.max()) + 1 <= np.ceil(lengths.sum() / 64 / 0.9)
    assert pack_rows(np.full(6, 32), 64).sequence.tolist() == [0, 0, 1, 1, 2, 2]
