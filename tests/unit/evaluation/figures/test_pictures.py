"""Pictures of a small MM-MAE run, and of each checkpoint of a run, without a trace in it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from matplotlib.figure import Figure
from PIL import Image

from tests.grids import always
from tests.runs import image_flags, lines, pretrain_here, to_flags
from tests.synthetic_modalities import depth_of
from tests.unit.evaluation.figures.test_trained_images import FLAGS
from trp_scale.checkpoint.export import find_checkpoint
from trp_scale.checkpoint.format import read_full_state
from trp_scale.config import RefusedError
from trp_scale.evaluation.figures import pictures
from trp_scale.evaluation.figures.pictures import draw_pictures, modality_reconstructions, task_losses
from trp_scale.evaluation.figures.trained_images import (
    TrainedImages,
    TrainedModalities,
)
from trp_scale.pretraining.modalities.depth import Depth
from trp_scale.pretraining.modalities.semseg import MOST_NAMED, Semseg

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
    trained = TrainedModalities(run)
    batch = trained.images(3)
    shown = modality_reconstructions(trained, batch)
    assert torch.allclose(shown["raw_rgb"]["input"], batch["images"] / 255.0, atol=1e-5)
    assert torch.equal(shown["semseg"]["input"], batch["semseg"].long())
    assert shown["depth"]["seen"].isnan().all(), "depth is no input"
    assert torch.equal(shown["depth"]["input"], depth_of(batch))
    for task, modality, hidden in (("rgb", "rgb", 0.5), ("semseg", "semseg", 255)):
        masked = trained.objective.masked_patches(batch)[modality].view(-1, GRID, GRID)
        side = shown[task]["input"].shape[-1] // GRID
        masked = masked.repeat_interleave(side, 1).repeat_interleave(side, 2)
        masked = masked.unsqueeze(1).expand_as(shown[task]["input"]) if task == "rgb" else masked
        assert masked.any() and not masked.all()
        for stage in ("seen", "predicted"):
            assert torch.equal(shown[task][stage][~masked], shown[task]["input"][~masked]), (task, stage)
        assert (shown[task]["seen"][masked] == hidden).all()


def test_losses_are_the_objective_s_and_the_plainest_guesses_are_known(run: Path) -> None:
    trained = TrainedModalities(run)
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


def test_an_image_of_one_s_own_alone(run: Path, tmp_path: Path) -> None:
    """The image is all that is seen: other modalities are predicted whole, and have no loss."""
    Image.linear_gradient("L").convert("RGB").save(tmp_path / "one.png")
    trained = TrainedModalities(run)
    batch = trained.own_images([tmp_path / "one.png"])
    assert batch["visible"].shape == (1, 10) and int(batch["visible"].max()) < GRID**2, "rgb is the first input"
    assert set(task_losses(trained, batch)) == {"rgb", "raw_rgb"}
    shown = modality_reconstructions(trained, batch)
    assert shown["depth"]["input"].isnan().all() and shown["depth"]["predicted"].isfinite().all()
    assert (shown["semseg"]["input"] == 255).all() and (shown["semseg"]["predicted"] != 255).all()
    (line,) = draw_pictures(run, tmp_path / "pictures", images=[tmp_path / "one.png"])
    assert "depth" not in line and "of rgb hidden patches are drawn with their true mean and deviation" in line
    with Image.open(tmp_path / "pictures" / "reconstructions.png") as picture:
        assert min(picture.size) > 100


def test_a_run_that_reads_no_images_is_given_none(run: Path, tmp_path: Path) -> None:
    trained = TrainedModalities(run)
    trained.config.modalities.inputs = ["depth", "semseg"]
    with pytest.raises(RefusedError, match=r"modalities\.inputs"):
        trained.own_images([tmp_path / "one.png"])


def test_the_legend_has_the_names_and_the_colours_of_the_classes_that_occur(run: Path) -> None:
    maps = [torch.tensor([[0, 2], [255, 2]]), torch.tensor([[21, 2]])]
    axes = Figure().subplots()
    entries = Semseg.legend(maps, ["sky", "wall", "floor"])
    assert [words for words, _ in entries] == ["sky", "floor", "class 21"]
    for number, (_, colour) in zip((0, 2, 21), entries, strict=True):
        Semseg.show(axes, torch.tensor([[number]]), maps[0])
        drawn = axes.images[-1]
        assert tuple(drawn.cmap(drawn.norm(drawn.get_array()))[0, 0]) == pytest.approx(colour)
    many = Semseg.legend([torch.arange(40).repeat_interleave(torch.arange(40) + 1)], [])
    assert len(many) == MOST_NAMED + 1 and many[0][0] == "class 16" and many[-1][0] == "and 16 more"
    assert Depth.legend([torch.rand(2, 2)], []) == []
    names = TrainedModalities(run).class_names()["semseg"]
    assert len(names) == 10 and all(isinstance(name, str) for name in names)


def test_another_kind_of_run_is_refused(run: Path) -> None:
    with pytest.raises(RefusedError, match=r"--upstream.*mm_mae"):
        TrainedImages(run)


SMALL = {"training.steps": 3, "checkpoint.every": 1, "checkpoint.keep": 1}


def learn(image_dataset: Path, directory: Path, *flags: str) -> int:
    small = [*FLAGS, *to_flags(SMALL)]
    return pretrain_here(
        ["--recipe", "mlo_mae_tiny", "--data.path", str(image_dataset), "--run_dir", str(directory), *small, *flags]
    )


@pytest.mark.parametrize("behind", always(["True", "False"], "True"))
def test_each_checkpoint_is_drawn_and_the_run_stays_the_same(image_dataset: Path, tmp_path: Path, behind: str) -> None:
    more = ["--checkpoint.asynchronous", behind]
    assert learn(image_dataset, tmp_path / "without", *more) == 0
    assert learn(image_dataset, tmp_path / "with", *more, "--hooks", "pictures", "--pictures.rows", "2") == 0
    folder = tmp_path / "with" / "pictures"
    drawn = sorted(str(path.relative_to(folder)) for path in folder.rglob("*.png"))
    assert drawn == [f"step_0000000{step}/{what}.png" for step in (1, 2, 3) for what in ("masks", "reconstructions")]
    for path in folder.rglob("*.png"):
        with Image.open(path) as picture:
            assert min(picture.size) > 100
    drawings = [line["pictures"] for line in lines(tmp_path / "with") if "pictures" in line]
    assert [one["step"] for one in drawings][:1] == [1] and all(
        one["files"] == 2 and one["seconds"] > 0 for one in drawings
    )
    ours, theirs = (read_full_state(find_checkpoint(tmp_path / name)) for name in ("with", "without"))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.exhaustive
def test_some_checkpoints_are_left_out(image_dataset: Path, tmp_path: Path) -> None:
    assert learn(image_dataset, tmp_path / "run", "--hooks", "pictures", "--pictures.every", "2") == 0
    assert sorted(path.name for path in (tmp_path / "run" / "pictures").iterdir()) == ["step_00000001", "step_00000003"]


@pytest.mark.parametrize("error", [RefusedError("the data is gone"), RuntimeError("the data is gone")], ids=repr)
def test_what_cannot_be_drawn_ends_nothing(
    error: Exception,
    image_dataset: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def refuse(*_: object, **__: object) -> list[str]:
        raise error

    monkeypatch.setattr(pictures, "draw_pictures", refuse)
    assert learn(image_dataset, tmp_path / "run", "--hooks", "pictures") == 0
    (first, *_) = [line["pictures"] for line in lines(tmp_path / "run") if "pictures" in line]
    assert first["notice"] == "no pictures of step_00000001: the data is gone"
    assert [f"no pictures of step_0000000{step}: the data is gone" in caplog.text for step in (1, 2, 3)] == [True] * 3


def test_text_has_none(text_dataset: Path, tmp_path: Path) -> None:
    arguments = ["--recipe", "pos_bert_tiny", "--data.path", str(text_dataset), "--run_dir", str(tmp_path / "run")]
    with pytest.raises(RefusedError, match="--hooks"):
        pretrain_here([*arguments, "--hooks", "pictures"])
