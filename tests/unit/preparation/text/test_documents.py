"""What cannot be used is skipped, counted and named; how the input is cut loses and doubles nothing."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from trp_scale.data.index import DataError
from trp_scale.preparation.text.corpus import embedded_documents, plan_corpus
from trp_scale.preparation.text.documents import Document, ReadSettings, Skipped, read_portion


def read(
    *inputs: Path, one_document_per_file: bool = True, shard_bytes: int = 0, max_line_bytes: int = 8_000_000
) -> list[Document | Skipped]:
    corpus = plan_corpus([str(item) for item in inputs], "auto", "train", one_document_per_file, shard_bytes)
    settings = ReadSettings(
        text_field="text", split="train", one_document_per_file=one_document_per_file, max_line_bytes=max_line_bytes
    )
    return [item for portion in corpus.portions for item in read_portion(portion, settings)]


def skipped(found: list[Document | Skipped]) -> list[tuple[str, str]]:
    return [(item.reason, Path(item.place).name) for item in found if isinstance(item, Skipped)]


def texts(found: list[Document | Skipped]) -> list[str]:
    return [item.text for item in found if isinstance(item, Document)]


def test_every_bad_json_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    lines = [
        b'{"text": "Good one."}',
        b"not json",
        b'{"title": "no text"}',
        b'{"text": 5}',
        b'["text"]',
        b'{"text": "caf\xe9"}',
        b'{"text": "nul \\u0000 inside"}',
        b'{"text": " \\n "}',
        b'{"text": "half \\ud800"}',
        json.dumps({"text": "x" * 10_000_000}).encode(),
        b"",
        b"[" * 100_000,
        b'{"text": "Good two."}',
    ]
    path.write_bytes(b"\n".join(lines) + b"\n")
    found = read(path)
    assert texts(found) == ["Good one.", "Good two."]
    assert skipped(found) == [
        ("not_json", "bad.jsonl:2"),
        ("no_text", "bad.jsonl:3"),
        ("no_text", "bad.jsonl:4"),
        ("not_json", "bad.jsonl:5"),
        ("invalid_utf8", "bad.jsonl:6"),
        ("control_characters", "bad.jsonl:7"),
        ("empty", "bad.jsonl:8"),
        ("invalid_utf8", "bad.jsonl:9"),
        ("long_line", "bad.jsonl:10"),
        ("not_json", "bad.jsonl:12"),
    ]


def test_every_bad_text_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "a_good.txt").write_bytes(b"\xef\xbb\xbfOne.\x0cTwo.")
    (tmp_path / "b_latin.txt").write_bytes(b"one\ntwo\ncaf\xe9 au lait")
    (tmp_path / "c_control.txt").write_bytes("é\nbell \x07".encode())
    (tmp_path / "d_empty.txt").write_bytes(b" \n\n")
    (tmp_path / "e_long.txt").write_bytes(b"short\n" + b"x" * 10_000_000)
    (tmp_path / "f_unreadable.txt").symlink_to(tmp_path / "nowhere")
    found = read(tmp_path)
    assert texts(found) == ["One.\nTwo."]
    assert skipped(found) == [
        ("invalid_utf8", "b_latin.txt:3"),
        ("control_characters", "c_control.txt:2"),
        ("empty", "d_empty.txt:1"),
        ("long_line", "e_long.txt:2"),
        ("unreadable", "f_unreadable.txt"),
    ]


def test_a_file_of_many_documents_is_cut_between_them(tmp_path: Path) -> None:
    paragraphs = [f"Paragraph {number}.\nIts second line." for number in range(500)]
    paragraphs[333] = "bad \x07 one"
    path = tmp_path / "many.txt"
    path.write_text("\n\n".join(paragraphs[:250]) + "\n \t\n\n\n" + "\r\n\r\n".join(paragraphs[250:]), newline="")
    whole = read(path, one_document_per_file=False)
    assert texts(whole) == [text for text in paragraphs if "bad" not in text]
    for shard_bytes in (300, 1000, 7777):
        cut = read(path, one_document_per_file=False, shard_bytes=shard_bytes)
        assert texts(cut) == texts(whole)
        assert skipped(cut) == skipped(whole) == [("control_characters", "many.txt:1002")]


def test_json_lines_are_cut_between_lines(tmp_path: Path) -> None:
    path = tmp_path / "many.jsonl"
    documents = [f"Document {number} " + "word " * (number % 50) for number in range(300)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    for shard_bytes in (100, 1000, 5000, 1 << 20):
        assert texts(read(path, shard_bytes=shard_bytes)) == documents


def test_portions_do_not_depend_on_anything_but_the_input(tmp_path: Path) -> None:
    for name in "cab":
        (tmp_path / f"{name}.txt").write_text(f"This is {name}. " * 100)
    plans = [plan_corpus(inputs, "auto", "train", True, 1000) for inputs in ([str(tmp_path)], [f"{tmp_path}/*.txt"])]
    assert plans[0] == plans[1]
    names = [Path(span.path).name for portion in plans[0].portions for span in portion.spans]
    assert names == ["a.txt", "b.txt", "c.txt"]
    before = plans[0].fingerprint
    (tmp_path / "b.txt").write_text("That is b. " * 140)
    assert plan_corpus([str(tmp_path)], "auto", "train", True, 1000).fingerprint != before


def test_inputs_that_do_not_exist_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such file or folder"):
        read(tmp_path / "nothing.txt")
    (tmp_path / "image.png").write_bytes(b"")
    with pytest.raises(DataError, match=r"ends in \.txt"):
        read(tmp_path)


def test_a_dataset_directory_is_read(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets", reason="the extra `datasets` is not installed")
    rows = [f"Row {number}." for number in range(20)] + [None, ""]
    datasets.DatasetDict({"train": datasets.Dataset.from_dict({"text": rows})}).save_to_disk(str(tmp_path / "stored"))
    found = read(tmp_path / "stored", shard_bytes=200)
    assert texts(found) == rows[:20]
    assert skipped(found) == [("no_text", "stored:20"), ("empty", "stored:21")]


def test_the_embedded_corpus_is_large_and_always_the_same() -> None:
    first = list(embedded_documents())
    assert list(itertools.islice(embedded_documents(), 150)) == first[:150]
    assert sum(len(text.encode()) for _, text in first) > 2_000_000
    assert len({name for name, _ in first}) == len(first)
    assert not any(">>> " in text for name, text in first if name.endswith(".py"))
