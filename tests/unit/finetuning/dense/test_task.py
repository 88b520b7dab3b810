"""Fine-tuning on pixels from the command line: it learns, resumes exactly, and refuses what cannot be."""

from __future__ import annotations

import argparse
import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import confusion_matrix, jaccard_score, recall_score

from tests.fixtures import copy_dataset
from tests.grids import always
from tests.runs import Refused, lines, to_flags
from tests.unit.finetuning.dense.test_model import convnext_state, dpt_state, published
from trp_scale.api import shard_images
from trp_scale.checkpoint.format import read_full_state
from trp_scale.checkpoint.run_directory import checkpoint_path
from trp_scale.cli import main as cli
from trp_scale.config import RefusedError
from trp_scale.config.loader import load_recipe
from trp_scale.core.batch import Batch
from trp_scale.distributed.groups import ALONE
from trp_scale.finetuning.arguments import parse_finetune
from trp_scale.finetuning.dense.depth import DepthTask
from trp_scale.finetuning.dense.settings import DepthTaskConfig
from trp_scale.finetuning.dense.task import ConfusionMatrix, SegmentationTask, segmentation_metrics
from trp_scale.reporting.results import read_results

SMALL: dict[str, Any] = {
    "model.layers": 2,
    "model.hidden_size": 32,
    "model.heads": 2,
    "model.intermediate_size": 64,
    "crops.size": 32,
    "batch.global_size": 16,
    "batch.micro_size": 16,
    "data.workers": 0,
    "data.validation_fraction": 0.2,
    "logging.every": 1,
    "dense.width": 16,
}


LEARNING: dict[str, Any] = {
    "downstream__epochs": 8,
    "downstream__drop_path": 0.0,
    "dense__min_scale": 1.0,
    "dense__max_scale": 1.0,
    "batch__global_size": 8,
    "batch__micro_size": 8,
    "optimizer__lr": 1e-2,
    "optimizer__layer_decay": 1.0,
}
"""Fast on a hundred scenes."""


def flags(kind: str, dataset: Path, run_dir: Path, **changes: Any) -> list[str]:
    """A small run; `changes` with "__" for the dot."""
    values = {**SMALL, "data.path": dataset, "run_dir": run_dir, "from": "scratch"}
    return ["--recipe", f"{kind}_tiny", *to_flags(values, **changes)]


def metrics_of(run_dir: Path) -> dict[str, float]:
    (task,) = read_results(run_dir).tasks
    return {name: values[0] for name, values in task.metrics.items()}


def test_segmentation_learns_more_than_the_most_frequent_class(image_dataset: Path, tmp_path: Path) -> None:
    assert cli.main(["finetune", *flags("segmentation", image_dataset, tmp_path / "run", **LEARNING)]) == 0
    found = metrics_of(tmp_path / "run")
    assert found["mean_iou"] > 2 * found["constant_mean_iou"]
    (task,) = read_results(tmp_path / "run").tasks
    assert set(task.detail[0]["iou"]) >= {"wall", "ground", "sphere"}
    flops = {line["model_flops"] for line in lines(tmp_path / "run" / "segmentation" / "seed_0")}
    assert len(flops) == 1 and flops.pop() > 1e8, "8 images of 16 patches, encoder and head"


@pytest.mark.exhaustive
def test_depth_learns_more_than_its_mean(image_dataset: Path, tmp_path: Path) -> None:
    words = flags("depth", image_dataset, tmp_path / "run", **{**LEARNING, "downstream__epochs": 4})
    assert cli.main(["finetune", *words]) == 0
    found = metrics_of(tmp_path / "run")
    assert found["delta_1"] > found["constant_delta_1"] + 0.1


def check_resume(kind: str, dataset: Path, directory: Path, changes: dict[str, Any]) -> None:
    """Run four steps whole and, without the last checkpoint, again: weights and figures are equal."""
    for name in ("whole", "stopped"):
        assert cli.main(["finetune", *flags(kind, dataset, directory / name, **changes)]) == 0
    whole, stopped = (directory / name / kind / "seed_0" for name in ("whole", "stopped"))
    (stopped / "result.json").unlink()
    shutil.rmtree(checkpoint_path(stopped, 4))
    assert cli.main(["finetune", *flags(kind, dataset, directory / "stopped", **changes)]) == 0
    weights, again = (read_full_state(checkpoint_path(run, 4)) for run in (whole, stopped))
    assert weights.keys() == again.keys() and all(torch.equal(weights[name], again[name]) for name in weights)
    assert metrics_of(directory / "whole") == metrics_of(directory / "stopped")


@pytest.mark.parametrize("kind", always(["segmentation", "depth"], "segmentation"))
def test_a_stopped_run_goes_on_to_the_same_weights(image_dataset: Path, tmp_path: Path, kind: str) -> None:
    changes = {"downstream__epochs": 0, "training__steps": 4, "checkpoint__every": 2, "validation__every": 4}
    check_resume(kind, image_dataset, tmp_path, changes)
    metrics = lines(tmp_path / "whole" / kind / "seed_0")
    losses = [line["tasks"][kind]["loss"] for line in metrics if "grad_norm" in line]
    assert len(losses) == 4


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("segmentation", {"dense__head": "dpt"}, "--dense.head is dpt, allowed for segmentation"),
        ("segmentation", {"dense__auxiliary_weight": 0.4}, "--dense.auxiliary_weight is 0.4, allowed: 0.0 with"),
        ("segmentation", {"dense__norm": "batch"}, "--dense.norm is batch, allowed: group with"),
        ("segmentation", {"dense__dropout": 0.1}, "--dense.dropout is 0.1, allowed: 0.0 with"),
        ("segmentation", {"dense__class_token": False}, "--dense.class_token is False, allowed: True with"),
        ("depth", {"dense__raw_tokens": True}, "--dense.raw_tokens is True, allowed: False with"),
        ("segmentation", {"dense__weights": "head.pth"}, "--dense.weights is head.pth, allowed with"),
        ("depth", {"dense__weights": "head.pth"}, "--dense.weights is head.pth, allowed with"),
        ("segmentation", {"dense__max_scale": 0.2}, "--dense.min_scale is 0.5 and --dense.max_scale 0.2"),
        ("segmentation", {"dense__head": "upernet", "crops__size": 8}, "--crops.size is 8, allowed with --dense.head"),
        ("segmentation", {"dense__after": 5}, "--dense.after is 5, allowed: 4 blocks"),
        ("depth", {"dense__width": 12}, "--dense.width is 12, allowed: 0"),
        ("depth", {"dense__max_depth": 1e-4}, "--dense.max_depth is 0.0001, allowed: more than --dense.min_depth"),
    ],
)
def test_invalid_settings_are_refused_by_flag(
    image_dataset: Path, tmp_path: Path, kind: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(RefusedError) as caught:
        parse_finetune(flags(kind, image_dataset, tmp_path / "x", **changes))
    assert message in str(caught.value)


def test_depth_without_metres_and_inverse_depth(image_dataset: Path, tmp_path: Path, refused: Refused) -> None:
    relative = copy_dataset(image_dataset, tmp_path / "relative", modalities={"depth": {"scale": None}})
    nearer = copy_dataset(relative, tmp_path / "nearer", modalities={"depth": {"larger_is": "nearer"}})
    short = {"downstream__epochs": 0, "training__steps": 1, "dense__head": "linear"}
    aligned = {**short, "dense__alignment": "scale_shift"}
    for data, changes, message in (
        (relative, short, "allowed: --dense.alignment scale_shift, or shard again with --depth.scale"),
        (nearer, aligned, "--dense.target is metric"),
        (image_dataset, {**short, "downstream__test_path": relative}, f"{relative} has relative depth maps"),
        (image_dataset, {**aligned, "downstream__test_path": nearer}, "allowed: the same direction"),
        (f"a:1={image_dataset},b:1={relative}", aligned, f"{relative} has relative depth maps"),
    ):
        assert message in refused("finetune", *flags("depth", data, tmp_path / "refused", **changes))
    means = {}
    for name, data, target in (
        ("metric", relative, "metric"),
        ("inverse", image_dataset, "inverse"),
        ("n", nearer, "inverse"),
    ):
        run_dir = tmp_path / f"run_{name}"
        assert cli.main(["finetune", *flags("depth", data, run_dir, **aligned, dense__target=target)]) == 0
        assert 0 < metrics_of(run_dir)["delta_1"] <= 1
        config = load_recipe(run_dir / "depth" / "seed_0" / "config.yaml")
        assert isinstance(config, DepthTaskConfig) and config.dense.depth_deviation > 0
        means[name] = config.dense.depth_mean
    assert means["metric"] == pytest.approx(means["n"]), "maps whose larger numbers are nearer are learned as they are"
    metres = means["metric"] * 65535 * 0.001
    assert 1 < metres < 20 and 1 / metres < means["inverse"], "the mean of 1 / depth is above 1 / the mean"


def test_depth_is_standardised_by_training_maps_alone(image_dataset: Path, tmp_path: Path) -> None:
    """Of 0.5 held out: crops as large as the scenes and jitter of 1 show whole maps."""
    size = int(json.loads((image_dataset / "dataset.json").read_text())["settings"]["size"])
    changes = {"data__validation_fraction": 0.5, "dense__min_scale": 1.0, "dense__max_scale": 1.0, "crops__size": size}
    config = parse_finetune(
        flags("depth", image_dataset, tmp_path, **changes, batch__global_size=1, batch__micro_size=1)
    ).config
    task = DepthTask(config, SimpleNamespace(data=ALONE, device=torch.device("cpu"), cpus=1))  # type: ignore[arg-type]
    maps = torch.cat([task.source.next_window()[0]["depth"] for _ in range(task.source.rows)]).double()  # type: ignore[attr-defined]
    assert 10 < len(maps) < 90
    assert config.dense.depth_mean == pytest.approx(float(maps[maps > 0].mean()), rel=1e-9)
    assert config.dense.depth_deviation == pytest.approx(float(maps[maps > 0].std(correction=0)), rel=1e-9)


def test_a_head_that_multimae_s_code_has_trained_is_the_initial_one(image_dataset: Path, tmp_path: Path) -> None:
    """A file as that code writes it: weights beside the arguments of the script. Another number of classes is
    refused."""
    where: Any = SimpleNamespace(data=ALONE, device=torch.device("cpu"), cpus=1)
    for kind, task_class, changes, state in (
        ("depth", DepthTask, {"head": "dpt", "class_token": False, "width": 32}, dpt_state(32, 32)),
        ("segmentation", SegmentationTask, {"raw_tokens": True, "width": 16}, convnext_state(32, 16, 10)),
    ):
        file = tmp_path / f"{kind}.pth"
        task_name = "depth" if kind == "depth" else "semseg"
        torch.save({"model": published(state, task_name), "args": argparse.Namespace(epochs=2)}, file)
        named = {f"dense__{name}": value for name, value in (changes | {"weights": file}).items()}
        config = parse_finetune(flags(kind, image_dataset, tmp_path / "run", **named)).config
        head = task_class(config, where).model().head  # type: ignore[arg-type]
        ours, theirs = (
            ("neck.convs.3.weight", "scratch.layer4_rn.weight")
            if kind == "depth"
            else ("blocks.3.mlp.fc1.weight", "blocks.3.pwconv1.weight")
        )
        assert torch.equal(head.state_dict()[ours], state[theirs].float())
    short = {**named, "downstream__epochs": 0, "training__steps": 1}
    assert cli.main(["finetune", *flags("segmentation", image_dataset, tmp_path / "run", **short)]) == 0
    file.unlink()
    assert cli.main(["evaluate", "--run", str(tmp_path / "run"), "--output", str(tmp_path / "again")]) == 0
    assert metrics_of(tmp_path / "run") == metrics_of(tmp_path / "again"), "the file is needed no more"
    torch.save(published(convnext_state(32, 16, 9), "semseg"), file)
    with pytest.raises(RefusedError, match=rf"--dense.weights {file}.*classifier"):
        SegmentationTask(config, where).model()  # type: ignore[arg-type]


def test_a_run_with_batch_norms_is_resumed_and_measured_again_with_their_statistics(
    image_dataset: Path, tmp_path: Path
) -> None:
    changes: dict[str, Any] = {
        "dense__head": "upernet",
        "dense__norm": "batch",
        "dense__dropout": 0.1,
        "dense__position_bias": True,
        "dense__distortion": True,
        "downstream__epochs": 0,
        "training__steps": 4,
        "checkpoint__every": 2,
    }
    check_resume("segmentation", image_dataset, tmp_path, changes)
    assert cli.main(["evaluate", "--run", str(tmp_path / "whole"), "--output", str(tmp_path / "again")]) == 0
    assert metrics_of(tmp_path / "again") == metrics_of(tmp_path / "whole")
    split = {**changes, "batch__micro_size": 4}
    assert cli.main(["finetune", *flags("segmentation", image_dataset, tmp_path / "split", **split)]) == 2


def test_camvid_is_segmented_better_than_by_its_most_frequent_class(tmp_path: Path) -> None:
    """Real street scenes: 120 to learn from, 40 to measure on."""
    images = Path(os.environ.get("TRP_SCALE_CAMVID", "camvid"))
    if not (images / "train" / "semseg").is_dir():
        pytest.skip(
            f"no CamVid at {images}: set TRP_SCALE_CAMVID to a folder with train/ and val/, each rgb/ and semseg/"
        )
    names = tmp_path / "names.txt"
    names.write_text("sky building pole road pavement tree sign fence car pedestrian cyclist void".replace(" ", "\n"))
    for split in ("train", "val"):
        shard_images(
            tmp_path / split,
            images / split / "rgb",
            modality=[f"semseg={images / split / 'semseg'}"],
            semseg={"classes": names},
            split=split,
            rows_per_block=8,
            processes=1,
            progress=False,
        )
    changes = {
        **LEARNING,
        "downstream__test_path": tmp_path / "val",
        "downstream__epochs": 6,
        "dense__ignored": 11,
        "dense__max_scale": 2.0,
        "crops__size": 64,
    }
    assert cli.main(["finetune", *flags("segmentation", tmp_path / "train", tmp_path / "run", **changes)]) == 0
    found = metrics_of(tmp_path / "run")
    assert found["mean_iou"] > 1.5 * found["constant_mean_iou"]


NAMES = ("sky", "road", "tree", "car", "sign")


def batch_of(maps: list[torch.Tensor]) -> Batch:
    """Labels of different sizes in one batch, as WholeBatchBuilder pads them."""
    tall, wide = (max(each.shape[side] for each in maps) for side in (0, 1))
    whole = torch.full((len(maps), tall, wide), 255, dtype=torch.uint8)
    for row, each in enumerate(maps):
        whole[row, : each.shape[0], : each.shape[1]] = each
    sizes = torch.tensor([each.shape for each in maps])
    return Batch(fields={"whole_semseg": whole, "sizes": sizes}, keys=torch.arange(len(maps)), start=0)


def random_labels(classes: int, *sizes: tuple[int, int], seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, classes, size, generator=generator, dtype=torch.uint8) for size in sizes]


def test_figures_are_scikit_learn_s_and_void_counts_nowhere() -> None:
    sizes = ((7, 9), (5, 20), (13, 4))
    labels, predicted = random_labels(5, *sizes), random_labels(5, *sizes, seed=1)
    for each in labels:
        each[:2, :3] = 255
    metric = ConfusionMatrix(NAMES)
    for chosen in ([0, 1], [2]):
        metric.add([predicted[i].long() for i in chosen], batch_of([labels[i] for i in chosen]))
    found = metric.finish(ALONE)
    true, guess = (np.concatenate([each.numpy().ravel() for each in maps]) for maps in (labels, predicted))
    true, guess = true[true != 255], guess[np.concatenate([each.numpy().ravel() for each in labels]) != 255]
    assert found["mean_iou"] == pytest.approx(jaccard_score(true, guess, average="macro"), abs=1e-12)
    assert found["pixel_accuracy"] == pytest.approx((true == guess).mean(), abs=1e-12)
    assert found["class_accuracy"] == pytest.approx(recall_score(true, guess, average="macro"), abs=1e-12)
    per_class = jaccard_score(true, guess, average=None)
    assert list(found["detail"]["iou"].values()) == pytest.approx(per_class.tolist(), abs=1e-12)
    assert list(found["detail"]["pixels"].values()) == confusion_matrix(true, guess).sum(1).tolist()


def test_absent_classes_are_excluded_from_the_means() -> None:
    counts = torch.tensor([[3, 1, 0, 0], [0, 4, 0, 2], [0, 0, 0, 0], [0, 0, 0, 0]])
    found = segmentation_metrics(counts, ("a", "b", "nowhere", "only predicted"))
    assert found["mean_iou"] == pytest.approx((3 / 4 + 4 / 7 + 0) / 3)
    assert found["class_accuracy"] == pytest.approx((3 / 4 + 4 / 6) / 2), "what is not labelled has no accuracy"
    detail = found["detail"]
    assert detail["iou"]["nowhere"] is None and detail["iou"]["only predicted"] == 0.0
    assert detail["accuracy"]["only predicted"] is None


def test_the_constant_prediction_s_figure_is_what_it_would_get() -> None:
    labels = random_labels(4, (30, 40))[0]
    labels[:20] = 2
    metric, constant = ConfusionMatrix(NAMES), ConfusionMatrix(NAMES)
    metric.add([random_labels(5, (30, 40), seed=3)[0].long()], batch_of([labels]))
    constant.add([torch.full((30, 40), 2)], batch_of([labels]))
    assert metric.finish(ALONE)["constant_mean_iou"] == pytest.approx(constant.finish(ALONE)["mean_iou"], abs=1e-12)


def test_maps_with_only_void_are_refused() -> None:
    metric = ConfusionMatrix(NAMES)
    metric.add([torch.zeros(4, 4, dtype=torch.long)], batch_of([torch.full((4, 4), 255, dtype=torch.uint8)]))
    with pytest.raises(RefusedError, match=r"--dense.ignored"):
        metric.finish(ALONE)
