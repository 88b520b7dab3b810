"""`trp-scale represent`: from the command line, on small runs of ours and on a directory of timm."""

from __future__ import annotations

import base64
import io
import json
import re
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from timm.models import save_for_hf

from tests.fixtures import copy_dataset
from tests.runs import Refused, image_flags, pretrain_here, to_flags
from trp_scale.cli import main as cli
from trp_scale.config import RefusedError
from trp_scale.evaluation.encoders import FrozenEncoder, encoder_config
from trp_scale.evaluation.figures.features import (
    choose_images,
    class_similarity,
    encode_images,
)
from trp_scale.evaluation.figures.represent import read_block, read_positions


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, image_dataset: Path) -> Path:
    """Two steps of a masked autoencoder on 4 x 4 patches of 8 pixels."""
    directory = tmp_path_factory.mktemp("runs") / "run"
    assert pretrain_here(image_flags("adpe_tiny", image_dataset, directory, training__steps=2)) == 0
    return directory


def finetuned(run: Path, data: Path, directory: Path, recipe: str, **changes: Any) -> Path:
    """One step on a task; its run directory."""
    settings: dict[str, Any] = {
        "downstream.epochs": 0,
        "training.steps": 1,
        "batch.global_size": 8,
        "batch.micro_size": 8,
        "crops.size": 32,
        "data.workers": 0,
        "data.path": data,
        "data.validation_fraction": 0.2,
        "run_dir": directory,
        "logging.progress": "false",
    }
    assert cli.main(["finetune", "--recipe", recipe, "--from", str(run), *to_flags(settings, **changes)]) == 0
    (result,) = directory.glob("*/seed_0")
    return result


def represent(*arguments: object) -> int:
    return cli.main(["represent", *map(str, arguments)])


def document(output: Path) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((output / "representation.json").read_text(encoding="utf-8"))
    return result


def test_everything_of_one_encoder_on_one_page(
    run: Path, image_dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    classifiers = [
        finetuned(run, image_dataset, tmp_path / name, "classification_tiny") for name in ("first", "second")
    ]
    capsys.readouterr()
    output = tmp_path / "out"
    flags = ("--images", 40, "--shown", 3, "--positions", "0,0", "3,1", "--block", -1)
    assert represent("--from", run, "--data", image_dataset, "--output", output, *flags, "--run", *classifiers) == 0
    printed = capsys.readouterr().out
    result = document(output)
    names = ["pca", "attention", "attention_average", "reconstructions", "positions", "grad_cam"]
    assert result["pictures"] == [f"{name}.png" for name in names] and not result["notes"]
    assert (result["images"], result["split"], result["image_size"], result["pooling"]) == (40, "train", 32, "mean")
    assert result["attention"]["block"] == 1
    assert 0 < result["attention"]["mean_distance_patches"] < 3 * 2**0.5
    similarity = result["class_similarity"]
    assert similarity["ratio"] == pytest.approx(similarity["intra"] / similarity["inter"])
    assert f"ratio (MLO-MAE, Table 13): {similarity['ratio']:.4f}" in printed
    page = (output / "index.html").read_text(encoding="utf-8")
    embedded = re.findall(r'src="data:image/png;base64,([^"]+)"', page)
    assert [base64.b64decode(classifier) for classifier in embedded] == [
        (output / name).read_bytes() for name in result["pictures"]
    ]
    assert not re.search(r'(src|href)="(?!data:|#)', page), "the page needs no other file"
    assert f"{similarity['ratio']:.4f}" in page
    for name in result["pictures"]:
        with Image.open(output / name) as picture:
            assert min(picture.size) > 100
            assert np.asarray(picture.convert("L")).std() > 5, f"{name} shows something"


@pytest.mark.exhaustive
def test_a_directory_of_timm_and_the_ratio_of_its_own_features(image_dataset: Path, tmp_path: Path) -> None:
    """DINO's encoders are plain vision transformers of timm; here a small one with random weights."""
    sizes = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 2, "num_classes": 0}
    model = timm.create_model("vit_tiny_patch16_224", pretrained=False, **sizes).eval()
    directory = tmp_path / "timm"
    save_for_hf(model, str(directory), model_args=sizes, safe_serialization=True)
    for pooling, plane_kind in (("class", "pca"), ("mean", "tsne")):
        output = tmp_path / pooling
        flags = ("--images", 24, "--shown", 2, "--seen", "whole", "--pooling", pooling, "--plane", plane_kind)
        assert represent("--from", directory, "--data", image_dataset, "--output", output, *flags) == 0
        result = document(output)
        assert result["pictures"] == [f"{plane_kind}.png", "attention.png", "attention_average.png"]
        expected = timm_similarity(model, image_dataset, pooling)
        assert result["class_similarity"]["intra"] == pytest.approx(expected.intra, abs=1e-5)
        assert result["class_similarity"]["inter"] == pytest.approx(expected.inter, abs=1e-5)


def timm_similarity(model: Any, data: Path, pooling: str) -> Any:
    """By timm's own forward pass, on images read by Pillow out of the tars."""
    pictures, labels = [], []
    for shard in sorted((data / "shards").glob("*.tar")):
        with tarfile.open(shard) as tar:
            for member in tar.getmembers():
                content = tar.extractfile(member).read()  # type: ignore[union-attr]
                if member.name.endswith(".jpg"):
                    pictures.append(np.asarray(Image.open(io.BytesIO(content)).convert("RGB")))
                elif member.name.endswith(".cls"):
                    labels.append(int(content))
    positions = np.random.default_rng(0).permutation(len(pictures))[:24]
    pixels = torch.from_numpy(np.stack([pictures[place] for place in positions])).permute(0, 3, 1, 2) / 255.0
    known = model.pretrained_cfg
    mean, deviation = torch.tensor([known["mean"], known["std"]]).view(2, 1, 3, 1, 1)
    with torch.no_grad():
        tokens = model.forward_features((pixels - mean) / deviation)
    features = tokens[:, 0] if pooling == "class" else tokens[:, 1:].mean(1)
    return class_similarity(features.numpy(), np.array([labels[place] for place in positions]))


@pytest.mark.exhaustive
def test_maps_of_fine_tuned_runs_beside_the_truth(run: Path, image_dataset: Path, tmp_path: Path) -> None:
    for kind in ("segmentation", "depth"):
        classifier = finetuned(run, image_dataset, tmp_path / f"run-{kind}", f"{kind}_tiny")
        output = tmp_path / kind
        flags = ("--images", 8, "--shown", 2, "--run", classifier)
        assert represent("--from", classifier, "--data", image_dataset, "--output", output, *flags) == 0
        assert document(output)["pictures"][-1] == f"{kind}.png"
        assert not document(output)["notes"]


@pytest.mark.exhaustive
def test_a_run_of_several_modalities_shows_them(image_dataset: Path, tmp_path: Path) -> None:
    several = tmp_path / "run"
    changes = {"training__steps": 1, "modalities__visible_tokens": 10}
    assert pretrain_here(image_flags("mm_mae_tiny", image_dataset, several, **changes)) == 0
    flags = ("--images", 8, "--shown", 2)
    assert represent("--from", several, "--data", image_dataset, "--output", tmp_path / "out", *flags) == 0
    assert document(tmp_path / "out")["pictures"][-1] == "reconstructions.png"


def test_what_cannot_be_is_refused_before_anything_is_encoded(
    run: Path, image_dataset: Path, text_dataset: Path, tmp_path: Path, refused: Refused
) -> None:
    output = tmp_path / "out"
    for flags, words in (
        (("--from", tmp_path, "--data", image_dataset), "--from"),
        (("--from", run, "--data", text_dataset), "kind 'text'"),
        (("--from", run, "--data", image_dataset, "--image_size", 30), "multiples of"),
        (("--from", run, "--data", image_dataset, "--block", 2), "-2 to 1"),
        (("--from", run, "--data", image_dataset, "--positions", "0,4"), "from 0 to 3"),
        (("--from", run, "--data", image_dataset, "--shown", 0), "--shown is 0"),
        (("--from", run, "--data", image_dataset, "--images", 3), "5 or more"),
        (("--from", run, "--data", image_dataset, "--run", run), "a pre-training run"),
        (("--from", "scratch", "--data", image_dataset), "--recipe is missing"),
        (("--from", run, "--recipe", "adpe_tiny", "--data", image_dataset), "others have their own"),
    ):
        assert words in refused("represent", *flags, "--output", output)
    assert not output.exists()
    output.touch()
    flags = ("--from", run, "--data", image_dataset, "--output")
    assert f"--output {output} cannot be created: File exists" in refused("represent", *flags, output)
    assert "weight_average" in refused("represent", *flags, tmp_path / "average", "--weights", "average")


def test_a_classifier_of_other_classes_is_refused(
    run: Path, image_dataset: Path, tmp_path: Path, refused: Refused
) -> None:
    classifier = finetuned(run, image_dataset, tmp_path / "run", "classification_tiny")
    data = copy_dataset(image_dataset, tmp_path / "data", classes=[f"other {number}" for number in range(8)])
    words = ("--from", run, "--data", data, "--output", tmp_path / "out", "--run", classifier)
    assert "other names" in refused("represent", *words)


def test_the_same_images_are_chosen_every_time(image_dataset: Path) -> None:
    every, some = choose_images(image_dataset, 0), choose_images(image_dataset, 10)
    assert sorted(every.positions.tolist()) == list(range(96))
    assert (
        some.positions.tolist() == every.positions[:10].tolist() == choose_images(image_dataset, 10).positions.tolist()
    )
    assert len(every.classes) == 8


def test_positions_and_blocks_are_read() -> None:
    assert read_positions(["0,3", "2,1"], 4) == [(0, 3), (2, 1)]
    for wrong in ("4,0", "0", "a,b", "-1,0", "1,2,3", "²,1"):
        with pytest.raises(RefusedError, match="ROW,COLUMN"):
            read_positions([wrong], 4)
    assert (read_block(-1, 12), read_block(0, 12)) == (11, 0)


def test_averages_are_over_all_images_of_all_batches(run: Path, image_dataset: Path) -> None:
    config = encoder_config(str(run))
    encoder, choice = FrozenEncoder(config, pooling="mean"), choose_images(image_dataset, 70)
    study = encode_images(encoder, config, choice, block=1, shown=70)
    assert study.features.shape == (70, 32) and study.shown_attention.shape == (70, 16, 16)
    assert torch.allclose(study.attention, study.shown_attention.double().mean(0), atol=1e-9)
    assert study.shown.labels.tolist() == study.labels.tolist()
    few = encode_images(encoder, config, choice, block=1, shown=3)
    assert torch.equal(few.shown.images, study.shown.images[:3])
    assert few.shown.choice.positions.tolist() == choice.positions[:3].tolist()
