"""Where masks lie: shares against maps that are known, and both sides of a division of the classes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.runs import Refused, image_flags, pretrain_here
from trp_scale.cli import main as cli
from trp_scale.evaluation.figures.masks_on_objects import MaskOverlap
from trp_scale.reporting.results import TaskResult, read_results
from trp_scale.sharding.images.scenes import SEGMENTATION_CLASSES, render_scene

GROUND = "wall,ground"
OBJECTS = ",".join(SEGMENTATION_CLASSES[2:])


@pytest.fixture(scope="module")
def run(image_dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("masks") / "run"
    changes = {"training__steps": 2, "multilevel__unroll": 1, "data__validation_fraction": 0.1}
    assert pretrain_here(image_flags("mlo_mae_tiny", image_dataset, directory, **changes)) == 0
    return directory


def measured(run: Path, data: Path, output: Path, background: str, *more: str) -> dict[str, TaskResult]:
    words = ["evaluate", "--run", str(run), "--data", str(data), "--background", background, "--output", str(output)]
    assert cli.main([*words, *more]) == 0
    return {task.task: task for task in read_results(output).tasks}


def test_shares_of_patches_that_are_known() -> None:
    """Void pixels are in no share, and an image without objects is in no average."""
    overlap = MaskOverlap()
    objects = torch.tensor([[1.0, 0.5, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]])
    valid = torch.tensor([[1.0, 1.0, 1.0, 0.0], [1.0, 1.0, 1.0, 1.0]])
    overlap.add(objects, valid, torch.tensor([[1, 2, 3], [0, 1, 2]]))
    assert overlap.on_objects == pytest.approx([0.25])
    assert overlap.of_objects == pytest.approx([1 / 3])
    assert overlap.by_chance == pytest.approx([0.5])
    assert overlap.left_out == 1


def test_masks_lie_on_objects_and_ground_together(run: Path, image_dataset: Path, tmp_path: Path) -> None:
    on_objects = measured(run, image_dataset, tmp_path / "objects", GROUND)
    on_ground = measured(run, image_dataset, tmp_path / "ground", OBJECTS)
    assert list(on_objects) == ["masks", "masks before the first lesson"]
    for name, task in on_objects.items():
        assert task.mean + on_ground[name].mean == pytest.approx(1.0, abs=1e-6)
        assert task.detail[0] == {"images": 96, "images_left_out": 0, "masked": 12, "patches": 16}
        assert not task.judged
    rendered = [render_scene(0, number, 32).segmentation >= 2 for number in range(96)]
    assert on_objects["masks"].metrics["by_chance"][0] == pytest.approx(np.mean(rendered), abs=1e-6)


def test_random_masks_lie_on_objects_by_chance(image_dataset: Path, tmp_path: Path) -> None:
    assert pretrain_here(image_flags("mae_vit_b", image_dataset, tmp_path / "run", vision__patch_size=8)) == 0
    results = measured(tmp_path / "run", image_dataset, tmp_path / "found", GROUND)
    assert list(results) == ["masks"]
    assert results["masks"].mean == pytest.approx(results["masks"].metrics["by_chance"][0], abs=0.03)
    few = measured(tmp_path / "run", image_dataset, tmp_path / "few", GROUND, "--rows", "5")
    assert few["masks"].detail[0]["images"] == 5


def test_self_guided_masks_are_those_of_the_encoder(image_dataset: Path, tmp_path: Path) -> None:
    shares = []
    for kind in ("none", "self_guided"):
        changes = {"vision__patch_size": 8, "multilevel__kind": kind}
        assert pretrain_here(image_flags("mae_vit_b", image_dataset, tmp_path / kind, **changes)) == 0
        shares.append(measured(tmp_path / kind, image_dataset, tmp_path / f"found_{kind}", GROUND)["masks"])
    random, guided = shares
    assert guided.metrics["by_chance"] == random.metrics["by_chance"]
    assert guided.mean != random.mean, "the masks do not depend on the encoder"


@pytest.mark.parametrize(
    ("background", "message"),
    [("sky", "'sky'"), (f"{GROUND},{OBJECTS}", f"--background {GROUND}")],
)
def test_refused(
    run: Path,
    image_dataset: Path,
    tmp_path: Path,
    refused: Refused,
    background: str,
    message: str,
) -> None:
    words = ["evaluate", "--run", str(run), "--background", background, "--output", str(tmp_path)]
    assert message in refused(*words, "--data", image_dataset)
    assert "--data DIR" in refused(*words)
