"""Verification reports every damaged byte and reads only listed members."""

from __future__ import annotations

import io
import pickle
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.fixtures import small_image_dataset, small_text_dataset
from tests.grids import always
from tests.unit.data.images.multimodal import nine_beside
from tests.unit.data.images.source_images import class_map, depth_map, encoded, jpeg, pixels, png, stored
from tests.unit.data.stored import Trap, npy, write_shard
from trp_scale.cli import main as cli
from trp_scale.data.images.dataset import open_image_dataset
from trp_scale.data.index import read_index, read_json, write_json
from trp_scale.errors import DataError
from trp_scale.sharding.display import read_block, stored_images
from trp_scale.sharding.verify import verify_dataset

SIZE = 32


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Text."""
    return small_text_dataset(tmp_path_factory.mktemp("verify") / "data", characters=30_000, shard_bytes=15_000)


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_image_dataset(tmp_path_factory.mktemp("verify") / "data", count=40, samples_per_shard=20)


@pytest.fixture
def image_copy(images: Path, tmp_path: Path) -> Path:
    return shutil.copytree(images, tmp_path / "image_copy")


def test_a_whole_data_set_is_whole(whole: Path, images: Path) -> None:
    found = verify_dataset(whole)
    dataset = read_json(whole / "dataset.json")
    assert (found.rows, found.blocks, found.shards) == (dataset["rows"], dataset["blocks"], len(dataset["shards"]))
    found = verify_dataset(images)
    assert (found.rows, found.shards) == (40, 2)
    assert found.blocks == len(open_image_dataset(images).blocks.rows) == 6
    assert found.bytes == sum(path.stat().st_size for path in (images / "shards").glob("*.tar"))


@pytest.mark.parametrize("kind", ["text", "image"])
def test_every_flipped_byte_is_found(copy: Path, image_copy: Path, kind: str) -> None:
    generator = np.random.default_rng(0)
    data = copy if kind == "text" else image_copy
    shard = data / "shards" / read_json(data / "dataset.json")["shards"][1]
    original = shard.read_bytes()
    header = 512 * (original[512:].index(f"{read_index(shard).blocks[0].key}.".encode()) // 512 + 1)
    for place in [0, len(original) - 1, *range(header + 148, header + 156), *generator.integers(0, len(original), 40)]:
        damaged = bytearray(original)
        damaged[place] ^= 0x01
        shard.write_bytes(damaged)
        with pytest.raises(DataError) as raised:
            verify_dataset(data)
        named = re.search(r"bytes (\d+)-(\d+)", str(raised.value))
        assert shard.name in str(raised.value)
        assert named and int(named[1]) <= place <= int(named[2])


def replace_sample(shard: Path, number: int, members: dict[str, bytes]) -> None:
    """Rewrite a shard with other members in one sample and a matching index."""
    blocks = read_index(shard).blocks
    contents = {**stored(shard.parent, shard.name), blocks[number].key: members}
    labels = {block.key: block.label for block in blocks if block.label is not None}
    write_shard(shard, contents, {block.key: block.rows for block in blocks}, labels)


def test_the_command_names_the_member_and_exits_with_1(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shard = copy / "shards" / read_json(copy / "dataset.json")["shards"][0]
    block = read_index(shard).blocks[1]
    member = block.members["tags.npy"]
    content = bytearray(shard.read_bytes())
    content[member.offset + 200] ^= 0xFF
    shard.write_bytes(content)
    assert cli.main(["verify", str(copy)]) == 1
    place = f"member tags.npy, bytes {member.offset}-{member.offset + member.length - 1}"
    assert f"{shard}: block {block.key}, {place}" in capsys.readouterr().err


def test_a_truncated_shard_and_a_missing_index_are_named(copy: Path) -> None:
    first, second, *_ = (copy / "shards" / name for name in read_json(copy / "dataset.json")["shards"])
    second.write_bytes(second.read_bytes()[:-1024])
    with pytest.raises(DataError, match=second.name):
        verify_dataset(copy)
    first.with_suffix(".index.json").unlink()
    with pytest.raises(DataError, match=r"text-000000\.index\.json"):
        verify_dataset(copy)


@pytest.mark.parametrize("suffix", always(["tags.pyd", "pickle", "tokens.npy.gz"], "pickle"))
def test_an_unlisted_member_is_refused_and_not_unpickled(
    copy: Path, tmp_path: Path, suffix: str, capsys: pytest.CaptureFixture[str]
) -> None:
    shard = copy / "shards" / "text-000000.tar"
    block = read_index(shard).blocks[0]
    replace_sample(shard, 0, {**stored(copy)[block.key], suffix: pickle.dumps(Trap(tmp_path / "sprung"))})
    for read in (lambda: verify_dataset(copy), lambda: read_block(shard, read_index(shard).blocks[0])):
        with pytest.raises(DataError, match=rf"\.{suffix}"):
            read()
    assert cli.main(["inspect", str(shard)]) == 2
    assert f".{suffix}" in capsys.readouterr().err
    assert not (tmp_path / "sprung").exists()


def test_an_array_of_objects_is_refused_and_not_unpickled(copy: Path, tmp_path: Path) -> None:
    stream = io.BytesIO()
    np.save(stream, np.array([Trap(tmp_path / "sprung")], dtype=object), allow_pickle=True)
    shard = copy / "shards" / "text-000000.tar"
    block = read_index(shard).blocks[0]
    replace_sample(shard, 0, {**stored(copy)[block.key], "tags.npy": stream.getvalue()})
    for read in (lambda: verify_dataset(copy), lambda: read_block(shard, read_index(shard).blocks[0])):
        with pytest.raises(DataError, match=rf"{block.key}.*tags\.npy"):
            read()
    assert not (tmp_path / "sprung").exists()


def test_arrays_that_break_the_promise_of_dataset_json_are_named(copy: Path) -> None:
    shard = copy / "shards" / "text-000000.tar"
    block = read_index(shard).blocks[0]
    good = stored(copy)[block.key]
    arrays = read_block(shard, block)
    tokens, tags, ends = (arrays[f"{name}.npy"] for name in ("tokens", "tags", "sentences"))
    too_large = tokens.copy()
    too_large[2, 0] = 1000
    no_group = tags.copy()
    no_group[1, 0] = 13
    descending = ends.copy()
    descending[0, -1] = 0
    for suffix, array, message in (
        ("tokens.npy", tokens.astype(np.int64), "int64"),
        ("tokens.npy", tokens[:, :-1], "expected"),
        ("tokens.npy", too_large, "row 2: .*1000"),
        ("tags.npy", no_group, "row 1"),
        ("sentences.npy", descending, "row 0"),
    ):
        replace_sample(shard, 0, {**good, suffix: npy(array)})
        with pytest.raises(DataError, match=message):
            verify_dataset(copy)


@pytest.mark.parametrize(
    ("suffix", "content", "message"),
    [
        ("jpg", jpeg()[:300], "not a JPEG"),
        ("jpg", png(pixels(0, SIZE, SIZE)), "not a JPEG"),
        ("jpg", encoded(Image.new("CMYK", (SIZE, SIZE)), "JPEG"), "CMYK"),
        ("jpg", jpeg(), "40 x 28"),
        ("depth.png", png(class_map(0, SIZE, SIZE)), "8 bits"),
        ("depth.png", png(depth_map(0, SIZE, SIZE - 1)), "32 x 31 pixels"),
        ("semseg.png", png(depth_map(0, SIZE, SIZE)), "16 bits"),
        ("semseg.png", b"", "not a PNG"),
        ("cls", b"8", "b'8'"),
        ("cls", b"-1", "b'-1'"),
        ("cls", b"", "b''"),
        ("cls", b"07", "b'07'"),
        ("cls", None, r"\.cls"),
        ("pyd", pickle.dumps(None), r"\.pyd"),
    ],
)
def test_members_that_break_the_promise_of_dataset_json_are_named(
    image_copy: Path, suffix: str, content: bytes | None, message: str
) -> None:
    shard = image_copy / "shards" / "image-000000.tar"
    key = read_index(shard).blocks[3].key
    members = {**stored(image_copy)[key], suffix: content}
    replace_sample(shard, 3, {name: data for name, data in members.items() if data is not None})
    with pytest.raises(DataError, match=message) as raised:
        verify_dataset(image_copy)
    assert key in str(raised.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rows": 41}, "41 rows"),
        ({"rows_per_block": {}}, "rows_per_block"),
        ({"shards": ["image-000000.tar"]}, "image-000001.tar"),
        ({"suffixes": ["jpg", "cls", "depth.png", "semseg.png", "pkl"]}, "pkl"),
        ({"kind": "sound"}, "'sound'"),
    ],
)
def test_counts_suffixes_and_kinds_are_noticed(image_copy: Path, changes: dict[str, object], message: str) -> None:
    write_json(image_copy / "dataset.json", {**read_json(image_copy / "dataset.json"), **changes})
    with pytest.raises(DataError, match=message):
        verify_dataset(image_copy)


def test_wrong_descriptions_are_refused_by_verifying_and_showing_too(tmp_path: Path) -> None:
    data = nine_beside(tmp_path / "data")
    document = read_json(data / "dataset.json")
    modalities = {**document["modalities"], "semseg": {"classes": 5}}
    write_json(data / "dataset.json", {**document, "modalities": modalities})
    for check in (verify_dataset, lambda data: list(stored_images(data / "shards" / "image-000000.tar", 1))):
        with pytest.raises(DataError, match=r"dataset\.json.*semseg.*classes.* 5"):
            check(data)
