"""Surface normals: stored and read back, mirrored, their losses against plain arithmetic in float64, those of rendered
scenes against geometry, and a run with four tasks from shards to pictures."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from PIL import Image

from tests.runs import image_flags, lines, pretrain_here
from tests.unit.data.images.stored import jpeg, write_images
from trp_scale.config.run_flags import parse
from trp_scale.data.images.formats import read_png, write_png
from trp_scale.data.images.maps import StoredMaps
from trp_scale.evaluation.figures.pictures import draw_pictures
from trp_scale.pretraining.base import open_sources
from trp_scale.pretraining.modalities.normals import Normals, stored_normals
from trp_scale.pretraining.modalities.settings import NormalsSettings
from trp_scale.sharding.images.scenes import (
    HALF_WIDTH,
    RenderedScene,
    render_scene,
)
from trp_scale.sharding.images.settings import ShardImagesConfig
from trp_scale.sharding.images.shard import shard_images

STORED = StoredMaps(name="normals", suffix="normals.png", directory="shards")
FOUR = ["rgb", "depth", "semseg", "normals"]
Float64 = npt.NDArray[np.float64]


def modality(loss: str = "cosine") -> Normals:
    return Normals(NormalsSettings(loss=loss), 4)  # type: ignore[arg-type]


def directions(*shape: int, seed: int = 0) -> Float64:
    """Random unit vectors [*shape, 3]; some of them are along an axis, some unknown."""
    random = np.random.default_rng(seed)
    vectors = random.normal(size=(*shape, 3))
    vectors /= np.linalg.norm(vectors, axis=-1, keepdims=True)
    flat = vectors.reshape(-1, 3)
    flat[:6] = np.concatenate([np.eye(3), -np.eye(3)])
    flat[6:12] = np.nan
    return vectors


# What is stored


@pytest.mark.parametrize(("bits", "degrees"), [(8, 0.4), (16, 0.002)])
def test_stored_normals_are_read_with_length_one(bits: int, degrees: float) -> None:
    normals = directions(16, 20)
    numbers = read_png(write_png(stored_normals(normals, bits)))
    found = modality().standardise(numbers, STORED, mirrored=False)
    unknown = np.isnan(normals).any(-1)
    assert found.dtype == np.float32 and (np.isnan(found) == unknown[..., None]).all() and unknown.sum() == 6
    own = found[~unknown].astype(np.float64)
    np.testing.assert_allclose(np.linalg.norm(own, axis=-1), 1, atol=2e-7)
    angles = np.arctan2(np.linalg.norm(np.cross(own, normals[~unknown]), axis=-1), (own * normals[~unknown]).sum(-1))
    assert np.rad2deg(angles).max() < degrees
    shares = numbers[~unknown].astype(np.float64) / (2**bits - 1) * 2 - 1
    np.testing.assert_allclose(own, shares / np.linalg.norm(shares, axis=-1, keepdims=True), atol=2e-7)


def test_crops_of_a_batch_are_mirrored_with_their_image(tmp_path: Path) -> None:
    """A slope that grows brighter to the right and faces left: in a mirrored crop it is the other way round."""
    slope = np.broadcast_to(np.array([-0.6, 0.0, 0.8]), (40, 40, 3))
    bright = np.broadcast_to(np.arange(40, dtype=np.uint8)[:, None] * 6, (40, 40, 3))
    contents = {"jpg": jpeg(Image.fromarray(bright.copy())), "normals.png": write_png(stored_normals(slope, 8))}
    rows = [{"__key__": f"n{number:05d}", **contents, "cls": b"0"} for number in range(16)]
    described = {"suffixes": ["jpg", "cls", "normals.png"], "modalities": {"normals": {}}}
    write_images(tmp_path / "data", [rows], changes=described)
    argv = image_flags("mm_mae_tiny", tmp_path / "data", tmp_path / "run", modalities__visible_tokens=4)
    argv += ["--modalities.inputs", "rgb", "normals", "--modalities.outputs", "normals", "--data.validation_fraction=0"]
    sides = set()
    for batch in open_sources(parse(argv).config, rank=0, world=1).train.next_window():
        rises = batch["images"][:, 0, 16, -4:].float().mean(1) - batch["images"][:, 0, 16, :4].float().mean(1)  # [R]
        across = batch["normals"][:, 0].mean((1, 2))
        assert (across.sign() == -rises.sign()).all() and torch.allclose(across.abs(), torch.tensor(0.6), atol=0.01)
        assert torch.allclose(batch["normals"][:, 2], torch.tensor(0.8), atol=0.01)
        assert (batch["normals_counts"] == 64).all() and batch["normals"].shape[1:] == (3, 32, 32)
        sides |= set(rises.sign().tolist())
    assert sides == {-1.0, 1.0}


# The loss


@pytest.mark.parametrize("loss", ["cosine", "l1"])
def test_losses_equal_plain_arithmetic(loss: str) -> None:
    true = directions(2, 3, 5, seed=1)  # [R, N, L, 3]
    guess = np.random.default_rng(2).normal(size=true.shape)
    expected = np.zeros((2, 3))
    for row, patch, place in np.ndindex(2, 3, 5):
        one, other = guess[row, patch, place], true[row, patch, place]
        if not np.isnan(other).any():
            cosine = one @ other / math.sqrt(one @ one)
            expected[row, patch] += 1 - cosine if loss == "cosine" else np.abs(one - other).mean()
    patches = torch.from_numpy(true).flatten(2)
    found = modality(loss).errors("normals", torch.from_numpy(guess).flatten(2), patches)
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-12)
    perfect = modality(loss).errors("normals", patches.nan_to_num(nan=7.0), patches)
    assert perfect.abs().max() < 1e-12


@pytest.mark.parametrize("loss", ["cosine", "l1"])
def test_gradients_are_finite_for_unknown_pixels_and_zero_predictions(loss: str) -> None:
    patches = torch.from_numpy(directions(1, 2, 8)).flatten(2)
    guess = torch.zeros_like(patches, requires_grad=True)
    modality(loss).errors("normals", guess, patches).sum().backward()  # type: ignore[no-untyped-call]
    assert guess.grad is not None and guess.grad.isfinite().all()
    assert (guess.grad[patches.isnan()] == 0).all() and guess.grad.any()


def test_the_plainest_guess_is_the_mean_direction() -> None:
    """No one direction has less loss of these patches (1 - cosine is linear in it)."""
    patches = torch.from_numpy(directions(2, 3, 4)).flatten(2)
    losses = [
        float(modality().errors("normals", guess, patches).sum())
        for guess in [
            modality().plainest("normals", torch.zeros_like(patches), patches),
            *(torch.from_numpy(one).repeat(4).expand_as(patches) for one in directions(50, seed=5)[12:]),
        ]
    ]
    assert losses[0] == min(losses)


# Rendered scenes


@pytest.fixture(scope="module")
def scenes() -> list[RenderedScene]:
    return [render_scene(0, number, 192) for number in range(12)]


def points(scene: RenderedScene) -> Float64:
    """Where each pixel's surface is in the camera's frame, [H, W, 3] metres, from its depth alone."""
    place = ((np.arange(len(scene.depth)) + 0.5) / len(scene.depth) * 2 - 1) * HALF_WIDTH
    across, down = np.meshgrid(place, place)
    depth = scene.depth.astype(np.float64) / scene.units_per_metre
    return np.stack([across, -down, -depth], axis=-1)


def test_normals_are_perpendicular_to_the_depth_surface(scenes: list[RenderedScene]) -> None:
    """Against the cross product of finite differences of depth, which is in whole millimetres: a hundredth of a radian
    in the middle, more beside the edges of a solid."""
    for number, scene in enumerate(scenes):
        place = points(scene)
        across, up = place[1:-1, 2:] - place[1:-1, :-2], place[:-2, 1:-1] - place[2:, 1:-1]
        upright = np.cross(across, up)
        upright /= np.linalg.norm(upright, axis=-1, keepdims=True)
        body = scene.bodies
        inner = np.logical_and.reduce(
            [body[1:-1, 1:-1] == other for other in (body[1:-1, 2:], body[1:-1, :-2], body[:-2, 1:-1], body[2:, 1:-1])]
        )
        own = scene.normals[1:-1, 1:-1].astype(np.float64)
        angles = np.arccos(np.clip((own * upright).sum(-1), -1, 1))[inner]
        assert np.median(angles) < 0.01 and np.quantile(angles, 0.9) < 0.06, number


# A run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five steps of minimax over four tasks, from rendered scenes."""
    directory = tmp_path_factory.mktemp("normals")
    scenes = ShardImagesConfig(
        output=directory / "scenes", embedded=True, count=48, size=32, rows_per_block=8, processes=1, progress=False
    )
    changes = {"training__steps": 5, "validation__every": 5, "data__validation_fraction": 0.2}
    argv = image_flags("mm_mae_tiny", shard_images(scenes), directory / "run", modalities__visible_tokens=16, **changes)
    argv += ["--modalities.inputs", *FOUR, "--modalities.outputs", *FOUR, "--balancer.alpha", "4"]
    assert pretrain_here(argv) == 0
    return directory / "run"


def test_four_tasks_pre_train_under_minimax(run: Path) -> None:
    steps = lines(run)
    assert [list(step["tasks"]) for step in steps] == [FOUR] * len(steps)
    losses = [step["tasks"]["normals"]["loss"] for step in steps]
    assert losses[-1] < losses[0] and all(0 < loss < 2 for loss in losses), "1 - cosine"
    weights = np.array([[task["weight"] for task in step["tasks"].values()] for step in steps])
    np.testing.assert_allclose(weights.sum(1), 1, rtol=1e-6)
    assert (weights > 0).all() and len(np.unique(weights[:, 3])) > 1


def test_pictures_show_normals(run: Path, tmp_path: Path) -> None:
    (line,) = draw_pictures(run, tmp_path, rows=2)
    assert "normals " in line
