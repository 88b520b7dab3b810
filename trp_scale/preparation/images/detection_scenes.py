"""Rendered scenes with a box and an exact mask for each visible object, as a COCO file and a folder of images."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from trp_scale.data.index import DataError
from trp_scale.preparation.images.scenes import SCENE_CLASSES, SEGMENTATION_CLASSES, RenderedScene, render_scene
from trp_scale.preparation.images.scenes_light import FIRST_SOLID

FILE = "annotations.json"

FEWEST_PIXELS = 12
"""Objects that show fewer are not annotated."""


def write_coco_scenes(directory: Path, *, count: int, size: int, seed: int) -> Path:
    """Write `count` scenes of size x size pixels: DIRECTORY/annotations.json and DIRECTORY/images/*.png.

    Raises:
        DataError: the directory holds something else.
    """
    if directory.exists() and any(one.name not in (FILE, "images") for one in directory.iterdir()):
        raise DataError(f"{directory} holds something else; give an empty directory")
    (directory / "images").mkdir(parents=True, exist_ok=True)
    images: list[dict[str, Any]] = []
    annotations: list[dict[str, Any]] = []
    for number in range(count):
        scene = render_scene(seed, number, size)
        name = f"scene-{number:08d}.png"
        Image.fromarray(scene.image).save(directory / "images" / name)
        images.append({"id": number + 1, "file_name": name, "height": size, "width": size})
        for entry in scene_objects(scene):
            annotations.append({"id": len(annotations) + 1, "image_id": number + 1, **entry})
    categories = [{"id": number + 1, "name": name} for number, name in enumerate(SCENE_CLASSES)]
    document = {"images": images, "annotations": annotations, "categories": categories}
    (directory / FILE).write_text(json.dumps(document), encoding="utf-8")
    return directory


def scene_objects(scene: RenderedScene) -> list[dict[str, Any]]:
    """COCO's annotation of each object that shows enough of itself."""
    found = []
    for body in range(FIRST_SOLID, int(scene.bodies.max()) + 1):
        mask = scene.bodies == body
        if mask.sum() < FEWEST_PIXELS:
            continue
        lines, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
        left, top, right, bottom = columns[0], lines[0], columns[-1] + 1, lines[-1] + 1
        kind = SEGMENTATION_CLASSES[int(scene.segmentation[mask][0])]
        found.append(
            {
                "category_id": SCENE_CLASSES.index(kind) + 1,
                "bbox": [int(left), int(top), int(right - left), int(bottom - top)],
                "area": int(mask.sum()),
                "iscrowd": 0,
                "segmentation": {"size": list(mask.shape), "counts": run_lengths(mask)},
            }
        )
    return found


def run_lengths(mask: npt.NDArray[np.bool_]) -> list[int]:
    """Lengths of the runs of 0 and 1 in turn, column by column, beginning with 0 (COCO's uncompressed form)."""
    flat = mask.ravel(order="F")
    changes = np.flatnonzero(np.diff(flat, prepend=False))
    lengths: list[int] = np.diff(changes, prepend=0, append=flat.size).tolist()
    return lengths
