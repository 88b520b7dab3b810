"""Stored pieces: any cut of a tensor is read into any other, and gaps, overlaps and foreign keys are refused."""

from __future__ import annotations

import random
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from tests.unit.core.test_pieces import SHAPES, cut, cut_at_random
from trp_scale.checkpoint.document import CheckpointDocument, FileEntry, StoredTensor
from trp_scale.checkpoint.format import (
    StoredPiece,
    StoredPieces,
    check_covered_once,
    join_pieces,
    overlap,
    read_header,
    without_values,
    write_pieces,
)
from trp_scale.core.pieces import Box, FlatRange, Piece, Region
from trp_scale.errors import CheckpointError


@settings(max_examples=60, deadline=None)
@given(shape=SHAPES, seed=st.integers(0, 10**6))
def test_any_cut_is_read_into_any_other(shape: tuple[int, ...], seed: int) -> None:
    chooser = random.Random(seed)
    check_covered_once("tensor", shape, stored(shape, cut_at_random(shape, random.Random(seed))))
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    pieces = [
        Piece(name="a@b#c", shape=shape, region=region, tensors={"weight": cut(tensor, region)})
        for region in cut_at_random(shape, chooser)
    ]
    with tempfile.TemporaryDirectory() as directory:
        names = ["rank-00000.safetensors", "rank-00001.safetensors"]
        for rank, name in enumerate(names):
            mine = pieces[rank::2]
            write_pieces(Path(directory) / name, lambda mine=mine: mine)
        with open_stored(Path(directory), join_pieces(map(without_values, pieces)), names) as reader:
            assert torch.equal(reader.whole("weight", "a@b#c"), tensor)
            for region in cut_at_random(shape, chooser):
                target = torch.full((region.size,), torch.nan)
                reader.fill("weight", "a@b#c", region, target)
                assert torch.equal(target, cut(tensor, region))


def stored(shape: tuple[int, ...], regions: list[Region]) -> list[StoredPiece]:
    return [StoredPiece(name="m", shape=shape, region=region, states={"weight": "F32"}) for region in regions]


def open_stored(directory: Path, tensors: dict[str, StoredTensor], names: list[str]) -> StoredPieces:
    entries = tuple(FileEntry(name=name, size=0, crc32=()) for name in names)
    document = CheckpointDocument(
        step=1,
        optimizer_steps=1,
        tensors=tensors,
        files=entries,
        cursors={},
        engine="fake",
        zero_stage=None,
        world_size=1,
        engine_state={},
        config={},
        hooks={},
        extra={},
    )
    return StoredPieces(directory, document, {name: read_header(directory / name) for name in names})


def test_files_are_safetensors_with_keys_that_can_be_read_by_people(tmp_path: Path) -> None:
    path = tmp_path / "rank-00000.safetensors"
    pieces = [
        Piece(name="m", shape=(2, 4), region=Box(((0, 2), (2, 4))), tensors={"exp_avg": torch.arange(4.0)}),
        Piece(name="m", shape=(2, 4), region=FlatRange(0, 2), tensors={"weight": torch.ones(2, dtype=torch.bfloat16)}),
    ]
    entry, _ = write_pieces(path, lambda: pieces)
    content = load_file(path)
    assert content.keys() == {"exp_avg:m#[0:2,2:4]", "weight:m@0:2"}
    assert torch.equal(content["exp_avg:m#[0:2,2:4]"], torch.arange(4.0))
    assert torch.equal(content["weight:m@0:2"], torch.ones(2, dtype=torch.bfloat16))
    assert entry.size == path.stat().st_size


def test_overlap_of_rows_with_columns() -> None:
    """Columns 2:4 of a 3 x 6 matrix that was stored as rows 1:3."""
    rows, columns = FlatRange(6, 18).runs((3, 6)), Box(((0, 3), (2, 4))).runs((3, 6))
    sources, targets, lengths = overlap(rows, columns)
    assert (sources.tolist(), targets.tolist(), lengths.tolist()) == ([2, 8], [2, 4], [2, 2])


@pytest.mark.parametrize(
    ("regions", "said"),
    [
        ([FlatRange(0, 5), FlatRange(7, 12)], "weight: elements 5:7 of 12 are in no piece"),
        ([FlatRange(0, 12), FlatRange(3, 4)], "weight: elements 3:12 of 12 are in more than one piece"),
        ([Box(((0, 3), (0, 2))), Box(((0, 3), (3, 4)))], "weight: elements 2:3 of 12 are in no piece"),
        ([Box(((0, 3), (0, 3))), Box(((0, 3), (2, 4)))], "weight: elements 2:3 of 12 are in more than one piece"),
        ([FlatRange(0, 13)], "weight: the piece @0:13 is empty or outside"),
        ([Box(((0, 3), (0, 5)))], "weight: the piece #.0:3,0:5. is empty or outside"),
        ([Box(((0, 3),))], "weight: the piece #.0:3. is empty or outside"),
        ([], "weight: elements 0:12 of 12 are in no piece"),
    ],
)
def test_gaps_and_overlaps_are_named(regions: list[Region], said: str) -> None:
    with pytest.raises(CheckpointError, match=said):
        check_covered_once("weight", (3, 4), stored((3, 4), regions))


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("weight:m", "not a piece"),
        ("weight:m@0-4", "not a piece"),
        ("weight:other@0:4", "weight of other is not listed"),
        ("exp_avg:m@0:4", "exp_avg of m is not listed"),
        ("weight:m@2:6", "outside the shape"),
        ("weight:m@0:3", r"shape \(4,\) of F32 found, \(3,\) of F32 expected"),
    ],
)
def test_foreign_keys_are_refused(tmp_path: Path, key: str, said: str) -> None:
    save_file({key: torch.ones(4)}, tmp_path / "rank-00000.safetensors")
    with pytest.raises(CheckpointError, match=said):
        open_stored(tmp_path, {"m": StoredTensor(shape=(4,), states={"weight": "F32"})}, ["rank-00000.safetensors"])
