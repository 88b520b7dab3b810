"""What is drawn and measured of small image runs: pictures, the linear probe, a sweep."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from PIL import Image

from tests.fixtures import small_image_dataset
from tests.runs import pretrain_here
from trp_scale.config import RefusedError
from trp_scale.evaluation.linear_probe import linear_probe
from trp_scale.evaluation.pictures import draw_pictures, reconstructions
from trp_scale.evaluation.sweep import combinations, sweep
from trp_scale.evaluation.trained_images import load_trained_images

SMALL = {
    "model.layers": 2,
    "model.hidden_size": 32,
    "model.heads": 2,
    "model.intermediate_size": 64,
    "vision.decoder_layers": 1,
    "vision.decoder_hidden_size": 32,
    "vision.decoder_heads": 2,
    "vision.patch_size": 4,
    "crops.size": 16,
    "batch.global_size": 8,
    "batch.micro_size": 8,
    "training.steps": 3,
    "optimizer.warmup_steps": 1,
    "data.workers": 0,
    "data.validation_fraction": 0.3,
    "validation.every": 0,
}
FLAGS = [word for name, value in SMALL.items() for word in (f"--{name}", str(value))]


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_image_dataset(tmp_path_factory.mktemp("scenes") / "data", count=64, size=32)


def train(scenes: Path, directory: Path, *flags: str) -> Path:
    arguments = ["--recipe", "adpe_tiny", "--data.path", str(scenes), "--run_dir", str(directory), *FLAGS, *flags]
    assert pretrain_here(arguments) == 0
    return directory


ABSOLUTE = ("--vision.positions", "absolute")


@pytest.mark.parametrize(
    "flags",
    [
        (),
        (*ABSOLUTE, "--adversary.kind", "absolute_coordinate"),
        (*ABSOLUTE, "--adversary.kind", "absolute_embedding"),
        ("--adversary.kind", "relative_embedding"),
    ],
    ids=lambda flags: flags[-1] if flags else "relative_coordinate",
)
def test_pictures_of_reconstructions_and_positions(scenes: Path, tmp_path: Path, flags: tuple[str, ...]) -> None:
    run = train(scenes, tmp_path / "run", *flags)
    lines = draw_pictures(run, tmp_path / "pictures", rows=2)
    assert "reconstruction loss" in lines[0] and len(lines) == 2
    for name in ("reconstructions.png", "positions.png"):
        with Image.open(tmp_path / "pictures" / name) as picture:
            assert min(picture.size) > 100


def test_no_positions_are_drawn_without_an_adversary(scenes: Path, tmp_path: Path) -> None:
    run = train(scenes, tmp_path / "run", "--adversary.kind", "none")
    assert len(draw_pictures(run, tmp_path / "pictures", rows=2)) == 1
    assert not (tmp_path / "pictures" / "positions.png").exists()


def test_visible_patches_are_the_image_and_the_losses_are_those_of_the_objective(scenes: Path, tmp_path: Path) -> None:
    trained = load_trained_images(train(scenes, tmp_path / "run"))
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


def test_pictures_of_text_are_refused(tmp_path: Path, scenes: Path) -> None:
    with pytest.raises(RefusedError, match="nothing to export"):
        draw_pictures(tmp_path, tmp_path / "pictures")


def test_the_probe_reads_classes_that_the_features_hold(
    scenes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Features that are the label itself give an accuracy of 1, and features that say nothing do not."""
    trained = load_trained_images(train(scenes, tmp_path / "run"))
    honest = linear_probe(trained, size=32)
    assert 0.0 <= honest < 0.9
    from trp_scale.evaluation import linear_probe as module

    extract = module.extract

    def telling(*arguments: object) -> tuple[object, object]:
        _, labels = extract(*arguments)  # type: ignore[arg-type]
        return torch.nn.functional.one_hot(torch.from_numpy(labels), 8).float().numpy(), labels

    monkeypatch.setattr(module, "extract", telling)
    assert linear_probe(trained, size=32) == 1.0


def test_a_sweep_trains_each_combination_once(scenes: Path, tmp_path: Path) -> None:
    flags = ["--data.path", str(scenes), *FLAGS]
    vary = ["crops.count=1,2"]
    points = sweep(recipe="adpe_tiny", run_dir=tmp_path / "sweep", vary=vary, flags=flags)
    assert [point.settings for point in points] == [{"crops.count": "1"}, {"crops.count": "2"}]
    assert all(point.hours > 0 and 0 <= point.accuracy <= 1 and point.size == 32 for point in points)
    stored = json.loads((tmp_path / "sweep" / "sweep.json").read_text(encoding="utf-8"))["runs"]
    assert [one["name"] for one in stored] == ["crops.count=1", "crops.count=2"]
    with Image.open(tmp_path / "sweep" / "sweep.png") as picture:
        assert min(picture.size) > 100
    metrics = tmp_path / "sweep" / "crops.count=2" / "metrics.jsonl"
    before = metrics.stat().st_mtime_ns
    assert sweep(recipe="adpe_tiny", run_dir=tmp_path / "sweep", vary=vary, flags=flags)[1].hours == points[1].hours
    assert metrics.stat().st_mtime_ns == before


def test_what_varies_is_read_and_checked_before_anything_runs(tmp_path: Path) -> None:
    assert combinations(["a.b=1,2", "c.d=x,y"]) == [
        {"a.b": "1", "c.d": "x"},
        {"a.b": "1", "c.d": "y"},
        {"a.b": "2", "c.d": "x"},
        {"a.b": "2", "c.d": "y"},
    ]
    for wrong in (["crops=1"], ["crops.count"], ["crops.count="], [], ["a.b=1", "a.b=2"]):
        with pytest.raises(RefusedError, match="--vary"):
            combinations(wrong)
    with pytest.raises(RefusedError, match=r"crops\.size"):
        sweep(recipe="adpe_tiny", run_dir=tmp_path / "sweep", vary=["crops.size=56,57"], flags=["--data.path", "x"])
    assert not (tmp_path / "sweep").exists()
