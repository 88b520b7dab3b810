"""What is drawn and measured of small image runs: pictures."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib.figure import Figure
from PIL import ExifTags, Image

from tests.fixtures import small_image_dataset
from tests.runs import SMALL_IMAGES, pretrain_here, to_flags
from tests.unit.data.images.stored import sample, write_images
from trp_scale.checkpoint.document import read_document
from trp_scale.checkpoint.export import find_checkpoint
from trp_scale.cli import main as cli
from trp_scale.config import RefusedError
from trp_scale.config.loader import to_dict
from trp_scale.config.registry import make_settings
from trp_scale.evaluation.figures.pictures import _draw_sizes, draw_pictures, mask_strips, reconstructions
from trp_scale.evaluation.figures.trained_images import (
    TrainedImages,
    load_masking_network,
)
from trp_scale.pretraining.pos_bert.settings import PosBertConfig

SMALL = {
    **SMALL_IMAGES,
    "vision.patch_size": 4,
    "crops.size": 16,
    "batch.micro_size": 8,
    "training.steps": 3,
    "optimizer.warmup_steps": 1,
    "data.validation_fraction": 0.3,
}
FLAGS = to_flags(SMALL)


def train(image_dataset: Path, directory: Path, *flags: str) -> Path:
    where = ["--data.path", str(image_dataset), "--run_dir", str(directory)]
    assert pretrain_here(["--recipe", "adpe_tiny", *where, *FLAGS, *flags]) == 0
    return directory


@pytest.fixture(scope="module")
def run(image_dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of AdPE."""
    return train(image_dataset, tmp_path_factory.mktemp("trained") / "run")


@pytest.fixture(scope="module")
def moved(image_dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A run of AdPE, and the present directory of its data, which was moved."""
    directory = tmp_path_factory.mktemp("moved")
    data = shutil.copytree(image_dataset, directory / "data")
    run = train(data, directory / "run")
    return run, data.rename(directory / "elsewhere")


ABSOLUTE = ("--vision.positions", "absolute")


@pytest.mark.parametrize(
    "flags",
    [
        (),
        (*ABSOLUTE, "--adversary.kind", "absolute_coordinate"),
        (*ABSOLUTE, "--adversary.kind", "absolute_embedding"),
    ],
    ids=lambda flags: flags[-1] if flags else "relative_coordinate",
)
def test_pictures_of_reconstructions_and_positions(
    image_dataset: Path, run: Path, tmp_path: Path, flags: tuple[str, ...]
) -> None:
    lines = draw_pictures(
        train(image_dataset, tmp_path / "run", *flags) if flags else run, tmp_path / "pictures", rows=2
    )
    assert "reconstruction loss" in lines[0] and len(lines) == 2
    for name in ("reconstructions.png", "positions.png"):
        with Image.open(tmp_path / "pictures" / name) as picture:
            assert min(picture.size) > 100


def photograph(path: Path, *, orientation: int = 1) -> Path:
    """A dark image of 60 x 40 with a bright left edge and a red upper one, as a camera stores it."""
    image = Image.new("RGB", (60, 40), (20, 20, 60))
    image.paste((250, 250, 250), (0, 0, 20, 40))
    image.paste((250, 0, 0), (0, 0, 60, 10))
    exif = image.getexif()
    exif[ExifTags.Base.Orientation] = orientation
    image.save(path, exif=exif, **({"quality": 95} if path.suffix == ".jpg" else {}))
    return path


def test_images_of_one_s_own_are_drawn_without_the_run_s_data(moved: tuple[Path, Path], tmp_path: Path) -> None:
    run, _ = moved
    for files in ([photograph(tmp_path / "one.png")], [tmp_path / "one.png", photograph(tmp_path / "two.jpg")]):
        images = ["--images", *map(str, files)]
        pictures = ["--pictures", str(tmp_path / f"pictures{len(files)}")]
        assert cli.main(["report", "--run", str(run), *pictures, *images]) == 0
        with Image.open(tmp_path / f"pictures{len(files)}" / "reconstructions.png") as picture:
            assert picture.height > 300
        lines = draw_pictures(run, tmp_path / "again", images=files)
        assert f"({len(files)} images" in lines[0] and "true mean and deviation" in lines[0]


def test_an_image_of_one_s_own_is_its_upright_central_square_with_the_same_masks_each_time(
    run: Path, tmp_path: Path
) -> None:
    trained = TrainedImages(run)
    files = [photograph(tmp_path / "a.png"), photograph(tmp_path / "b.jpg", orientation=6)]
    batch, again = trained.own_images(files), trained.own_images(files)
    assert batch["images"].shape == (2, 1, 3, 16, 16) and batch["images"].dtype == torch.uint8
    assert all(torch.equal(batch[name], again[name]) for name in batch.fields) and torch.equal(batch.keys, again.keys)
    assert not torch.equal(batch["masked"][0], batch["masked"][1])
    places = torch.cat([batch["visible"], batch["masked"]], -1).sort(-1).values
    assert torch.equal(places, torch.arange(16).expand(2, 1, -1))
    upright, turned = batch["images"][:, 0].float()
    assert upright[0, 0].mean() > 200 > 100 > upright[0, -1, 8:].mean(), "red above"
    # Orientation 6: the first stored column is the upper edge, the first stored row the right one.
    assert turned[0, :, -1].mean() > 200 and turned[2, 0, :8].mean() > turned[2, -1, :8].mean() + 100
    trained.config.training.seed += 1
    assert not torch.equal(trained.own_images(files)["masked"], batch["masked"])


def test_files_that_are_no_images_are_named_and_images_go_with_pictures(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text.png").write_text("no image")
    for file in (tmp_path / "text.png", tmp_path / "absent.png"):
        with pytest.raises(RefusedError, match=rf"--images.*.*{file.name}"):
            draw_pictures(run, tmp_path / "pictures", images=[file])
    assert cli.main(["report", "--run", str(run), "--images", str(tmp_path / "text.png")]) != 0
    assert "--pictures DIR" in capsys.readouterr().err


def test_visible_patches_are_the_image_and_the_losses_are_those_of_the_objective(run: Path) -> None:
    trained = TrainedImages(run)
    batch = trained.images(3)
    shown, loss, mean_patch = reconstructions(trained, batch)
    first = {name: value[:, :1] for name, value in batch.fields.items() if value.ndim > 1}
    batch.fields |= first
    losses = trained.objective(trained.model, batch)
    assert loss == pytest.approx(float(losses.sums.detach() / losses.counts), rel=1e-5)
    assert 0.5 < mean_patch <= 1.0
    image = batch["images"][:, 0].float() / 255
    assert torch.allclose(shown["image"], image, atol=1e-5)
    for row in range(3):
        for number in range(16):
            top, left = number // 4 * 4, number % 4 * 4
            place = (row, slice(None), slice(top, top + 4), slice(left, left + 4))
            hidden = number in batch["masked"][row, 0].tolist()
            assert torch.allclose(shown["masked"][place], torch.tensor(0.5) if hidden else image[place], atol=1e-5)
            assert hidden or torch.allclose(shown["reconstruction"][place], image[place], atol=1e-5)


@pytest.mark.exhaustive
def test_learned_masks_are_drawn_beside_those_of_the_untrained_network(image_dataset: Path, tmp_path: Path) -> None:
    """Before the first lesson they are the same; after lessons at a high rate they are not."""
    own = {**SMALL, "masking.ratio": 0.5, "multilevel.unroll": 1, "multilevel.every": 1, "multilevel.lr": 0.05}
    flags = to_flags(own)
    shares = []
    for steps, every in ((1, 9), (6, 1)):
        run = tmp_path / f"run{steps}"
        command = ["--recipe", "mlo_mae_tiny", "--data.path", str(image_dataset), "--run_dir", str(run), *flags]
        assert pretrain_here([*command, "--training.steps", str(steps), "--multilevel.every", str(every)]) == 0
        trained = TrainedImages(run)
        network = load_masking_network(trained)
        assert network is not None
        strips = mask_strips(trained, network, trained.images(4))
        names = ["image", *(f"{name} {share} %" for share in (10, 50) for name in ("random", "untrained", "learned"))]
        assert list(strips) == [*names, "probability", "as untrained"]
        share = float(strips["as untrained"])
        assert torch.equal(strips["untrained 50 %"], strips["learned 50 %"]) == (share == 1.0)
        shares.append(share)
        assert f"share {share:.1%} of the patches" in draw_pictures(run, tmp_path / "pictures", rows=4)[-1]
    assert shares[0] == 1.0 and 0.0 < shares[1] < 1.0


def test_pictures_need_the_checkpoint_of_a_masked_autoencoder(run: Path, tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match="no weights to read"):
        draw_pictures(tmp_path, tmp_path / "pictures")
    copy = Path(shutil.copytree(run, tmp_path / "copy"))
    checkpoint = find_checkpoint(copy)
    replace(read_document(checkpoint), config=to_dict(PosBertConfig())).write(checkpoint)
    with pytest.raises(RefusedError, match=r"pos_bert"):
        draw_pictures(copy, tmp_path / "pictures")


def test_rows_that_are_not_there_are_left_out(run: Path, tmp_path: Path) -> None:
    trained = TrainedImages(run)
    few, many = trained.images(3), trained.images(60)
    assert few.rows == 3
    held_out = many.rows
    assert 3 < held_out < 60 and bool((many["row_weights"] > 0).all())
    assert torch.equal(many["images"][:3], few["images"])
    assert f"({held_out} images" in draw_pictures(run, tmp_path / "pictures", rows=60)[0]


def test_data_that_was_moved_is_asked_for_and_other_data_refused(
    moved: tuple[Path, Path], text_dataset: Path, tmp_path: Path
) -> None:
    run, elsewhere = moved
    few = write_images(tmp_path / "few", [[sample(1, 40, 40)]])
    for other, found in ((text_dataset, "kind 'text' found"), (few, "none remains for")):
        with pytest.raises(RefusedError, match=found) as caught:
            TrainedImages(run, str(other)).images(2)
        assert set(re.findall(r"--[\w.]+", str(caught.value))) == {"--data"}, "report has no other flag of these"
    with pytest.raises(RefusedError, match=r"data\.path.*--data"):
        draw_pictures(run, tmp_path / "pictures")
    words = ["report", "--run", str(run), "--pictures", str(tmp_path / "pictures")]
    assert cli.main([*words, "--data", str(elsewhere)]) == 0
    assert (tmp_path / "pictures" / "reconstructions.png").exists()
    other = small_image_dataset(tmp_path / "other", count=64, size=32, seed=1)
    with pytest.raises(RefusedError, match="is not the training data"):
        draw_pictures(run, tmp_path / "pictures", data=str(other))


@pytest.mark.parametrize(("norm", "eps"), [("l2", 3.0), ("linf", 20.0)])
def test_sizes_of_perturbations_are_norms_of_their_balls(norm: Any, eps: float) -> None:
    axes = Figure().subplots()
    perturbation = torch.randn(2, 5, 4)
    perturbation = perturbation / perturbation.norm(dim=-1, keepdim=True) * 3.0
    _draw_sizes(axes, perturbation, make_settings("adversary", "absolute_embedding", norm=norm, eps=eps))
    heights = [bar.get_height() for bar in axes.patches]
    expected = [3.0, 3.0] if norm == "l2" else perturbation.abs().amax((1, 2)).tolist()
    assert heights == pytest.approx(expected, rel=1e-6)
