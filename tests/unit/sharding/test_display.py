"""Display of samples with classes and maps, and of coloured text rows; nothing is unpickled."""

from __future__ import annotations

import io
import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.fixtures import small_image_dataset
from tests.unit.data.images.multimodal import DESCRIBED, SECOND, nine_beside, rewrite_maps, samples
from tests.unit.data.images.source_images import stored
from tests.unit.sharding.test_verify import SIZE, replace_sample
from trp_scale.cli import main as cli
from trp_scale.data.index import read_index, read_json, write_json
from trp_scale.errors import DataError
from trp_scale.sharding.display import contact_sheet, is_image_shard, row_texts, stored_images


def test_rows_are_shown_as_text(text_dataset: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shard = text_dataset / "shards" / "text-000000.tar"
    key = read_index(shard).blocks[1].key
    shown = list(row_texts(shard, 3, key))
    assert [name for name, _ in shown] == [f"{key} row {row}" for row in range(3)]
    assert any("bold red" in str(span.style) for _, line in shown for span in line.spans)
    assert cli.main(["inspect", str(shard), "--rows", "2", "--block", key]) == 0
    printed = capsys.readouterr().out
    assert printed.count(key) == 2
    assert shown[0][1].plain.split()[:3] == printed.split(f"{key} row 0")[1].split("\n")[1].split()[:3]


def test_rows_that_are_not_there_are_refused(text_dataset: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["inspect", "nowhere/shards/a.tar"]) == 2
    assert "nowhere/shards/a.tar: no such file or directory" in capsys.readouterr().err
    assert cli.main(["inspect", str(text_dataset / "shards" / "text-000000.tar"), "--block", "text-000000-99999"]) == 2
    assert "no block" in capsys.readouterr().err


def test_a_contact_sheet_holds_every_image_and_its_maps(image_dataset: Path) -> None:
    shown = list(stored_images(image_dataset / "shards" / "image-000000.tar", 4))
    sheet = np.asarray(contact_sheet(shown, side=SIZE + 2)).astype(int)
    wanted = np.asarray(Image.open(io.BytesIO(shown[2].members["jpg"]))).astype(int)
    green = wanted[..., 1]  # one channel tells an image
    tiles = np.lib.stride_tricks.sliding_window_view(sheet[..., 1], green.shape)
    nearest = np.abs(tiles - green).mean(axis=(2, 3)).min()
    assert nearest < 1, "the third image is somewhere on the sheet"
    segmentation = np.asarray(Image.open(io.BytesIO(shown[0].members["semseg.png"])))
    corner = sheet[2 : SIZE + 2, 2 * (SIZE + 2) : 2 * (SIZE + 2) + SIZE]
    for number in np.unique(segmentation):
        assert len(np.unique(corner[segmentation == number], axis=0)) == 1
    assert len(np.unique(corner.reshape(-1, 3), axis=0)) == len(np.unique(segmentation))


def test_a_sharding_that_has_failed_or_was_stopped_is_said_to_be(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """First a failed run without readable images, then a stopped run with one of two shards."""
    (tmp_path / "in").mkdir()
    for number in range(2):
        (tmp_path / "in" / f"{number}.jpg").write_bytes(b"junk")
    failed, stopped = tmp_path / "failed", tmp_path / "stopped"
    sharding = ["shard-images", "--inputs", str(tmp_path / "in"), "--output", str(failed), "--processes", "1"]
    assert cli.main(sharding) == 2
    small_image_dataset(stopped, count=16, samples_per_shard=8)
    (stopped / "dataset.json").unlink()
    (stopped / "progress").mkdir()
    part = {"kind": "image", "settings": {}, "max_skipped": 0.01, "shards": 2}
    write_json(stopped / "progress" / "part-00000-of-00001.json", part)
    (stopped / "shards" / "image-000001.index.json").unlink()
    capsys.readouterr()
    for place, said in (
        (failed, "1 shards are finished, with 0 samples; skipped so far: 2 not_an_image"),
        (failed / "shards" / "image-000000.tar", "skipped so far: 2 not_an_image"),
        (stopped, "1 shards are finished, with 8 samples; skipped so far: nothing"),
        (stopped / "shards" / "image-000000.tar", "the sharding of kind 'image' is unfinished"),
    ):
        assert cli.main(["inspect", str(place)]) == 2
        printed = capsys.readouterr()
        assert said in printed.err and "noun" not in printed.out, "it was taken for text"


def test_an_unlisted_member_is_not_shown(image_dataset: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(image_dataset, tmp_path / "data"))
    shard = copy / "shards" / "image-000000.tar"
    members = stored(copy)[read_index(shard).blocks[0].key]
    replace_sample(shard, 0, {**members, "pickle": pickle.dumps(None)})
    with pytest.raises(DataError, match=r"\.pickle"):
        list(stored_images(shard, 1))


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return nine_beside(tmp_path / "data")


def test_which_shade_of_depth_is_near_is_told(data: Path) -> None:
    document = read_json(data / "dataset.json")
    for larger_is, shades in (("nearer", "black (far) to white (near)"), (None, "black (near) to white (far)")):
        said = {} if larger_is is None else {"larger_is": larger_is}
        depth = {**DESCRIBED["depth"], **said}
        write_json(data / "dataset.json", {**document, "modalities": {**document["modalities"], "depth": depth}})
        (shown,) = stored_images(data / "shards" / "image-000000.tar", 1)
        assert f" bytes, {shades}  semseg.png" in shown.describe()
        picture = contact_sheet([shown], side=64).crop((64, 0, 128, 64)).convert("L")  # depth: beside the image
        stored = np.asarray(Image.open(io.BytesIO(shown.members["depth.png"])))
        row, column = np.unravel_index(int(stored.argmax()), stored.shape)
        top = 64 - stored.shape[0]
        assert picture.getpixel((int(column), top + int(row))) == 255  # the largest is white, whatever it means


def test_they_are_shown_with_their_images(data: Path) -> None:
    expected = [bytes(one["semseg.png"]) for one in samples(9)[6:8]]  # type: ignore[arg-type]
    for directory in ("shards", SECOND):
        tar = data / directory / "image-000001.tar"
        assert is_image_shard(read_index(tar).blocks)
        shown = list(stored_images(tar, 2, "n00006"))
        assert [one.key for one in shown] == ["n00006", "n00007"]
        assert [one.members["semseg.png"] for one in shown] == expected
        assert set(shown[0].members) == {"jpg", "cls", "depth.png", "semseg.png"}
    rewrite_maps(data, order=[0])
    with pytest.raises(DataError, match=r"semseg-made/image-000001\.tar: .*image-000001\.tar"):
        list(stored_images(data / "shards" / "image-000001.tar", 2, "n00006"))
