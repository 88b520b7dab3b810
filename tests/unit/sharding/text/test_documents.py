"""Unusable documents are skipped, counted and named; splitting the input neither loses nor duplicates text."""

from __future__ import annotations

import gzip
import json
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.grids import grid
from trp_scale.errors import DataError
from trp_scale.sharding.text.corpus import Span, plan_corpus
from trp_scale.sharding.text.documents import Document, ReadSettings, Skipped, _LineNumbers, read_portion


def read(
    *inputs: Path, one_document_per_file: bool = True, shard_bytes: int = 0, max_line_bytes: int = 8_000_000
) -> list[Document | Skipped]:
    corpus = plan_corpus([str(item) for item in inputs], "auto", "train", one_document_per_file, shard_bytes)
    settings = ReadSettings(
        text_field="text", split="train", one_document_per_file=one_document_per_file, max_line_bytes=max_line_bytes
    )
    return [item for portion in corpus.portions for item in read_portion(portion, settings)]


def skipped(found: list[Document | Skipped]) -> list[tuple[str, str]]:
    return [(item.reason, Path(item.location).name) for item in found if isinstance(item, Skipped)]


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


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (gzip.compress(b"One.", mtime=0), "gzip"),
        (b"PAR1" + bytes(20), "parquet"),
        (b"PK\x03\x04" + bytes(20), "packed"),
        (b"\x28\xb5\x2f\xfd" + bytes(20), "packed"),
    ],
)
def test_what_is_packed_and_is_not_called_so_is_told_by_its_content(
    content: bytes, reason: str, tmp_path: Path
) -> None:
    (tmp_path / "a.txt").write_bytes(content)
    assert skipped(read(tmp_path)) == [(reason, "a.txt")]


def test_fields_are_named_where_the_text_is_in_none(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"body": "One.", "id": 1}\n{"text": 5}\n')
    found = [item.detail for item in read(tmp_path) if isinstance(item, Skipped)]
    assert found == ["['body', 'id']", "5"]


def test_a_dataset_directory_is_read(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets", reason="the extra `datasets` is not installed")
    rows = [f"Row {number}." for number in range(20)] + [None, ""]
    datasets.DatasetDict({"train": datasets.Dataset.from_dict({"text": rows})}).save_to_disk(str(tmp_path / "stored"))
    found = read(tmp_path / "stored", shard_bytes=200)
    assert texts(found) == rows[:20]
    assert skipped(found) == [("no_text", "stored:20"), ("empty", "stored:21")]


def test_a_dataset_directory_whose_rows_lead_out_of_its_file_is_refused(tmp_path: Path) -> None:
    """The library memory-maps the file and would crash the process."""
    datasets = pytest.importorskip("datasets", reason="the extra `datasets` is not installed")
    rows = [f"Row {number}." for number in range(5)]
    datasets.DatasetDict({"train": datasets.Dataset.from_dict({"text": rows})}).save_to_disk(str(tmp_path / "stored"))
    (file,) = (tmp_path / "stored").rglob("*.arrow")
    offsets = [struct.pack("<6i", *(6 * number for number in range(5)), end) for end in (30, 2**30)]
    content = file.read_bytes()
    assert content.count(offsets[0]) == 1
    file.write_bytes(content.replace(*offsets))
    with pytest.raises(DataError, match="stored: rows 0 to 4"):
        read(tmp_path / "stored")


def gzipped(path: Path) -> Path:
    packed = path.with_name(f"{path.name}.gz")
    packed.write_bytes(gzip.compress(path.read_bytes()))
    return packed


@pytest.mark.parametrize("chunk", [64, 1000, 1 << 20])
@pytest.mark.parametrize("one_document_per_file", [True, False])
def test_gzipped_files_are_what_is_in_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int, one_document_per_file: bool
) -> None:
    monkeypatch.setattr("trp_scale.sharding.text.documents.CHUNK", chunk)
    lines = [json.dumps({"text": f"Document {number}. " * (number % 7 + 1)}) for number in range(50)]
    lines[30:30] = ["not json", "", json.dumps({"text": "x" * 3000}), json.dumps({"title": "none"})]
    (tmp_path / "lines.jsonl").write_text("\n".join(lines))
    text = [f"Paragraph {number}.\nIts second line." for number in range(50)]
    text[40] = "bad \x07 one"
    (tmp_path / "text.txt").write_text("\n\n".join(text))
    for name in ("lines.jsonl", "text.txt"):
        if name == "text.txt" and one_document_per_file and chunk < 1 << 20:
            continue  # a document that is larger than a chunk goes on as another
        plain, packed = (
            read(path, one_document_per_file=one_document_per_file, max_line_bytes=2000)
            for path in (tmp_path / name, gzipped(tmp_path / name))
        )
        assert texts(packed) == texts(plain)
        assert [(why, where.replace(".gz", "")) for why, where in skipped(packed)] == skipped(plain)
    corpus = plan_corpus([str(tmp_path)], "auto", "train", True, 0)
    kinds = {Path(span.path).name: span.kind for portion in corpus.portions for span in portion.items}
    assert kinds.pop("lines.jsonl") == kinds.pop("lines.jsonl.gz") == "jsonl" and set(kinds.values()) == {"text"}


def test_a_long_document_in_a_gzipped_file_goes_on_at_a_blank_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trp_scale.sharding.text.documents.CHUNK", 100)
    paragraphs = [f"Paragraph {number}." for number in range(50)]
    (tmp_path / "book.txt").write_text("\n\n".join(paragraphs))
    found = texts(read(gzipped(tmp_path / "book.txt")))
    assert len(found) > 5 and "".join(found) == "\n\n".join(paragraphs)
    assert all(text.startswith("Paragraph") for text in found)


def test_a_gzipped_file_that_is_cut_or_grows_too_much_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trp_scale.sharding.text.documents.CHUNK", 1000)
    lines = "".join(json.dumps({"text": f"Document {number}."}) + "\n" for number in range(500))
    cut = tmp_path / "cut.jsonl.gz"
    cut.write_bytes(gzip.compress(lines.encode())[:-300])
    found = read(cut)
    assert texts(found)[:2] == ["Document 0.", "Document 1."]
    assert skipped(found) == [("unreadable", "cut.jsonl.gz")]
    (tmp_path / "no.txt.gz").write_bytes(b"plain text")
    assert skipped(read(tmp_path / "no.txt.gz")) == [("unreadable", "no.txt.gz")]
    bomb = tmp_path / "bomb.jsonl.gz"
    bomb.write_bytes(gzip.compress(b'{"text": "first"}\n' + bytes(5_000_000) + b'\n{"text": "last"}\n'))
    found = []
    assert peak_of(lambda: found.extend(read(bomb, max_line_bytes=2000))) < 2_000_000
    assert texts(found) == ["first", "last"] and skipped(found) == [("long_line", "bomb.jsonl.gz:2")]


def test_parquet_files_are_cut_between_their_row_groups_where_there_are_enough(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="the extra `datasets` is not installed")
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = [f"Row {number}." for number in range(100)] + [None, " "]
    table = pyarrow.table({"text": rows, "number": list(range(102))})
    for group in (7, 102):
        path = tmp_path / f"{group}.parquet"
        parquet.write_table(table, path, row_group_size=group)
        for shard_bytes in (300, 1 << 20):
            found = read(path, shard_bytes=shard_bytes)
            assert texts(found) == rows[:100]
            assert skipped(found) == [("no_text", f"{path.name}:100"), ("empty", f"{path.name}:101")]
    corpus = plan_corpus([str(tmp_path)], "auto", "train", True, 1500)
    cut = [span for portion in corpus.portions for span in portion.items if span.path.endswith("/7.parquet")]
    assert len(cut) > 2 and all(span.start % 7 == 0 for span in cut)
    parquet.write_table(pyarrow.table({"content": rows}), tmp_path / "other.parquet")
    assert [why for why, _ in skipped(read(tmp_path / "other.parquet"))] == ["no_text"] * 102
    (tmp_path / "no.parquet").write_bytes(b"not parquet")
    with pytest.raises(DataError, match=r"no\.parquet"):
        read(tmp_path / "no.parquet")


def peak_of(read_all: Callable[[], object]) -> int:
    """Return the peak memory of Python in bytes."""
    tracemalloc.start()
    try:
        read_all()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(("name", "unit"), grid(["x.txt.gz", "x.jsonl.gz"], [b"a\n\n", b"\n\r", b"11\n"]))
def test_a_few_gzipped_bytes_of_many_documents_or_lines_take_little(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, unit: bytes
) -> None:
    """64 KB on the disk took 3 GB and more."""
    monkeypatch.setattr("trp_scale.sharding.text.documents.CHUNK", 1 << 17)
    path = tmp_path / name
    path.write_bytes(gzip.compress(unit * ((1 << 18) // len(unit))))

    def read_all() -> None:
        settings = ReadSettings(text_field="text", split="", one_document_per_file=False, max_line_bytes=1000)
        for portion in plan_corpus([str(path)], "auto", "train", False, 0).portions:
            for _ in read_portion(portion, settings):
                pass

    assert peak_of(read_all) < 1 << 20


class Counted(bytes):
    """Bytes that record how many bytes `count` has scanned."""

    passed = 0

    def count(self, what: bytes, first: int, last: int) -> int:  # type: ignore[override]
        self.passed += last - first
        return super().count(what, first, last)


def test_the_numbers_of_many_bad_lines_are_not_each_counted_from_the_first() -> None:
    """Counting from the start took hours for a gzipped file of 8 KB (8 MB unpacked)."""
    content = Counted(b"11\n" * 1000)
    lines = _LineNumbers(Span("bad.jsonl", "jsonl", 0, len(content)), content, lambda: 7, 5)
    assert [lines.location(3 * number) for number in range(1000)] == [f"bad.jsonl:{13 + n}" for n in range(1000)]
    assert content.passed == len(content) - 3
    assert lines.location(3) == "bad.jsonl:14"


def test_a_line_that_is_longer_than_memory_is_never_read_as_a_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Uses a sparse file, which needs no disk space."""
    monkeypatch.setattr("trp_scale.sharding.text.documents.CHUNK", 1 << 20)
    path = tmp_path / "sparse.jsonl"
    with path.open("wb") as stream:
        stream.write(b'{"text": "first"}\n')
        stream.seek(200_000_000)
        stream.write(b'\n{"text": "last"}\nnot json\n')
    found: list[Document | Skipped] = []
    assert peak_of(lambda: found.extend(read(path, max_line_bytes=2000))) < 8 << 20
    assert texts(found) == ["first", "last"]
    assert skipped(found) == [("long_line", "sparse.jsonl:2"), ("not_json", "sparse.jsonl:4")]


def test_rows_of_parquet_that_share_a_long_text_are_not_held_together(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="the extra `datasets` is not installed")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "shared.parquet"
    text = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * 120, pyarrow.int32()), ["x" * 1_000_000])
    parquet.write_table(pyarrow.table({"text": text}), path, compression="zstd")
    assert path.stat().st_size < 1000
    settings = ReadSettings(text_field="text", split="", one_document_per_file=True, max_line_bytes=8_000_000)
    (portion,) = plan_corpus([str(path)], "auto", "train", True, 0).portions
    assert peak_of(lambda: all(isinstance(each, Document) for each in read_portion(portion, settings))) < 60_000_000
