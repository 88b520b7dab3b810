"""Layout and light of a scene, drawn from (seed, number) by hashing, never by a generator; and its solids: where a ray
first meets each, in closed form.

Every solid lies in its own space around the origin, within |x|, |y|, |z| <= 1. A ray is o + t d; `d` is not normalised,
so that t means the same here as in the world. All arrays are float32, and coordinates come first: loops over the rays
are long then, and short ones over the coordinates cost little.
"""

from __future__ import annotations

import colorsys
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from trp_scale.data.hashing import mix_integer, stream

Floats = NDArray[np.floating[Any]]

RING_HOLE = 0.6
"""Radius of the hole of a ring whose outer radius is 1."""

_SMALLEST = np.float32(1e-9)
_INFINITE = np.float32(np.inf)


def dot(first: Floats, second: Floats) -> Floats:
    """Products of columns, [n]; first, second [k, n]."""
    product: Floats = np.einsum("kn,kn->n", first, second)
    return product


class Hit(NamedTuple):
    """First meeting of each ray with a solid: t [n], inf where there is none; outward normal [3, n], not normalised."""

    t: Floats
    normal: Floats


class Interval(NamedTuple):
    """The part of each ray inside a convex body: t of entry and exit [n] (none if entry > exit), normal [3, n]."""

    entry: Floats
    exit: Floats
    normal: Floats


def _half_spaces(o: Floats, d: Floats, normals: Floats, offsets: Floats) -> Interval:
    """Inside all of normal . p <= offset. o, d [3, n], normals [k, 3], offsets [k]."""
    speed = normals @ d  # [k, n]
    speed[np.abs(speed) < _SMALLEST] = _SMALLEST
    t = (offsets[:, None] - normals @ o) / speed  # [k, n]
    entering = np.where(speed < 0, t, -_INFINITE)
    face = entering.argmax(axis=0)
    return Interval(entering.max(axis=0), np.where(speed > 0, t, _INFINITE).min(axis=0), normals[face].T)


def _roots(a: Floats, half_b: Floats, c: Floats) -> tuple[Floats, Floats]:
    """Both roots of a t^2 + 2 half_b t + c, the smaller first; (inf, -inf) where there is none."""
    discriminant = half_b * half_b - a * c
    some = discriminant > 0
    root = np.sqrt(np.maximum(discriminant, 0))
    a = np.where(np.abs(a) < _SMALLEST, _SMALLEST, a)
    first, second = (-half_b - root) / a, (-half_b + root) / a
    low, high = np.minimum(first, second), np.maximum(first, second)
    return np.where(some, low, _INFINITE), np.where(some, high, -_INFINITE)


def _round(o: Floats, d: Floats, axes: list[int], radius: float = 1.0) -> Interval:
    """A sphere (three axes) or an endless upright cylinder (x and z) around the origin."""
    o, d = o[axes], d[axes]
    low, high = _roots(dot(d, d), dot(o, d), dot(o, o) - np.float32(radius * radius))
    normal = np.zeros((3, d.shape[1]), dtype=np.float32)
    normal[axes] = o + np.where(np.isfinite(low), low, 0) * d
    return Interval(low, high, normal)


def _both(first: Interval, second: Interval) -> Interval:
    """What is inside both."""
    later = second.entry > first.entry
    return Interval(
        np.where(later, second.entry, first.entry),
        np.minimum(first.exit, second.exit),
        np.where(later, second.normal, first.normal),
    )


def _hit(inside: Interval) -> Hit:
    """Where the ray enters. A ray that begins inside, or behind the body, does not meet it."""
    return Hit(np.where((inside.entry < inside.exit) & (inside.entry > 0), inside.entry, _INFINITE), inside.normal)


def _planes(*planes: tuple[float, float, float, float]) -> tuple[Floats, Floats]:
    table = np.array(planes, dtype=np.float32)
    return table[:, :3], table[:, 3]


_BOX = _planes((1, 0, 0, 1), (-1, 0, 0, 1), (0, 1, 0, 1), (0, -1, 0, 1), (0, 0, 1, 1), (0, 0, -1, 1))
_PYRAMID = _planes((0, -1, 0, 1), (2, 1, 0, 1), (-2, 1, 0, 1), (0, 1, 2, 1), (0, 1, -2, 1))
_OCTAHEDRON = _planes(*((x, y, z, 1) for x in (1, -1) for y in (1, -1) for z in (1, -1)))
_SLAB = _planes((0, 1, 0, 1), (0, -1, 0, 1))
_UPPER = _planes((0, -1, 0, 0))


def _box(o: Floats, d: Floats) -> Hit:
    return _hit(_half_spaces(o, d, *_BOX))


def _pyramid(o: Floats, d: Floats) -> Hit:
    return _hit(_half_spaces(o, d, *_PYRAMID))


def _octahedron(o: Floats, d: Floats) -> Hit:
    return _hit(_half_spaces(o, d, *_OCTAHEDRON))


def _sphere(o: Floats, d: Floats) -> Hit:
    return _hit(_round(o, d, [0, 1, 2]))


def _dome(o: Floats, d: Floats) -> Hit:
    """The upper half of a sphere, stretched to the height of the others."""
    stretch = np.array([[1], [0.5], [1]], dtype=np.float32)
    raised = o * stretch + np.array([[0], [0.5], [0]], dtype=np.float32)
    slow = d * stretch
    inside = _both(_round(raised, slow, [0, 1, 2]), _half_spaces(raised, slow, *_UPPER))
    return _hit(inside._replace(normal=inside.normal * stretch))


def _cylinder(o: Floats, d: Floats) -> Hit:
    return _hit(_both(_round(o, d, [0, 2]), _half_spaces(o, d, *_SLAB)))


def _ring(o: Floats, d: Floats) -> Hit:
    """A cylinder with a hole: where the entry lies over the hole, the ray meets the wall on the hole's far side."""
    outer = _both(_round(o, d, [0, 2]), _half_spaces(o, d, *_SLAB))
    hole = _round(o, d, [0, 2], RING_HOLE)
    over = (outer.entry > hole.entry) & (outer.entry < hole.exit)
    t = np.where(over, hole.exit, outer.entry)
    met = (outer.entry < outer.exit) & (t < outer.exit) & (t > 0)
    inward = -(o + np.where(over, t, 0) * d)
    inward[1] = 0
    return Hit(np.where(met, t, _INFINITE), np.where(over, inward, outer.normal))


def _cone(o: Floats, d: Floats) -> Hit:
    """Tip at y = 1, a disc of radius 1 at y = -1."""
    across, along = o[[0, 2]], d[[0, 2]]
    height, fall = (1 - o[1]) / 2, -d[1] / 2
    a, half_b = dot(along, along) - fall * fall, dot(across, along) - height * fall
    c = dot(across, across) - height * height
    nearest = np.full(d.shape[1], _INFINITE)
    for t in _roots(a, half_b, c):
        y = o[1] + np.where(np.isfinite(t), t, 0) * d[1]
        side = np.isfinite(t) & (t > 0) & (np.abs(y) <= 1)
        nearest = np.where(side, np.minimum(nearest, t), nearest)
    normal = o + np.where(np.isfinite(nearest), nearest, 0) * d
    normal[1] = (1 - normal[1]) / 4
    upward = d[1] > _SMALLEST  # only then the base can be met first
    base = np.where(upward, (-1 - o[1]) / np.where(upward, d[1], 1), 0)
    position = across + base * along
    on_disc = (base > 0) & (base < nearest) & (dot(position, position) <= 1)
    normal[:, on_disc] = [[0], [-1], [0]]
    return Hit(np.where(on_disc, base, nearest), normal)


SOLIDS: dict[str, Callable[[Floats, Floats], Hit]] = {
    "sphere": _sphere,
    "box": _box,
    "cylinder": _cylinder,
    "cone": _cone,
    "pyramid": _pyramid,
    "octahedron": _octahedron,
    "dome": _dome,
    "ring": _ring,
}
"""By name: (o [3, n], d [3, n]) -> Hit. The place of a name is its class number."""


KINDS = tuple(SOLIDS)

PATTERNS = ("plain", "stripes", "checks", "dots", "marble", "bands")


@dataclass(frozen=True, kw_only=True)
class Surface:
    """Two colours (linear light, [3] each) and the pattern that they make.

    Attributes:
        scale: radians of the pattern per metre.
        phase: [3] radians.
        gloss: strength of the highlight.
    """

    pattern: str
    first: Floats
    second: Floats
    scale: float
    phase: Floats
    gloss: float


@dataclass(frozen=True, kw_only=True)
class Solid:
    """One object. Local space -> world: rotation @ (size * p) + centre.

    Attributes:
        kind: name in SOLIDS.
        centre: [3] metres.
        size: [3] metres, half the extent along each local axis.
        rotation: [3, 3].
        reach: radius in metres of the sphere around the centre that holds it.
        footprint: radius in metres of the circle on the ground that holds it.
    """

    kind: str
    centre: Floats
    size: Floats
    rotation: Floats
    reach: float
    footprint: float
    surface: Surface


@dataclass(frozen=True, kw_only=True)
class Scene:
    """A scene: x to the right, y up, z away from the camera, metres; the ground is y = 0, the wall z = `wall`.

    Attributes:
        solids: the main one first.
        camera: [3] position.
        pitch: radians that the camera looks down.
        slope: tangent of half the field of view.
        sun: [3] unit vector towards the light; `sun_colour`, `sky_colour` [3] linear light.
    """

    solids: tuple[Solid, ...]
    ground: Surface
    backdrop: Surface
    wall: float
    camera: Floats
    pitch: float
    slope: float
    sun: Floats
    sun_colour: Floats
    sky_colour: Floats


class _Draws:
    """Numbers that follow from (seed, number, attempt) alone."""

    def __init__(self, seed: int, number: int, attempt: int) -> None:
        self._state = stream(seed, "scene", number, attempt)
        self._count = 0

    def between(self, low: float, high: float) -> float:
        self._count += 1
        return low + (high - low) * mix_integer(self._state ^ self._count) / 2.0**64

    def choose(self, names: tuple[str, ...]) -> str:
        return names[int(self.between(0, len(names)))]


def draw_scene(seed: int, number: int, attempt: int) -> Scene:
    """The scene of (seed, number); a later attempt is another one with the same main kind and fewer other objects."""
    draws = _Draws(seed, number, attempt)
    slope = math.tan(math.radians(draws.between(19, 27)))
    camera = _vector(0.0, draws.between(1.0, 2.3), 0.0)
    aim = draws.between(0.45, 0.75)  # height in metres that the camera looks at, at the main object's distance
    distance = draws.between(3.3, 4.6)
    pitch = math.atan2(float(camera[1]) - aim, distance)
    radius = draws.between(0.5, 0.72) * slope * distance
    x = draws.between(-0.4, 0.4) * slope * distance
    solids = [_solid(draws, KINDS[number % len(KINDS)], x, distance, radius)]
    wall = draws.between(8.5, 12.5)
    for _ in range(max(0, int(draws.between(2, 7)) - attempt)):
        z = draws.between(2.9, wall - 1.2)
        other = _solid(draws, draws.choose(KINDS), draws.between(-1, 1) * slope * z, z, draws.between(0.28, 0.7))
        if all(_is_apart(other, solid) for solid in solids):
            solids.append(other)
    azimuth, elevation = draws.between(-2.6, 2.6), draws.between(0.45, 1.2)  # 0: the sun is behind the camera
    warmth = draws.between(-0.12, 0.18)
    strength = draws.between(0.75, 1.15)
    return Scene(
        solids=tuple(solids),
        ground=_surface(draws, 0.5, 2.6, saturation=0.45, gloss=0.0),
        backdrop=_surface(draws, 0.3, 1.6, saturation=0.4, gloss=0.0),
        wall=wall,
        camera=camera,
        pitch=pitch,
        slope=slope,
        sun=_vector(
            math.sin(azimuth) * math.cos(elevation), math.sin(elevation), -math.cos(azimuth) * math.cos(elevation)
        ),
        sun_colour=_vector(1 + warmth, 1.0, 1 - warmth) * np.float32(strength),
        sky_colour=_vector(1 - warmth, 1.0, 1 + warmth) * np.float32(draws.between(0.3, 0.5)),
    )


def _solid(draws: _Draws, kind: str, x: float, z: float, radius: float) -> Solid:
    """An object that stands on the ground. Round ones keep a round cross-section."""
    wide, tall, deep = draws.between(0.75, 1.1), draws.between(0.7, 1.25), draws.between(0.75, 1.1)
    if kind == "sphere":
        tall = deep = wide
    elif kind in ("cylinder", "cone", "ring", "dome", "octahedron"):
        deep = wide
    if kind in ("dome", "ring"):
        tall *= 0.6
    if kind in ("box", "cylinder"):  # they fill their bounds
        radius *= 0.8
    size = _vector(wide, tall, deep) * np.float32(radius)
    upright = kind == "ring" and draws.between(0, 1) < 0.7
    turn = draws.between(-1, 1) if upright else draws.between(0, 2 * math.pi)  # one sees the hole of a ring
    rotation = np.array(
        [[math.cos(turn), 0, math.sin(turn)], [0, 1, 0], [-math.sin(turn), 0, math.cos(turn)]], dtype=np.float32
    )
    centre = _vector(x, float(size[1]), z)
    if upright:
        rotation = rotation @ np.array([[1, 0, 0], [0, 0, -1], [0, 1, 0]], dtype=np.float32)
        centre = _vector(x, float(size[2]), z)
    corners = {"box": (1, 1, 1), "pyramid": (1, 1, 1), "sphere": (1, 0, 0), "octahedron": (0, 1, 0)}
    flat = _vector(*corners.get(kind, (1, 1, 0))) * size
    reach = max(float(np.linalg.norm(flat)), float(size.max()))
    square = kind in ("box", "pyramid")
    return Solid(
        kind=kind,
        centre=centre,
        size=size,
        rotation=rotation,
        reach=reach * 1.001,
        footprint=math.hypot(float(size[0]), float(size[2])) if square else float(size.max()),
        surface=_surface(draws, 5.0, 14.0, saturation=0.85, gloss=0.35, kind=kind),
    )


def _is_apart(first: Solid, second: Solid) -> bool:
    """Whether two objects do not touch on the ground."""
    across, along = first.centre[0] - second.centre[0], first.centre[2] - second.centre[2]
    return math.hypot(float(across), float(along)) > first.footprint + second.footprint


def _surface(
    draws: _Draws, fine: float, coarse: float, *, saturation: float, gloss: float, kind: str | None = None
) -> Surface:
    """A surface of any first colour; the first hue of an object hints at its kind."""
    hue = draws.between(0, 1)
    least = 0.15
    if kind is not None:
        hue, least = (KINDS.index(kind) + 2 * hue) / len(KINDS), 0.4
    first = _colour(hue, draws.between(least, saturation), draws.between(0.45, 0.95))
    second = _colour(hue + draws.between(-0.5, 0.5), draws.between(0.05, saturation), draws.between(0.2, 0.95))
    return Surface(
        pattern=draws.choose(PATTERNS),
        first=first,
        second=second,
        scale=draws.between(fine, coarse),
        phase=_vector(draws.between(0, 6.3), draws.between(0, 6.3), draws.between(0, 6.3)),
        gloss=draws.between(0, gloss),
    )


def _colour(hue: float, saturation: float, value: float) -> Floats:
    """A colour in linear light, gamma 2."""
    return np.square(_vector(*colorsys.hsv_to_rgb(hue % 1.0, saturation, value)))


def _vector(x: float, y: float, z: float) -> Floats:
    return np.array([x, y, z], dtype=np.float32)
