"""A fine-tuned classifier on sets of some of its classes, and on corrupted ones."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from tests.runs import Refused
from tests.unit.data.images.stored import write_images
from tests.unit.evaluation.test_evaluate import reddish, tuned_run
from trp_scale.checkpoint.document import read_document
from trp_scale.checkpoint.format import read_full_state
from trp_scale.cli import main as cli
from trp_scale.config import RefusedError
from trp_scale.distributed.environment import Environment
from trp_scale.distributed.groups import ALONE
from trp_scale.evaluation.robustness import (
    ALEXNET_ERRORS,
    RobustClassifier,
    class_columns,
)
from trp_scale.finetuning.classification.task import ImageClassifier, open_labelled
from trp_scale.finetuning.measurement import read_run
from trp_scale.models.patches import Pixels
from trp_scale.reporting.results import read_results


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A classifier of ant, bee and cat."""
    return tuned_run(tmp_path_factory.mktemp("tuned"))


def of_classes(directory: Path, names: list[str], count: int, first: int = 100) -> Path:
    """`count` images whose classes are numbered within `names`."""
    samples = [reddish(number, cls=str(number % len(names)).encode()) for number in range(first, first + count)]
    return write_images(directory, [samples], changes={"classes": names})


def logits_of(tuned: Path, data: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Over all three classes, computed anew; and the set's own labels."""
    run = read_run(tuned / "classification" / "seed_0")
    model = ImageClassifier(run.config).eval()
    model.load_state_dict(read_full_state(run.checkpoint))
    result, labels = [], []
    for batch in open_labelled(run.config, str(data)).batches(ALONE):
        present = batch["row_weights"] > 0
        with torch.no_grad():
            result.append(model(Pixels()(batch["images"]))[present])
        labels.append(batch["labels"][present])
    return torch.cat(result), torch.cat(labels)


def test_logits_are_restricted_to_the_classes_of_the_set(tuned: Path, tmp_path: Path) -> None:
    """Two of three classes, in another order and so numbered otherwise."""
    data = of_classes(tmp_path / "set", ["cat", "ant"], 41)
    assert cli.main(["evaluate", "--run", str(tuned), "--robustness", f"r={data}"]) == 0
    (task,) = read_results(tuned / "evaluations" / "robustness-r").tasks
    assert (task.task, task.metric, task.split) == ("ImageNet-R", "accuracy", "test")
    logits, labels = logits_of(tuned, data)
    among = logits[:, [2, 0]].argmax(1)
    assert task.values == [float((among == labels).double().mean())]
    assert task.detail[0] == {"images": 41, "classes": 2}
    assert (logits.argmax(1) == 1).any(), "some images look most like a class that the set does not have"


def test_columns_are_matched_by_name() -> None:
    model = ("ant", "bee", "cat")
    assert class_columns(model, ("cat", "ant"), Path("x")).tolist() == [2, 0]
    with pytest.raises(RefusedError, match=r"x: 1 of its 2 classes \(dog\)"):
        class_columns(model, ("dog", "ant"), Path("x"))
    with pytest.raises(RefusedError, match=r"^x: .*--class_names"):
        class_columns(model, None, Path("x"))
    cranes = ("crane", "ant", "crane")  # ImageNet has a bird and a machine
    assert class_columns(cranes, cranes, Path("x")).tolist() == [0, 1, 2]
    assert class_columns(cranes, ("ant",), Path("x")).tolist() == [1]
    with pytest.raises(RefusedError, match=r"^x: .*crane"):
        class_columns(cranes, ("ant", "crane"), Path("x"))


def test_corruption_errors_of_folders(
    tuned: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, refused: Refused
) -> None:
    """Two corruptions at two severities: refused, and partial when asked for."""
    places = ["fog/1", "fog/5", "snow/1", "snow/5"]
    for number, place in enumerate(places):
        of_classes(tmp_path / "c" / place, ["ant", "bee", "cat"], 12 + number, first=100 * number)
    flags = ["evaluate", "--run", str(tuned), "--robustness", f"c={tmp_path / 'c'}", "--output", str(tmp_path / "out")]
    assert f"{tmp_path / 'c'}: 71 of 75 are missing (gaussian_noise/1, " in refused(*flags)
    (tmp_path / "empty").mkdir()
    assert f"{tmp_path / 'empty'}/CORRUPTION/SEVERITY" in refused(
        *flags[:3], "--robustness", f"c={tmp_path / 'empty'}", "--partial"
    )
    assert cli.main([*flags, "--partial"]) == 0
    (task,) = read_results(tmp_path / "out").tasks
    assert task.metric == "mean_corruption_error (partial: 4 of 75)" and task.lower_is_better
    errors = []
    for place in places:
        logits, labels = logits_of(tuned, tmp_path / "c" / place)
        errors.append(1 - float((logits.argmax(1) == labels).double().mean()))
    fog, snow = (errors[0] + errors[1]) / 2, (errors[2] + errors[3]) / 2
    assert task.values[0] == pytest.approx((fog / ALEXNET_ERRORS["fog"] + snow / ALEXNET_ERRORS["snow"]) / 2)
    assert task.metrics["mean_error (partial: 4 of 75)"][0] == pytest.approx((fog + snow) / 2)
    assert task.detail[0]["errors"]["snow"] == pytest.approx({"1": errors[2], "5": errors[3]})
    assert "published figures" in caplog.text


def test_corrupted_images_are_seen_as_they_are(tuned: Path, tmp_path: Path) -> None:
    """They are central squares already; a run that is measured on such squares sees no smaller one of theirs."""
    run = read_run(tuned / "classification" / "seed_0")
    data = of_classes(tmp_path / "fog", ["ant", "bee", "cat"], 60)
    logits, labels = logits_of(tuned, data)
    run.config.augmentation.measured, run.config.augmentation.centre_share = "centre", 0.25
    with Environment() as environment:
        classifier = RobustClassifier(run, environment)
        centre, whole = (classifier.accuracy(data, whole=whole)["accuracy"] for whole in (False, True))
        (tmp_path / "c" / "fog").mkdir(parents=True)
        data.rename(tmp_path / "c" / "fog" / "3")
        result = classifier.measure("c", tmp_path / "c", partial=True)
    assert whole == pytest.approx(float((logits.argmax(1) == labels).double().mean())) and whole != centre
    assert result.detail["errors"] == {"fog": {"3": pytest.approx(1 - whole)}}


def test_names_of_classes_can_be_given(tuned: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = of_classes(tmp_path / "set", ["bee"], 9)
    monkeypatch.setattr("trp_scale.finetuning.measurement.ReadRun.classes", ("0", "1", "2"))
    flags = ["evaluate", "--run", str(tuned), "--robustness", f"a={data}", "--output", str(tmp_path / "out")]
    assert cli.main(flags) == 2
    names = of_classes(tmp_path / "names", ["ant", "bee", "cat"], 9)
    assert cli.main([*flags, "--classes", str(names)]) == 0
    assert read_results(tmp_path / "out").tasks[0].values == [1.0]  # of one class all are right
    assert cli.main([*flags, "--classes", str(data)]) == 2


def test_one_task_at_a_time(tuned: Path, tmp_path: Path, refused: Refused) -> None:
    """Figures of two classifiers on one set would stand in one row."""
    several = tmp_path / "several"
    shutil.copytree(tuned / "classification", several / "first")
    shutil.copytree(tuned / "classification", several / "second")
    (checkpoint,) = (several / "second").glob("seed_0/checkpoints/*")
    document = read_document(checkpoint)
    document.config["downstream"]["task"] = "second"
    document.write(checkpoint)
    data = of_classes(tmp_path / "set", ["bee"], 9)
    assert "2 tasks (classification, second)" in refused("evaluate", "--run", several, "--robustness", f"a={data}")


def test_alexnet_errors_are_the_published_ones() -> None:
    """AlexNet's row of Table 1 (Hendrycks and Dietterich 2019), in percent, in the order of its columns."""
    published = [88.6, 89.4, 92.3, 82.0, 82.6, 78.6, 79.8, 86.7, 82.7, 81.9, 56.5, 85.3, 64.6, 71.8, 60.7]
    assert [100 * value for value in ALEXNET_ERRORS.values()] == pytest.approx(published, abs=0.051)
