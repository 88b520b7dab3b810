"""Images and maps of too many pixels are refused by their header, before memory is taken for them."""

from __future__ import annotations

import io
import resource
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.unit.data.images.multimodal import first_window, multimodal_config, sample, write_multimodal
from tests.unit.data.images.source_images import (
    HEIGHT,
    WIDTH,
    class_folder,
    class_map,
    depth_map,
    encoded,
    jpeg,
    maps_folder,
    pixels,
    png,
    png_of_size,
    shard,
)
from tests.unit.data.stored import npy
from trp_scale.data.images.dataset import decode_image, decode_scaled
from trp_scale.data.images.formats import MOST_PIXELS, MOST_SCANS, jpeg_frame_size
from trp_scale.data.images.maps import map_formats
from trp_scale.data.index import read_json
from trp_scale.data.tar_reader import npy_header, read_npy
from trp_scale.errors import DataError
from trp_scale.finetuning.detection.batch import read_image
from trp_scale.pretraining.modalities.depth import stretch, units_of_metres
from trp_scale.sharding.images.files import UnusableError
from trp_scale.sharding.images.reencode import open_image
from trp_scale.sharding.verify import check_decodes


def jpeg_of_size(height: int, width: int) -> bytes:
    """A small JPEG whose header says another size."""
    content = bytearray(jpeg())
    place = next(n for n in range(len(content)) if content[n] == 0xFF and content[n + 1] in (0xC0, 0xC2))
    struct.pack_into(">HH", content, place + 5, height, width)
    return bytes(content)


def in_file(folder: Path, content: bytes) -> Path:
    path = folder / "image"
    path.write_bytes(content)
    return path


DECODERS: dict[str, Callable[[Path], object]] = {
    "JPEG": lambda folder: decode_image(bytearray(jpeg_of_size(65_500, 65_500))),
    "JPEG, scaled": lambda folder: decode_scaled(bytearray(jpeg_of_size(65_500, 65_500)), 8),
    "PNG": lambda folder: decode_image(bytearray(png_of_size(40_000, 40_000, 8, 2))),
    "map": lambda folder: map_formats()["semseg"].decode(png_of_size(40_000, 40_000, 8, 0), None),
    "detection, PNG": lambda folder: read_image(in_file(folder, png_of_size(40_000, 40_000, 8, 2)), (0, 0)),
    "detection, JPEG": lambda folder: read_image(in_file(folder, jpeg_of_size(65_500, 65_500)), (0, 0)),
    "verify": lambda folder: check_decodes("x", jpeg_of_size(65_500, 65_500)),
}


@pytest.mark.parametrize("decoder", DECODERS)
def test_a_bomb_is_refused_before_it_is_decoded(decoder: str, tmp_path: Path) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(DataError, match=r"pixels"):
        DECODERS[decoder](tmp_path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000, "KiB"


def test_a_map_of_another_size_than_its_image_is_not_unpacked() -> None:
    with pytest.raises(DataError, match=r"40000 x 40000 .* 64 x 64"):
        map_formats()["semseg"].decode(png_of_size(40_000, 40_000, 8, 0), (64, 64))


def many_scans(count: int) -> bytes:
    """A progressive JPEG whose last scan comes again and again."""
    content = encoded(Image.fromarray(pixels()), "JPEG", progressive=True)
    return content[:-2] + content[content.rindex(b"\xff\xda") : -2] * count + b"\xff\xd9"


SCAN_DECODERS: dict[str, Callable[[bytes], object]] = {
    "whole": lambda content: decode_image(bytearray(content)),
    "scaled": lambda content: decode_scaled(bytearray(content), 8),
    "verify": lambda content: check_decodes("x", content),
    "shard-images": lambda content: open_image(content, MOST_PIXELS),
}


@pytest.mark.parametrize("decoder", SCAN_DECODERS)
def test_a_jpeg_of_many_scans_is_refused(decoder: str) -> None:
    """Of 100 megapixels each takes 140 bytes and 65 ms: a file of 1 MB took minutes."""
    SCAN_DECODERS[decoder](many_scans(400))
    with pytest.raises((DataError, UnusableError), match=r"51\d scans.* 500 "):
        SCAN_DECODERS[decoder](many_scans(MOST_SCANS + 5))


def tiff_of_tile(width: int, height: int) -> bytes:
    """A TIFF of 16 x 16 pixels in one deflated tile of this size, by its header."""
    tags = [(256, 16), (257, 16), (258, 8), (259, 8), (262, 1), (277, 1)]
    tags += [(322, width), (323, height), (324, 300), (325, 17)]
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags)
    header = b"II*\0" + struct.pack("<IH", 8, len(tags)) + entries + bytes(4)
    return header.ljust(300, b"\0") + zlib.compress(bytes(1000))


@pytest.mark.parametrize(
    "content", [tiff_of_tile(40_000, 40_000), png_of_size(1, 90_000_000, 8, 2)], ids=["tile", "line"]
)
def test_sharding_leaves_out_what_its_size_hides(content: bytes) -> None:
    """A tile of more pixels than the image took 1.7 GB; of a line that long Pillow says that memory lacks, which ended
    the run."""
    with pytest.raises(UnusableError, match="too_many_pixels"):
        open_image(content, MOST_PIXELS)


def test_a_run_leaves_a_bomb_out_by_its_name(tmp_path: Path) -> None:
    bomb = sample(1, 24, 30, jpg=jpeg_of_size(65_500, 65_500))
    data = write_multimodal(tmp_path / "data", [[sample(0, 24, 30), bomb, sample(2, 24, 30)]])
    window = first_window(multimodal_config(data))
    assert {key for batch in window for key in batch.corrupt} == {"image-000000/n00001"}


@pytest.mark.parametrize("progressive", [False, True])
@pytest.mark.parametrize("size", [(1, 1), (40, 48), (300, 7)])
def test_the_size_in_the_markers_is_pillows(size: tuple[int, int], progressive: bool) -> None:
    image = Image.fromarray(np.resize(pixels(), (*size, 3)))
    content = encoded(image, "JPEG", progressive=progressive, exif=b"Exif\0\0" + b"\xff\xc0" * 40)
    assert jpeg_frame_size(content) == size
    assert size[0] * size[1] < MOST_PIXELS


@pytest.mark.parametrize(
    "content", [b"", b"\xff\xd8", b"\xff\xd8\xff", b"\xff\xd8\xff\xda\0\2", b"\x89PNG\xff\xc0" * 9]
)
def test_what_has_no_frame_has_no_size(content: bytes) -> None:
    assert jpeg_frame_size(content) is None


METRES = {"scale": 0.001}
RELATIVE = {"relative": True}


def metres(seed: int) -> np.ndarray:
    """float32 [height, width], with what was not measured."""
    found = np.random.default_rng(seed).uniform(0.3, 60.0, (HEIGHT, WIDTH)).astype(np.float32)
    found[0, :3] = (0.0, np.nan, np.inf)
    return found


def folder(tmp_path: Path, content: Callable[[int], bytes], suffix: str = ".npy") -> Path:
    """images/ of four images, and depth/ with their maps."""
    maps_folder(tmp_path / "depth", class_folder(tmp_path / "images", classes=1, each=4), content, suffix)
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
        (png(class_map()), ".png", {}, "8 bits .*--depth.relative"),
        (png(class_map()), ".png", METRES, "8 bits "),
        (npy(class_map()), ".npy", METRES, "8 bits "),
        (npy(metres(0)), ".npy", {}, "floats .* --depth.scale .* --depth.relative"),
    ],
)
def test_what_would_have_to_be_guessed_is_asked_before_anything_is_stored(
    tmp_path: Path, content: bytes, suffix: str, depth: dict[str, Any], words: str
) -> None:
    place = folder(tmp_path, lambda number: content, suffix)
    with pytest.raises(DataError, match=rf"--modality depth.*image\d\.jpg: {words}"):
        sharded(place, depth)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({**METRES, **RELATIVE}, r"--depth\.relative: .*--depth\.scale 0\.001"),
        ({**METRES, "larger_is": "nearer"}, r"--depth\.larger_is nearer: .*--depth\.scale"),
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
    with pytest.raises(DataError, match=r"image1\.npy .*image1\.png"):
        sharded(place, METRES)


def test_no_memory_is_taken_for_what_a_header_claims() -> None:
    stream = io.BytesIO()
    described = {"descr": "<f4", "fortran_order": False, "shape": (1 << 20, 1 << 20)}
    np.lib.format.write_array_header_1_0(stream, described)
    for content in (stream.getvalue(), stream.getvalue() + bytes(4000)):
        with pytest.raises(DataError, match=r"\(1048576, 1048576\) float32"):
            read_npy(content)
    with pytest.raises(DataError):
        npy_header(stream.getvalue().replace(b"1048576", b"9**9**9"))


def test_equal_numbers_and_tiny_depths() -> None:
    assert stretch(np.full((2, 2), 7.0)).tolist() == [[1, 1], [1, 1]]
    assert stretch(np.zeros((2, 2))).tolist() == [[0, 0], [0, 0]]
    assert units_of_metres(np.array([[1e-6, 0.0, 65.535]]), 0.001).tolist() == [[1, 0, 65535]]
