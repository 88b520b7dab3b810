"""Fine-tuned runs of every kind: two ranks measure and learn what one does on every engine, and a run that is killed
goes on exactly."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.engine_layouts import ENGINE_FLAGS
from tests.distributed.launched import descendants, finetune_until_killed, wait_for_steps
from tests.fixtures import small_image_dataset
from tests.grids import always
from tests.ranks import Ranks
from tests.runs import SIZES, essence, lines, recipe_flags, start
from tests.unit.finetuning.detection.small_sets import small_scenes
from tests.unit.finetuning.glue.small_data import glue_flags, write_cola, write_stsb
from tests.unit.finetuning.test_finetune import tuning_flags
from trp_scale.checkpoint.document import read_document, read_hooks_state
from trp_scale.checkpoint.format import read_full_state
from trp_scale.checkpoint.run_directory import checkpoint_path
from trp_scale.cli import main as cli
from trp_scale.reporting.results import SPEED

DEV = 21
"""Rows of GLUE to measure on: not a multiple of two ranks' micro-batches of 4, so that filler rows end them."""

STRONG: dict[str, Any] = {
    "augmentation__magnitude": 9,
    "augmentation__erasing": 0.25,
    "augmentation__mixup": 0.8,
    "augmentation__cutmix": 1.0,
    "augmentation__smoothing": 0.1,
    "augmentation__measured": "centre",
    "downstream__epochs": 0,
    "optimizer__schedule": "constant",
    "logging__every": 1,
}
SMALL: dict[str, Any] = {
    **{name: value for name, value in SIZES.items() if name.startswith(("model.", "data."))},
    "from": "scratch",
    "downstream.epochs": 0,
    "downstream.warmup_share": 0,
}
DENSE: dict[str, Any] = {
    **SMALL,
    "crops.size": 32,
    "batch.global_size": 4,
    "batch.micro_size": 1,
    "data.validation_fraction": 0.1,
    "dense.width": 16,
    "downstream.drop_path": 0.0,
    "optimizer.warmup_steps": 0,
}
DETECTION: dict[str, Any] = {
    **SMALL,
    "crops.size": 64,
    "data.validation_fraction": 0.5,
    "batch.global_size": 8,
    "batch.micro_size": 2,
    "optimizer.schedule": "constant",
    "training.steps": 2,
    "detection.width": 16,
    "detection.box_width": 32,
    "detection.train_proposals": 50,
    "detection.test_proposals": 50,
    "detection.score_threshold": 0.0,
    "detection.min_scale": 0.5,
    "detection.max_scale": 1.5,
    "logging.every": 1,
}
VITDET: dict[str, Any] = {
    "detection__heads": "cascade",
    "detection__window": 3,
    "detection__whole_blocks": 1,
    "optimizer__schedule": "multistep",
    "optimizer__milestones": 1,
    "optimizer__layer_decay": 0.7,
}
"""Padded windows in the first block, three stages of boxes, and a lower rate from the second step on."""
STILL = {"training__steps": 1, "optimizer__lr": 1e-30}
"""A run whose weights do not move: any difference is one of measuring."""


def text_flags(text_dataset: Path, root: Path, run_dir: Path, task: str, **changes: Any) -> list[str]:
    tokenizer = text_dataset / "tokenizer"
    settings = {"downstream__tokenizer": tokenizer, "downstream__epochs": 0, "training__steps": 6, **changes}
    return glue_flags(root, run_dir, task, "scratch", **settings)


def image_flags(dataset: Path, run_dir: Path, **changes: Any) -> list[str]:
    return tuning_flags(dataset, run_dir, "scratch", **{**STRONG, **changes})


def small_flags(small: dict[str, Any], recipe: str, dataset: Path, run_dir: Path, **changes: Any) -> list[str]:
    return recipe_flags(f"{recipe}_tiny", {**small, "data.path": dataset, "run_dir": run_dir}, **changes)


detection_flags = partial(small_flags, DETECTION, "detection")


def finetune_here(arguments: list[str]) -> int:
    """In this process, or on shared ranks."""
    return cli.main(["finetune", *arguments])


def seed_directory(run_dir: Path, task: str) -> Path:
    return run_dir / task / "seed_0"


def result(run_dir: Path, task: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((seed_directory(run_dir, task) / "result.json").read_text())
    found["detail"].pop(SPEED, None)
    return found


def essences(run_dir: Path, task: str) -> list[dict[str, Any]]:
    return [essence(line) for line in lines(seed_directory(run_dir, task))]


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_scenes(tmp_path_factory.mktemp("detection") / "scenes", count=24)


MEASURED: dict[str, Callable[[dict[str, Any]], bool]] = {
    "cola": lambda one: one["detail"]["all"]["rows"] == DEV,
    "stsb": lambda one: one["detail"]["all"]["rows"] == DEV and one["metrics"]["spearman"] not in (0.0, 1.0),
    "classification": lambda one: sum(each["images"] for each in one["detail"]["classes"].values()) == 21,
    "segmentation": lambda one: len(one["metrics"]) > 3,
    "depth": lambda one: len(one["metrics"]) > 3,
    "detection": lambda one: one["metrics"]["AP"] > 0 and "mask_AP" in one["metrics"],  # by chance, but not nothing
}
"""What must hold of a result so that measuring was no empty thing."""


@pytest.mark.parametrize("task", always(MEASURED, "cola", "segmentation", "detection"))
def test_two_ranks_measure_what_one_does(
    two_ranks: Ranks, text_dataset: Path, image_dataset: Path, scenes: Path, tmp_path: Path, task: str
) -> None:
    """The rows that are measured do not fill the last micro-batches of two ranks."""
    split: dict[str, Any] = {}
    if task in ("cola", "stsb"):
        root = {"cola": write_cola, "stsb": write_stsb}[task](tmp_path / "glue", 40, DEV)
        flags = partial(text_flags, text_dataset, root, task=task)
    elif task == "classification":
        test_set = small_image_dataset(tmp_path / "test", count=21, seed=1)
        flags = partial(image_flags, image_dataset, batch__micro_size=4, downstream__test_path=test_set)
    elif task == "detection":
        flags = partial(detection_flags, scenes, batch__micro_size=4)
    else:
        flags = partial(small_flags, DENSE, task, image_dataset, batch__micro_size=3, batch__global_size=6)
        split = ENGINE_FLAGS["fsdp"]
    assert finetune_here(flags(tmp_path / "one", **STILL)) == 0
    assert two_ranks(finetune_here, flags(tmp_path / "two", **STILL, **split)) == [0, 0]
    one, two = (result(tmp_path / name, task) for name in ("one", "two"))
    assert one == two and MEASURED[task](one)


def check_lines(one: Path, two: Path, task: str) -> None:
    """Six steps of two runs are the same within invariant 1."""
    mine, theirs = (lines(seed_directory(run_dir, task)) for run_dir in (one, two))
    assert len(mine) == 6
    for line, other in zip(mine, theirs, strict=True):
        assert line["loss"] == pytest.approx(other["loss"], rel=1e-5), line["step"]
        assert line["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-4), line["step"]


MODERN = {"model__kind": "modern", "model__dropout": 0.0, "model__local_attention": 8, "model__layer_norm_eps": 1e-5}
LAYOUTS = [("ddp", "bert"), ("zero2", "bert"), ("fsdp", "modern"), ("zero3", "modern")]


@pytest.mark.parametrize(("layout", "kind"), always(LAYOUTS, ("zero2", "bert"), ("fsdp", "modern")))
def test_two_ranks_learn_of_text_what_one_does(
    two_ranks: Ranks, text_dataset: Path, tmp_path: Path, layout: str, kind: str
) -> None:
    """Invariant 1, rows that share sequences on one side included."""
    root = write_stsb(tmp_path / "glue", 40, DEV)
    changes = MODERN if kind == "modern" else {"model__dropout": 0.0}
    flags = partial(text_flags, text_dataset, root, task="stsb", downstream__dropout=0.0, **changes)
    assert finetune_here(flags(tmp_path / "one", downstream__padding="length", batch__micro_size=8)) == 0
    engine = {} if layout == "ddp" else ENGINE_FLAGS[layout]
    split = flags(tmp_path / "two", downstream__padding="none", batch__micro_size=2, **engine)
    assert two_ranks(finetune_here, split) == [0, 0]
    check_lines(tmp_path / "one", tmp_path / "two", "stsb")
    losses = [line["loss"] for line in lines(seed_directory(tmp_path / "one", "stsb"))]
    assert losses[-1] < losses[0]
    figures = [result(tmp_path / name, "stsb")["metrics"] for name in ("one", "two")]
    assert figures[0] == pytest.approx(figures[1], abs=1e-3)


@pytest.mark.parametrize("layout", always(["fsdp", "zero3"], "fsdp"))
def test_two_ranks_learn_of_images_what_one_does(
    two_ranks: Ranks, image_dataset: Path, tmp_path: Path, layout: str
) -> None:
    """Invariant 1 with every augmentation: images are mixed with the same neighbours however the batch is split."""
    # Drop path is drawn for each micro-batch, like dropout.
    flags = partial(image_flags, image_dataset, training__steps=6, downstream__drop_path=0.0)
    assert finetune_here(flags(tmp_path / "one", batch__micro_size=8)) == 0
    assert two_ranks(finetune_here, flags(tmp_path / "two", batch__micro_size=2, **ENGINE_FLAGS[layout])) == [0, 0]
    check_lines(tmp_path / "one", tmp_path / "two", "classification")
    mine, theirs = (
        read_full_state(checkpoint_path(seed_directory(tmp_path / name, "classification"), 6))
        for name in ("one", "two")
    )
    for name, tensor in mine.items():
        torch.testing.assert_close(
            theirs[name], tensor, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}"
        )


def read_statistics(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Running means and variances of batch norms, by name."""
    state: dict[str, torch.Tensor] = read_hooks_state(checkpoint, read_document(checkpoint))["batch_norm"]
    return state


@pytest.mark.parametrize(
    ("engine", "kind", "head"),
    always(
        [
            ("fsdp", "depth", "dpt"),
            ("zero3", "segmentation", "upernet"),
            *((engine, "segmentation", "batch_norm") for engine in ("ddp", "fsdp", "zero2", "zero3")),
        ],
        ("fsdp", "depth", "dpt"),
        ("ddp", "segmentation", "batch_norm"),
        ("fsdp", "segmentation", "batch_norm"),
    ),
)
def test_two_ranks_learn_of_pixels_what_one_does(
    two_ranks: Ranks, image_dataset: Path, tmp_path: Path, engine: str, kind: str, head: str
) -> None:
    """One image to a micro-batch on two ranks, four on one: the sums are the same, and no norm is over the batch but
    batch norms, whose micro-batches are a rank's whole share. By gradient descent: AdamW divides the rounding of
    gradients that are almost 0 by their size."""
    changes: dict[str, Any] = {"training__steps": 3, "checkpoint__every": 1, "checkpoint__keep": 0, "dense__head": head}
    share: dict[str, Any] = {}
    if head == "batch_norm":
        changes |= {"dense__head": "upernet", "dense__norm": "batch", "dense__position_bias": True}
        changes |= {"dense__distortion": True}
        share = {"batch__micro_size": 2}
    changes |= {"optimizer__kind": "sgd", "optimizer__lr": 0.05, "optimizer__schedule": "constant"}
    changes |= {"dense__auxiliary_weight": 0.0 if head == "dpt" else 0.4}
    changes |= {"dense__threshold": "batch"} if kind == "depth" else {}
    flags = partial(small_flags, DENSE, kind, image_dataset, **changes)
    split = {} if engine == "ddp" else ENGINE_FLAGS[engine]
    assert two_ranks(finetune_here, flags(tmp_path / "two", **split, **share)) == [0, 0]
    assert finetune_here(flags(tmp_path / "one", batch__micro_size=4)) == 0
    one, two = (seed_directory(tmp_path / name, kind) for name in ("one", "two"))
    if head == "batch_norm":
        statistics = [read_statistics(checkpoint_path(run, 3)) for run in (one, two)]
        torch.testing.assert_close(statistics[0], statistics[1], rtol=1e-4, atol=1e-6)
        assert all((running[0] != 0).any() for running in statistics[0].values())
    first, theirs = (read_full_state(checkpoint_path(one, step)) for step in (1, 3))
    ours = read_full_state(checkpoint_path(two, 3))
    assert ours.keys() == theirs.keys()
    for name, reference in theirs.items():
        apart, size, travelled = ((ours[name] - reference).norm(), reference.norm(), (reference - first[name]).norm())
        assert apart <= 1e-5 * size + 1e-7, name
        assert apart <= 1e-4 * travelled + 1e-7, name
    assert sum(float((theirs[name] - first[name]).norm()) for name in theirs) > 0.01


DETECTORS: dict[str, dict[str, Any]] = {"one_stage": {}, "vitdet": VITDET}


@pytest.fixture(scope="module")
def alone(scenes: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The detection run of one rank, by the detector."""

    @cache
    def run(detector: str) -> Path:
        run_dir = tmp_path_factory.mktemp("alone") / "run"
        assert finetune_here(detection_flags(scenes, run_dir, **DETECTORS[detector])) == 0
        return run_dir

    return run


LAYOUTS_OF_DETECTORS = list(product(["fsdp", "zero2", "zero3"], DETECTORS))


@pytest.mark.parametrize(
    ("layout", "detector"), always(LAYOUTS_OF_DETECTORS, ("zero2", "one_stage"), ("fsdp", "vitdet"))
)
def test_two_ranks_learn_to_detect_what_one_does_in_micro_batches_of_one_size(
    two_ranks: Ranks, scenes: Path, alone: Callable[[str], Path], tmp_path: Path, layout: str, detector: str
) -> None:
    flags = detection_flags(scenes, tmp_path, **DETECTORS[detector], **ENGINE_FLAGS[layout])
    assert two_ranks(finetune_here, flags) == [0, 0]
    ours, reference = (lines(seed_directory(run, "detection")) for run in (tmp_path, alone(detector)))
    assert [line["step"] for line in ours] == [1, 2]
    for line, other in zip(ours, reference, strict=True):
        assert line["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-4)
        for task, values in other["tasks"].items():
            assert line["tasks"][task]["loss"] == pytest.approx(values["loss"], rel=1e-4), task
            assert line["tasks"][task]["count"] == values["count"] == 8


@pytest.mark.exhaustive
@pytest.mark.parametrize(("task", "kind"), [("cola", "bert"), ("cola", "modern"), ("classification", "vit")])
def test_kill_9_at_a_random_step_and_go_on(
    text_dataset: Path, image_dataset: Path, tmp_path: Path, task: str, kind: str
) -> None:
    """With dropout or drop path; images come from a worker process after the kill."""
    many = {"training__steps": 60, "checkpoint__every": 2}
    if task == "cola":
        root = write_cola(tmp_path / "glue", 60, DEV)
        changes = MODERN if kind == "modern" else {"model__dropout": 0.1}
        flags = partial(text_flags, text_dataset, root, task=task, optimizer__lr=1e-3, **changes, **many)
        workers = {}
    else:
        flags = partial(image_flags, image_dataset, downstream__drop_path=0.2, **many)
        workers = {"data__workers": 1}
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert finetune_here(flags(whole, **dict.fromkeys(workers, 0))) == 0
    command = flags(killed, **workers)
    finetune_until_killed(command, seed_directory(killed, task), 60)
    assert finetune_here(command) == 0
    assert essences(whole, task) == essences(killed, task) and len(essences(whole, task)) == 60
    found = [result(run_dir, task) for run_dir in (whole, killed)]
    settings = [each.pop("settings")["data"]["workers"] for each in found]
    assert settings == [0, 1] or task == "cola"
    assert found[0] == found[1]


@pytest.mark.exhaustive
def test_kill_9_and_a_restart_in_its_place(image_dataset: Path, tmp_path: Path) -> None:
    changes = {"training__steps": 60, "checkpoint__every": 2, "data__workers": 0, "downstream__drop_path": 0.2}
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert finetune_here(image_flags(image_dataset, whole, **changes)) == 0
    command = [*image_flags(image_dataset, killed, **changes), "--reliability.restarts", "1"]
    process = start(command, script="finetune.py")
    wait_for_steps(process, seed_directory(killed, "classification"), 7)
    (forked,) = descendants(process.pid)
    os.kill(forked, signal.SIGKILL)
    output = process.communicate(timeout=600)[0]
    assert process.returncode == 0, output
    runs = [essences(run_dir, "classification") for run_dir in (whole, killed)]
    assert runs[0] == runs[1] and len(runs[0]) == 60


@pytest.mark.exhaustive
@pytest.mark.parametrize("detector", DETECTORS)
def test_a_detection_run_goes_on_bit_for_bit(scenes: Path, tmp_path: Path, detector: str) -> None:
    whole, again = tmp_path / "whole", tmp_path / "again"
    changes = {**DETECTORS[detector], "training__steps": 4, "checkpoint__every": 2}
    flags = partial(detection_flags, scenes, **changes)
    assert finetune_here(flags(whole)) == 0
    shutil.copytree(whole, again)
    directory = seed_directory(again, "detection")
    shutil.rmtree(checkpoint_path(directory, 4))
    (directory / "result.json").unlink()
    assert finetune_here(flags(again)) == 0
    assert essences(again, "detection") == essences(whole, "detection")
    ours, reference = (lines(seed_directory(run, "detection")) for run in (again, whole))
    assert ours[-1] != reference[-1], "times differ where the steps were made again"
    assert result(again, "detection") == result(whole, "detection")
