"""Images and maps of too many pixels are refused by their header, before memory is taken for them."""

from __future__ import annotations

import resource
import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.unit.data.images.multimodal import first_window, multimodal_config, sample, write_multimodal
from tests.unit.data.images.source_images import encoded, jpeg, pixels
from trp_scale.data.images.maps import map_formats
from trp_scale.data.images.pixel_limit import MOST_PIXELS, MOST_SCANS, jpeg_frame_size
from trp_scale.data.images.rows import decode_image, decode_scaled
from trp_scale.errors import DataError
from trp_scale.finetuning.detection.batch import read_image
from trp_scale.sharding.images.reencode import open_image
from trp_scale.sharding.images.samples import UnusableError
from trp_scale.sharding.images.verify import check_decodes


def jpeg_of_size(height: int, width: int) -> bytes:
    """A small JPEG whose header says another size."""
    content = bytearray(jpeg())
    place = next(n for n in range(len(content)) if content[n] == 0xFF and content[n + 1] in (0xC0, 0xC2))
    struct.pack_into(">HH", content, place + 5, height, width)
    return bytes(content)


def png_of_size(height: int, width: int, bits: int, colour_type: int) -> bytes:
    """A PNG with little in it and a header of this size."""
    header = struct.pack(">IIBBBBB", width, height, bits, colour_type, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(bytes(1000))), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    )


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
    with pytest.raises(DataError, match=r"40000 x 40000 pixels, the image has 64 x 64"):
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
    with pytest.raises((DataError, UnusableError), match=r"51\d scans, at most 500 are decoded"):
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
