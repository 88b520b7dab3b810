"""Rendered scenes: the same each time, and image, depth, segmentation and class tell of the same objects."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from trp_scale.sharding.images.scenes import (
    FIRST_SOLID,
    GROUND,
    SCENE_CLASSES,
    SEGMENTATION_CLASSES,
    SMALLEST_SHARE,
    WALL,
    RenderedScene,
    render_scene,
    see,
)
from trp_scale.sharding.images.scenes_layout import RING_HOLE, SOLIDS, draw_scene

ROOT = Path(__file__).resolve().parents[4]
SIZE = 48
COUNT = 64


@pytest.fixture(scope="module")
def scenes() -> list[RenderedScene]:
    return [render_scene(0, number, SIZE) for number in range(COUNT)]


def inside(kind: str, p: np.ndarray) -> np.ndarray:
    """Whether points [3, n] lie in a solid, from its definition as a set, in float64."""
    x, y, z = p
    across = np.hypot(x, z)
    slab = np.abs(y) <= 1
    return {
        "sphere": x**2 + y**2 + z**2 <= 1,
        "box": np.abs(p).max(axis=0) <= 1,
        "cylinder": (across <= 1) & slab,
        "cone": (across <= (1 - y) / 2) & slab,
        "pyramid": (np.maximum(np.abs(x), np.abs(z)) <= (1 - y) / 2) & slab,
        "octahedron": np.abs(p).sum(axis=0) <= 1,
        "dome": (x**2 + ((y + 1) / 2) ** 2 + z**2 <= 1) & slab,
        "ring": (across <= 1) & (across >= RING_HOLE) & slab,
    }[kind]


@pytest.mark.parametrize("kind", SOLIDS)
def test_a_ray_meets_a_solid_where_it_first_enters_the_set(kind: str) -> None:
    """Against marching along the ray in small steps."""
    generator = np.random.default_rng(1)
    origins = generator.normal(size=(3, 400))
    origins *= 4 / np.linalg.norm(origins, axis=0)
    directions = generator.uniform(-1.3, 1.3, size=(3, 400)) - origins
    hit = SOLIDS[kind](origins.astype(np.float32), directions.astype(np.float32))
    steps = np.linspace(0, 2, 4001)
    marched = np.full(400, np.inf)
    for step in steps[::-1]:
        marched[inside(kind, origins + step * directions)] = step
    met = np.isfinite(marched)
    assert 60 < met.sum() < 400
    # A ray may graze a corner between two steps.
    assert (met != np.isfinite(hit.t)).sum() <= 6
    both = met & np.isfinite(hit.t)
    assert np.median(np.abs(hit.t[both] - marched[both])) < 5e-4
    assert (np.abs(hit.t[both] - marched[both]) < 2e-3).mean() > 0.97
    # The normal points out of the body: towards where the ray comes from, and out of the set.
    normals = hit.normal[:, both] / np.linalg.norm(hit.normal[:, both], axis=0)
    assert ((normals * directions[:, both]).sum(axis=0) < 1e-3).all()
    points = origins[:, both] + hit.t[both] * directions[:, both]
    assert inside(kind, points - 2e-3 * normals).mean() > 0.97
    assert not inside(kind, points + 2e-3 * normals).any()


def test_a_scene_follows_from_its_seed_and_number_alone(scenes: list[RenderedScene]) -> None:
    program = (
        "import hashlib; from trp_scale.sharding.images.scenes import render_scene; "
        f"s = render_scene(0, 5, {SIZE}); "
        "print(hashlib.sha256(s.image.tobytes() + s.depth.tobytes() + s.segmentation.tobytes()).hexdigest())"
    )
    fresh = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    here = scenes[5].image.tobytes() + scenes[5].depth.tobytes() + scenes[5].segmentation.tobytes()
    assert fresh.stdout.strip() == hashlib.sha256(here).hexdigest()
    assert not np.array_equal(render_scene(1, 5, SIZE).image, scenes[5].image)
    assert len({scene.image.tobytes() for scene in scenes}) == COUNT


def test_the_class_is_the_kind_with_the_largest_visible_area_and_all_are_balanced(scenes: list[RenderedScene]) -> None:
    assert len(SCENE_CLASSES) >= 6
    assert np.bincount([scene.label for scene in scenes]).tolist() == [COUNT // len(SCENE_CLASSES)] * len(SCENE_CLASSES)
    for scene in scenes:
        areas = np.bincount(scene.bodies.ravel(), minlength=FIRST_SOLID + 1)
        main = int(areas[FIRST_SOLID:].argmax()) + FIRST_SOLID
        assert areas[main] >= SMALLEST_SHARE * SIZE * SIZE
        kinds = np.unique(scene.segmentation[scene.bodies == main])
        assert [SEGMENTATION_CLASSES[kind] for kind in kinds] == [SCENE_CLASSES[scene.label]]


def test_objects_are_nearer_than_what_they_hide(scenes: list[RenderedScene]) -> None:
    """The depth of the empty scene at the same pixels is further away, and equal where no object is."""
    for number, scene in enumerate(scenes):
        solid = scene.segmentation >= 2
        assert np.array_equal(solid, scene.bodies >= FIRST_SOLID)
        assert scene.depth.min() > 0
        # Wall above ground: seen from above the ground, their depths are those of two planes.
        rows = np.arange(SIZE)
        for body in (WALL, GROUND):
            mask = scene.bodies == body
            depths = [scene.depth[row][mask[row]] for row in rows if mask[row].any()]
            assert all(np.ptp(each.astype(int)) <= 1 for each in depths), f"scene {number}: a row of a plane is level"
            means = [each.mean() for each in depths]
            falling = np.diff(means) <= 1
            assert falling.all() or body == WALL
        for column in range(SIZE):
            ground = scene.depth[:, column][scene.bodies[:, column] == GROUND].astype(int)
            assert (np.diff(ground) <= 0).all(), "the ground comes nearer from top to bottom"


def test_the_nearest_of_all_bodies_is_seen() -> None:
    """A scene is its objects seen one at a time, the nearest at each ray; and t is the depth along the axis."""
    generator = np.random.default_rng(0)
    for number in range(24):
        scene = draw_scene(3, number, 0)
        directions = np.stack(
            [generator.uniform(-0.4, 0.4, 900), generator.uniform(-0.7, 0.2, 900), np.ones(900)]
        ).astype(np.float32)
        seen = see(scene, directions)
        alone = [see(replace(scene, solids=(solid,)), directions) for solid in scene.solids]
        empty = see(replace(scene, solids=()), directions)
        depths = np.stack([empty.t, *(each.t for each in alone)])
        nearest = depths.argmin(axis=0)
        assert np.array_equal(seen.t, depths.min(axis=0))
        hidden = nearest > 0
        assert np.array_equal(seen.body[hidden], nearest[hidden] + FIRST_SOLID - 1)
        assert np.array_equal(seen.body[~hidden], empty.body[~hidden])
        for place, solid in enumerate(scene.solids):
            points = scene.camera[:, None] + seen.t * directions
            of_it = seen.body == FIRST_SOLID + place
            distance = np.linalg.norm(points[:, of_it] - solid.centre[:, None], axis=0)
            assert (distance <= solid.reach + 1e-3).all()
            assert solid.centre[1] - solid.reach < points[1].max()
            assert (points[1, of_it] >= -1e-3).all(), "objects stand on the ground"
        assert np.allclose(np.linalg.norm(seen.normal, axis=0), 1, atol=1e-5)
        assert ((seen.normal * directions).sum(axis=0) < 1e-4).all(), "normals face the camera"


def test_images_show_edges_where_the_segmentation_has_them(scenes: list[RenderedScene]) -> None:
    """Alignment: the image changes more across the borders of objects than elsewhere; moved by pixels, it does not."""

    def contrast(scene: RenderedScene, shift: int) -> float:
        grey = scene.image.astype(float).mean(axis=2)
        across = np.abs(np.diff(grey, axis=1))
        border = np.roll(np.diff(scene.segmentation.astype(int), axis=1) != 0, shift, axis=1)
        return float(across[border].mean() / across.mean())

    aligned = np.mean([contrast(scene, 0) for scene in scenes])
    moved = np.mean([contrast(scene, 5) for scene in scenes])
    assert aligned > 1.5 * moved
