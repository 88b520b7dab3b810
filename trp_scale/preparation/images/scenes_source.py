"""Rendered scenes as a source of images: made when they are read."""

from __future__ import annotations

import hashlib
import io
from typing import Any

import numpy as np
from PIL import Image

from trp_scale.data.images.members import SUFFIXES
from trp_scale.preparation.images.samples import Listing, Loaded, Sample
from trp_scale.preparation.images.scenes import DEPTH_UNITS_PER_METRE, SCENE_CLASSES, SEGMENTATION_CLASSES, render_scene


class SceneSource:
    """Synthetic scenes by number."""

    def __init__(self, seed: int, size: int) -> None:
        self._seed = seed
        self._size = size

    def read(self, sample: Sample) -> Loaded:
        scene = render_scene(self._seed, sample.row, self._size)
        maps = {"depth.png": _png(scene.depth), "semseg.png": _png(scene.segmentation)}
        return Loaded(image=Image.fromarray(scene.image), label=scene.label, maps=maps)


def list_scenes(seed: int, count: int, size: int) -> Listing:
    """`count` scenes of size x size pixels, as many of each class."""
    source = SceneSource(seed, size)
    samples = [Sample(f"scene-{number:08d}", f"scene {number}", None, number) for number in range(count)]
    first = source.read(samples[0])  # another renderer, or another numpy that rounds otherwise, is another input
    return Listing(
        source=source,
        samples=samples,
        suffixes=SUFFIXES,
        classes=list(SCENE_CLASSES),
        fingerprint=hashlib.sha256(first.maps["depth.png"] + np.asarray(first.image).tobytes()).hexdigest(),
        described={
            "depth": {
                "scale": 1 / DEPTH_UNITS_PER_METRE,
                "unit": f"1/{DEPTH_UNITS_PER_METRE} metre along the camera's axis",
                "exact": True,
            },
            "semseg": {"classes": list(SEGMENTATION_CLASSES), "exact": True},
        },
    )


def _png(pixels: np.ndarray[Any, np.dtype[Any]]) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "PNG")
    return stream.getvalue()
