"""What rays see in a scene: the nearest surface of each, and the light that it sends back."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from trp_scale.preparation.images.scenes_layout import Scene, Solid, Surface
from trp_scale.preparation.images.scenes_shapes import SOLIDS, Floats, Hit, dot

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
    for place, solid in enumerate(scene.solids):
        rays = _near(solid, origins, directions)
        hit = _meet(solid, origins[:, rays], directions[:, rays])
        nearer = hit.t < t[rays]
        rays = rays[nearer]
        t[rays], body[rays] = hit.t[nearer], FIRST_SOLID + place
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
    place = points[:, ground][[0, 2]]
    factor = np.ones(len(ground), dtype=np.float32)
    for solid in scene.solids:
        across = place - solid.centre[[0, 2], None]
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
        place = points[:, rays]
        if body >= FIRST_SOLID:
            solid = scene.solids[body - FIRST_SOLID]
            place = solid.rotation.T @ (place - solid.centre[:, None])
            gloss[rays] = surface.gloss
        albedo[:, rays] = _pattern(surface, place)
    # Far ground fades into one colour: its pattern would be finer than the pixels there.
    far = np.flatnonzero((seen.body == GROUND) & (seen.t > 4))
    mean = (scene.ground.first + scene.ground.second)[:, None] / 2
    albedo[:, far] += np.clip((seen.t[far] - 4) / 6, 0, 0.8) * (mean - albedo[:, far])
    return albedo, gloss


def _pattern(surface: Surface, place: Floats) -> Floats:
    """Colour [3, n] of a surface at place [3, n], metres."""
    first, second = surface.first[:, None], surface.second[:, None]
    if surface.pattern == "plain":
        return first
    x, y, z = place * np.float32(surface.scale) + surface.phase[:, None]
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
