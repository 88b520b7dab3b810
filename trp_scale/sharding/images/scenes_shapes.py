"""Solids of the rendered scenes: where a ray first meets each, in closed form.

Every solid lies in its own space around the origin, within |x|, |y|, |z| <= 1. A ray is o + t d; `d` is not normalised,
so that t means the same here as in the world. All arrays are float32, and coordinates come first: loops over the rays
are long then, and short ones over the coordinates cost little.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

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
