"""Maps in tars of their own: joined by position, keys compared, verified and shown."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.unit.data.images.multimodal import DESCRIBED, multimodal_config, samples, write_beside
from tests.unit.data.images.source_images import class_map, png
from tests.unit.data.images.stored import write_tar
from trp_scale.data.images.dataset import ImageDataset, open_image_dataset
from trp_scale.data.index import index_path, read_index, read_json, write_json
from trp_scale.errors import DataError
from trp_scale.pretraining.base import open_sources
from trp_scale.sharding.images.display import contact_sheet, is_image_shard, stored_images
from trp_scale.sharding.verify import verify_dataset

SECOND = "semseg-made"


@pytest.fixture
def data(tmp_path: Path) -> Path:
    every = samples(9)
    return write_beside(tmp_path / "data", [every[:5], every[5:]])


def opened(data: Path) -> ImageDataset:
    return open_image_dataset(data, used=("depth", "semseg"))


def rewrite(data: Path, **changes: Any) -> None:
    """Write the second tar of maps anew, with other keys or contents: `changes` by place, "key=content"."""
    maps = [{"__key__": one["__key__"], "semseg.png": one["semseg.png"]} for one in samples(9)[5:]]
    order = changes.get("order", range(len(maps)))
    maps = [{**maps[place], **changes.get("members", {}).get(place, {})} for place in order]
    write_tar(data / SECOND / "image-000001.tar", maps)


def test_tables_have_the_same_images_and_the_members_that_are_read(data: Path) -> None:
    dataset = opened(data)
    assert dataset.samples.suffixes == ("jpg", "depth.png")
    (maps,) = dataset.aligned
    assert maps.suffixes == ("semseg.png",) and maps.key_digests == dataset.samples.key_digests
    assert maps.starts.tolist() == dataset.samples.starts.tolist() == [0, 5, 9]
    assert open_image_dataset(data).aligned == () and open_image_dataset(data, used=("depth",)).aligned == ()


def test_the_digest_sees_them_only_when_they_are_read(data: Path) -> None:
    both, neither = opened(data).digest(), open_image_dataset(data).digest()
    rewrite(data, members={2: {"semseg.png": png(class_map())}})
    assert opened(data).digest() != both and open_image_dataset(data).digest() == neither


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"order": [0, 2, 1, 3]}, r"place 1: a map of n00007 found, .*shards/image-000001\.tar has image n00006 there"),
        ({"order": [0, 1, 2]}, "place 3: no more maps found, .* has image n00008 there"),
        ({"members": {3: {"__key__": "n00009"}}}, "place 3: a map of n00009 found, .* has image n00008 there"),
        ({"members": {1: {"depth.png": b"x"}}}, r"block n00006 has member \.depth\.png; allowed are \.semseg\.png"),
    ],
)
def test_tars_that_are_not_aligned_are_refused(data: Path, changes: dict[str, Any], message: str) -> None:
    rewrite(data, **changes)
    with pytest.raises(DataError, match=message) as raised:
        opened(data)
    assert f"{SECOND}/image-000001.tar" in str(raised.value)
    assert "make the semseg maps again (trp-scale pseudo-label)" in str(raised.value)
    assert open_image_dataset(data).meta.rows == 9  # without them the images are as good as before


def test_missing_tars_members_and_bytes_are_refused(data: Path) -> None:
    tar = data / SECOND / "image-000001.tar"
    document = read_json(index_path(tar))
    del document["blocks"][2]["members"]["semseg.png"]
    write_json(index_path(tar), document)
    with pytest.raises(DataError, match=r"semseg maps .*image-000001\.tar: block n00007 has no member \.semseg\.png"):
        opened(data)
    rewrite(data)
    tar.write_bytes(tar.read_bytes()[:-512])
    with pytest.raises(DataError, match=r"semseg maps beside the images: .*image-000001\.tar: \d+ bytes found"):
        opened(data)
    tar.unlink()
    with pytest.raises(DataError, match=r"image-000001\.tar: cannot be read .*make the semseg maps again"):
        opened(data)
    index_path(tar).unlink()
    with pytest.raises(DataError, match=r"image-000001\.index\.json: not found; make the semseg maps again"):
        opened(data)


def test_a_map_beside_that_goes_bad_leaves_its_row_out(data: Path) -> None:
    sources = open_sources(multimodal_config(data), rank=0, world=1)
    (data / SECOND / "image-000001.tar").unlink()
    window = sources.train.next_window()
    names = {name for batch in window for name in batch.corrupt}
    assert names == {f"image-000001/n{number:05d}" for number in range(5, 9)}
    assert sum(float(batch["row_weights"].sum()) for batch in window) >= 5


def test_they_are_verified(data: Path) -> None:
    found = verify_dataset(data)
    tars = [*(data / "shards").glob("*.tar"), *(data / SECOND).glob("*.tar")]
    assert (found.rows, found.shards, found.bytes) == (9, 2, sum(tar.stat().st_size for tar in tars))
    for changes, message in (
        ({"order": [0, 2, 1, 3]}, "place 1: a map of n00007 found"),
        (
            {"members": {1: {"semseg.png": png(class_map(width=7, height=9) % 3)}}},
            "n00006, .*: 7 x 9 pixels, the image",
        ),
        ({"members": {1: {"semseg.png": b"none"}}}, "n00006, .*: not a PNG that can be decoded"),
        (
            {"members": {1: {"semseg.png": png(class_map() + 3)}}},
            r"n00006, .*: class \d+ found, 0 to 2 or 255 \(void\)",
        ),
        ({"members": {1: {"cls": b"0"}}}, r"n00006: member \.cls is refused"),
    ):
        rewrite(data, **changes)
        with pytest.raises(DataError, match=message) as raised:
            verify_dataset(data)
        assert SECOND in str(raised.value)
    rewrite(data)
    tar = data / SECOND / "image-000001.tar"
    content = bytearray(tar.read_bytes())
    content[read_index(tar).blocks[2].members["semseg.png"].offset + 60] ^= 1
    tar.write_bytes(content)
    with pytest.raises(DataError, match=rf"{SECOND}/image-000001\.tar: block n00007, member semseg\.png.*checksum"):
        verify_dataset(data)
    rewrite(data)
    (data / SECOND / "image-000007.tar").write_bytes(b"")
    with pytest.raises(DataError, match=r"image-000007\.tar: not listed"):
        verify_dataset(data)


def test_wrong_descriptions_are_refused_by_verifying_and_showing_too(data: Path) -> None:
    document = read_json(data / "dataset.json")
    modalities = {**document["modalities"], "semseg": {"classes": 5}}
    write_json(data / "dataset.json", {**document, "modalities": modalities})
    for check in (verify_dataset, lambda data: list(stored_images(data / "shards" / "image-000000.tar", 1))):
        with pytest.raises(DataError, match=r"dataset\.json: modalities\.semseg\.classes 5 found"):
            check(data)


def test_which_shade_of_depth_is_near_is_told(data: Path) -> None:
    document = read_json(data / "dataset.json")
    for larger_is, shades in (("nearer", "black (far) to white (near)"), (None, "black (near) to white (far)")):
        said = {} if larger_is is None else {"larger_is": larger_is}
        depth = {**DESCRIBED["depth"], **said}
        write_json(data / "dataset.json", {**document, "modalities": {**document["modalities"], "depth": depth}})
        (shown,) = stored_images(data / "shards" / "image-000000.tar", 1)
        assert f" bytes, {shades}  semseg.png" in shown.line()
        picture = contact_sheet([shown], side=64).crop((64, 0, 128, 64)).convert("L")  # depth: beside the image
        stored = np.asarray(Image.open(io.BytesIO(shown.members["depth.png"])))
        row, column = np.unravel_index(int(stored.argmax()), stored.shape)
        top = 64 - stored.shape[0]
        assert picture.getpixel((int(column), top + int(row))) == 255  # the largest is white, whatever it means


def test_a_direction_does_not_part_a_checkpoint_from_its_data(data: Path) -> None:
    before, document = opened(data).digest(), read_json(data / "dataset.json")
    depth = {**DESCRIBED["depth"], "larger_is": "nearer"}
    write_json(data / "dataset.json", {**document, "modalities": {**document["modalities"], "depth": depth}})
    assert opened(data).maps[0].larger_is == "nearer" and opened(data).digest() == before


def test_they_are_shown_with_their_images(data: Path) -> None:
    expected = [bytes(one["semseg.png"]) for one in samples(9)[6:8]]  # type: ignore[arg-type]
    for directory in ("shards", SECOND):
        tar = data / directory / "image-000001.tar"
        assert is_image_shard(read_index(tar).blocks)
        shown = list(stored_images(tar, 2, "n00006"))
        assert [one.key for one in shown] == ["n00006", "n00007"]
        assert [one.members["semseg.png"] for one in shown] == expected
        assert set(shown[0].members) == {"jpg", "cls", "depth.png", "semseg.png"}
    rewrite(data, order=[0])
    with pytest.raises(DataError, match=r"no \.semseg\.png of 'n00006', which is an image of shards/image-000001\.tar"):
        list(stored_images(data / "shards" / "image-000001.tar", 2, "n00006"))
