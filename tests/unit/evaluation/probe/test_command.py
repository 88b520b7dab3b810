"""`trp-scale probe` from the command line."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.grids import always
from tests.runs import Refused, image_flags, pretrain_here
from tests.unit.evaluation.small_encoder import small_config
from tests.unit.finetuning.test_groups import write_image_groups
from tests.unit.test_frozen import FROZEN
from trp_scale.cli import main as cli
from trp_scale.config import RefusedError
from trp_scale.config.registry import make_settings
from trp_scale.distributed.groups import ALONE
from trp_scale.evaluation.arguments import parse_probe
from trp_scale.evaluation.figures.trained_images import TrainedImages
from trp_scale.evaluation.probe.classifiers import LabelledFeatures
from trp_scale.evaluation.probe.command import NAME, StageTwo, draw_of_each_class, stage_two
from trp_scale.finetuning.classification.task import open_labelled
from trp_scale.pretraining.mae.settings import MaeConfig
from trp_scale.reporting.results import read_results
from trp_scale.sharding.images.settings import ShardImagesConfig
from trp_scale.sharding.images.shard import shard_images

TEXT_RUN = FROZEN / "run"
PROTOCOL = ("--method", "linear", "--protocol", "mae")
SMALL = {"crops__size": 16, "vision__patch_size": 4, "training__steps": 4, "batch__micro_size": 8}


@pytest.fixture(scope="module")
def learned(stripes: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with learned masks."""
    return learned_run(stripes, tmp_path_factory.mktemp("learned") / "run")


def learned_run(data: Path, run: Path, **changes: Any) -> Path:
    flags = image_flags("mlo_mae_tiny", data, run, data__validation_fraction=0, **SMALL, **changes)
    assert pretrain_here(flags) == 0
    return run


def probe(tmp_path: Path, source: Path | str, data: Path, *more: object, name: str = "probe") -> Path:
    flags = ["--from", source, "--data", data, "--cache", tmp_path / "cache", "--run_dir", tmp_path / name, *more]
    assert cli.main(["probe", *(str(flag) for flag in flags)]) == 0
    return tmp_path / name


@pytest.mark.parametrize("method", always(["logistic", "linear", "knn"], "logistic"))
def test_results_of_a_probe_and_its_kept_features(
    stripes: Path, others: Path, learned: Path, tmp_path: Path, method: str
) -> None:
    first = read_results(probe(tmp_path, learned, stripes, "--test", others, "--method", method))
    task = first.tasks[0]
    assert (task.task, task.metric, task.split) == (f"others ({method} probe)", "accuracy", "test")
    detail = task.detail[0]
    assert detail["images"] == 43 and not detail["features_from_cache"]
    assert detail["accuracy_by_class"].keys() == {"upright", "across"}
    again = read_results(probe(tmp_path, learned, stripes, "--test", others, "--method", method, name="again"))
    assert again.tasks[0].detail[0]["features_from_cache"] and again.tasks[0].values == task.values


def test_without_a_test_set_held_out_images_are_measured(
    stripes: Path, learned: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[np.ndarray, np.ndarray]] = []

    def noted(train: LabelledFeatures, features: np.ndarray, *arguments: object) -> np.ndarray:
        seen.append((train.features, features))
        return np.zeros(len(features), np.int64)

    monkeypatch.setattr("trp_scale.evaluation.probe.command.classify", noted)
    (task,) = read_results(probe(tmp_path, learned, stripes, "--validation_fraction", 0.4, "--method", "knn")).tasks
    assert task.split == "dev" and task.task == "train (knn probe)"
    ((train, held_out),) = seen
    assert len(held_out) == task.detail[0]["images"] and len(train) + len(held_out) == 64
    assert not {row.tobytes() for row in train} & {row.tobytes() for row in held_out}


@pytest.mark.exhaustive
def test_random_features_over_seeds(stripes: Path, others: Path, learned: Path, tmp_path: Path) -> None:
    recipe = learned / "config.yaml"
    flags = ("--test", others, "--recipe", recipe, "--seeds", 3)
    results = read_results(probe(tmp_path, "scratch", stripes, *flags))
    assert results.encoder == "scratch" and results.tasks[0].seeds == [0, 1, 2]
    assert len(set(results.tasks[0].values)) > 1, "each seed has weights of its own"


def test_fresh_crops_change_what_is_learned(
    stripes: Path, others: Path, learned: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And the encoder runs over random crops alone: training features are not asked for. MAE's protocol is that with
    the class token, under a name of its own."""
    flags = ["--test", others, "--method", "linear", "--linear.epochs", 3, "--linear.warmup_epochs", 1]
    flags += ["--linear.batch_size", 32, "--batch_size", 16, "--workers", 0]
    protocol = read_results(probe(tmp_path, learned, stripes, *flags, "--protocol", "mae"))
    assert capsys.readouterr().out.count(" of 3, loss ") == 3
    assert "fresh crops" in protocol.recipe and "class token" in protocol.recipe
    # Of the test images alone; the run's head, which is measured too, reads the class token as well.
    assert len(list((tmp_path / "cache").glob("*.safetensors"))) == 1
    flags += ["--linear.crops", "fresh", "--pooling", "class"]
    fresh = read_results(probe(tmp_path, learned, stripes, *flags, name="flags"))
    assert fresh.tasks[0].values == protocol.tasks[0].values
    assert fresh.tasks[0].task != protocol.tasks[0].task


def test_the_head_of_stage_two_is_measured_beside_the_probe(
    stripes: Path, others: Path, learned: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Computed anew by the pre-training's model and the head's state. They are two measurements of one task: neither is
    the worst."""
    results = read_results(probe(tmp_path, learned, stripes, "--test", others, "--seen", "whole"))
    table = capsys.readouterr().out.split("\nthis run:")[0]
    assert table.count("others (") == 2 and "worst" not in table and "average" not in table
    probed, head_result = results.tasks
    assert head_result.task == f"others ({NAME})" and head_result.split == "test"
    head = stage_two(str(learned))
    assert head is not None and head.weight.shape == (2, 32) and float(head.weight.abs().max()) > 0
    trained, right, count = TrainedImages(learned), 0, 0
    for batch in open_labelled(small_config(), str(others)).batches(ALONE):
        present = batch["row_weights"] > 0
        batch.fields["images"] = batch["images"][:, None]
        patches = trained.objective.patches(batch)
        every = torch.arange(patches.shape[1]).expand(len(patches), -1)
        with torch.no_grad():
            features = trained.model.features(patches, every)[:, 1:].mean(1)
        settings = trained.config.multilevel
        if settings.head_norm == "layer":
            features = F.layer_norm(features, features.shape[-1:])
        predicted = (features @ head.weight.T + head.bias).argmax(1)
        right += int((predicted == batch["labels"])[present].sum())
        count += int(present.sum())
    assert count == 43 and head_result.values == [right / 43]
    assert probed.task != head_result.task


def test_the_head_sees_what_it_has_learned_on() -> None:
    """By hand: without a norm 10 and 0 + 5 say class 0; normalised to 1 and -1 they say class 1."""
    config = MaeConfig()
    head = StageTwo(config=config, checkpoint=Path(), weight=torch.eye(2), bias=torch.tensor([0.0, 5.0]))
    test = LabelledFeatures(features=np.array([[10.0, 0.0]], np.float32), labels=np.array([1]))
    for norm, expected in (("layer", 1.0), ("none", 0.0)):
        config.multilevel = make_settings("multilevel", "head", head_norm=norm)
        assert head.accuracy(test) == expected


@pytest.mark.exhaustive
def test_a_second_encoder_s_head_is_measured_on_its_own(stripes: Path, others: Path, tmp_path: Path) -> None:
    """With fine-tuning in level II the head has learned on that encoder's features (MLO-MAE eq. 13)."""
    run = learned_run(stripes, tmp_path / "run", multilevel__kind="fine_tuning", optimizer__lr=0.05)
    head = stage_two(str(run))
    assert head is not None
    weights, head_result = head.encoder_weights(), TrainedImages(run).model.state_dict()
    assert weights is not None and not torch.equal(weights["norm.weight"], head_result["norm.weight"])
    tasks = read_results(probe(tmp_path, run, stripes, "--test", others)).tasks
    assert len(tasks) == 2
    assert len(list((tmp_path / "cache").iterdir())) == 3, "of the test images by both encoders"


@pytest.mark.exhaustive
def test_the_own_figure_is_left_out_where_it_would_say_nothing(
    stripes: Path, others: Path, learned: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    probe(tmp_path, learned, stripes, "--method", "knn")
    assert "give --test DIR" in caplog.text
    caplog.clear()
    results = read_results(probe(tmp_path, learned, others, "--test", stripes, "--method", "knn", name="seen"))
    assert len(results.tasks) == 1 and "64 of its 64 images are in the run's data" in caplog.text
    drawn = tmp_path / "drawn"
    assert pretrain_here(image_flags("mlo_mae_tiny", stripes, drawn, multilevel__kind="none", **SMALL)) == 0
    assert stage_two(str(drawn)) is None


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--data", "x"], "--from is missing"),
        (["--from", "x"], "--data is missing"),
        (["--from", "scratch", "--data", "x"], "--from scratch needs --recipe"),
        (["--from", "x", "--data", "x", "--recipe", "mae_vit_b"], "--recipe mae_vit_b is for --from scratch"),
        (["--from", "x", "--data", "x", "--seeds", "3"], "--seeds 3: --method logistic"),
        (["--from", "x", "--data", "x", "--validation_fraction", "0"], "--validation_fraction is 0.0"),
        (["--from", "x", "--data", "x", "--linear.epochs", "10"], "--linear.warmup_epochs is 10"),
        (["--from", "x", "--data", "x", "--workers", "-1"], "--workers is -1"),
        (["--from", "x", "--data", "x", "--protocol", "mae"], "--method is logistic; .*linear"),
        (["--from", "x", "--data", "x", *PROTOCOL, "--pooling", "mean"], "--pooling is mean; .*class"),
        (["--from", "x", "--data", "x", *PROTOCOL, "--linear.crops", "cached"], "--linear.crops is cached; .*fresh"),
        (["--from", "x", "--data", "x", *PROTOCOL, "--seen", "whole"], "--seen is whole; .*centre"),
        (["--from", "x", "--data", "x", *PROTOCOL, "--centre_share", "1"], "--centre_share is 1.0; .*0.875"),
        (["--from", "x", "--data", "x", *PROTOCOL, "--per_class", "4"], "--per_class 4 .*--protocol mae"),
        (["--from", "x", "--data", "x", *PROTOCOL, "--task", "sst2"], "--task sst2 .*--protocol"),
    ],
)
def test_flags_that_cannot_be(flags: list[str], message: str) -> None:
    with pytest.raises(RefusedError, match=message):
        parse_probe(flags)


def test_what_does_not_fit_is_refused(
    stripes: Path, others: Path, learned: Path, tmp_path: Path, refused: Refused
) -> None:
    base = ["probe", "--from", str(learned), "--data", str(stripes), "--run_dir", str(tmp_path / "x")]
    for more, message in (
        (["--image_size", "18"], "--image_size is 18"),
        (["--test", str(stripes)], "64 of its 64 images"),
        (["--test", str(others), *PROTOCOL, "--batch_size", "128"], "--batch_size is 128"),
        ([*PROTOCOL, "--from", str(TEXT_RUN)], f"--from {TEXT_RUN}"),
    ):
        assert message in refused(*base, *more)
    assert not (tmp_path / "x" / "results.json").exists()


def test_pre_training_on_real_images_beats_random_features(tmp_path: Path) -> None:
    """Minutes: a small MAE on ten thousand images of CIFAR-10, probed on two thousand others, against three draws."""
    published = Path(os.environ.get("TRP_SCALE_CIFAR10", "cifar10"))
    if not published.is_dir():
        pytest.skip(f"{published.absolute()}: no tars train-*.tar and test-*.tar there (TRP_SCALE_CIFAR10)")
    for split in ("train", "test"):
        tars = sorted(str(path) for path in published.glob(f"{split}-*.tar"))
        shard_images(ShardImagesConfig(output=tmp_path / split, inputs=tars, split=split, processes=1))  # type: ignore[arg-type]
    run = tmp_path / "run"
    changes: dict[str, Any] = {"model__layers": 4, "model__hidden_size": 128, "model__heads": 4}
    changes |= {"model__intermediate_size": 512, "vision__patch_size": 4, "multilevel__kind": "none"}
    changes |= {"batch__global_size": 64, "batch__micro_size": 64, "training__steps": 600}
    changes |= {"training__precision": "fp32", "optimizer__lr": 1e-3, "data__validation_fraction": 0.0}
    words = image_flags("mlo_mae_cifar", tmp_path / "train", run, **changes)
    assert pretrain_here(words) == 0
    more = ("--test", tmp_path / "test", "--seen", "whole")
    (learned,) = read_results(probe(tmp_path, run, tmp_path / "train", *more, name="learned")).tasks
    scratch = ("--recipe", run / "config.yaml", "--seeds", 3)
    (drawn,) = read_results(probe(tmp_path, "scratch", tmp_path / "train", *more, *scratch, name="drawn")).tasks
    assert learned.values[0] > max(drawn.values) + 0.01, (learned.values, drawn.values)


def test_few_images_of_each_class_are_drawn_by_the_seed() -> None:
    labels = np.repeat([0, 1, 2], [5, 9, 4])
    first, again, other = (draw_of_each_class(labels, 4, seed) for seed in (0, 0, 1))
    assert np.bincount(labels[first]).tolist() == [4, 4, 4]
    assert first.tolist() == again.tolist() != other.tolist()
    with pytest.raises(RefusedError, match="--per_class is 5, but class 2 has 4 training images"):
        draw_of_each_class(labels, 5, 0)


@pytest.mark.parametrize("held_out", always([False, True], True), ids=["test set", "held out"])
def test_groups_of_measured_images(
    stripes: Path, others: Path, learned: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, held_out: bool
) -> None:
    """All images are called upright, so the accuracy of a group is its share of upright images."""
    groups = write_image_groups(stripes if held_out else others, tmp_path / "groups.csv", number=3)
    monkeypatch.setattr(
        "trp_scale.evaluation.probe.command.classify", lambda train, features, *_: np.zeros(len(features), np.int64)
    )
    where = ["--validation_fraction", 0.4] if held_out else ["--test", others]
    flags = [*where, "--groups", tmp_path / "groups.csv", "--least_group", 2]
    task, *_ = read_results(probe(tmp_path, learned, stripes, *flags)).tasks
    opened = open_labelled(small_config(), str(stripes if held_out else others))
    measured = opened.held_out(0.4) if held_out else np.ones(43, dtype=np.bool_)
    upright = opened.labels([np.ones(len(data.blocks.rows), np.bool_) for data in opened.datasets]) == 0
    names = np.array(list(groups.values()))
    shares = {name: upright[measured & (names == name)].mean() for name in sorted(set(names[measured]))}
    assert {name: entry["accuracy"] for name, entry in task.detail[0]["groups"].items()} == pytest.approx(shares)
    assert task.metrics["group_average"] == [pytest.approx(task.metrics["accuracy"][0])]
    assert len(shares) == 3 and task.metrics["worst_group"] == [pytest.approx(min(shares.values()))]
