"""Synthetic scenes for runs without downloads: solids on a textured ground, with exact depth, segmentation and normals.

A depth buffer keeps the nearest surface of each pixel. The projection is orthographic. The class of a scene is the kind
of its main object, which has the largest visible area. Two kinds share each hue, so that a small network can learn the
classes. Use the scenes for tests and trial runs, not for results about real images.
"""

from __future__ import annotations

import colorsys
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from trp_scale.data.hashing import mix_integer, stream
from trp_scale.errors import DataError

Floats = NDArray[np.floating[Any]]

_SLAB = ((0, 0, 0, 0, 1, 0, -1), (0, 0, 0, 0, -1, 0, -1))
_SIDES = tuple((0, 0, 0, x, 0, z, -1) for x, z in ((1, 0), (-1, 0), (0, 1), (0, -1)))
_SLOPES = tuple((0, 0, 0, 2 * x, 1, 2 * z, -1) for x, z in ((1, 0), (-1, 0), (0, 1), (0, -1)))
_OCTANTS = tuple((0, 0, 0, x, y, z, -1) for x in (1, -1) for y in (1, -1) for z in (1, -1))
_TUBE = (1, 0, 1, 0, 0, 0, -1)
SOLIDS: dict[str, tuple[tuple[float, ...], ...]] = {
    "sphere": ((1, 1, 1, 0, 0, 0, -1),),
    "box": _SLAB + _SIDES,
    "cylinder": (_TUBE, *_SLAB),
    "cone": ((1, -0.25, 1, 0, 0.5, 0, -0.25), *_SLAB),
    "pyramid": (_SLAB[1], *_SLOPES),
    "octahedron": _OCTANTS,
    "dome": ((1, 0.25, 1, 0, 0.5, 0, -0.75), _SLAB[1]),
    "ring": (_TUBE, *_SLAB, (-1, 0, -1, 0, 0, 0, 0.36)),
}
"""Constraints (a, b, c, d, e, f, g) by kind: a x^2 + b y^2 + c z^2 + d x + e y + f z + g <= 0."""

_PLANE = ((0, 0, 0, 0, 1, 0, 0),)  # wall and ground: y <= 0

SCENE_CLASSES: tuple[str, ...] = tuple(SOLIDS)
"""Name of each class number: the kind of the main object. Classes are balanced."""

SEGMENTATION_CLASSES: tuple[str, ...] = ("wall", "ground", *SCENE_CLASSES)
"""Name of each value of a segmentation map."""

WALL, GROUND, FIRST_SOLID = 0, 1, 2
"""Body numbers of a scene; further solids follow in order."""

DEPTH_UNITS_PER_METRE = 1000
SMALLEST_SHARE = 0.06  # minimum share of the image that the main object covers
HALF_WIDTH = 2.0  # metres from the middle of the image to its sides
CAMERA_DISTANCE = 4.0  # metres from the camera to z = 0


@dataclass(frozen=True, kw_only=True)
class RenderedScene:
    """One image with labels, sampled at pixel centres.

    Attributes:
        image: [size, size, 3] uint8, RGB.
        depth: [size, size] uint16, millimetres along the camera axis, at every pixel.
        segmentation: [size, size] uint8, index into SEGMENTATION_CLASSES.
        normals: [size, size, 3] float32, unit length: x right, y up, z towards the camera.
        bodies: [size, size] uint8: 0 wall, 1 ground, 2 main object, then other objects.
        label: index into SCENE_CLASSES.
    """

    classes: ClassVar[tuple[str, ...]] = SEGMENTATION_CLASSES
    units_per_metre: ClassVar[int] = DEPTH_UNITS_PER_METRE

    image: NDArray[np.uint8]
    depth: NDArray[np.uint16]
    segmentation: NDArray[np.uint8]
    normals: Floats
    bodies: NDArray[np.uint8]
    label: int


class Body(NamedTuple):
    """Body in camera coordinates axes @ local + centre, in metres: x right, y up, z towards the camera."""

    kind: str
    axes: Floats  # [3, 3]
    centre: Floats  # [3]
    texture: list[float]  # [8] in [0, 1): the parameters of `_colours`


def render_scene(seed: int, number: int, size: int) -> RenderedScene:
    """Render scene `number` of `seed` at size x size pixels, deterministically and independently of other scenes."""
    label = number % len(SCENE_CLASSES)
    for attempt in range(8):  # each attempt has fewer objects that can hide the main one
        bodies = draw_bodies(seed, number, attempt)
        z, nearest = find_nearest(bodies, size)
        areas = np.bincount(nearest.ravel(), minlength=len(bodies))[FIRST_SOLID:]
        if areas[0] >= SMALLEST_SHARE * size * size and areas[0] == areas.max():
            break
    normals, image = np.empty((size, size, 3), np.float32), np.empty((size, size, 3), np.uint8)
    sun = np.array([2 * bodies[GROUND].texture[0] - 1, 0.9, 0.8], np.float32)
    for index, body in enumerate(bodies):
        pixels = nearest == index
        inverse, origins = _to_local(body, size)
        points = origins[:, pixels] + inverse[:, 2, None] * (z[pixels] - np.float32(body.centre[2]))  # [3, n]
        table = np.array(SOLIDS.get(body.kind, _PLANE), np.float32)
        values = table[:, :3] @ points**2 + table[:, 3:6] @ points + table[:, 6:]  # [k, n], 0 where a constraint binds
        binding = table[values.argmax(axis=0)]  # [n, 7]
        gradients = (2 * binding[:, :3] * points.T + binding[:, 3:6]) @ inverse
        normals[pixels] = gradients / np.linalg.norm(gradients, axis=1, keepdims=True)
        light = np.float32(0.45) + np.float32(0.4) * np.maximum(normals[pixels] @ sun, 0)  # [n]
        image[pixels] = np.rint(255 * np.minimum(_colours(body, points) * light[:, None], 1))
    kinds = np.array([SEGMENTATION_CLASSES.index(body.kind) for body in bodies], dtype=np.uint8)
    depth = np.rint((CAMERA_DISTANCE - z) * DEPTH_UNITS_PER_METRE).astype(np.uint16)
    return RenderedScene(
        image=image, depth=depth, segmentation=kinds[nearest], normals=normals, bodies=nearest, label=label
    )


def draw_bodies(seed: int, number: int, attempt: int) -> list[Body]:
    """Draw the wall, the ground, the main object and smaller objects without contact, by hashing."""
    state, count = stream(seed, "scene", number, attempt), iter(range(1, 1000))

    def draw(low: float = 0.0, high: float = 1.0) -> float:
        return low + (high - low) * mix_integer(state ^ next(count)) / 2.0**64

    pitch, back = draw(0.35, 0.55), draw(2.0, 4.0)  # radians that the camera looks down; metres to the wall
    tilt = np.array([[1, 0, 0], [0, math.cos(pitch), -math.sin(pitch)], [0, math.sin(pitch), math.cos(pitch)]])
    foot = np.array([0, draw(-1.1, -0.8), 0])  # of the main object
    facing = tilt @ np.array([[1, 0, 0], [0, 0, -1], [0, 1, 0]])  # local y towards the camera
    planes = (("wall", facing, foot - back * tilt[:, 2]), ("ground", tilt, foot))
    bodies = [Body(kind, axes, centre, [draw() for _ in range(8)]) for kind, axes, centre in planes]
    circles: list[tuple[float, float, float]] = []  # x, z and radius on the ground
    for other in range(max(1, int(draw(3, 8)) - attempt)):
        kind = SCENE_CLASSES[int(draw() * len(SOLIDS)) if other else number % len(SOLIDS)]
        x, z = (draw(-1.9, 1.9), draw(0.7 - back, 1.6)) if other else (draw(-0.7, 0.7), 0.0)
        size = np.full(3, draw(0.3, 0.62) if other else draw(0.8, 1.05))
        size *= 0.75 if kind in ("box", "cylinder") else 1  # they fill their bounds
        size[1] *= {"sphere": 1, "dome": 0.6, "ring": 0.6}.get(kind, draw(0.75, 1.2))
        turn = draw(0, 2 * math.pi)
        turned = np.array([[math.cos(turn), 0, math.sin(turn)], [0, 1, 0], [-math.sin(turn), 0, math.cos(turn)]])
        texture = [(SCENE_CLASSES.index(kind) + 2 * draw()) / len(SOLIDS) % 1, *(draw() for _ in range(7))]
        radius = float(size[0]) * (math.sqrt(2) if kind in ("box", "pyramid") else 1)
        if all(math.dist((x, z), circle[:2]) > radius + circle[2] for circle in circles):
            circles.append((x, z, radius))
            bodies.append(Body(kind, tilt @ turned * size, tilt @ np.array([x, size[1], z]) + foot, texture))
    return bodies


def find_nearest(bodies: list[Body], size: int) -> tuple[Floats, NDArray[np.uint8]]:
    """Return the depth buffer: z of the nearest surface of each pixel [size, size], and its body number."""
    z, nearest = np.full((size, size), -np.inf, dtype=np.float32), np.zeros((size, size), dtype=np.uint8)
    for index, body in enumerate(bodies):
        inverse, origins = _to_local(body, size)
        heights = cross(body.kind, origins, inverse[:, 2]) + np.float32(body.centre[2])
        nearest[heights > z] = index
        z = np.maximum(z, heights)
    return z, nearest


def _to_local(body: Body, size: int) -> tuple[Floats, Floats]:
    """Return the inverse axes of a body [3, 3], and local points [3, size, size] of the pixels at z = centre[2]."""
    inverse = np.linalg.inv(body.axes).astype(np.float32)
    places = (((np.arange(size) + 0.5) / size * 2 - 1) * HALF_WIDTH).astype(np.float32)
    x, y = places - np.float32(body.centre[0]), -places - np.float32(body.centre[1])  # columns, rows
    return inverse, inverse[:, 0, None, None] * x + inverse[:, 1, None, None] * y[:, None]


def cross(kind: str, origins: Floats, direction: Floats) -> Floats:
    """Find the largest t where origins [3, ...] + t * direction [3] is in a body: [...], -inf where a ray misses it."""
    front, back = np.full(origins.shape[1:], np.inf, np.float32), np.full(origins.shape[1:], -np.inf, np.float32)
    for row in np.array(SOLIDS.get(kind, _PLANE), np.float32):
        squares, linear = row[:3], row[3:6]
        c, slope = np.tensordot(linear, origins, 1) + row[6], linear @ direction
        if not squares.any():  # a half-space
            plane = -c / (slope if abs(slope) > 1e-9 else np.float32(-1e-9))
            front, back = (np.minimum(front, plane), back) if slope > 1e-9 else (front, np.maximum(back, plane))
            continue
        a, half_b = squares @ direction**2, np.tensordot(squares * direction, origins, 1) + slope / 2
        root = np.sqrt(np.maximum(half_b**2 - a * (np.tensordot(squares, origins**2, 1) + c), 0))
        high, low = (root - half_b) / a, (-root - half_b) / a
        if a > 0:
            front, back = np.where(root > 0, np.minimum(front, high), -np.inf), np.maximum(back, low)
        else:  # a hole: if the front point is inside, the far side is visible
            front = np.where((root > 0) & (front < low) & (front > high), high, front)
    return np.where(front > back, front, -np.inf).astype(np.float32)


def _colours(body: Body, points: Floats) -> Floats:
    """Return colours [n, 3] at local points [3, n]: plain, or two colours in stripes, bands, checks or dots."""
    hue, saturation, value, turn, second_value, pattern, scale, phase = body.texture
    low, high = (0.5, 0.9) if body.kind in SOLIDS else (0.1, 0.4)
    first = np.array(colorsys.hsv_to_rgb(hue, low + (high - low) * saturation, 0.65 + 0.35 * value), np.float32)
    second = np.array(colorsys.hsv_to_rgb((hue + 0.3 * turn) % 1, low, 0.3 + 0.6 * second_value), np.float32)
    x, y, z = points * np.float32(3 + 5 * scale) + np.float32(6.3 * phase)
    flat, index = np.float32(math.pi / 2), int(pattern * 5)
    u, v = ((np.full_like(x, -flat), flat), (x + z, flat), (y + z / 3, flat), (x, z), (x, y + z))[index]
    share = np.clip(np.float32(0.5) + np.float32(2.5) * np.sin(u) * np.sin(v) - (index == 4), 0, 1)
    colours: Floats = first + share[:, None] * (second - first)
    return colours


def write_coco_scenes(directory: Path, *, count: int, size: int, seed: int) -> Path:
    """Write `count` scenes of size x size pixels: DIRECTORY/annotations.json and DIRECTORY/images/*.png.

    Raises:
        DataError: the directory contains something else.
    """
    if directory.exists() and any(path.name not in ("annotations.json", "images") for path in directory.iterdir()):
        raise DataError(f"{directory} contains something else; give an empty directory")
    (directory / "images").mkdir(parents=True, exist_ok=True)
    images: list[dict[str, Any]] = []
    objects: list[dict[str, Any]] = []
    for number in range(count):
        scene = render_scene(seed, number, size)
        name = f"scene-{number:08d}.png"
        Image.fromarray(scene.image).save(directory / "images" / name)
        images.append({"id": number + 1, "file_name": name, "height": size, "width": size})
        objects += ({"image_id": number + 1, **entry} for entry in scene_objects(scene))
    categories = [{"id": number + 1, "name": name} for number, name in enumerate(SCENE_CLASSES)]
    annotations = [{"id": number + 1, **entry} for number, entry in enumerate(objects)]
    document = {"images": images, "annotations": annotations, "categories": categories}
    (directory / "annotations.json").write_text(json.dumps(document), encoding="utf-8")
    return directory


def scene_objects(scene: RenderedScene) -> list[dict[str, Any]]:
    """Return a COCO annotation of each object with at least 12 visible pixels."""
    objects = []
    for body in range(FIRST_SOLID, int(scene.bodies.max()) + 1):
        mask = scene.bodies == body
        if mask.sum() < 12:
            continue
        rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
        left, top, right, bottom = (int(edge) for edge in (columns[0], rows[0], columns[-1] + 1, rows[-1] + 1))
        shape = {"bbox": [left, top, right - left, bottom - top], "area": int(mask.sum()), "iscrowd": 0}
        segmentation = {"size": list(mask.shape), "counts": run_lengths(mask)}
        category = int(scene.segmentation[mask][0]) - FIRST_SOLID + 1
        objects.append({"category_id": category, **shape, "segmentation": segmentation})
    return objects


def run_lengths(mask: NDArray[np.bool_]) -> list[int]:
    """Return alternating run lengths of 0 and 1, column by column, starting with 0 (COCO's uncompressed RLE)."""
    flat = mask.ravel(order="F")
    changes = np.flatnonzero(np.diff(flat, prepend=False))
    lengths: list[int] = np.diff(changes, prepend=0, append=flat.size).tolist()
    return lengths
