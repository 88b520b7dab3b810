"""Depth maps from .npy files and from PNG of 8 bits: what is stored of them, and what is asked for before."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.unit.data.images.source_images import HEIGHT, WIDTH, class_folder, class_map, depth_map, png, shard
from trp_scale.data.images.npy import npy_header, read_npy
from trp_scale.data.index import read_json
from trp_scale.errors import DataError
from trp_scale.pretraining.modalities.depth import stretched, units_of_metres

METRES = {"scale": 0.001}
RELATIVE = {"relative": True}


def npy(array: np.ndarray, **options: Any) -> bytes:
    """The content of a .npy file."""
    stream = io.BytesIO()
    np.lib.format.write_array(stream, array, **{"allow_pickle": False, **options})
    return stream.getvalue()


def metres(seed: int) -> np.ndarray:
    """float32 [height, width], with what was not measured."""
    found = np.random.default_rng(seed).uniform(0.3, 60.0, (HEIGHT, WIDTH)).astype(np.float32)
    found[0, :3] = (0.0, np.nan, np.inf)
    return found


def folder(tmp_path: Path, content: Callable[[int], bytes], suffix: str = ".npy") -> Path:
    """images/ of four images, and depth/ with their maps."""
    class_folder(tmp_path / "images", classes=1, each=4)
    (tmp_path / "depth" / "c0").mkdir(parents=True)
    for number in range(4):
        (tmp_path / "depth" / "c0" / f"image{number}{suffix}").write_bytes(content(number))
    return tmp_path


def sharded(place: Path, depth: dict[str, Any], **settings: Any) -> dict[int, np.ndarray]:
    """The stored depth of each image."""
    settings = {"modality": [f"depth={place / 'depth'}"], "depth": depth, **settings}
    found = shard(place / "out", place / "images", **settings)
    maps = {int(key[-1]): np.asarray(Image.open(io.BytesIO(one["depth.png"]))) for key, one in found.items()}
    assert all(each.dtype == np.uint16 for each in maps.values())
    return maps


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, ">f4"])
def test_floats_are_metres_of_a_scale_that_is_given(tmp_path: Path, dtype: Any) -> None:
    found = sharded(folder(tmp_path, lambda number: npy(metres(number).astype(dtype))), METRES)
    for number, stored in found.items():
        true = metres(number).astype(dtype).astype(np.float64)
        assert (stored[0, :3] == 0).all(), "not measured"
        known = np.isfinite(true) & (true > 0)
        assert np.abs(stored * 0.001 - true)[known].max() <= 0.0005 + 1e-9 and (stored[known] > 0).all()
    description = read_json(tmp_path / "out" / "dataset.json")["modalities"]["depth"]
    assert description == {"scale": 0.001, "unit": "0.001 metres", "exact": False}


@pytest.mark.parametrize("dtype", [np.uint16, np.int32, np.int64])
@pytest.mark.parametrize("depth", [METRES, {}])
def test_whole_numbers_are_units_as_those_of_a_png_are(tmp_path: Path, dtype: Any, depth: dict[str, Any]) -> None:
    place = folder(tmp_path, lambda number: npy(np.asfortranarray(depth_map(number).astype(dtype))))
    for number, stored in sharded(place, depth).items():
        assert np.array_equal(stored, depth_map(number))


@pytest.mark.parametrize("suffix", [".png", ".npy"])
def test_eight_bits_are_stored_as_relative_depth_when_that_is_said(tmp_path: Path, suffix: str) -> None:
    make = png if suffix == ".png" else npy
    place = folder(tmp_path, lambda number: make(class_map(number)), suffix)
    for number, stored in sharded(place, {**RELATIVE, "larger_is": "nearer"}).items():
        true = class_map(number).astype(np.int64)  # 0 to 19
        assert (stored[true == 0] == 0).all(), "0: nothing was measured there"
        assert np.array_equal(stored[true > 0], 1 + np.rint((true[true > 0] - 1) / 18 * 65534).astype(np.int64))
    description = read_json(tmp_path / "out" / "dataset.json")["modalities"]["depth"]
    assert description == {"scale": None, "unit": "relative", "exact": False, "larger_is": "nearer"}


def test_floats_without_a_unit_are_stretched_and_sixteen_bits_stay(tmp_path: Path) -> None:
    place = folder(tmp_path, lambda number: npy(metres(number)) if number else npy(depth_map(0)))
    found = sharded(place, RELATIVE)
    assert np.array_equal(found[0], depth_map(0))
    assert found[1][metres(1) > 0].max() == 65535 and found[1][0, 1] == 0


@pytest.mark.parametrize(
    ("content", "suffix", "depth", "words"),
    [
        (
            png(class_map()),
            ".png",
            {},
            "8 bits found: 256 steps are a picture of depth and no metres; give --depth.relat",
        ),
        (png(class_map()), ".png", METRES, "8 bits found"),
        (npy(class_map()), ".npy", METRES, "8 bits found"),
        (
            npy(metres(0)),
            ".npy",
            {},
            "floats found, .* --depth.scale 0.001 if they are metres .* or --depth.relative if",
        ),
    ],
)
def test_what_would_have_to_be_guessed_is_asked_before_anything_is_stored(
    tmp_path: Path, content: bytes, suffix: str, depth: dict[str, Any], words: str
) -> None:
    place = folder(tmp_path, lambda number: content, suffix)
    with pytest.raises(DataError, match=rf"--modality depth, the map of .*image\d\.jpg: {words}"):
        sharded(place, depth)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({**METRES, **RELATIVE}, r"--depth\.relative: not with --depth\.scale 0\.001"),
        ({**METRES, "larger_is": "nearer"}, r"--depth\.larger_is nearer: not with --depth\.scale"),
    ],
)
def test_settings_that_contradict_each_other(tmp_path: Path, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(DataError, match=words):
        sharded(folder(tmp_path, lambda number: npy(metres(number))), settings)


BAD = {
    "below zero": (npy(-metres(0)), "bad_map_number"),
    "too far": (npy(metres(0) * 10), "bad_map_number"),
    "out of 16 bits": (npy(depth_map().astype(np.int64) * 2), "bad_map_number"),
    "eight bits": (npy(class_map()), "bad_map_number"),
    "of another size": (npy(metres(0)[:, 1:]), "map_size"),
    "three dimensions": (npy(metres(0)[..., None]), "bad_map"),
    "complex": (npy(metres(0).astype(np.complex64)), "bad_map"),
    "objects": (npy(np.array([[{}]]), allow_pickle=True), "bad_map"),
    "cut short": (npy(metres(0))[:-4], "bad_map"),
    "a PNG cut short": (png(depth_map())[:-400], "bad_map"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_file_that_cannot_be_used_is_left_out_and_named(tmp_path: Path, name: str) -> None:
    content, reason = BAD[name]
    place = folder(tmp_path, lambda number: npy(metres(number)))
    (place / "depth" / "c0" / "image2.npy").write_bytes(content)
    found = sharded(place, METRES, max_skipped=0.5)
    skipped = read_json(tmp_path / "out" / "dataset.json")["skipped_places"]
    assert sorted(found) == [0, 1, 3] and [one["reason"] for one in skipped] == [reason]


def test_two_maps_of_one_image_are_refused(tmp_path: Path) -> None:
    place = folder(tmp_path, lambda number: npy(metres(number)))
    (place / "depth" / "c0" / "image1.png").write_bytes(png(depth_map()))
    with pytest.raises(DataError, match=r"image1\.npy and .*image1\.png are maps of one image"):
        sharded(place, METRES)


def test_maps_shrink_with_their_images(tmp_path: Path) -> None:
    found = sharded(folder(tmp_path, lambda number: npy(metres(number))), METRES, short_side=14)
    assert all(stored.shape == (14, 20) for stored in found.values())


def test_no_memory_is_taken_for_what_a_header_claims() -> None:
    stream = io.BytesIO()
    described = {"descr": "<f4", "fortran_order": False, "shape": (1 << 20, 1 << 20)}
    np.lib.format.write_array_header_1_0(stream, described)
    for content in (stream.getvalue(), stream.getvalue() + bytes(4000)):
        with pytest.raises(DataError, match=r"bytes of numbers, but its header says \(1048576, 1048576\) float32"):
            read_npy(content)
    with pytest.raises(DataError, match="header cannot be read"):
        npy_header(stream.getvalue().replace(b"1048576", b"9**9**9"))


def test_equal_numbers_and_tiny_depths() -> None:
    assert stretched(np.full((2, 2), 7.0)).tolist() == [[1, 1], [1, 1]]
    assert stretched(np.zeros((2, 2))).tolist() == [[0, 0], [0, 0]]
    assert units_of_metres(np.array([[1e-6, 0.0, 65.535]]), 0.001).tolist() == [[1, 0, 65535]]
