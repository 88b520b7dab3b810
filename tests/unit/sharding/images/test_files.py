"""Inputs that do not enter the data set are counted and named, for text and images."""

from __future__ import annotations

import io
import json
import logging
import os
import tarfile
from pathlib import Path

import pytest

from tests.unit.data.images.foreign_tars import encoded, of_format
from tests.unit.data.images.stored import photograph
from tests.unit.sharding.text.test_documents import read, skipped, texts
from trp_scale.cli.main import main
from trp_scale.data.index import read_json
from trp_scale.data.raw_files import all_files
from trp_scale.sharding.images.files import list_folder
from trp_scale.sharding.images.tars import find_tars

NOT_UTF8 = os.fsdecode(b"caf\xe9")


def add(tar: tarfile.TarFile, name: str, content: bytes = b"", kind: bytes = tarfile.REGTYPE, link: str = "") -> None:
    entry = tarfile.TarInfo(name)
    entry.size, entry.type, entry.linkname = len(content), kind, link
    tar.addfile(entry, io.BytesIO(content))


def tar_of(path: Path, **images: int) -> Path:
    with tarfile.open(path, "w") as tar:
        for name, number in images.items():
            add(tar, f"{name}.jpg", of_format(number, "jpg"))
    return path


def index(tar: Path, output: Path, *flags: str) -> tuple[int, dict[str, object]]:
    """Return the exit status of `trp-scale index`, and dataset.json."""
    status = main(["index", str(tar), "--output", str(output), "--processes", "1", "--no-progress", *flags])
    return status, read_json(output / "dataset.json") if status == 0 else {}


def shard_images(inputs: Path | str, output: Path) -> int:
    return main(["shard-images", "--inputs", str(inputs), "--output", str(output), "--processes", "1", "--no-progress"])


def test_tars_that_were_joined_are_read_to_their_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    both = tmp_path / "both.tar"
    both.write_bytes(tar_of(tmp_path / "1", a=0, b=1).read_bytes() + tar_of(tmp_path / "2", c=2).read_bytes())
    status, document = index(both, tmp_path / "index")
    assert status == 0 and document["rows"] == 3
    assert shard_images(both, tmp_path / "shards") == 0
    assert read_json(tmp_path / "shards" / "dataset.json")["rows"] == 3
    assert main(["verify", str(tmp_path / "index")]) == 0
    both.write_bytes(both.read_bytes() + b"no header")
    assert index(both, tmp_path / "other")[0] == 2
    assert "both.tar: not a tar" in capsys.readouterr().err


def test_links_in_a_tar_are_followed_and_others_counted(tmp_path: Path) -> None:
    path = tmp_path / "links.tar"
    with tarfile.open(path, "w") as tar:
        add(tar, "x/", kind=tarfile.DIRTYPE)
        add(tar, "x/hard.jpg", kind=tarfile.LNKTYPE, link="x/file.jpg")
        add(tar, "x/first.jpg", kind=tarfile.SYMTYPE, link="second.jpg")
        add(tar, "x/second.jpg", kind=tarfile.SYMTYPE, link="../x/file.jpg")
        add(tar, "x/file.jpg", of_format(0, "jpg"))
        add(tar, "x/away.jpg", kind=tarfile.SYMTYPE, link="/etc/hostname")
        add(tar, "x/round.jpg", kind=tarfile.SYMTYPE, link="round.jpg")
        add(tar, "x/pipe.jpg", kind=tarfile.FIFOTYPE)
        add(tar, "x/readme", b"x")
    status, document = index(path, tmp_path / "index", "--max_skipped", "1")
    assert status == 0 and document["rows"] == 4
    assert document["skipped"] == {"not_a_file": 3} and document["ignored"] == {"": 1}
    kinds = sorted(place.rpartition("x/")[2] for _, place in document["skipped_places"])  # type: ignore[attr-defined]
    assert kinds == ["away (link)", "pipe (special file)", "round (link)"]
    words = ["shard-images", "--inputs", str(path), "--output", str(tmp_path / "shards"), "--max_skipped", "1"]
    assert main([*words, "--processes", "1", "--no-progress"]) == 0
    sharded = read_json(tmp_path / "shards" / "dataset.json")
    assert sharded["rows"] == 4 and sharded["skipped"] == {"not_a_file": 3}


def test_hidden_members_and_jpegs_of_phones(tmp_path: Path) -> None:
    pictures = [photograph(40, 48, number) for number in range(2)]
    phone = io.BytesIO()
    pictures[0].save(phone, "MPO", save_all=True, append_images=pictures[1:])
    path = tmp_path / "phone.tar"
    with tarfile.open(path, "w") as tar:
        for name in (".DS_Store", "._0.jpg", ".git/1.jpg"):
            add(tar, name, b"x")
        add(tar, "./0.jpg", phone.getvalue())
        add(tar, "./1.jpg", encoded(pictures[1], "JPEG"))
    status, document = index(path, tmp_path / "index")
    assert status == 0 and document["rows"] == 2 and document["ignored"] == {"": 3} and not document["skipped"]
    assert shard_images(path, tmp_path / "shards") == 0
    assert read_json(tmp_path / "shards" / "dataset.json")["rows"] == 2


def test_a_tar_whose_path_looks_like_a_pattern(tmp_path: Path) -> None:
    folder = tmp_path / "a[1]{0..1}"
    folder.mkdir()
    tar = tar_of(folder / "b[2].tar", a=0)
    tar_of(folder / "._b[2].tar", a=0)
    assert find_tars(str(tar)) == find_tars(str(folder)) == [str(tar)]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Two texts, one in a linked folder; also hidden copies and a link to a parent folder."""
    tree = tmp_path / "in"
    for folder in ("real", "real/.git", ".ipynb_checkpoints"):
        (tree / folder).mkdir(parents=True)
        (tree / folder / "a.txt").write_text("One.")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "B.JSONL").write_text(json.dumps({"text": "Two."}))
    (tree / "linked").symlink_to("../other")
    (tree / "real" / "up").symlink_to("..")
    (tree / "real" / "itself").symlink_to("itself")
    return tree


def test_folders_of_text(tree: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert texts(read(tree)) == ["Two.", "One."]
    assert "left out: 2 hidden, 1 link to a folder around it, 1 itself" in caplog.text
    assert texts(read(tree / "*")) == ["Two.", "One."], "folders that a pattern finds are read like those given"
    assert [path.name for path in all_files(tree)] == ["B.JSONL", "a.txt", "itself"]


def test_folders_of_images(tree: Path, caplog: pytest.LogCaptureFixture) -> None:
    for folder in ("real", "linked", "real/.git"):
        (tree / folder / "0.jpg").write_bytes(of_format(0, "jpg"))
    with caplog.at_level(logging.WARNING):
        listing = list_folder(tree, {})
    assert sorted(sample.key for sample in listing.samples) == ["linked/0", "real/0"]
    assert "left out: 2 hidden, 1 link to a folder around it, 1 .JSONL, 1 .txt, 1 without a suffix" in caplog.text


def test_only_regular_files_are_read(tmp_path: Path) -> None:
    """A pipe would block, and a device has no end."""
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("One.")
    os.mkfifo(tmp_path / "texts" / "b.txt")
    (tmp_path / "texts" / "c.txt").symlink_to("/dev/zero")
    os.mkfifo(tmp_path / "d.tar")
    found = read(tmp_path / "texts")
    assert texts(found) == ["One."] and skipped(found) == [("unreadable", "b.txt"), ("unreadable", "c.txt")]
    assert index(tmp_path / "d.tar", tmp_path / "index")[0] == 2
    (tmp_path / "images").mkdir()
    os.mkfifo(tmp_path / "images" / "a.jpg")
    assert shard_images(tmp_path / "images", tmp_path / "shards") == 2


def test_names_that_are_not_utf8(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """File names are stored escaped; paths in flags are refused before any work."""
    (tmp_path / "in" / NOT_UTF8).mkdir(parents=True)
    (tmp_path / "in" / NOT_UTF8 / f"{NOT_UTF8}.jpg").write_bytes(of_format(0, "jpg"))
    (tmp_path / "in" / NOT_UTF8 / "bad.jpg").write_bytes(b"x")
    with tarfile.open(tmp_path / "in.tar", "w") as tar:
        add(tar, f"{NOT_UTF8}.jpg", of_format(0, "jpg"))
        add(tar, f"0.{NOT_UTF8}", b"x")
    words = ["--processes", "1", "--no-progress", "--max_skipped", "1"]
    for inputs, output in (("in", "folder"), ("in.tar", "tar")):
        given = ["--inputs", str(tmp_path / inputs), "--output", str(tmp_path / output)]
        assert main(["shard-images", *given, *words]) == 0
    document = read_json(tmp_path / "folder" / "dataset.json")
    assert document["classes"] == [r"caf\udce9"] and r"caf\udce9/bad.jpg" in str(document["skipped_places"][0]["place"])
    status, document = index(tmp_path / "in.tar", tmp_path / "index", "--max_skipped", "1")
    assert status == 0 and document["ignored"] == {r"caf\udce9": 1}
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / f"{NOT_UTF8}.jsonl").write_text('{"text": 3}')
    assert [item.reason for item in read(tmp_path / "text")] == ["no_text"]  # type: ignore[union-attr]
    capsys.readouterr()
    assert main(["shard-text", "--inputs", "a.txt", "--output", NOT_UTF8]) == 2
    assert capsys.readouterr().err == "error: caf\\udce9: a name that is not UTF-8 cannot be stored; rename it\n"
    monkeypatch.chdir(tmp_path / "in" / NOT_UTF8)
    assert main(["report"]) == 2
