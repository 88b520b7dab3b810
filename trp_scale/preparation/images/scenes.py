"""Synthetic scenes for runs without downloads: solids on a textured ground, with exact depth, segmentation and normals.

Rendered by casting rays with numpy: occlusion, one sun with shadows, patterns, highlights, varied cameras. The class of
a scene is the kind of its main object, the one with the largest visible area. They are toys: good for seeing a run
learn and for checking pipelines, never for a figure about real images.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from trp_scale.preparation.images.scenes_layout import KINDS, Scene, draw_scene
from trp_scale.preparation.images.scenes_light import FIRST_SOLID, Seen, see, shade
from trp_scale.preparation.images.scenes_shapes import Floats

SCENE_CLASSES: tuple[str, ...] = KINDS
"""Name of each class number: the kinds of the main object, equally many of each."""

SEGMENTATION_CLASSES: tuple[str, ...] = ("wall", "ground", *KINDS)
"""Name of each value of a segmentation map."""

DEPTH_UNITS_PER_METRE = 1000
"""A depth map holds millimetres along the camera's axis (not along the ray); every pixel has one."""

SMALLEST_SHARE = 0.06
"""Share of the image that the main object covers at least."""

_ATTEMPTS = 8
_EDGE = 0.06
"""Difference of brightness between neighbours from which on a pixel is the mean of four rays."""


@dataclass(frozen=True, kw_only=True)
class RenderedScene:
    """One image with its labels.

    Attributes:
        image: [size, size, 3] uint8, RGB.
        depth: [size, size] uint16, millimetres, at the pixel's centre.
        segmentation: [size, size] uint8, number in SEGMENTATION_CLASSES, at the pixel's centre.
        normals: [size, size, 3] float32 of length 1, at the pixel's centre: x to the right, y up, z towards the camera.
        bodies: [size, size] uint8, 0 wall, 1 ground, then the objects, the main one first.
        label: number in SCENE_CLASSES.
        classes, units_per_metre: of segmentation and depth.
    """

    classes: ClassVar[tuple[str, ...]] = SEGMENTATION_CLASSES
    units_per_metre: ClassVar[int] = DEPTH_UNITS_PER_METRE

    image: NDArray[np.uint8]
    depth: NDArray[np.uint16]
    segmentation: NDArray[np.uint8]
    normals: Floats
    bodies: NDArray[np.uint8]
    label: int


def render_scene(seed: int, number: int, size: int) -> RenderedScene:
    """Render scene `number` of `seed` at size x size pixels: the same bytes each time, whatever was rendered before."""
    for attempt in range(_ATTEMPTS):
        scene = draw_scene(seed, number, attempt)
        directions = _rays(scene, size, 0.5, 0.5)
        seen = see(scene, directions)
        areas = np.bincount(seen.body, minlength=FIRST_SOLID + len(scene.solids))[FIRST_SOLID:]
        if areas[0] >= SMALLEST_SHARE * size * size and areas[0] == areas.max():
            break
    kinds = np.array([0, 1, *(FIRST_SOLID + KINDS.index(solid.kind) for solid in scene.solids)], dtype=np.uint8)
    light = _smooth(scene, size, shade(scene, directions, seen))
    image = np.rint(np.sqrt(np.clip(light, 0, 1)) * np.float32(255)).astype(np.uint8)  # [3, size * size], gamma 2
    return RenderedScene(
        image=np.ascontiguousarray(image.T).reshape(size, size, 3),
        depth=np.rint(seen.t * np.float32(DEPTH_UNITS_PER_METRE)).astype(np.uint16).reshape(size, size),
        segmentation=kinds[seen.body].reshape(size, size),
        normals=np.ascontiguousarray((_axes(scene).T @ seen.normal).T).reshape(size, size, 3),
        bodies=seen.body.reshape(size, size),
        label=number % len(KINDS),
    )


def _rays(scene: Scene, size: int, right: float, below: float, pixels: NDArray[np.intp] | None = None) -> Floats:
    """Directions [3, n] through (right, below) of each pixel; 1 along the camera's axis, so that t is depth."""
    pixels = np.arange(size * size) if pixels is None else pixels
    row, column = np.divmod(pixels, size)
    across = ((column + right) / size * 2 - 1) * scene.slope
    up = (1 - (row + below) / size * 2) * scene.slope
    sine, cosine = math.sin(scene.pitch), math.cos(scene.pitch)
    return np.stack([across, up * cosine - sine, cosine + up * sine]).astype(np.float32)


def _axes(scene: Scene) -> Floats:
    """The camera's right, up and backward direction in the world, the columns of [3, 3]."""
    sine, cosine = math.sin(scene.pitch), math.cos(scene.pitch)
    return np.array([[1, 0, 0], [0, cosine, sine], [0, sine, -cosine]], dtype=np.float32)


def _smooth(scene: Scene, size: int, light: Floats) -> Floats:
    """Pixels at an edge become the mean of four rays each; light [3, size * size] is changed."""
    brightness = np.sqrt(np.clip(light, 0, 1)).mean(axis=0).reshape(size, size)
    edge = np.zeros((size, size), dtype=np.bool_)
    for first, second in (
        ((slice(None, -1), slice(None)), (slice(1, None), slice(None))),
        ((slice(None), slice(None, -1)), (slice(None), slice(1, None))),
    ):
        steep = np.abs(brightness[first] - brightness[second]) > _EDGE
        edge[first] |= steep
        edge[second] |= steep
    pixels = np.flatnonzero(edge)
    directions = np.concatenate(
        [_rays(scene, size, right, below, pixels) for right in (0.25, 0.75) for below in (0.25, 0.75)], axis=1
    )
    seen: Seen = see(scene, directions)
    rays = np.clip(shade(scene, directions, seen), 0, 1)
    light[:, pixels] = rays.reshape(3, 4, len(pixels)).mean(axis=1)
    return light
