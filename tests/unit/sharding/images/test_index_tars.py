"""External tars are indexed in one pass and used in place."""

from __future__ import annotations

import io
import logging
import os
import shutil
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import webdataset
from PIL import Image

from tests.unit.data.images.foreign_tars import encoded, index, of_format, three_tars, write_foreign
from tests.unit.data.images.stored import config_for, photograph
from tests.unit.data.loaded import assert_same, steps
from trp_scale.cli.main import main
from trp_scale.data.images.dataset import decode_image, open_image_dataset
from trp_scale.data.index import read_index, read_json
from trp_scale.data.tar_reader import SampleReader
from trp_scale.data.tars import find_external_tars
from trp_scale.errors import DataError
from trp_scale.sharding.verify import verify_dataset


def refused(capsys: pytest.CaptureFixture[str], tars: Path | str, output: Path, *flags: str) -> str:
    """Return the error message for these tars."""
    assert main(["index", str(tars), "--output", str(output), "--processes", "1", "--no-progress", *flags]) == 2
    assert not (output / "dataset.json").exists()
    return capsys.readouterr().err.replace("\n", " ")


@pytest.fixture
def tars(tmp_path: Path) -> list[Path]:
    return three_tars(tmp_path / "far")


def test_images_and_classes_are_what_webdataset_reads(tars: list[Path], tmp_path: Path) -> None:
    before = [tar.read_bytes() for tar in tars]
    found = open_image_dataset(index(tmp_path / "far" / "train-{000000..000002}.tar", tmp_path / "data"))
    reader, number = SampleReader(found.samples, verify=True), 0
    for tar in tars:
        for sample in webdataset.WebDataset(str(tar), shardshuffle=False):
            image = next(sample[suffix] for suffix in ("jpg", "png", "webp") if suffix in sample)
            assert reader.members(number) == [image]
            assert int(found.samples.labels[number]) == int(sample["cls"])
            assert found.samples.key(number) == f"{tar.stem}/{sample['__key__']}"
            number += 1
    assert number == found.meta.rows == 18
    document = read_json(tmp_path / "data" / "dataset.json")
    assert document["shards"] == [tar.name for tar in tars] and document["suffixes"] == ["jpg", "cls"]
    assert document["counts"]["per_class"] == {"0": 6, "1": 6, "2": 6} and document["ignored"]["pyd"] == 18
    assert [tar.read_bytes() for tar in tars] == before
    assert not list((tmp_path / "data").rglob("*.tar")) and not (tmp_path / "data" / "progress").exists()


def test_rows_are_those_of_the_sharded_data_set(tars: list[Path], tmp_path: Path) -> None:
    """The order depends on tar names and positions, so the same tars in a sharded data set give the same rows."""
    ours = index(tmp_path / "far", tmp_path / "data", "--rows_per_block", "4")
    inside = Path(shutil.copytree(ours, tmp_path / "inside"))
    (inside / "shards" / "places.json").unlink()
    for tar in tars:
        shutil.copy(tar, inside / "shards")
    expected = steps(config_for(inside), world=1, count=3)
    for workers, world in ((0, 2), (1, 1)):
        assert_same(steps(config_for(ours, data={"workers": workers}), world=world, count=3), expected)


def test_images_of_every_mode_of_png_and_webp_become_rgb() -> None:
    grey = np.arange(0, 256, 16, dtype=np.uint8).reshape(4, 4)
    cases = {
        "L": Image.fromarray(grey),
        "P": photograph(4, 4).convert("P"),
        "I;16": Image.fromarray(grey.astype(np.uint16) * 257),
        "LA": Image.merge("LA", (Image.fromarray(grey), Image.new("L", (4, 4), 255))),
    }
    for mode, image in cases.items():
        pixels = decode_image(bytearray(encoded(image, "PNG")))
        assert pixels.shape == (3, 4, 4) and pixels.dtype == torch.uint8
        if mode != "P":
            assert (pixels == torch.from_numpy(grey)).all(), mode
    clear = Image.new("RGBA", (2, 2), (10, 20, 30, 0))
    for form in ("PNG", "WEBP"):
        assert (decode_image(bytearray(encoded(clear, form))) == 255).all()
    for form in ("PNG", "WEBP"):
        content = encoded(photograph(30, 30), form)
        with pytest.raises(DataError, match="PNG"):
            decode_image(bytearray(content[: len(content) // 2]))


def test_nothing_but_jpeg_png_and_webp_is_decoded() -> None:
    for form in ("GIF", "TIFF", "BMP", "EPS"):
        with pytest.raises(DataError, match="JPEG"):
            decode_image(bytearray(encoded(photograph(8, 8), form)))


@pytest.mark.parametrize(("label", "classes"), [("cls", 3), ("json:label", 4), ("none", 0), ("auto", 3)])
def test_classes_are_where_the_flag_says(label: str, classes: int, tars: list[Path], tmp_path: Path) -> None:
    found = open_image_dataset(index(tmp_path / "far", tmp_path / "data", "--label", label))
    expected = [number % classes if classes else -1 for number in range(18)]
    assert found.samples.labels.tolist() == expected
    assert verify_dataset(tmp_path / "data").rows == 18


def test_a_folder_is_indexed_in_place_and_again(tars: list[Path], tmp_path: Path) -> None:
    folder = index(tmp_path / "far")
    digest = open_image_dataset(folder).digest()
    made = {path.name: path.stat().st_mtime_ns for path in (folder / "shards").glob("*.json")}
    index(folder)
    assert open_image_dataset(folder).digest() == digest
    after = {path.name: path.stat().st_mtime_ns for path in (folder / "shards").glob("*.index.json")}
    assert after == {name: when for name, when in made.items() if name in after}, "tars were not read again"


def test_what_was_stopped_goes_on(tars: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from trp_scale.sharding.images import index_tars

    read: list[str] = []
    real = index_tars.read_tar

    def stops(where: str, *arguments: Any, **named: Any) -> Any:
        read.append(Path(where).name)
        if len(read) == 2:
            raise KeyboardInterrupt
        return real(where, *arguments, **named)

    monkeypatch.setattr(index_tars, "read_tar", stops)
    assert main(["index", str(tmp_path / "far"), "--output", str(tmp_path / "data"), "--processes", "1"]) == 130
    assert not (tmp_path / "data" / "dataset.json").exists()
    index(tmp_path / "far", tmp_path / "data")
    assert read == ["train-000000.tar", "train-000001.tar", "train-000001.tar", "train-000002.tar"]


def test_parts_in_any_order_are_the_same_data_set(
    tars: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pattern = f"{tmp_path}/far/train-{{000000..000002}}.tar"
    one = index(pattern, tmp_path / "one")
    parts = index(pattern, tmp_path / "parts", "--shard_index", "1", "--num_shards", "2")
    assert refusal(capsys, "merge", str(parts)) == (
        f"error: {parts}: 1 of 2 parts are missing; run the command of each, then merge again:"
        "   --shard_index 0 --num_shards 2 (not begun) "
    )
    other = ("--output", str(parts), "--num_shards", "2", "--label", "none")
    assert "label 'auto' there, 'none' asked for" in refusal(capsys, "index", pattern, *other)
    index(pattern, parts, "--shard_index", "0", "--num_shards", "2")
    (parts / "shards" / "train-000002.index.json").unlink()
    assert "--shard_index 0 --num_shards 2 (unfinished: 1 shards are missing, train-000002.tar)" in refusal(
        capsys, "merge", str(parts)
    )
    index(pattern, parts, "--shard_index", "0", "--num_shards", "2")
    assert main(["merge", str(parts)]) == main(["merge", str(parts)]) == 0
    assert {path.relative_to(parts): path.read_bytes() for path in parts.rglob("*") if path.is_file()} == {
        path.relative_to(one): path.read_bytes() for path in one.rglob("*") if path.is_file()
    }


def refusal(capsys: pytest.CaptureFixture[str], *command: str) -> str:
    assert main(list(command)) == 2
    return capsys.readouterr().err.replace("\n", " ")


def test_a_text_file_lists_tars_and_names_are_told_apart(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        three_tars(tmp_path / folder)
    (tmp_path / "list.txt").write_text(f"# ours\na/train-{{000000..000001}}.tar\n\n{tmp_path}/b/train-000001.tar\n")
    found = index(tmp_path / "list.txt", tmp_path / "data")
    names = ["train-000000.tar", "a-train-000001.tar", "b-train-000001.tar"]
    assert read_json(found / "dataset.json")["shards"] == names
    places = find_external_tars(found / "shards")
    assert places is not None
    assert [places.where(Path(name)) for name in names] == [
        f"{tmp_path}/a/train-000000.tar",
        f"{tmp_path}/a/train-000001.tar",
        f"{tmp_path}/b/train-000001.tar",
    ]
    assert verify_dataset(found).rows == 18


def test_what_is_left_out_is_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    samples: list[dict[str, Any]] = [{"__key__": f"{n:03d}", "jpg": of_format(n, "jpg"), "cls": b"1"} for n in range(9)]
    samples += [
        {"__key__": "only-text", "txt": b"no image", "cls": b"2"},
        {"__key__": "no-class", "jpg": of_format(1, "jpg")},
        {"__key__": "empty", "jpg": b"", "cls": b"0"},
        {"__key__": "other", "jpg": encoded(photograph(9, 9), "GIF"), "cls": b"0"},
        {"__key__": "nothing", "jpg": b"no image at all, but long enough to look", "cls": b"0"},
        {"__key__": "large", "png": encoded(Image.new("L", (200, 300)), "PNG"), "cls": b"0"},
    ]
    write_foreign(tmp_path / "far" / "a.tar", samples)
    with caplog.at_level(logging.WARNING):
        index(tmp_path / "far", tmp_path / "data", "--max_skipped", "0.5", "--max_pixels", "50000")
    document = read_json(tmp_path / "data" / "dataset.json")
    assert document["rows"] == 9
    reasons = ("no_image", "no_class", "empty", "other_format", "not_an_image", "too_many_pixels")
    assert document["skipped"] == dict.fromkeys(reasons, 1)
    assert ["no_image", f"{tmp_path}/far/a.tar: only-text"] in document["skipped_places"]
    assert ["too_many_pixels", f"{tmp_path}/far/a.tar: large (200 x 300)"] in document["skipped_places"]
    assert "6 of 15" in caplog.text
    assert verify_dataset(tmp_path / "data").rows == 9


def add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    entry = tarfile.TarInfo(name)
    entry.size = len(content)
    if content is LINK:
        entry.type, entry.linkname = tarfile.SYMTYPE, "/etc/passwd"
    tar.addfile(entry, io.BytesIO(content))


JPEG = of_format(0, "jpg")
LINK = b""


@pytest.mark.parametrize(
    ("members", "flags", "named"),
    [
        ([("a.jpg", JPEG), ("b.jpg", JPEG), ("a.jpg", JPEG)], (), "key 'a'"),
        ([("a.jpg", JPEG), ("a.png", JPEG)], (), "--image jpg"),
        ([("a.jpg", LINK)], (), "not_a_file"),
        ([("a.jpg", JPEG), ("a.cls", b"cat")], (), "a.cls: class 'cat'"),
        ([("a.jpg", JPEG), ("a.cls", b"-1")], (), "a.cls: class '-1'"),
        ([("a.jpg", JPEG), ("a.json", b'{"text": 1}')], ("--label", "json:label"), "a.json: no field 'label'"),
        ([("a.jpg", JPEG), ("a.json", b'{"label": true}')], ("--label", "json:label"), "a.json: class True"),
        ([("a.jpg", JPEG), ("a.json", b"[")], ("--label", "json:label"), "a.json: not JSON"),
        ([("readme", b"x")], (), "some.tar"),
        ([("a.jpg", JPEG), ("a.cls", b"7")], ("--class_names", "NAMES"), "class 7"),
        ([("a.jpg", JPEG)], ("--label", "json"), "--label json"),
        ([("a.jpg", JPEG)], ("--image", "gif"), "--image gif"),
    ],
)
def test_tars_that_cannot_be_used_are_refused(
    members: list[tuple[str, bytes]],
    flags: tuple[str, ...],
    named: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "names.txt").write_text("ant\nbee\n")
    flags = tuple(flag.replace("NAMES", str(tmp_path / "names.txt")) for flag in flags)
    with tarfile.open(tmp_path / "some.tar", "w") as tar:
        for name, content in members:
            add(tar, name, content)
    assert named in refused(capsys, tmp_path / "some.tar", tmp_path / "data", *flags)


@pytest.mark.parametrize("length", [100, 3000])
def test_a_tar_that_is_cut_short_is_refused(
    length: int, tars: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tars[1].write_bytes(tars[1].read_bytes()[:length])
    found = refused(capsys, tmp_path / "far", tmp_path / "data")
    assert f"{tars[1]}" in found and ("read to its end" in found or "the tar ends after" in found), found


@pytest.mark.parametrize(
    ("pattern", "named"),
    [
        ("far/train-{000000..000009}.tar", "far/train-000003.tar"),
        ("nowhere-*.tar", "nowhere-*.tar"),
        ("empty", "empty: no .tar"),
        ("list.txt", "list.txt, line 2: 'pipe:cat x.tar'"),
        ("x.tar.gz", "x.tar.gz"),
        ("pipe:cat x.tar", "pipe:cat x.tar"),
    ],
)
def test_patterns_of_nothing(
    pattern: str,
    named: str,
    tars: list[Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "list.txt").write_text("far/train-000000.tar\npipe:cat x.tar\n")
    (tmp_path / "x.tar.gz").write_bytes(b"\x1f\x8b")
    monkeypatch.chdir(tmp_path)
    assert named in refused(capsys, pattern, tmp_path / "data")


def test_a_tar_that_has_changed_is_refused_until_it_is_indexed_again(tars: list[Path], tmp_path: Path) -> None:
    data = index(tmp_path / "far", tmp_path / "data")
    changed = tars[1].read_bytes()
    tars[1].write_bytes(changed.replace(b"a sight", b"a SIGHT"))
    os.utime(tars[1], ns=(0, tars[1].stat().st_mtime_ns + 1))
    for act in (lambda: open_image_dataset(data), lambda: verify_dataset(data)):
        with pytest.raises(DataError, match=r"train-000001\.tar.*trp-scale index .*data"):
            act()
    index(data)
    assert open_image_dataset(data).meta.rows == 18
    with tars[1].open("ab") as stream:
        stream.write(bytes(512))
    with pytest.raises(DataError, match=r"train-000001\.tar: \d+ bytes"):
        open_image_dataset(data)
    tars[1].unlink()
    with pytest.raises(DataError, match=r"far/train-000001\.tar"):
        open_image_dataset(data)


def test_a_change_while_a_run_reads_is_met_when_the_tar_is_opened(tars: list[Path], tmp_path: Path) -> None:
    table = open_image_dataset(index(tmp_path / "far", tmp_path / "data")).samples
    os.utime(tars[2], ns=(0, 0))
    assert SampleReader(table, verify=True).members(0)
    with pytest.raises(DataError, match=r"train-000002\.tar"):
        SampleReader(table, verify=True).members(17)


def test_verify_reads_every_byte_of_the_images(tars: list[Path], tmp_path: Path) -> None:
    data = index(tmp_path / "far", tmp_path / "data")
    found = verify_dataset(data)
    assert (found.rows, found.shards, found.bytes) == (18, 3, sum(tar.stat().st_size for tar in tars))
    member = read_index(data / "shards" / tars[0].name).blocks[2].members["jpg"]
    status, content = tars[0].stat(), bytearray(tars[0].read_bytes())
    content[member.offset + member.length // 2] ^= 1
    tars[0].write_bytes(content)
    os.utime(tars[0], ns=(status.st_atime_ns, status.st_mtime_ns))  # as a failing disk does it
    with pytest.raises(DataError, match=r"0002"):
        verify_dataset(data)


def test_inspect_shows_images(tars: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "names.txt").write_text("ant\nbee\ncat\n")
    data = index(tmp_path / "far", tmp_path / "data", "--class_names", str(tmp_path / "names.txt"))
    assert main(["inspect", str(data), "--rows", "3", "--output", str(tmp_path / "sheet.png")]) == 0
    found = capsys.readouterr().out
    assert "class 1 (bee)" in found and "48 x 41 RGB" in found
    assert Image.open(tmp_path / "sheet.png").size[0] > 100


def test_a_sharded_data_set_is_no_place_for_another(tars: list[Path], tmp_path: Path, image_dataset: Path) -> None:
    copy = Path(shutil.copytree(image_dataset, tmp_path / "copy"))
    assert main(["index", str(tmp_path / "far"), "--output", str(copy)]) == 2
    assert main(["index", str(copy), "--label", "cls"]) == 2
    assert main(["index", str(copy)]) == 0
    assert open_image_dataset(copy).digest() == open_image_dataset(image_dataset).digest()


def test_flags_of_an_indexed_data_set_stay(
    tars: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = index(tmp_path / "far", tmp_path / "data", "--label", "none", "--rows_per_block", "5")
    index(data)
    document = read_json(data / "dataset.json")
    assert document["suffixes"] == ["jpg"] and document["rows_per_block"] == 5
    assert main(["index", str(data), "--rows_per_block", "7"]) == 2
    assert "--rows_per_block 7: applies to external tars" in capsys.readouterr().err
