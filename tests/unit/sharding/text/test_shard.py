"""Text data sets: deterministic bytes and no incomplete data set."""

from __future__ import annotations

import json
import logging
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from tests.fixtures import small_text_config
from tests.unit.sharding.test_parts import content
from trp_scale.data.index import read_index, read_json
from trp_scale.data.text.dataset import GROUP_BITS, GROUPS, OTHER, WORD_START
from trp_scale.errors import DataError
from trp_scale.sharding.display import read_block
from trp_scale.sharding.text import annotate
from trp_scale.sharding.text.annotate import NLTK_INSTALL, TaggerError, make_tagger, resolve_tagger
from trp_scale.sharding.text.shard import ShardTextConfig, shard_text
from trp_scale.sharding.verify import verify_dataset

ROOT = Path(__file__).resolve().parents[4]


def source_of(dataset: Path) -> Path:
    return dataset.with_name(f"{dataset.name}.jsonl")


def config_of(dataset: Path, output: Path, **changes: object) -> ShardTextConfig:
    """Settings of `text_dataset`."""
    return small_text_config(source_of(dataset), output, **changes)


def small_config(source: Path, output: Path, **changes: object) -> ShardTextConfig:
    """Settings for a few sentences."""
    return small_text_config(source, output, **{"vocab_size": 100, "length": 32, **changes})


def test_two_processes_write_the_same_bytes_as_one(text_dataset: Path, tmp_path: Path) -> None:
    shard_text(config_of(text_dataset, tmp_path / "two", processes=2))
    assert content(tmp_path / "two") == content(text_dataset)


def test_a_finished_data_set_is_left_alone_and_another_one_refused(text_dataset: Path, tmp_path: Path) -> None:
    before = content(text_dataset)
    shard_text(config_of(text_dataset, text_dataset))
    assert content(text_dataset) == before
    with pytest.raises(DataError, match="rows_per_block 16 there, 8 asked for"):
        shard_text(config_of(text_dataset, text_dataset, rows_per_block=8))
    other = tmp_path / "other.jsonl"
    other.write_text('{"text": "Other text."}\n')
    with pytest.raises(DataError, match="input"):
        shard_text(config_of(text_dataset, text_dataset, inputs=[str(other)]))
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").write_text("do not touch")
    with pytest.raises(DataError, match=r"--output .*full"):
        shard_text(config_of(text_dataset, tmp_path / "full"))
    assert content(text_dataset) == before


def test_dataset_json_counts_what_is_stored(text_dataset: Path) -> None:
    dataset = read_json(text_dataset / "dataset.json")
    pieces_per_group = np.zeros(len(GROUPS), dtype=int)
    rows = blocks = words = 0
    for name in dataset["shards"]:
        shard = text_dataset / "shards" / name
        for block in read_index(shard).blocks:
            arrays = read_block(shard, block)
            lengths = arrays["sentences.npy"][:, -1]
            inside = np.arange(dataset["row_length"]) < lengths[:, None]
            pieces_per_group += np.bincount(arrays["tags.npy"][inside] & GROUP_BITS, minlength=len(GROUPS))
            words += int((arrays["tags.npy"] & WORD_START > 0).sum())
            assert (arrays["tags.npy"][~inside] == OTHER).all()
            rows += block.rows
            blocks += 1
    assert (dataset["rows"], dataset["blocks"]) == (rows, blocks)
    assert [dataset["pieces_per_group"][group] for group in GROUPS] == pieces_per_group.tolist()
    assert sum(dataset["words_per_group"].values()) == dataset["words"] >= words > 0.97 * dataset["words"]
    assert dataset["row_length"] == dataset["length"] - 3
    assert blocks > len(dataset["shards"]) > 1


def test_the_webdataset_library_and_memory_maps_read_the_shards(text_dataset: Path) -> None:
    webdataset = pytest.importorskip("webdataset", reason="webdataset is not installed")
    dataset = read_json(text_dataset / "dataset.json")
    shard = text_dataset / "shards" / dataset["shards"][0]
    samples: Iterator[dict[str, bytes]] = iter(webdataset.WebDataset(str(shard), shardshuffle=False))
    for block in read_index(shard).blocks:
        sample = next(samples)
        assert sample["__key__"] == block.key
        for suffix, array in read_block(shard, block).items():
            member = block.members[suffix]
            stored = sample[suffix]
            assert len(stored) == member.length
            mapped = np.memmap(
                shard,
                dtype=array.dtype,
                mode="r",
                offset=member.offset + member.length - array.nbytes,
                shape=array.shape,
            )
            assert np.array_equal(mapped, array)
    assert next(samples, None) is None


def test_the_tokenizer_loads_in_transformers_and_gives_the_stored_pieces(text_dataset: Path) -> None:
    dataset = read_json(text_dataset / "dataset.json")
    tokenizer = AutoTokenizer.from_pretrained(str(text_dataset / "tokenizer"))
    assert len(tokenizer) == dataset["vocab_size"] == 1000
    assert tokenizer.mask_token_id == dataset["special_tokens"]["mask"]
    assert tokenizer.all_special_ids and set(tokenizer.all_special_ids) == set(dataset["special_token_ids"])
    shard = text_dataset / "shards" / dataset["shards"][0]
    arrays = read_block(shard, read_index(shard).blocks[0])
    text = json.loads(source_of(text_dataset).read_text(encoding="utf-8").splitlines()[0])["text"]
    stored = [
        int(piece)
        for row, ends in zip(arrays["tokens.npy"], arrays["sentences.npy"], strict=True)
        for piece in row[: ends[-1]]
    ]
    wanted = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert stored[: len(wanted)] == wanted[: len(stored)]
    assert (text_dataset / "tokenizer" / "vocab.txt").read_text(encoding="utf-8").splitlines()[:2] == ["[PAD]", "[UNK]"]


def test_a_given_tokenizer_is_used(text_dataset: Path, tmp_path: Path) -> None:
    shard_text(config_of(text_dataset, tmp_path / "given", tokenizer=str(text_dataset / "tokenizer")))
    trained, given = read_json(text_dataset / "dataset.json"), read_json(tmp_path / "given" / "dataset.json")
    for name in ("vocab_size", "special_tokens", "pieces", "pieces_per_group", "rows"):
        assert given[name] == trained[name]
    for name in trained["shards"]:
        assert (tmp_path / "given" / "shards" / name).read_bytes() == (text_dataset / "shards" / name).read_bytes()
    with pytest.raises(DataError, match=r"nowhere.*--tokenizer"):
        shard_text(config_of(text_dataset, tmp_path / "none", tokenizer=str(tmp_path / "nowhere")))


def test_skipped_documents_are_listed_and_too_many_stop_the_run(tmp_path: Path) -> None:
    source = tmp_path / "source.jsonl"
    lines = ['{"text": "The cat sat. It purred."}'] * 30 + ["broken", '{"text": "\\u200b"}']
    source.write_text("\n".join(lines))
    config = small_config(source, tmp_path / "out")
    with pytest.raises(DataError) as raised:
        shard_text(config)
    for part in ("2 of 32", "--max_skipped 0.01", "1 not_json", "1 empty", "source.jsonl:31", "source.jsonl:32"):
        assert part in str(raised.value)
    assert list((tmp_path / "out" / "shards").glob("*.tar"))
    assert not (tmp_path / "out" / "dataset.json").exists()
    shard_text(replace(config, max_skipped=0.1))
    dataset = read_json(tmp_path / "out" / "dataset.json")
    assert dataset["documents"] == dataset["rows"] == 30
    assert dataset["skipped"] == {"not_json": 1, "empty": 1}
    assert [entry["reason"] for entry in dataset["skipped_places"]] == ["not_json", "empty"]


def test_an_attempt_that_failed_does_not_stand_in_the_way_of_another(tmp_path: Path) -> None:
    """A stopped run stays resumable by the same command; differences are reported as settings."""
    good, bad = tmp_path / "good.txt", tmp_path / "bad.txt"
    good.write_text("The cat sat. It purred. " * 20)
    bad.write_bytes("caf\u00e9".encode("latin-1"))
    config = small_config(good, tmp_path / "out", inputs=[str(good), str(bad)])
    with pytest.raises(DataError, match="1 of 2"):
        shard_text(config)
    shard_text(replace(config, inputs=[str(good)], length=16))
    assert read_json(tmp_path / "out" / "dataset.json")["documents"] == 1
    good.write_text("The dog sat. It barked. " * 20)
    with pytest.raises(DataError, match="length 16 there, 32 asked for"):
        shard_text(replace(config, inputs=[str(good)]))
    with pytest.raises(DataError, match="input") as raised:
        shard_text(replace(config, inputs=[str(good)], length=16))
    assert not re.search("[0-9a-f]{32}", str(raised.value))


ENGLISH = (
    "This is a page of plain English, which is about nothing in particular and says so in a few more common words. "
)
GERMAN = (
    "Die künstliche Intelligenz ist ein Teilgebiet der Informatik. Es umfasst alle Anstrengungen, deren Ziel es ist, "
    "Maschinen intelligent zu machen. "
)
FRENCH = (
    "L'intelligence artificielle est un ensemble de théories et de techniques visant à réaliser des machines capables "
    "de simuler l'intelligence humaine. "
)
CHINESE = "人工智能是计算机科学的一个分支。它企图了解智能的实质。"


@pytest.mark.parametrize(
    ("text", "another"),
    [(ENGLISH, False), (GERMAN, True), (FRENCH, True), (CHINESE * 20, True), ("Danke schön!", False)],
)
def test_words_tell_another_language(text: str, another: bool) -> None:
    share, examples = annotate.unknown_words(text)
    assert (share >= annotate.NOT_ENGLISH_SHARE) == another
    assert len(examples) <= 5 and bool(examples) == (text != ENGLISH)


def test_another_language_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name, text in (("english", ENGLISH), ("german", GERMAN)):
        (tmp_path / f"{name}.txt").write_text(text * 5)
        caplog.clear()
        shard_text(small_config(tmp_path / f"{name}.txt", tmp_path / name, vocab_size=200))
        assert ("% of its words are unknown, such as künstliche, " in caplog.text) == (name == "german")


def test_taggers_say_what_is_missing_and_which_is_used(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("nltk.data.path", [str(tmp_path)])
    with pytest.raises(TaggerError, match=NLTK_INSTALL):
        make_tagger("nltk")
    assert NLTK_INSTALL == "python -m nltk.downloader averaged_perceptron_tagger_eng"
    assert resolve_tagger("auto") == "textblob"
    source = tmp_path / "source.txt"
    source.write_text("The cat sat on the mat.")
    with caplog.at_level(logging.INFO):
        shard_text(small_config(source, tmp_path / "out", tagger="auto"))
    assert "tagger: textblob" in caplog.text
    monkeypatch.setattr(annotate, "nltk_data_present", lambda: True)
    assert resolve_tagger("auto") == "nltk"


@pytest.mark.parametrize(("tagger", "library"), [("auto", "nltk"), ("textblob", "textblob")])
def test_a_library_that_is_not_installed_is_named_with_its_extra(
    text_dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tagger: str, library: str
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] in (library, "textblob")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(TaggerError, match=rf"{library}.*trp-scale\[text\]"):
        shard_text(config_of(text_dataset, tmp_path / "out", tagger=tagger))


def test_nltk_tagger_gives_the_groups_of_nltk() -> None:
    if not annotate.nltk_data_present():
        pytest.skip(f"NLTK's data is not installed: {NLTK_INSTALL}")
    groups = make_tagger("nltk").groups(
        ["Oh", ",", "she", "quickly", "gave", "the", "old", "dog", "to", "him", "and", "left", "."]
    )
    names = [GROUPS[group] for group in groups]
    expected = "pronoun adverb verb determiner adjective noun preposition pronoun conjunction verb other"
    assert names[2:] == expected.split()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"embedded": True}, "one of the two"),
        ({"length": 4}, "--length is 4"),
        ({"segments_per_row": 4}, "--segments_per_row 4 needs --pack"),
    ],
)
def test_settings_that_cannot_work_are_refused(
    text_dataset: Path, tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        shard_text(config_of(text_dataset, tmp_path / "out", **changes))


def byte_level_tokenizer(directory: Path, texts: list[str]) -> Path:
    """Write a tokenizer whose pieces begin with the space before a word."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    tokenizer.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=600, special_tokens=special, show_progress=False)
    )
    names = ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **dict(zip(names, special, strict=True))).save_pretrained(
        directory
    )
    return directory


@pytest.mark.parametrize("pieces", ["words", "bytes"])
def test_packed_rows_have_the_pieces_of_each_document(text_dataset: Path, tmp_path: Path, pieces: str) -> None:
    texts = [json.loads(line)["text"] for line in source_of(text_dataset).read_text("utf-8").splitlines()]
    directory = text_dataset / "tokenizer" if pieces == "words" else byte_level_tokenizer(tmp_path / "bytes", texts)
    output = shard_text(
        config_of(text_dataset, tmp_path / "out", pack=True, tokenizer=str(directory), shard_bytes=1 << 20)
    )
    dataset, tokenizer = read_json(output / "dataset.json"), AutoTokenizer.from_pretrained(str(directory))
    assert (dataset["format"], dataset["row_length"], dataset["segments_per_row"]) == (2, 64, 8)
    parts: list[list[int]] = []
    rows = 0
    for name in dataset["shards"]:
        for block in read_index(output / "shards" / name).blocks:
            arrays = read_block(output / "shards" / name, block)
            for row, tags, ends in zip(
                *(arrays[f"{name}.npy"] for name in ("tokens", "tags", "sentences")), strict=True
            ):
                rows += 1
                for start, end in zip([0, *ends[:-1]], ends, strict=True):
                    if end > start:
                        assert (row[start], row[end - 1]) == (tokenizer.cls_token_id, tokenizer.sep_token_id)
                        assert tags[start] == tags[end - 1] == OTHER
                        parts.append(row[start + 1 : end - 1].tolist())
    stored = iter(parts)
    for text in texts:
        wanted = tokenizer(text, add_special_tokens=False)["input_ids"]
        joined: list[int] = []
        while len(joined) < len(wanted):
            joined += next(stored)
        assert joined == wanted
    assert next(stored, None) is None
    assert dataset["segments"] == len(parts)
    assert dataset["padding"] == 64 * rows - sum(len(part) + 2 for part in parts)
    assert dataset["padding"] < 0.01 * 64 * rows
    verify_dataset(output)
