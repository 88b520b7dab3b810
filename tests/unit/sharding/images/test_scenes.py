"""Rendered scenes are deterministic; image, depth, segmentation and class are consistent."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.grids import always
from trp_scale.sharding.images.scenes import (
    FIRST_SOLID,
    SCENE_CLASSES,
    SEGMENTATION_CLASSES,
    SMALLEST_SHARE,
    SOLIDS,
    RenderedScene,
    cross,
    draw_bodies,
    find_nearest,
    render_scene,
)

ROOT = Path(__file__).resolve().parents[4]
SIZE = 48
COUNT = 64


@pytest.fixture(scope="module")
def scenes() -> list[RenderedScene]:
    return [render_scene(0, number, SIZE) for number in range(COUNT)]


def inside(kind: str, p: np.ndarray) -> np.ndarray:
    """Whether points [3, n] are inside a solid, by its definition as a set, in float64."""
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
        "ring": (across <= 1) & (across >= 0.6) & slab,
    }[kind]


@pytest.mark.parametrize("kind", SOLIDS)
@pytest.mark.parametrize("turn", always([0.3, 2.0], 0.3))
def test_a_ray_meets_a_solid_where_it_first_enters_the_set(kind: str, turn: float) -> None:
    """Compare with ray marching from above, as for a camera that looks down."""
    generator = np.random.default_rng(1)
    direction = np.array([np.sin(turn) * 0.9, 0.43, np.cos(turn) * 0.9])
    origins = generator.uniform(-1.2, 1.2, size=(3, 400))
    steps = np.linspace(-3.5, 3.5, 7001)
    marched = np.full(400, -np.inf)
    for step in steps:
        marched[inside(kind, origins + step * direction[:, None])] = step
    t = cross(kind, origins.astype(np.float32), direction.astype(np.float32))
    assert 40 < np.isfinite(marched).sum() < 400
    assert (np.isfinite(marched) != np.isfinite(t)).sum() <= 6, "a ray may graze a corner between two steps"
    both = np.isfinite(marched) & np.isfinite(t)
    assert np.median(np.abs(t[both] - marched[both])) < 1e-3
    assert (np.abs(t[both] - marched[both]) < 3e-3).mean() > 0.97


def test_a_scene_follows_from_its_seed_and_number_alone(scenes: list[RenderedScene]) -> None:
    assert np.array_equal(render_scene(0, 5, SIZE).image, scenes[5].image)
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


def test_the_nearest_of_all_bodies_is_visible() -> None:
    """The depth buffer of a scene is the nearest of the buffers of its bodies, whatever their order."""
    for number in range(24):
        bodies = draw_bodies(3, number, 0)
        z, nearest = find_nearest(bodies, SIZE)
        alone = np.stack([find_nearest([body], SIZE)[0] for body in bodies])
        assert np.array_equal(z, alone.max(axis=0))
        assert np.array_equal(nearest, alone.argmax(axis=0))
        backwards, places = find_nearest(bodies[::-1], SIZE)
        assert np.array_equal(backwards, z)
        assert np.mean(len(bodies) - 1 - places == nearest) > 0.99, "bodies at the same depth may change"


def test_images_show_edges_where_the_segmentation_has_them(scenes: list[RenderedScene]) -> None:
    """The image changes more across object borders than elsewhere, unless the segmentation is shifted."""

    def contrast(scene: RenderedScene, shift: int) -> float:
        grey = scene.image.astype(float).mean(axis=2)
        across = np.abs(np.diff(grey, axis=1))
        border = np.roll(np.diff(scene.segmentation.astype(int), axis=1) != 0, shift, axis=1)
        return float(across[border].mean() / across.mean())

    aligned = np.mean([contrast(scene, 0) for scene in scenes])
    moved = np.mean([contrast(scene, 5) for scene in scenes])
    assert aligned > 1.5 * moved
