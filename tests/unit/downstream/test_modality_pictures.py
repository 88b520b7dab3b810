"""Pictures of a small MM-MAE run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from PIL import Image

from tests.runs import image_flags, pretrain_here
from tests.synthetic_modalities import depth_of
from trp_scale.config import RefusedError
from trp_scale.downstream.pictures import draw_pictures, modality_reconstructions, task_losses
from trp_scale.downstream.trained_images import load_trained_images, load_trained_modalities

GRID, PATCH = 4, 8


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, image_dataset: Path) -> Path:
    """Two steps with the raw image as a fourth task, which has no patches of its own to see, and without depth among
    the inputs."""
    directory = tmp_path_factory.mktemp("runs") / "run"
    changes = {"training__steps": 2, "data__validation_fraction": 0.2, "modalities__visible_tokens": 10}
    flags = image_flags("mm_mae_tiny", image_dataset, directory, **changes)
    flags += ["--modalities.inputs", "rgb", "semseg", "--modalities.outputs", "rgb", "depth", "semseg", "raw_rgb"]
    assert pretrain_here(flags) == 0
    return directory


def test_one_picture_and_a_line_with_every_task(run: Path, tmp_path: Path) -> None:
    (line,) = draw_pictures(run, tmp_path / "pictures", rows=2)
    assert all(f"{task} " in line for task in ("rgb", "depth", "semseg", "raw_rgb"))
    with Image.open(tmp_path / "pictures" / "reconstructions.png") as picture:
        assert min(picture.size) > 100


def test_visible_patches_are_the_input_s_and_masked_ones_are_not_seen(run: Path) -> None:
    trained = load_trained_modalities(run)
    batch = trained.images(3)
    shown = modality_reconstructions(trained, batch)
    assert torch.allclose(shown["raw_rgb"]["input"], batch["images"] / 255.0, atol=1e-5)
    assert torch.equal(shown["semseg"]["input"], batch["semseg"].long())
    assert shown["depth"]["seen"].isnan().all(), "depth is no input"
    assert torch.equal(shown["depth"]["input"], depth_of(batch))
    for task, modality, hidden in (("rgb", "rgb", 0.5), ("semseg", "semseg", 255)):
        masked = trained.objective.masked(batch)[modality].view(-1, GRID, GRID)
        side = shown[task]["input"].shape[-1] // GRID
        masked = masked.repeat_interleave(side, 1).repeat_interleave(side, 2)
        masked = masked.unsqueeze(1).expand_as(shown[task]["input"]) if task == "rgb" else masked
        assert masked.any() and not masked.all()
        for stage in ("seen", "predicted"):
            assert torch.equal(shown[task][stage][~masked], shown[task]["input"][~masked]), (task, stage)
        assert (shown[task]["seen"][masked] == hidden).all()


def test_losses_are_the_objective_s_and_the_plainest_guesses_are_known(run: Path) -> None:
    trained = load_trained_modalities(run)
    batch = trained.images(3)
    losses = task_losses(trained, batch)
    with torch.no_grad():
        own = trained.objective(trained.model, batch)
    assert [loss for loss, _ in losses.values()] == pytest.approx((own.sums / own.counts).tolist())
    assert losses["rgb"][1] == pytest.approx(1.0, abs=0.1), "a normalised patch has variance 1, a flat one 0"
    assert losses["depth"][1] == pytest.approx(float(depth_of(batch).abs().mean()), rel=1e-5), "all of depth is masked"
    shares = torch.bincount(batch["semseg"].flatten().long(), minlength=10) / batch["semseg"].numel()
    entropy = -float((shares[shares > 0] * shares[shares > 0].log()).sum())
    assert losses["semseg"][1] == pytest.approx(entropy, rel=0.3), "of all labels, not of the masked ones alone"


def test_another_kind_of_run_is_refused(run: Path) -> None:
    with pytest.raises(RefusedError, match=r"--upstream mae is needed; its upstream is mm_mae"):
        load_trained_images(run)
