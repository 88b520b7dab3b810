"""`trp-scale evaluate`: fine-tuned runs measured again, and on other data; runs of pre-training."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.fixtures import copy_dataset
from tests.runs import Refused, flags, image_flags, lines, pretrain_here
from tests.unit.data.images.stored import jpeg, photograph, sample, write_images
from tests.unit.finetuning.test_finetune import tuning_flags
from trp_scale.checkpoint.document import read_document
from trp_scale.cli import main as cli
from trp_scale.reporting.results import TaskResult, read_results


def reddish(number: int, **members: bytes) -> dict[str, str | bytes]:
    """Image `number`, of class `number` modulo 3: random colours, more or less red after its class."""
    image = np.asarray(photograph(16, 16, number)).astype(np.int64)
    image[:, :, 0] = (image[:, :, 0] + 120 * (number % 3)) // 2
    return sample(number, 16, 16, **{"jpg": jpeg(Image.fromarray(image.clip(0, 255).astype(np.uint8))), **members})


def tuned_run(directory: Path, *more: str, seeds: int = 1) -> Path:
    """Classifiers of ant, bee and cat, which they learn in part; their training data lies in directory/data."""
    data = write_images(directory / "data", [[reddish(number) for number in range(90)]])
    words = tuning_flags(
        data,
        directory / "run",
        "scratch",
        seeds=seeds,
        crops__size=16,
        vision__patch_size=4,
        downstream__epochs=10,
        optimizer__lr=0.003,
        augmentation__measured="whole",
        data__validation_fraction=0.4,
    )
    assert cli.main(["finetune", *words, *more]) == 0
    return directory / "run"


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tuned_run(tmp_path_factory.mktemp("tuned"), seeds=2)


def images(directory: Path, numbers: range, **changes: object) -> Path:
    return write_images(directory, [[reddish(number) for number in numbers]], changes=changes)


def test_a_run_and_one_of_its_seeds_measured_again_give_what_they_gave(tuned: Path, tmp_path: Path) -> None:
    assert cli.main(["evaluate", "--run", str(tuned), "--micro_size", "7"]) == 0
    again, first = read_results(tuned / "evaluations" / "own"), read_results(tuned)
    assert again.tasks[0].metrics == first.tasks[0].metrics
    assert again.tasks[0].detail == first.tasks[0].detail
    assert sum(found["images"] for found in first.tasks[0].detail[0]["classes"].values()) > 20
    assert (again.recipe, again.encoder, again.tasks[0].seeds) == (first.recipe, "scratch", [0, 1])
    seed = tuned / "classification" / "seed_1"
    assert cli.main(["evaluate", "--run", str(seed), "--output", str(tmp_path)]) == 0
    (task,) = read_results(tmp_path).tasks
    assert task.seeds == [1] and task.values == first.tasks[0].values[1:]


def test_predictions_have_a_line_for_the_class_of_each_image(tuned: Path, tmp_path: Path) -> None:
    words = ["--predictions", str(tmp_path / "out"), "--output", str(tmp_path / "again")]
    assert cli.main(["evaluate", "--run", str(tuned), *words]) == 0
    (task,) = read_results(tuned).tasks
    for seed, accuracy in zip(task.seeds, task.values, strict=True):
        with (tmp_path / "out" / f"seed_{seed}" / "classification.csv").open(encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
        assert accuracy == pytest.approx(np.mean([row["predicted"] == row["label"] for row in rows]))
        assert all(row["class"] == ("ant", "bee", "cat")[int(row["predicted"])] for row in rows)
        assert all(int(row["key"].removeprefix("n")) % 3 == int(row["label"]) for row in rows)
        assert all(1 / 3 <= float(row["probability"]) <= 1 for row in rows)


def test_the_most_frequent_class_of_the_training_images_is_measured_beside_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Four of five training images are cats, three of four measured ones are ants. The figure stays where the training
    images are gone."""
    train = [reddish(number, cls=b"0" if number % 5 == 0 else b"2") for number in range(40)]
    data = write_images(tmp_path / "data", [train])
    test = write_images(
        tmp_path / "test", [[reddish(number, cls=b"2" if number % 4 == 0 else b"0") for number in range(100, 108)]]
    )
    words = tuning_flags(data, tmp_path / "run", "scratch", crops__size=16, vision__patch_size=4, downstream__epochs=1)
    assert cli.main(["finetune", *words, "--downstream.test_path", str(test)]) == 0
    assert read_results(tmp_path / "run").tasks[0].metrics["constant_accuracy"] == [0.25]
    printed = capsys.readouterr().out
    assert "constant" in next(line for line in printed.splitlines() if "metric" in line) and "0.2500" in printed
    shutil.rmtree(data)
    assert cli.main(["evaluate", "--run", str(tmp_path / "run"), "--data", str(test)]) == 0
    (task,) = read_results(tmp_path / "run" / "evaluations" / "test").tasks
    assert task.metrics["constant_accuracy"] == [0.25]


def test_the_average_of_the_weights_is_measured_in_their_place(tuned: Path, tmp_path: Path, refused: Refused) -> None:
    """A run that measures its average itself says what is expected; the average has hardly left the first weights."""
    averaging = ("--hooks", "weight_average", "--weight_average.decay", "0.999", "--weight_average.warmup", "false")
    run = tuned_run(tmp_path, *averaging, "--weight_average.validate", "true")
    for words in ((), ("--weights", "average")):
        assert cli.main(["evaluate", "--run", str(run), *words]) == 0
    (last,), (average,) = (read_results(run / "evaluations" / name).tasks for name in ("own", "own-average"))
    assert average.metrics == read_results(run).tasks[0].metrics and average.mean < last.mean
    assert "weight_average" in refused("evaluate", "--run", tuned, "--weights", "average")


def test_other_data_is_all_measured_and_needs_no_training_data(tuned: Path, tmp_path: Path) -> None:
    """The training data is moved away and what was pre-trained is not looked for."""
    moved = tmp_path / "moved"
    shutil.copytree(tuned.parent, moved)
    data = images(tmp_path / "test", range(100, 141))
    assert cli.main(["evaluate", "--run", str(moved / "run"), "--data", str(data)]) == 0
    with_training_data = read_results(moved / "run" / "evaluations" / "test").tasks
    (tuned.parent / "data").rename(tmp_path / "away")
    try:
        assert cli.main(["evaluate", "--run", str(tuned), "--data", str(data)]) == 0
    finally:
        (tmp_path / "away").rename(tuned.parent / "data")
    (task,) = read_results(tuned / "evaluations" / "test").tasks
    assert task.split == "test" and task.metrics == with_training_data[0].metrics
    assert sum(found["images"] for found in task.detail[0]["classes"].values()) == 41


def test_what_cannot_be_measured_is_refused(tuned: Path, tmp_path: Path, refused: Refused) -> None:
    renamed = images(tmp_path / "renamed", range(20), classes=["ant", "cat", "bee"])
    fewer = write_images(
        tmp_path / "fewer", [[sample(number, 16, 16, cls=b"0") for number in range(9)]], changes={"classes": ["ant"]}
    )
    (tmp_path / "empty").mkdir()
    run = ["--run", str(tuned)]
    for words, message in (
        ([], "--run is missing"),
        (["--run", str(tmp_path / "nowhere")], "no such directory"),
        (["--run", str(tmp_path / "empty")], "no checkpoints found"),
        ([*run, "--output", __file__], "is a file; allowed: a directory"),
        ([*run, "--predictions", __file__], "is a file; allowed: a directory"),
        ([*run, "--rows", "3"], "--rows is for"),
        ([*run, "--data", str(renamed)], "allowed: the same names in the same order"),
        ([*run, "--robustness", f"a={fewer}", "--data", str(fewer)], "--robustness names its own data"),
    ):
        assert message in refused("evaluate", *words)
    (tuned.parent / "data").rename(tmp_path / "away")
    try:
        for data in (renamed, fewer):
            assert "3 (ant, bee, cat)" in refused("evaluate", *run, "--data", data)
    finally:
        (tmp_path / "away").rename(tuned.parent / "data")


def test_data_that_was_changed_is_not_taken_for_the_run_s_own(tuned: Path, tmp_path: Path, refused: Refused) -> None:
    """The path is the same; the figures of before stay."""
    (tuned.parent / "data").rename(tmp_path / "away")
    try:
        images(tuned.parent / "data", range(200, 290))
        new = ["--output", str(tmp_path / "new" / "own"), "--predictions", str(tmp_path / "new" / "own" / "said")]
        assert f"the data at {tuned.parent / 'data'}" in refused("evaluate", "--run", tuned, *new)
        assert not (tmp_path / "new").exists(), "a refused measurement leaves no directory"
        shutil.rmtree(tuned.parent / "data")
        (tuned.parent / "data").mkdir()  # something else lies where the run has learned from
        other = images(tmp_path / "test", range(100, 120))
        assert cli.main(["evaluate", "--run", str(tuned), "--data", str(other), "--output", str(tmp_path / "o")]) == 0
        (tuned.parent / "data").rmdir()
    finally:
        shutil.rmtree(tuned.parent / "data", ignore_errors=True)
        (tmp_path / "away").rename(tuned.parent / "data")


def test_images_that_were_learned_from_are_noted_and_a_seed_that_was_refused_is_passed_over(
    tuned: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Another task's seed was refused and left an empty directory."""
    refused = tuned / "other" / "seed_0"
    refused.mkdir(parents=True)
    try:
        seen = images(tmp_path / "seen", range(80, 100))
        assert cli.main(["evaluate", "--run", str(tuned), "--data", str(seen), "--output", str(tmp_path / "out")]) == 0
    finally:
        refused.rmdir()
        refused.parent.rmdir()
    assert f"10 images of {seen}" in caplog.text
    assert [task.task for task in read_results(tmp_path / "out").tasks] == ["classification"]


def test_a_run_that_has_not_ended_is_refused(tuned: Path, tmp_path: Path, refused: Refused) -> None:
    seed_dir = shutil.copytree(tuned / "classification" / "seed_0", tmp_path / "seed_0")
    (checkpoint,) = seed_dir.glob("checkpoints/*")
    document = read_document(checkpoint)
    document.config["training"]["steps"] *= 10
    document.write(checkpoint)
    assert "stopped after" in refused("evaluate", "--run", seed_dir)


RECIPES = {
    "pos_bert": "pos_bert_tiny",
    "mae_plus": "adpe_tiny",
    "learned_masks": "mlo_mae_tiny",
    "modalities": "mm_mae_tiny",
}
SMALL = {"training__steps": 2, "validation__every": 2, "data__validation_fraction": 0.2}


def trained(kind: str, data: Path, run_dir: Path, **changes: Any) -> Path:
    """A run of two steps that ends with a validation; what it holds out does not fill the last micro-batch."""
    changes = {**SMALL, **changes}
    if kind == "pos_bert":
        arguments = flags(data, run_dir, batch__micro_size=4, **changes)
    else:
        arguments = image_flags(RECIPES[kind], data, run_dir, **changes)
    assert pretrain_here(arguments) == 0
    return run_dir


def measured(run: Path, output: Path, *more: str) -> dict[str, TaskResult]:
    """The results of `trp-scale evaluate`, by task."""
    assert cli.main(["evaluate", "--run", str(run), "--output", str(output), *more]) == 0
    return {task.task: task for task in read_results(output).tasks}


@pytest.mark.parametrize("kind", RECIPES)
def test_the_rows_that_were_held_out_give_the_losses_of_the_validation(
    kind: str, text_dataset: Path, image_dataset: Path, tmp_path: Path
) -> None:
    data = text_dataset if kind == "pos_bert" else image_dataset
    run = trained(kind, data, tmp_path / "run")
    expected = lines(run)[-1]["validation"]
    results = measured(run, tmp_path / "found")
    there = {name: one for name, one in expected["tasks"].items() if one["count"]}
    assert results.keys() == there.keys()
    for name, one in there.items():
        assert results[name].mean == pytest.approx(one["loss"], rel=1e-6), name
        assert results[name].detail[0]["elements"] == one["count"]
        assert (results[name].metric, results[name].split, results[name].lower_is_better) == ("loss", "dev", True)
    judged = {name: task.mean for name, task in results.items() if task.judged}
    assert max(judged, key=lambda name: judged[name]) == expected["worst_task"]


@pytest.fixture(scope="module")
def run(text_dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained("pos_bert", text_dataset, tmp_path_factory.mktemp("pretrained") / "run")


def rows_in(dataset: Path) -> int:
    return int(json.loads((dataset / "dataset.json").read_text())["rows"])


def test_all_rows_of_other_data_are_measured_up_to_a_number(
    run: Path, text_dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The other data is a copy in another place, which is what the run has learned from, and is said to be."""
    other = Path(shutil.copytree(text_dataset, tmp_path / "other"))
    whole = measured(run, tmp_path / "whole", "--data", str(other))
    assert whole["next_sentence"].detail[0] == {"elements": rows_in(other), "rows": rows_in(other)}
    assert whole["noun"].split == "test"
    few = measured(run, tmp_path / "few", "--data", str(other), "--rows", "13", "--micro_size", "5")
    assert few["next_sentence"].detail[0] == {"elements": 13, "rows": 13}
    assert few["noun"].mean != whole["noun"].mean
    assert cli.main(["evaluate", "--run", str(run), "--data", str(other), "--rows", "13"]) == 0
    assert {task.task: task.mean for task in read_results(run / "evaluations" / "other-13").tasks} == {
        name: pytest.approx(task.mean, rel=1e-6) for name, task in few.items()
    }
    assert cli.main(["compare", str(tmp_path / "whole"), str(tmp_path / "few")]) == 0
    assert "noun is not compared between these rows" in capsys.readouterr().out


def test_the_worst_is_a_task_that_the_balancer_weighs(
    run: Path, text_dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two runs side by side: each has one worst task, and next-sentence prediction, which is outside, is none."""
    other = trained("pos_bert", text_dataset, tmp_path / "other", optimizer__lr=0.01)
    for directory, name in ((run, "a"), (other, "b")):
        results = measured(directory, tmp_path / name)
        assert not results["next_sentence"].judged and not results["other"].judged and results["noun"].judged
    capsys.readouterr()
    assert cli.main(["compare", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert sum(line.count(" worst") for line in printed if "lower is better" in line) == 2
    assert not any("worst" in line for line in printed if line.startswith("next_sentence"))
    assert any(line.startswith("a: ") and "step 2" in line for line in printed)


def test_data_of_another_vocabulary_is_refused(run: Path, text_dataset: Path, tmp_path: Path, refused: Refused) -> None:
    other = Path(shutil.copytree(text_dataset, tmp_path / "other"))
    vocabulary = 1 + json.loads((text_dataset / "dataset.json").read_text())["vocab_size"]
    larger = copy_dataset(text_dataset, tmp_path / "larger", vocab_size=vocabulary)
    tokenizer = other / "tokenizer" / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text() + "\n")
    for data, message in ((larger, f"vocabulary has {vocabulary}"), (other, "tokenizer differs")):
        error = " ".join(refused("evaluate", "--run", run, "--data", data).split())
        assert message in error and f"--tokenizer {run}/tokenizer" in error


def test_maps_of_other_classes_and_data_of_another_kind_are_refused(
    image_dataset: Path, text_dataset: Path, tmp_path: Path, refused: Refused
) -> None:
    run = trained("modalities", image_dataset, tmp_path / "run")
    names = json.loads((image_dataset / "dataset.json").read_text())["modalities"]["semseg"]["classes"]
    others = [
        copy_dataset(image_dataset, tmp_path / f"other_{number}", modalities={"semseg": {"classes": classes}})
        for number, classes in enumerate(([*names, "unicorn"], [names[1], names[0], *names[2:]]))
    ]
    found = [(other, "give data with the same classes") for other in others]
    for data, message in (*found, (text_dataset, "kind 'text' found")):
        error = refused("evaluate", "--run", run, "--data", data)
        assert message in error and "--data.path" not in error, "evaluate has no such flag"


def test_a_run_that_held_nothing_out_needs_data_and_flags_of_other_runs_are_refused(
    image_dataset: Path, tmp_path: Path, refused: Refused
) -> None:
    """Pictures without maps and classes are enough to measure a run whose masks were learned from classes."""
    run = trained("learned_masks", image_dataset, tmp_path / "run", data__validation_fraction=0, validation__every=0)
    for more, message in (
        ([], "data.validation_fraction 0"),
        (["--robustness", f"a={image_dataset}"], "--robustness is for"),
        (["--images", str(tmp_path)], "--images is for"),
        (["--rows", "-1"], "--rows is -1"),
    ):
        assert message in refused("evaluate", "--run", run, *more)
    samples = [{name: part for name, part in sample(number, 40, 40).items() if name != "cls"} for number in range(9)]
    described = {"classes": None, "suffixes": ["jpg"], "settings": {"split": "test"}}
    kept = write_images(tmp_path / "kept", [samples], changes=described)
    (task,) = measured(run, tmp_path / "found", "--data", str(kept)).values()
    assert task.task == "reconstruction" and task.detail[0]["rows"] == 9
