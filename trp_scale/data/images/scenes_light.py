"""What rays see in a scene: the nearest surface of each, and the light that it sends back."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from trp_scale.data.images.scenes_layout import Scene, Solid, Surface
from trp_scale.data.images.scenes_shapes import SOLIDS, Floats, Hit

WALL, GROUND, FIRST_SOLID = 0, 1, 2
"""Numbers of the bodies of a scene; its solids follow in their order."""

_SHADOW_GAP = np.float32(2e-3)
"""Metres above a surface where its shadow rays begin, so that rounding does not let it shade itself."""


class Seen(NamedTuple):
    """Of each ray: body [n] (WALL, GROUND, FIRST_SOLID + place), t [n], unit normal [n, 3]."""

    body: NDArray[np.uint8]
    t: Floats
    normal: Floats


def see(scene: Scene, directions: Floats) -> Seen:
    """The nearest body along camera + t * direction, directions [n, 3] with z > 0: the wall ends every ray."""
    t = (np.float32(scene.wall) - scene.camera[2]) / directions[:, 2]
    body = np.full(len(t), WALL, dtype=np.uint8)
    normal = np.zeros((len(t), 3), dtype=np.float32)
    normal[:, 2] = -1
    down = directions[:, 1] < 0
    floor = np.where(down, -scene.camera[1] / np.where(down, directions[:, 1], -1), np.inf)
    first = floor < t
    t = np.where(first, floor, t).astype(np.float32)
    body[first], normal[first] = GROUND, (0, 1, 0)
    for place, solid in enumerate(scene.solids):
        rays = _near(solid, scene.camera[None], directions)
        hit = _meet(solid, scene.camera[None], directions[rays])
        nearer = hit.t < t[rays]
        rays = rays[nearer]
        t[rays], body[rays] = hit.t[nearer], FIRST_SOLID + place
        across = (hit.normal[nearer] / solid.size) @ solid.rotation.T
        normal[rays] = across / np.linalg.norm(across, axis=1, keepdims=True)
    return Seen(body, t, normal)


def _near(solid: Solid, origins: Floats, directions: Floats) -> NDArray[np.intp]:
    """Rays that pass through the sphere around a solid, [m]; origins [n or 1, 3], directions [n, 3]."""
    to_centre = solid.centre - origins
    along = (to_centre * directions).sum(1)
    squared = (directions * directions).sum(1)
    beyond = (to_centre * to_centre).sum(1) - np.float32(solid.reach**2)
    return np.flatnonzero((along > 0) & (along * along > squared * beyond))


def _meet(solid: Solid, origins: Floats, directions: Floats) -> Hit:
    """The hit in the solid's own space."""
    local_origins = (origins - solid.centre) @ solid.rotation / solid.size
    return SOLIDS[solid.kind](local_origins, directions @ solid.rotation / solid.size)


def shade(scene: Scene, directions: Floats, seen: Seen) -> Floats:
    """Linear light [n, 3] that comes back along each ray: hemisphere sky, one sun with shadows, highlights."""
    points = scene.camera + seen.t[:, None] * directions  # [n, 3]
    albedo, gloss = _albedo(scene, points, seen)
    facing = np.maximum(seen.normal @ scene.sun, 0)  # [n]
    lit = np.flatnonzero((facing > 0) & (seen.body != WALL))
    facing[lit] *= ~_in_shadow(scene, points[lit] + _SHADOW_GAP * seen.normal[lit])
    on_wall = seen.body == WALL
    facing[on_wall] = 0.55 + 0.04 * points[on_wall, 1]  # evenly lit, a little brighter towards the top
    open_sky = (0.65 + 0.35 * seen.normal[:, 1]) * _openness(scene, points, seen)
    light = albedo * (facing[:, None] * scene.sun_colour + open_sky[:, None] * scene.sky_colour)
    shiny = np.flatnonzero((gloss > 0) & (facing > 0))
    view = -directions[shiny] / np.linalg.norm(directions[shiny], axis=1, keepdims=True)
    half = view + scene.sun
    half /= np.linalg.norm(half, axis=1, keepdims=True)
    cosine = np.maximum((half * seen.normal[shiny]).sum(1), 0)
    light[shiny] += (gloss[shiny] * cosine**32)[:, None] * scene.sun_colour
    return light


def _in_shadow(scene: Scene, points: Floats) -> NDArray[np.bool_]:
    shadow = np.zeros(len(points), dtype=np.bool_)
    towards = np.broadcast_to(scene.sun, points.shape)
    for solid in scene.solids:
        rays = _near(solid, points, towards)
        rays = rays[~shadow[rays]]
        shadow[rays] = np.isfinite(_meet(solid, points[rays], towards[rays]).t)
    return shadow


def _openness(scene: Scene, points: Floats, seen: Seen) -> Floats:
    """How much of the sky the ground sees, [n]: less of it close to where an object stands."""
    openness = np.ones(len(points), dtype=np.float32)
    ground = np.flatnonzero(seen.body == GROUND)
    place = points[ground][:, [0, 2]]
    factor = np.ones(len(ground), dtype=np.float32)
    for solid in scene.solids:
        across = place - solid.centre[[0, 2]]
        distance = np.sqrt((across * across).sum(1)) / np.float32(1.5 * solid.footprint)
        factor *= 1 - np.float32(0.6) * np.maximum(1 - distance, 0)
    openness[ground] = factor
    return openness


def _albedo(scene: Scene, points: Floats, seen: Seen) -> tuple[Floats, Floats]:
    """Colour [n, 3] and gloss [n] of the surface at each point."""
    albedo = np.empty_like(points)
    gloss = np.zeros(len(points), dtype=np.float32)
    surfaces = [scene.backdrop, scene.ground, *(solid.surface for solid in scene.solids)]
    for body, surface in enumerate(surfaces):
        rays = np.flatnonzero(seen.body == body)
        place = points[rays]
        if body >= FIRST_SOLID:
            solid = scene.solids[body - FIRST_SOLID]
            place = (place - solid.centre) @ solid.rotation
            gloss[rays] = surface.gloss
        albedo[rays] = _pattern(surface, place)
    # Far ground fades into one colour: its pattern would be finer than the pixels there.
    far = np.flatnonzero(seen.body == GROUND)
    mean = (scene.ground.first + scene.ground.second) / 2
    fade = np.clip((seen.t[far] - 4) / 6, 0, 0.8)[:, None]
    albedo[far] += fade * (mean - albedo[far])
    return albedo, gloss


def _pattern(surface: Surface, place: Floats) -> Floats:
    """Colour of a surface at place [n, 3], metres."""
    if surface.pattern == "plain":
        return np.broadcast_to(surface.first, place.shape)
    x, y, z = (place * np.float32(surface.scale) + surface.phase).T
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
    share = np.clip(np.float32(0.5) + np.float32(2.5) * wave, 0, 1)[:, None]  # steep, not sharp
    return surface.first + share * (surface.second - surface.first)
