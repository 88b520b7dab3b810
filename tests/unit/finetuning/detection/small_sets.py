"""Small data sets with boxes, in the formats that are read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from trp_scale.finetuning.detection.settings import DetectionTaskConfig
from trp_scale.sharding.images.shard import ShardImagesConfig, shard_images


def small_scenes(directory: Path, count: int = 16, size: int = 48) -> Path:
    """Rendered scenes as a COCO file and images."""
    return shard_images(ShardImagesConfig(output=directory, embedded=True, coco=True, count=count, size=size))


def detection_config(side: int = 64, **detection: Any) -> DetectionTaskConfig:
    """Settings of a small detector on patches of 8 pixels."""
    config = DetectionTaskConfig()
    config.downstream.classes, config.batch.micro_size = 8, 32
    config.model.layers, config.model.hidden_size = 4, 32
    config.model.heads, config.model.intermediate_size = 2, 64
    config.vision.patch_size, config.crops.size, config.crops.interpolation = 8, side, "bilinear"
    small = {"masks": "on", "width": 16, "box_head": "2fc", "box_width": 32, "rpn_convolutions": 1, "mask_size": 28}
    small |= {"train_proposals": 50, "test_proposals": 50, "rpn_samples": 32, "box_samples": 16}
    for name, value in {**small, **detection}.items():
        setattr(config.detection, name, value)
    return config


SQUARE = [4.0, 2.0, 4.0, 8.0, 10.0, 8.0, 10.0, 2.0]
"""Polygon of a box at left 4, top 2, 6 wide and 6 high."""


def coco_document() -> dict[str, Any]:
    """Two images of 12 x 16 pixels, four objects, category ids with gaps."""
    runs = [2, 3, 9, 3, 12 * 16 - 17]  # column by column: rows 2-4 of the columns 0 and 1
    return {
        "images": [
            {"id": 7, "file_name": "a.png", "height": 12, "width": 16},
            {"id": 3, "file_name": "b.png", "height": 12, "width": 16},
        ],
        "annotations": [
            {"id": 1, "image_id": 7, "category_id": 90, "bbox": [4, 2, 6, 6], "segmentation": [SQUARE], "area": 36},
            {
                "id": 2,
                "image_id": 3,
                "category_id": 5,
                "bbox": [0, 2, 2, 3],
                "segmentation": {"size": [12, 16], "counts": runs},
                "area": 6,
            },
            {"id": 5, "image_id": 7, "category_id": 5, "bbox": [1, 1, 3, 3], "segmentation": [SQUARE], "iscrowd": 1},
            {"id": 6, "image_id": 7, "category_id": 17, "bbox": [4, 2, 6, 6], "segmentation": [SQUARE]},
        ],
        "categories": [{"id": 90, "name": "brush"}, {"id": 5, "name": "plane"}, {"id": 17, "name": "cat"}],
    }


def write_coco(directory: Path, document: Any) -> Path:
    """The file, and both images beside it in images/."""
    (directory / "images").mkdir(parents=True, exist_ok=True)
    for number, name in enumerate(("a.png", "b.png")):
        pixels = np.full((12, 16, 3), 50 + 100 * number, dtype=np.uint8)
        Image.fromarray(pixels).save(directory / "images" / name)
    path = directory / "annotations.json"
    path.write_text(document if isinstance(document, str) else json.dumps(document), encoding="utf-8")
    return path


VOC_OBJECT = """<object><name>{name}</name><difficult>{difficult}</difficult>
<part><name>head</name><bndbox><xmin>1</xmin><ymin>1</ymin><xmax>2</xmax><ymax>2</ymax></bndbox></part>
<bndbox><xmin>{box[0]}</xmin><ymin>{box[1]}</ymin><xmax>{box[2]}</xmax><ymax>{box[3]}</ymax></bndbox></object>"""


def write_voc(root: Path, images: dict[str, list[tuple[str, int, tuple[int, int, int, int]]]]) -> Path:
    """A Pascal VOC folder of images of 20 x 30 pixels with their objects (name, difficult, box); returns the list."""
    for folder in ("Annotations", "JPEGImages", "ImageSets/Main"):
        (root / folder).mkdir(parents=True, exist_ok=True)
    for name, objects in images.items():
        Image.new("RGB", (30, 20)).save(root / "JPEGImages" / f"{name}.jpg")
        listed = "".join(VOC_OBJECT.format(name=kind, difficult=hard, box=box) for kind, hard, box in objects)
        size = "<size><width>30</width><height>20</height><depth>3</depth></size>"
        (root / "Annotations" / f"{name}.xml").write_text(f"<annotation>{size}{listed}</annotation>")
    path = root / "ImageSets" / "Main" / "trainval.txt"
    path.write_text("\n".join(images) + "\n")
    return path
