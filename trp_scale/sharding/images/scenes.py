"""Synthetic scenes for runs without downloads: solids on a textured ground, with exact depth, segmentation and normals.

Rendered by casting rays with numpy: occlusion, one sun with shadows, patterns, highlights, varied cameras. The class of
a scene is the kind of its main object, the one with the largest visible area; its hue hints at it (each hue is that of
two kinds), since a network of a tiny recipe cannot tell kinds by shape. They are toys: good for seeing a run learn and
for checking pipelines, never for a figure about real images.

A set of scenes can also be written with a box and an exact mask for each visible object, as a COCO file and a folder of
images.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt
from numpy.typing import NDArray
from PIL import Image

from trp_scale.errors import DataError
from trp_scale.sharding.images.scenes_layout import KINDS, SOLIDS, Floats, Hit, Scene, Solid, Surface, dot, draw_scene

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


WALL, GROUND, FIRST_SOLID = 0, 1, 2
"""Numbers of the bodies of a scene; its solids follow in their order."""

_SHADOW_GAP = np.float32(2e-3)
"""Metres above a surface where its shadow rays begin, so that rounding does not let it shade itself."""


class Seen(NamedTuple):
    """What each ray meets: body [n] (WALL, GROUND, FIRST_SOLID + place), t [n], unit normal [3, n]."""

    body: NDArray[np.uint8]
    t: Floats
    normal: Floats


def see(scene: Scene, directions: Floats) -> Seen:
    """The nearest body along camera + t * direction, directions [3, n] with z > 0: the wall ends every ray."""
    origins = np.broadcast_to(scene.camera[:, None], directions.shape)
    t = (np.float32(scene.wall) - scene.camera[2]) / directions[2]
    body = np.full(len(t), WALL, dtype=np.uint8)
    normal = np.zeros(directions.shape, dtype=np.float32)
    down = directions[1] < 0
    floor = np.where(down, -scene.camera[1] / np.where(down, directions[1], -1), np.float32(np.inf))
    first = floor < t
    t = np.where(first, floor, t)
    body[first] = GROUND
    normal[1], normal[2] = first, ~first * np.float32(-1)
    for number, solid in enumerate(scene.solids):
        rays = _near(solid, origins, directions)
        hit = _meet(solid, origins[:, rays], directions[:, rays])
        nearer = hit.t < t[rays]
        rays = rays[nearer]
        t[rays], body[rays] = hit.t[nearer], FIRST_SOLID + number
        across = solid.rotation @ (hit.normal[:, nearer] / solid.size[:, None])
        normal[:, rays] = across / np.sqrt(dot(across, across))
    return Seen(body, t, normal)


def _near(solid: Solid, origins: Floats, directions: Floats) -> NDArray[np.intp]:
    """Rays that pass through the sphere around a solid, [m]; origins, directions [3, n]."""
    to_centre = solid.centre[:, None] - origins
    along = dot(to_centre, directions)
    beyond = dot(to_centre, to_centre) - np.float32(solid.reach**2)
    return np.flatnonzero((along > 0) & (along * along > dot(directions, directions) * beyond))


def _meet(solid: Solid, origins: Floats, directions: Floats) -> Hit:
    """The hit in the solid's own space."""
    into = solid.rotation.T / solid.size[:, None]  # [3, 3]
    return SOLIDS[solid.kind](into @ (origins - solid.centre[:, None]), into @ directions)


def shade(scene: Scene, directions: Floats, seen: Seen) -> Floats:
    """Linear light [3, n] that comes back along each ray: hemisphere sky, one sun with shadows, highlights."""
    points = scene.camera[:, None] + seen.t * directions  # [3, n]
    albedo, gloss = _albedo(scene, points, seen)
    facing = np.maximum(scene.sun @ seen.normal, 0)  # [n]
    lit = np.flatnonzero((facing > 0) & (seen.body != WALL))
    facing[lit] *= ~_in_shadow(scene, points[:, lit] + _SHADOW_GAP * seen.normal[:, lit])
    on_wall = seen.body == WALL
    facing[on_wall] = 0.55 + 0.04 * points[1, on_wall]  # evenly lit, a little brighter towards the top
    open_sky = (0.65 + 0.35 * seen.normal[1]) * _openness(scene, points, seen)
    light: Floats = albedo * (facing * scene.sun_colour[:, None] + open_sky * scene.sky_colour[:, None])
    shiny = np.flatnonzero((gloss > 0) & (facing > 0))
    view = directions[:, shiny]
    half = scene.sun[:, None] - view / np.sqrt(dot(view, view))
    cosine = np.maximum(dot(half, seen.normal[:, shiny]) / np.sqrt(dot(half, half)), 0)
    light[:, shiny] += gloss[shiny] * cosine**32 * scene.sun_colour[:, None]
    return light


def _in_shadow(scene: Scene, points: Floats) -> NDArray[np.bool_]:
    shadow = np.zeros(points.shape[1], dtype=np.bool_)
    towards = np.broadcast_to(scene.sun[:, None], points.shape)
    for solid in scene.solids:
        rays = _near(solid, points, towards)
        rays = rays[~shadow[rays]]
        shadow[rays] = np.isfinite(_meet(solid, points[:, rays], towards[:, rays]).t)
    return shadow


def _openness(scene: Scene, points: Floats, seen: Seen) -> Floats:
    """How much of the sky each point sees, [n]: the ground sees less of it close to where an object stands."""
    openness = np.ones(len(seen.t), dtype=np.float32)
    ground = np.flatnonzero(seen.body == GROUND)
    position = points[:, ground][[0, 2]]
    factor = np.ones(len(ground), dtype=np.float32)
    for solid in scene.solids:
        across = position - solid.centre[[0, 2], None]
        distance = np.sqrt(dot(across, across)) / np.float32(1.5 * solid.footprint)
        factor *= 1 - np.float32(0.6) * np.maximum(1 - distance, 0)
    openness[ground] = factor
    return openness


def _albedo(scene: Scene, points: Floats, seen: Seen) -> tuple[Floats, Floats]:
    """Colour [3, n] and gloss [n] of the surface at each point."""
    albedo = np.empty_like(points)
    gloss = np.zeros(len(seen.t), dtype=np.float32)
    surfaces = [scene.backdrop, scene.ground, *(solid.surface for solid in scene.solids)]
    for body, surface in enumerate(surfaces):
        rays = np.flatnonzero(seen.body == body)
        position = points[:, rays]
        if body >= FIRST_SOLID:
            solid = scene.solids[body - FIRST_SOLID]
            position = solid.rotation.T @ (position - solid.centre[:, None])
            gloss[rays] = surface.gloss
        albedo[:, rays] = _pattern(surface, position)
    # Far ground fades into one colour: its pattern would be finer than the pixels there.
    far = np.flatnonzero((seen.body == GROUND) & (seen.t > 4))
    mean = (scene.ground.first + scene.ground.second)[:, None] / 2
    albedo[:, far] += np.clip((seen.t[far] - 4) / 6, 0, 0.8) * (mean - albedo[:, far])
    return albedo, gloss


def _pattern(surface: Surface, position: Floats) -> Floats:
    """Colour [3, n] of a surface at place [3, n], metres."""
    first, second = surface.first[:, None], surface.second[:, None]
    if surface.pattern == "plain":
        return first
    x, y, z = position * np.float32(surface.scale) + surface.phase[:, None]
    if surface.pattern == "stripes":
        wave = np.sin(x + z)
    elif surface.pattern == "bands":
        wave = np.sin(y + np.float32(0.3) * z)
    elif surface.pattern == "checks":
        wave = np.sin(x) * np.sin(z) * np.where(np.sin(y) > 0, 1, -1).astype(np.float32)
    elif surface.pattern == "dots":
        wave = np.sin(x) * np.sin(y + z) - np.float32(0.45)
    else:
        wave = np.sin(x + 2 * np.sin(np.float32(0.7) * y + np.sin(z))) * np.float32(0.35)
    mixed: Floats = first + np.clip(np.float32(0.5) + np.float32(2.5) * wave, 0, 1) * (
        second - first
    )  # steep, not sharp
    return mixed


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
    samples = []
    for body in range(FIRST_SOLID, int(scene.bodies.max()) + 1):
        mask = scene.bodies == body
        if mask.sum() < FEWEST_PIXELS:
            continue
        lines, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
        left, top, right, bottom = columns[0], lines[0], columns[-1] + 1, lines[-1] + 1
        kind = SEGMENTATION_CLASSES[int(scene.segmentation[mask][0])]
        samples.append(
            {
                "category_id": SCENE_CLASSES.index(kind) + 1,
                "bbox": [int(left), int(top), int(right - left), int(bottom - top)],
                "area": int(mask.sum()),
                "iscrowd": 0,
                "segmentation": {"size": list(mask.shape), "counts": run_lengths(mask)},
            }
        )
    return samples


def run_lengths(mask: npt.NDArray[np.bool_]) -> list[int]:
    """Lengths of the runs of 0 and 1 in turn, column by column, beginning with 0 (COCO's uncompressed form)."""
    flat = mask.ravel(order="F")
    changes = np.flatnonzero(np.diff(flat, prepend=False))
    lengths: list[int] = np.diff(changes, prepend=0, append=flat.size).tolist()
    return lengths
