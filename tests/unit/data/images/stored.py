"""A small stored image data set for tests."""

from __future__ import annotations

import io
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from PIL import Image

from tests.settings import changed, of_upstream
from tests.unit.data import stored
from trp_scale.config import Config
from trp_scale.data.images.dataset import open_image_dataset
from trp_scale.data.index import write_json

CLASSES = ["ant", "bee", "cat"]

SIZES = [(40, 60), (64, 48), (33, 33), (1, 1), (20, 90), (90, 20), (16, 16), (50, 51)]
"""Height and width of the images of `small_images`, in turn."""


def photograph(height: int, width: int, seed: int = 0) -> Image.Image:
    """Smooth random colours, so that JPEG keeps them."""
    coarse = np.random.default_rng(seed).integers(0, 256, (4, 5, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)


def jpeg(image: Image.Image) -> bytes:
    """The content of a .jpg file."""
    stream = io.BytesIO()
    image.save(stream, "JPEG", quality=95)
    return stream.getvalue()


def write_tar(path: Path, samples: Iterable[dict[str, str | bytes]]) -> int:
    """A tar with its index; returns the number of samples. `samples`: "__key__" and members' contents by suffix."""
    members = {
        str(sample["__key__"]): {suffix: bytes(each) for suffix, each in sample.items() if isinstance(each, bytes)}
        for sample in samples
    }
    labels = {key: int(contents["cls"]) for key, contents in members.items() if "cls" in contents}
    stored.write_shard(path, members, dict.fromkeys(members, 1), labels)
    return len(members)


def sample(number: int, height: int, width: int, **members: bytes) -> dict[str, str | bytes]:
    """Image `number`, of class `number` modulo 3; `members` replace or add contents (jpg, cls)."""
    contents = {"jpg": jpeg(photograph(height, width, number)), "cls": str(number % len(CLASSES)).encode()}
    return {"__key__": f"n{number:05d}", **contents, **members}


def write_images(
    directory: Path,
    shards: list[list[dict[str, str | bytes]]],
    *,
    rows_per_block: int = 4,
    changes: dict[str, object] | None = None,
) -> Path:
    """A data set with these samples in its shards; `changes` go into dataset.json."""
    (directory / "shards").mkdir(parents=True)
    names = [f"image-{number:06d}.tar" for number in range(len(shards))]
    rows = sum(write_tar(directory / "shards" / name, samples) for name, samples in zip(names, shards, strict=True))
    document: dict[str, object] = {
        "format": 1,
        "kind": "image",
        "shards": names,
        "suffixes": ["jpg", "cls"],
        "rows": rows,
        "rows_per_block": rows_per_block,
        "classes": CLASSES,
    }
    write_json(directory / "dataset.json", {**document, **(changes or {})})
    return directory


def small_images(directory: Path, **changes: object) -> Path:
    """34 images of different sizes in 3 shards, blocks of 4; the smallest is one pixel."""
    samples = [sample(number, *SIZES[number % len(SIZES)]) for number in range(34)]
    return write_images(directory, [samples[:14], samples[14:21], samples[21:]], changes=changes)


def config_for(path: Path | str, **sections: dict[str, object]) -> Config:
    """A run on `path`: 2 crops of 32 pixels in patches of 8; global batch 12 in micro-batches of 3."""
    config = of_upstream(stored.config_for(path), "mae")
    config.vision.patch_size, config.masking.ratio, config.masking.maskings = 8, 0.75, 0
    config.crops.count, config.crops.size, config.crops.view_size = 2, 32, 48
    return changed(config, **sections)  # type: ignore[no-any-return]


def sample_of_key(dataset: Path) -> dict[int, int]:
    """Row key -> number of the image in stored order, worked out from the blocks."""
    blocks = open_image_dataset(dataset).blocks
    return {
        (identity + row) & (2**63 - 1): first + row
        for identity, rows, first in zip(
            blocks.identities.tolist(), blocks.rows.tolist(), blocks.first.tolist(), strict=True
        )
        for row in range(rows)
    }
