"""Input images for tests, as files of every kind, good and bad."""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image

from trp_scale.config.loader import read_section
from trp_scale.data.index import read_index
from trp_scale.sharding.images.shard import ShardImagesConfig, shard_images
from trp_scale.sharding.verify import verify_dataset

WIDTH, HEIGHT = 40, 28


def pixels(seed: int = 0, width: int = WIDTH, height: int = HEIGHT) -> np.ndarray:
    """Smooth colours that differ in every corner, uint8 [height, width, 3]."""
    coarse = np.random.default_rng(seed).integers(0, 256, (3, 4, 3), dtype=np.uint8)
    return np.asarray(Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC))


def encoded(image: Image.Image, kind: str, **options: object) -> bytes:
    """The content of a file."""
    stream = io.BytesIO()
    image.save(stream, kind, **options)
    return stream.getvalue()


def jpeg(seed: int = 0, **options: object) -> bytes:
    """A plain RGB JPEG."""
    return encoded(Image.fromarray(pixels(seed)), "JPEG", quality=90, **options)


def rotated_jpeg(orientation: int, seed: int = 0) -> bytes:
    """A JPEG whose EXIF tag says how it was held."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    return jpeg(seed, exif=exif)


def png_of_size(height: int, width: int, bits: int = 8, colour_type: int = 2) -> bytes:
    """A PNG of a few bytes whose header claims this size."""
    header = struct.pack(">IIBBBBB", width, height, bits, colour_type, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(bytes(1000))), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    )


def decoded(content: bytes) -> np.ndarray:
    """RGB pixels, int64 [height, width, 3]."""
    return np.asarray(Image.open(io.BytesIO(content)).convert("RGB")).astype(np.int64)


def depth_map(seed: int = 0, width: int = WIDTH, height: int = HEIGHT) -> np.ndarray:
    """uint16 [height, width]."""
    return np.random.default_rng(seed).integers(0, 1 << 16, (height, width)).astype(np.uint16)


def class_map(seed: int = 0, width: int = WIDTH, height: int = HEIGHT) -> np.ndarray:
    """uint8 [height, width]."""
    return np.random.default_rng(seed).integers(0, 20, (height, width)).astype(np.uint8)


def png(array: np.ndarray) -> bytes:
    """The content of a .png file."""
    return encoded(Image.fromarray(array), "PNG")


def class_folder(folder: Path, classes: int = 3, each: int = 6) -> Path:
    """A folder of class sub-folders c2, c1, c0 with plain JPEGs."""
    for number in reversed(range(classes)):
        (folder / f"c{number}").mkdir(parents=True)
        for place in range(each):
            (folder / f"c{number}" / f"image{place}.jpg").write_bytes(jpeg(10 * number + place))
    return folder


def maps_folder(folder: Path, images: Path, content: Callable[[int], bytes], suffix: str = ".png") -> Path:
    """A folder with a map of each JPEG, under the same relative path."""
    for number, path in enumerate(sorted(images.rglob("*.jpg"))):
        target = folder / path.relative_to(images).with_suffix(suffix)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content(number))
    return folder


def shard(output: Path, *inputs: object, **settings: object) -> dict[str, dict[str, bytes]]:
    """Shard, verify, and read back."""
    given = {"inputs": [str(item) for item in inputs], "output": str(output), "processes": 1, "progress": False}
    shard_images(read_section(ShardImagesConfig.with_modality_sections(), {**given, **settings}, "the test"))
    verify_dataset(output)
    return stored(output)


def stored(directory: Path, *tars: str) -> dict[str, dict[str, bytes]]:
    """All members by key and suffix, read with the index from the tars' bytes: of DIRECTORY/shards, or of `tars`."""
    found = {}
    for shard in [directory / tar for tar in tars] or sorted((directory / "shards").glob("*.tar")):
        content = shard.read_bytes()
        for block in read_index(shard).blocks:
            found[block.key] = {
                suffix: content[member.offset : member.offset + member.length]
                for suffix, member in block.members.items()
            }
    return found
