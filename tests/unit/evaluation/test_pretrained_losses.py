"""`trp-scale evaluate` of runs of pre-training: their validation again, and losses on other data."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.runs import flags, image_flags, lines, pretrain_here
from tests.unit.data.images.stored import sample, write_images
from trp_scale.cli import main as cli
from trp_scale.reporting.results import TaskResult, read_results

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


def test_data_of_another_vocabulary_is_refused(
    run: Path, text_dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    larger, other = (Path(shutil.copytree(text_dataset, tmp_path / name)) for name in ("larger", "other"))
    document = json.loads((larger / "dataset.json").read_text())
    document["vocab_size"] += 1
    (larger / "dataset.json").write_text(json.dumps(document))
    tokenizer = other / "tokenizer" / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text() + "\n")
    for data, message in ((larger, f"vocabulary has {document['vocab_size']}"), (other, "tokenizer differs")):
        assert cli.main(["evaluate", "--run", str(run), "--data", str(data)]) == 2
        error = " ".join(capsys.readouterr().err.split())
        assert message in error and f"--tokenizer {run}/tokenizer" in error.replace("\n", "")


def test_maps_of_other_classes_and_data_of_another_kind_are_refused(
    image_dataset: Path, text_dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = trained("modalities", image_dataset, tmp_path / "run")
    names = json.loads((image_dataset / "dataset.json").read_text())["modalities"]["semseg"]["classes"]
    others = []
    for number, classes in enumerate(([*names, "unicorn"], [names[1], names[0], *names[2:]])):
        others.append(Path(shutil.copytree(image_dataset, tmp_path / f"other_{number}")))
        document = json.loads((others[-1] / "dataset.json").read_text())
        document["modalities"]["semseg"]["classes"] = classes
        (others[-1] / "dataset.json").write_text(json.dumps(document))
    refused = [(other, "give data with the same classes") for other in others]
    for data, message in (*refused, (text_dataset, "kind 'text' found")):
        assert cli.main(["evaluate", "--run", str(run), "--data", str(data)]) == 2
        error = capsys.readouterr().err
        assert message in error and "--data.path" not in error, "evaluate has no such flag"


def test_a_run_that_held_nothing_out_needs_data_and_flags_of_other_runs_are_refused(
    image_dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Pictures without maps and classes are enough to measure a run whose masks were learned from classes."""
    run = trained("learned_masks", image_dataset, tmp_path / "run", data__validation_fraction=0, validation__every=0)
    for more, message in (
        ([], "data.validation_fraction 0"),
        (["--robustness", f"a={image_dataset}"], "--robustness is for"),
        (["--images", str(tmp_path)], "--images is for"),
        (["--rows", "-1"], "--rows is -1"),
    ):
        assert cli.main(["evaluate", "--run", str(run), *more]) == 2
        assert message in capsys.readouterr().err
    samples = [{name: part for name, part in sample(number, 40, 40).items() if name != "cls"} for number in range(9)]
    described = {"classes": None, "suffixes": ["jpg"], "settings": {"split": "test"}}
    kept = write_images(tmp_path / "kept", [samples], changes=described)
    (task,) = measured(run, tmp_path / "found", "--data", str(kept)).values()
    assert task.task == "reconstruction" and task.detail[0]["rows"] == 9
