"""Every damaged byte is found and named; nothing but the listed members is read."""

from __future__ import annotations

import io
import pickle
import re
from pathlib import Path

import numpy as np
import pytest

from tests.fixtures import small_text_dataset
from tests.grids import always
from tests.runs import run_command
from tests.unit.sharding.images.test_stored import replace_sample
from trp_scale.cli import main as cli
from trp_scale.data.index import Block, read_index, read_json, write_json
from trp_scale.errors import DataError
from trp_scale.sharding.text.stored import read_block, row_texts
from trp_scale.sharding.verify import verify_dataset


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_text_dataset(tmp_path_factory.mktemp("verify") / "data", characters=30_000, shard_bytes=15_000)


def test_a_whole_data_set_is_whole(whole: Path) -> None:
    found = verify_dataset(whole)
    dataset = read_json(whole / "dataset.json")
    assert (found.rows, found.blocks, found.shards) == (dataset["rows"], dataset["blocks"], len(dataset["shards"]))


def test_every_flipped_byte_is_found(copy: Path) -> None:
    generator = np.random.default_rng(0)
    shard = copy / "shards" / read_json(copy / "dataset.json")["shards"][1]
    original = shard.read_bytes()
    for place in [0, len(original) - 1, *generator.integers(0, len(original), 60).tolist()]:
        damaged = bytearray(original)
        damaged[place] ^= 0x01
        shard.write_bytes(damaged)
        with pytest.raises(DataError) as raised:
            verify_dataset(copy)
        named = re.search(r"bytes (\d+)-(\d+)", str(raised.value))
        assert shard.name in str(raised.value)
        assert named and int(named[1]) <= place <= int(named[2])


def test_the_script_names_the_member_and_exits_with_1(copy: Path) -> None:
    shard = copy / "shards" / read_json(copy / "dataset.json")["shards"][0]
    block = read_index(shard).blocks[1]
    member = block.members["tags.npy"]
    content = bytearray(shard.read_bytes())
    content[member.offset + 200] ^= 0xFF
    shard.write_bytes(content)
    result = run_command("verify", str(copy))
    assert result.returncode == 1
    assert (
        f"{shard}: block {block.key}, member tags.npy, bytes {member.offset}-{member.offset + member.length - 1}"
        in result.stderr
    )


def test_a_truncated_shard_and_a_missing_index_are_named(copy: Path) -> None:
    first, second, *_ = (copy / "shards" / name for name in read_json(copy / "dataset.json")["shards"])
    second.write_bytes(second.read_bytes()[:-1024])
    with pytest.raises(DataError, match=second.name):
        verify_dataset(copy)
    first.with_suffix(".index.json").unlink()
    with pytest.raises(DataError, match=r"text-000000\.index\.json"):
        verify_dataset(copy)


def members_of(shard: Path, block: Block) -> dict[str, bytes]:
    return {suffix: shard.read_bytes()[m.offset : m.offset + m.length] for suffix, m in block.members.items()}


class Trap:
    """Makes a folder when it is unpickled."""

    def __init__(self, place: Path) -> None:
        self.place = place

    def __reduce__(self) -> tuple[object, tuple[Path]]:
        return Path.mkdir, (self.place,)


@pytest.mark.parametrize("suffix", always(["tags.pyd", "pickle", "tokens.npy.gz"], "pickle"))
def test_an_unlisted_member_is_refused_and_not_unpickled(
    copy: Path, tmp_path: Path, suffix: str, capsys: pytest.CaptureFixture[str]
) -> None:
    shard = copy / "shards" / "text-000000.tar"
    block = read_index(shard).blocks[0]
    replace_sample(shard, 0, {**members_of(shard, block), suffix: pickle.dumps(Trap(tmp_path / "sprung"))})
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
    replace_sample(shard, 0, {**members_of(shard, block), "tags.npy": stream.getvalue()})
    for read in (lambda: verify_dataset(copy), lambda: read_block(shard, read_index(shard).blocks[0])):
        with pytest.raises(DataError, match=rf"{block.key}.*tags\.npy"):
            read()
    assert not (tmp_path / "sprung").exists()


def npy(array: np.ndarray[tuple[int, ...], np.dtype[np.generic]]) -> bytes:
    stream = io.BytesIO()
    np.save(stream, array, allow_pickle=False)
    return stream.getvalue()


def test_arrays_that_break_the_promise_of_dataset_json_are_named(copy: Path) -> None:
    shard = copy / "shards" / "text-000000.tar"
    block = read_index(shard).blocks[0]
    good = members_of(shard, block)
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


def test_counts_and_strange_shards_are_noticed(copy: Path) -> None:
    dataset = read_json(copy / "dataset.json")
    write_json(copy / "dataset.json", {**dataset, "rows": dataset["rows"] + 1})
    with pytest.raises(DataError, match=f"{dataset['rows'] + 1} rows"):
        verify_dataset(copy)
    write_json(copy / "dataset.json", {**dataset, "shards": dataset["shards"][:-1]})
    with pytest.raises(DataError, match=dataset["shards"][-1]):
        verify_dataset(copy)


def test_rows_are_shown_as_text(whole: Path) -> None:
    shard = whole / "shards" / "text-000000.tar"
    key = read_index(shard).blocks[1].key
    shown = list(row_texts(shard, 3, key))
    assert [name for name, _ in shown] == [f"{key} row {row}" for row in range(3)]
    assert any("bold red" in str(span.style) for _, text in shown for span in text.spans)
    result = run_command("inspect", str(shard), "--rows", "2", "--block", key)
    assert result.returncode == 0 and result.stdout.count(key) == 2
    assert shown[0][1].plain.split()[:3] == result.stdout.split(f"{key} row 0")[1].split("\n")[1].split()[:3]


def test_rows_that_are_not_there_are_refused(whole: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["inspect", "nowhere/shards/a.tar"]) == 2
    assert "nowhere/shards/a.tar: no such file or directory" in capsys.readouterr().err
    assert cli.main(["inspect", str(whole / "shards" / "text-000000.tar"), "--block", "text-000000-99999"]) == 2
    assert "no block" in capsys.readouterr().err
