"""Small stored images with depth and segmentation maps, in the image's own tar or beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from tests.settings import changed, of_upstream
from tests.unit.data.images.source_images import png
from tests.unit.data.images.stored import config_for, jpeg, write_images, write_tar
from trp_scale.config import Config
from trp_scale.core.batch import Batch
from trp_scale.pretraining.base import open_sources

SECOND = "semseg-made"
"""Directory of maps beside the images' tars."""
SEMSEG_CLASSES = ["ground", "box", "sky"]
DESCRIBED: dict[str, dict[str, object]] = {
    "depth": {"scale": 0.001, "unit": "millimetres"},
    "semseg": {"classes": SEMSEG_CLASSES},
}
SUFFIXES = ["jpg", "cls", "depth.png", "semseg.png"]
SIZES = [(40, 60), (64, 48), (33, 33), (37, 90), (90, 31), (50, 51), (1, 1)]

Contents = dict[str, str | bytes]


def maps(height: int, width: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Depth [height, width] uint16 with holes, classes [height, width] uint8 with void."""
    random = np.random.default_rng(seed)
    depth = random.integers(500, 9000, (height, width)).astype(np.uint16)
    depth[random.random((height, width)) < 0.1] = 0
    semseg = random.integers(0, len(SEMSEG_CLASSES), (height, width)).astype(np.uint8)
    semseg[random.random((height, width)) < 0.1] = 255
    return depth, semseg


def sample(number: int, height: int, width: int, **members: bytes) -> Contents:
    """Image `number` with its maps; `members` replace contents."""
    depth, semseg = maps(height, width, number)
    colours = np.random.default_rng(number).integers(0, 256, (3, 3, 3), dtype=np.uint8)
    image = Image.fromarray(colours).resize((width, height), Image.Resampling.BICUBIC)
    contents = {"jpg": jpeg(image), "cls": str(number % 3).encode(), "depth.png": png(depth), "semseg.png": png(semseg)}
    return {"__key__": f"n{number:05d}", **contents, **members}


def samples(count: int) -> list[Contents]:
    """Images of several sizes."""
    return [sample(number, *SIZES[number % len(SIZES)]) for number in range(count)]


def write_multimodal(directory: Path, shards: list[list[Contents]], **changes: object) -> Path:
    """A data set with depth and segmentation in the images' own tars; `changes` go into dataset.json."""
    document = {"suffixes": SUFFIXES, "modalities": DESCRIBED, **changes}
    return write_images(directory, shards, changes=document)


def write_beside(directory: Path, shards: list[list[Contents]]) -> Path:
    """The same data set with depth in the images' tars, and segmentation in tars of its own."""
    described = {**DESCRIBED, "semseg": {**DESCRIBED["semseg"], "directory": SECOND}}
    own = [[{name: one[name] for name in one if name != "semseg.png"} for one in shard] for shard in shards]
    write_images(directory, own, changes={"suffixes": SUFFIXES[:3], "modalities": described})
    (directory / SECOND).mkdir()
    for number, shard in enumerate(shards):
        beside = [{name: one[name] for name in ("__key__", "semseg.png")} for one in shard]
        write_tar(directory / SECOND / f"image-{number:06d}.tar", beside)
    return directory


def nine_beside(directory: Path) -> Path:
    """Nine images in two tars, their segmentation beside them."""
    return write_beside(directory, [samples(9)[:5], samples(9)[5:]])


def rewrite_maps(data: Path, order: Sequence[int] = range(4), members: Mapping[int, Contents] | None = None) -> None:
    """Write the second tar of maps of `nine_beside` anew, in another order or with other `members` by place."""
    maps = [{"__key__": sample["__key__"], "semseg.png": sample["semseg.png"]} for sample in samples(9)[5:]]
    write_tar(
        data / SECOND / "image-000001.tar", [{**maps[place], **(members or {}).get(place, {})} for place in order]
    )


def multimodal_config(path: Path | str, **sections: dict[str, object]) -> Config:
    """A run on `path`: crops of 32 pixels in patches of 8, segmentation at a quarter, 10 of 48 patches visible."""
    config = of_upstream(config_for(path, crops={"count": 1}), "mm_mae")
    config.modalities.visible_tokens = 10
    return changed(config, **sections)  # type: ignore[no-any-return]


def first_window(config: Config) -> list[Batch]:
    """The first window of one rank."""
    return open_sources(config, rank=0, world=1).train.next_window()
