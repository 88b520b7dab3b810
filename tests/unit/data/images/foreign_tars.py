"""WebDataset tars as others make them, by the webdataset library."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import webdataset

from tests.unit.data.images.source_images import encoded
from tests.unit.data.images.stored import photograph
from trp_scale.cli.main import main


def of_format(number: int, suffix: str) -> bytes:
    """Image `number`, 40 x 48 pixels, as .jpg, .jpeg, .png or .webp."""
    form = {"jpg": "JPEG", "jpeg": "JPEG"}.get(suffix, suffix.upper())
    options = {"JPEG": {"quality": 95}, "WEBP": {"lossless": True}}.get(form, {})
    return encoded(photograph(40 + number, 48, number), form, **options)


def write_foreign(path: Path, samples: list[Mapping[str, Any]]) -> Path:
    """A tar of these samples: "__key__" and members by suffix, bytes as they are."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with webdataset.TarWriter(str(path)) as writer:
        for sample in samples:
            writer.write(dict(sample))
    return path


def three_tars(folder: Path, suffixes: tuple[str, ...] = ("jpg", "png", "webp"), each: int = 6) -> list[Path]:
    """train-000000.tar and two more; images of several formats, classes in .cls and in .json, keys from 0 in each."""
    tars = []
    for number in range(3):
        samples = []
        for place in range(each):
            image = number * each + place
            suffix = suffixes[image % len(suffixes)]
            samples.append(
                {
                    "__key__": f"{place:04d}",
                    suffix: of_format(image, suffix),
                    "cls": str(image % 3).encode(),
                    "json": json.dumps({"label": image % 4, "caption": "a sight"}).encode(),
                    "txt": b"a sight",
                    "pyd": b"never opened",
                    "depth.npy": np.zeros(3).tobytes(),
                }
            )
        tars.append(write_foreign(folder / f"train-{number:06d}.tar", samples))
    return tars


def index(tars: Path | str, output: Path | None = None, *flags: str) -> Path:
    """The data set of these tars, made by the command; by default in their folder."""
    where = [] if output is None else ["--output", str(output)]
    assert main(["index", str(tars), *where, "--processes", "1", "--no-progress", *flags]) == 0
    return Path(tars) if output is None else output
