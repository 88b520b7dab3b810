"""Stored bytes of images: unchanged where possible, otherwise an upright RGB JPEG."""

from __future__ import annotations

import io

import numpy as np
import pytest
import torch
import torchvision.io
from PIL import Image

from tests.unit.data.images.source_images import (
    HEIGHT,
    WIDTH,
    class_map,
    decoded,
    depth_map,
    encoded,
    jpeg,
    pixels,
    png,
    png_of_size,
    rotated_jpeg,
)
from trp_scale.data.images.maps import map_formats
from trp_scale.pretraining.modalities.base import MapFiles
from trp_scale.sharding.images.files import Loaded, UnusableError
from trp_scale.sharding.images.reencode import Encoded, EncodeSettings, encode_sample


def encode(content: bytes | Image.Image, short_side: int = 0, quality: int = 0, **maps: bytes) -> Encoded:
    named = {f"{name}.png": stored for name, stored in maps.items()}
    formats = map_formats()
    files = {f"{name}.png": MapFiles(name=name, format=formats[name], description={}) for name in maps}
    settings = EncodeSettings(short_side=short_side, quality=quality, max_pixels=1_000_000, maps=files)
    return encode_sample(Loaded(image=content, maps=named), settings)


def grey(colours: np.ndarray) -> np.ndarray:
    return np.asarray(Image.fromarray(colours).convert("L")).astype(np.int64)


def near(content: bytes, wanted: np.ndarray, tolerance: float = 6.0) -> bool:
    """Whether a JPEG is `wanted` [height, width, 3] up to compression loss."""
    found = decoded(content)
    return found.shape == wanted.shape and float(np.abs(found - wanted.astype(np.int64)).mean()) < tolerance


def test_plain_jpegs_keep_their_bytes() -> None:
    for content in (jpeg(), rotated_jpeg(1), encoded(Image.fromarray(pixels()).convert("L"), "JPEG")):
        found = encode(content)
        assert found.image == content
        assert found.unchanged and found.size == (WIDTH, HEIGHT)
    assert encode(jpeg(), quality=90).image != jpeg(quality_layers=[1])
    assert not encode(jpeg(), quality=90).unchanged


def test_progressive_jpegs_become_baseline() -> None:
    found = encode(jpeg(progressive=True))
    assert not found.unchanged
    assert "progressive" not in Image.open(io.BytesIO(found.image)).info
    assert near(found.image, pixels())


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_rotation_is_applied(orientation: int) -> None:
    """Compare with the EXIF definition: the stored row and column of the visual top and left side."""
    sideways = pixels().astype(np.int64)
    upright = {
        1: sideways,
        2: sideways[:, ::-1],
        3: sideways[::-1, ::-1],
        4: sideways[::-1],
        5: sideways.transpose(1, 0, 2),
        6: sideways.transpose(1, 0, 2)[:, ::-1],
        7: sideways.transpose(1, 0, 2)[::-1, ::-1],
        8: sideways.transpose(1, 0, 2)[::-1],
    }[orientation]
    found = encode(rotated_jpeg(orientation))
    assert near(found.image, upright)
    assert found.size == upright.shape[1::-1]
    assert Image.open(io.BytesIO(found.image)).getexif().get(0x0112, 1) == 1
    plain = torchvision.io.decode_jpeg(torch.frombuffer(bytearray(found.image), dtype=torch.uint8))
    assert np.abs(plain.numpy().transpose(1, 2, 0).astype(np.int64) - upright).mean() < 6


def test_every_mode_becomes_rgb() -> None:
    colours = pixels()
    image = Image.fromarray(colours)
    half = np.where(np.arange(WIDTH) < WIDTH // 2, 255, 0).astype(np.uint8) * np.ones((HEIGHT, 1), np.uint8)
    on_white = np.where(half[..., None] > 0, colours, 255)
    transparent = image.copy()
    transparent.putalpha(Image.fromarray(half))
    palette = image.quantize(64)
    grey_rows = np.repeat(grey(colours)[..., None], 3, axis=2)
    deep = (grey(colours) * 257).astype(np.uint16)
    cases = {
        "png": (encoded(image, "PNG"), colours),
        "webp": (encoded(image, "WEBP", lossless=True), colours),
        "bmp": (encoded(image, "BMP"), colours),
        "tiff": (encoded(image, "TIFF"), colours),
        "cmyk": (encoded(image.convert("CMYK"), "JPEG", quality=95), colours),
        "palette": (encoded(palette, "PNG"), np.asarray(palette.convert("RGB"))),
        "gif": (encoded(palette, "GIF"), np.asarray(palette.convert("RGB"))),
        "grey": (encoded(image.convert("L"), "PNG"), grey_rows),
        "one bit": (encoded(image.convert("1"), "PNG"), np.asarray(image.convert("1").convert("RGB"))),
        "16-bit": (encoded(Image.fromarray(deep), "PNG"), grey_rows),
        "16-bit tiff": (encoded(Image.fromarray(deep), "TIFF"), grey_rows),
        "alpha": (encoded(transparent, "PNG"), on_white),
        "grey alpha": (encoded(transparent.convert("LA"), "PNG"), np.where(half[..., None] > 0, grey_rows, 255)),
    }
    for name, (content, wanted) in cases.items():
        found = encode(content)
        stored = Image.open(io.BytesIO(found.image))
        assert (stored.format, stored.mode) == ("JPEG", "RGB"), name
        assert not found.unchanged
        if name != "one bit":
            assert near(found.image, wanted, 8.0), name
    assert decoded(encode(encoded(image.convert("1"), "PNG")).image).std() > 60


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "empty"),
        (b"this is no image, whatever its name says", "not_an_image"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\nshowpage\n", "not_an_image"),
        (jpeg()[:200], "damaged"),
        (jpeg()[: jpeg().index(b"\xff\xda") + 40], "damaged"),  # a whole header
        (jpeg()[:-100], "damaged"),
        (jpeg(progressive=True)[:-100], "damaged"),
        (png(pixels())[:-400], "damaged"),
        (png(pixels())[:60] + b"\xff" * 40 + png(pixels())[100:], "damaged"),
        (png_of_size(1000, 1001), "too_many_pixels"),
        (png_of_size(60_000, 60_000), "too_many_pixels"),
        (encoded(Image.fromarray(np.ones((8, 8), np.float32)), "TIFF"), "unsupported_mode"),
        (encoded(Image.fromarray(np.ones((8, 8), np.int32)), "TIFF"), "unsupported_mode"),
    ],
    ids=lambda value: value if isinstance(value, str) else f"{len(value)} bytes",
)
def test_what_cannot_be_used_is_named(content: bytes, reason: str) -> None:
    with pytest.raises(UnusableError) as raised:
        encode(content)
    assert raised.value.reason == reason
    limit = Image.MAX_IMAGE_PIXELS
    assert limit is not None and limit > 0, "Pillow's own limit is back for others"


def test_the_pixel_limit_is_ours_and_exact() -> None:
    settings = EncodeSettings(short_side=0, quality=0, max_pixels=WIDTH * HEIGHT)
    assert encode_sample(Loaded(image=jpeg()), settings).unchanged
    with pytest.raises(UnusableError, match="too_many_pixels"):
        encode_sample(Loaded(image=jpeg()), EncodeSettings(short_side=0, quality=0, max_pixels=WIDTH * HEIGHT - 1))


def test_large_images_shrink_to_the_short_side_and_small_ones_stay() -> None:
    found = encode(jpeg(), short_side=14)
    assert found.size == (20, 14) and not found.unchanged
    wanted = np.asarray(Image.fromarray(pixels()).resize((20, 14), Image.Resampling.BICUBIC))
    assert near(found.image, wanted, 7.0)
    for side in (HEIGHT, HEIGHT + 1):
        assert encode(jpeg(), short_side=side).image == jpeg()
    turned = encode(rotated_jpeg(6), short_side=14)
    assert turned.size == (14, 20) == Image.open(io.BytesIO(turned.image)).size
    large = Image.fromarray(pixels(width=640, height=480))
    reduced = encode(encoded(large, "JPEG", quality=95), short_side=60)
    assert near(reduced.image, np.asarray(large.resize((80, 60), Image.Resampling.BICUBIC)))


def test_quality_is_that_of_the_encoder() -> None:
    sizes = [len(encode(jpeg(), quality=quality).image) for quality in (20, 50, 80, 95)]
    assert sizes == sorted(sizes) and len(set(sizes)) == 4
    assert encode(png(pixels())).image == encode(png(pixels()), quality=95).image


def test_maps_keep_their_bytes() -> None:
    depth, semseg = png(depth_map()), png(class_map())
    found = encode(jpeg(), depth=depth, semseg=semseg)
    assert found.maps == {"depth.png": depth, "semseg.png": semseg}


def test_a_palette_of_class_numbers_keeps_its_numbers() -> None:
    numbers = class_map()
    coloured = Image.frombytes("P", (WIDTH, HEIGHT), numbers.tobytes())
    coloured.putpalette(np.random.default_rng(0).integers(0, 256, 768).tolist())
    found = Image.open(io.BytesIO(encode(jpeg(), semseg=encoded(coloured, "PNG")).maps["semseg.png"]))
    assert found.mode == "L"
    assert np.array_equal(np.asarray(found), numbers)
    few = Image.frombytes("P", (WIDTH, HEIGHT), (numbers % 4).tobytes())
    few.putpalette([0, 0, 0, 255, 0, 0, 0, 255, 0, 0, 0, 255])
    content = encoded(few, "PNG", bits=2)
    assert content[24] == 2
    found = Image.open(io.BytesIO(encode(jpeg(), semseg=content).maps["semseg.png"]))
    assert np.array_equal(np.asarray(found), numbers % 4)


def test_maps_shrink_with_their_image_by_picking_numbers() -> None:
    depth, semseg = depth_map(), class_map()
    found = encode(jpeg(), short_side=14, depth=png(depth), semseg=png(semseg))
    for suffix, wanted in (("depth.png", depth), ("semseg.png", semseg)):
        small = np.asarray(Image.open(io.BytesIO(found.maps[suffix])))
        assert small.shape == (14, 20) and small.dtype == wanted.dtype
        assert np.array_equal(small, wanted[1::2, 1::2])


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("depth", png(class_map()), "bad_map"),
        ("depth", jpeg(), "bad_map"),
        ("depth", png(depth_map())[:-300], "bad_map"),
        ("depth", b"", "bad_map"),
        ("depth", png(depth_map(width=HEIGHT, height=WIDTH)), "map_size"),
        ("semseg", png(depth_map()), "bad_map"),
        ("semseg", png(pixels()), "bad_map"),
        ("semseg", encoded(Image.fromarray(class_map()).convert("1"), "PNG"), "bad_map"),
        ("semseg", png(class_map(width=WIDTH // 2)), "map_size"),
    ],
)
def test_maps_of_another_form_are_named(name: str, content: bytes, reason: str) -> None:
    with pytest.raises(UnusableError) as raised:
        encode(jpeg(), **{name: content})
    assert raised.value.reason == reason


def test_maps_are_aligned_with_the_upright_image() -> None:
    upright = png(depth_map(width=HEIGHT, height=WIDTH))
    assert encode(rotated_jpeg(6), depth=upright).maps["depth.png"] == upright
    with pytest.raises(UnusableError, match="map_size"):
        encode(rotated_jpeg(6), depth=png(depth_map()))
