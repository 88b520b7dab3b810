"""The split of the input depends only on the input, and neither loses nor duplicates text."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from tests.unit.sharding.text.test_documents import read, skipped, texts
from trp_scale.errors import DataError
from trp_scale.sharding.text.corpus import embedded_documents, plan_corpus


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
    names = [Path(span.path).name for portion in plans[0].portions for span in portion.items]
    assert names == ["a.txt", "b.txt", "c.txt"]
    before = plans[0].fingerprint
    (tmp_path / "b.txt").write_text("That is b. " * 140)
    assert plan_corpus([str(tmp_path)], "auto", "train", True, 1000).fingerprint != before


def test_inputs_that_do_not_exist_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nothing\.txt"):
        read(tmp_path / "nothing.txt")
    (tmp_path / "image.png").write_bytes(b"")
    with pytest.raises(DataError, match=r"1 \.png"):
        read(tmp_path)
    with pytest.raises(DataError, match="s3://bucket/texts"):
        plan_corpus(["s3://bucket/texts"], "auto", "train", True, 1000)


def test_what_no_suffix_tells_is_left_out_and_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("a.txt", "b.rst", "c.rst", "README"):
        (tmp_path / name).write_text("One.")
    assert texts(read(tmp_path)) == ["One."]
    assert "left out: 2 .rst, 1 README; --format text reads all" in caplog.text


@pytest.mark.exhaustive  # all that Python carries is read
def test_the_embedded_corpus_is_large_and_always_the_same() -> None:
    first = list(embedded_documents())
    assert list(itertools.islice(embedded_documents(), 150)) == first[:150]
    assert sum(len(text.encode()) for _, text in first) > 1_900_000  # Debian leaves some modules out
    assert len({name for name, _ in first}) == len(first)
    assert not any(">>> " in text for name, text in first if name.endswith(".py"))
