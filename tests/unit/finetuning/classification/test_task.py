"""Fine-tuned classifiers: their figures, what they learn, their settings from the data, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sklearn.metrics import recall_score, top_k_accuracy_score
from torch import nn

from tests.fixtures import small_image_dataset
from tests.runs import image_flags, lines, pretrain_here
from tests.unit.data.images.stored import sample, write_images
from tests.unit.finetuning.test_finetune import tuning_flags
from tests.unit.models.encoder_peers import CLASSES, copy_timm_weights, finetune_config, timm_vit
from tests.unit.models.small_images import images, randomise_weights
from trp_scale.checkpoint.format import read_full_state
from trp_scale.checkpoint.run_directory import checkpoint_path
from trp_scale.cli import main as cli
from trp_scale.config import RefusedError
from trp_scale.core.batch import Batch
from trp_scale.distributed.groups import Group
from trp_scale.errors import ExitStatus
from trp_scale.finetuning.classification.task import (
    Accuracy,
    ClassificationTask,
    ImageClassifier,
)
from trp_scale.finetuning.measurement import label_ranks
from trp_scale.reporting.results import read_results

NAMES = tuple(f"class {number}" for number in range(12))


def compute_metrics(logits: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor | None = None) -> dict[str, Any]:
    """The figures, in three micro-batches that come in another order."""
    accuracy = Accuracy(NAMES[: logits.shape[1]])
    weights = torch.ones(len(labels)) if weights is None else weights
    for first in (8, 0, 4):
        part = slice(first, first + 4 if first < 8 else len(labels))
        fields = {"labels": labels[part], "row_weights": weights[part]}
        accuracy.add(logits[part], Batch(fields=fields, keys=labels[part], start=first))
    return accuracy.finish(Group("data"))


def test_figures_are_scikit_learns() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(300, 12, generator=generator)
    labels = torch.randint(0, 11, (300,), generator=generator)  # class 11 has no images
    found = compute_metrics(logits, labels)
    every = list(range(12))
    assert found["accuracy"] == pytest.approx(top_k_accuracy_score(labels, logits, k=1, labels=every))
    assert found["accuracy_top5"] == pytest.approx(top_k_accuracy_score(labels, logits, k=5, labels=every))
    recall = recall_score(labels, logits.argmax(1), labels=every[:11], average=None)
    classes = found["detail"]["classes"]
    assert [classes[name]["accuracy"] for name in NAMES[:11]] == pytest.approx(recall.tolist())
    assert classes["class 11"] == {"accuracy": None, "images": 0}
    assert sum(one["images"] for one in classes.values()) == 300


def test_classes_of_one_name_are_told_apart_by_their_number() -> None:
    accuracy = Accuracy(("crane", "crane", "maillot"))
    accuracy.add(
        torch.eye(3),
        Batch(fields={"labels": torch.tensor([0, 2, 2]), "row_weights": torch.ones(3)}, keys=torch.arange(3), start=0),
    )
    classes = accuracy.finish(Group("data"))["detail"]["classes"]
    assert {name: one["images"] for name, one in classes.items()} == {"crane (0)": 1, "crane (1)": 0, "maillot": 2}


def test_padding_rows_are_ignored() -> None:
    logits, labels = torch.eye(12), torch.arange(12)
    logits[3] = logits[3].flip(0)  # the one that is wrong
    weights = torch.ones(12)
    assert compute_metrics(logits, labels, weights)["accuracy"] == pytest.approx(11 / 12)
    weights[3] = 0
    found = compute_metrics(logits, labels, weights)
    assert found["accuracy"] == 1.0 and found["detail"]["classes"]["class 3"]["images"] == 0


def test_ties_go_to_the_lower_class() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 0.0]] * 4)
    assert label_ranks(logits, torch.arange(4)).tolist() == [2, 0, 1, 3]
    constant = compute_metrics(torch.zeros(12, 12), torch.arange(12))
    assert (constant["accuracy"], constant["accuracy_top5"]) == pytest.approx((1 / 12, 5 / 12))


def test_non_finite_logits_are_wrong() -> None:
    for broken in (float("nan"), float("inf")):
        logits = torch.full((12, 12), broken)
        found = compute_metrics(logits, torch.arange(12))
        assert (found["accuracy"], found["accuracy_top5"]) == (0.0, 0.0)


@pytest.fixture(scope="module")
def learned(tmp_path_factory: pytest.TempPathFactory, image_dataset: Path) -> Path:
    """A masked autoencoder of one step."""
    run_dir = tmp_path_factory.mktemp("source") / "run"
    pretrain_here(image_flags("adpe_tiny", image_dataset, run_dir, training__steps=1, crops__count=1))
    return run_dir


STRONG = {
    "augmentation.magnitude": 9,
    "augmentation.mixup": 0.8,
    "augmentation.cutmix": 1.0,
    "augmentation.smoothing": 0.1,
}


def test_a_run_from_a_pre_trained_encoder(
    learned: Path, image_dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No learning: rate 0 keeps the encoder, whose weights are then the pre-training's."""
    capsys.readouterr()
    flags = tuning_flags(
        image_dataset, tmp_path, str(learned), downstream__epochs=0, training__steps=2, optimizer__lr=1e-30, **STRONG
    )
    assert cli.main(["finetune", *flags]) == 0
    slow = ["importing torch", "classification, seed 0: opening", "making the first step"]
    said = capsys.readouterr().out
    assert [each for line in said.splitlines() for each in slow if each in line] == slow
    (task,) = read_results(tmp_path).tasks
    assert (task.task, task.metric, task.split) == ("classification", "accuracy", "dev")
    assert "accuracy_top5" not in task.metrics
    assert set(task.detail[0]["classes"]) == set(json.loads((image_dataset / "dataset.json").read_text())["classes"])
    run_dir = tmp_path / "classification" / "seed_0"
    before, after = (read_full_state(checkpoint_path(path, step)) for path, step in ((learned, 1), (run_dir, 2)))
    taken = {name.removeprefix("encoder."): tensor for name, tensor in after.items() if name.startswith("encoder.")}
    assert "norm.weight" not in taken and "fc_norm.weight" in after
    assert any(name.endswith("relative_positions.table") for name in taken)
    for name, tensor in taken.items():
        torch.testing.assert_close(tensor, before[name], rtol=0, atol=1e-20)
    assert "Fine-tuning report" in (run_dir / "report.txt").read_text()
    assert "Pre-training report" in (learned / "report.txt").read_text()
    assert all(line["model_flops"] > 0 for line in lines(run_dir))


def test_a_classifier_fits_what_it_sees(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """24 images, measured on themselves, which users may not: far above chance, which is one in eight."""
    monkeypatch.setattr("trp_scale.data.images.leakage.MOST_IN_COMMON", 1.0)
    path = small_image_dataset(tmp_path / "images", count=24)
    flags = tuning_flags(
        path,
        tmp_path / "run",
        "scratch",
        downstream__test_path=path,
        downstream__split="test",
        downstream__epochs=0,
        training__steps=60,
        optimizer__lr=3e-3,
        optimizer__layer_decay=1.0,
        crops__min_scale=1.0,
        downstream__drop_path=0.0,
        logging__every=60,
    )
    assert cli.main(["finetune", *flags]) == 0
    (task,) = read_results(tmp_path / "run").tasks
    assert task.mean > 0.7 and task.split == "test"
    assert sum(one["images"] for one in task.detail[0]["classes"].values()) == 24


def task_on(path: Path, test_path: Path | None = None) -> ClassificationTask:
    config = finetune_config(8, test_path=str(test_path or path), classes=0)
    config.data.path, config.data.workers = str(path), 0
    where: Any = SimpleNamespace(data=Group("data"), device=torch.device("cpu"), cpus=1)
    return ClassificationTask(config, where)


def write(directory: Path, labels: list[str], **changes: object) -> Path:
    samples = [sample(number, 20, 20, cls=label.encode()) for number, label in enumerate(labels)]
    return write_images(directory, [samples], changes=changes)


def test_classes_come_from_the_names_or_from_the_numbers(tmp_path: Path) -> None:
    named = task_on(write(tmp_path / "named", ["0", "1"]))
    assert (named.config.downstream.classes, named.classes) == (3, ("ant", "bee", "cat"))
    numbered = task_on(write(tmp_path / "numbered", ["0", "4"], classes=None))
    assert (numbered.config.downstream.classes, numbered.classes) == (5, ("0", "1", "2", "3", "4"))
    assert numbered.model().head.out_features == 5  # type: ignore[union-attr]


def test_ranks_agree_on_what_is_measured_too(tmp_path: Path) -> None:
    """What ranks compare at their start."""
    train, first, second = (
        write(tmp_path / name, labels) for name, labels in zip("abc", (["0"], ["0"], ["1"]), strict=True)
    )
    digests = [task_on(train, measured).sources.digest() for measured in (first, first, second)]
    assert digests[0] == digests[1] != digests[2]


def test_data_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    train = write(tmp_path / "train", ["0", "1"])
    other = write(tmp_path / "other", ["0"], classes=["ant", "bee"])
    with pytest.raises(RefusedError, match=r"--downstream.test_path has 2 classes .ant, bee"):
        task_on(train, other)
    few, many = (write(tmp_path / name, labels, classes=None) for name, labels in (("few", ["1"]), ("many", ["7"])))
    with pytest.raises(RefusedError, match=r"--downstream.test_path .*class 7, --data.path has 2"):
        task_on(few, many)
    plain = {name: content for name, content in sample(0, 20, 20).items() if name != "cls"}
    blind = write_images(tmp_path / "blind", [[plain]], changes={"suffixes": ["jpg"], "classes": None})
    with pytest.raises(RefusedError, match=r"\.cls"):
        task_on(blind)
    odd = write(tmp_path / "odd", ["1"], classes=None)
    index = odd / "shards" / "image-000000.index.json"
    index.write_text(index.read_text().replace('"label": 1', '"label": "1"'))
    with pytest.raises(RefusedError, match=r"n00000: class '1' found, a whole number from 0 expected"):
        task_on(odd)


def test_measured_images_that_cannot_be_read_give_no_figure(
    image_dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    samples = [sample(number, 20, 20, cls=b"0") for number in range(4)]
    samples[2]["jpg"] = b"no image"
    names = json.loads((image_dataset / "dataset.json").read_text())["classes"]
    broken = write_images(tmp_path / "broken", [samples], changes={"classes": names})
    flags = tuning_flags(
        image_dataset,
        tmp_path / "run",
        "scratch",
        downstream__test_path=broken,
        downstream__epochs=0,
        training__steps=1,
    )
    assert cli.main(["finetune", *flags]) == ExitStatus.FAILED
    assert "(image-000000/n00002)" in capsys.readouterr().err
    assert not (tmp_path / "run" / "results.json").exists()


POOL = {"mean": "avg", "class": "token"}


@pytest.mark.parametrize("pooling", POOL)
def test_timm_gives_the_same_logits(pooling: str) -> None:
    peer = timm_vit(global_pool=POOL[pooling]).double()
    model = ImageClassifier(finetune_config(pooling=pooling, learned_positions=True)).double().eval()
    copy_timm_weights(model.encoder, peer)
    model.head.load_state_dict(peer.head.state_dict())
    if model.fc_norm is not None:
        model.fc_norm.load_state_dict(peer.fc_norm.state_dict())
    assert isinstance(model.fc_norm, nn.LayerNorm) is (pooling == "mean")
    with torch.no_grad():
        torch.testing.assert_close(model(images()), peer(images()), rtol=0, atol=1e-10)


@pytest.mark.parametrize("pooling", POOL)
def test_every_parameter_takes_part(pooling: str) -> None:
    model = ImageClassifier(finetune_config(pooling=pooling)).double()
    randomise_weights(model)
    model(images()).square().sum().backward()  # type: ignore[no-untyped-call]
    without = [name for name, parameter in model.named_parameters() if not parameter.grad.abs().sum()]  # type: ignore[union-attr]
    assert without == []


def test_all_classes_start_almost_equally_likely_and_the_norm_of_the_mean_at_one() -> None:
    model = ImageClassifier(finetune_config(classes=500))
    assert float(model.head.weight.detach().std()) == pytest.approx(2e-5, rel=0.05)
    assert not model.head.bias.any()
    assert model.fc_norm is not None
    assert model.fc_norm.weight.eq(1).all() and model.fc_norm.bias.eq(0).all()
    with torch.no_grad():
        chances = model(images().float()).softmax(1)
    torch.testing.assert_close(chances, torch.full_like(chances, 1 / 500), rtol=2e-3, atol=0)


def test_the_seed_makes_the_head() -> None:
    first, second = ImageClassifier(finetune_config()), ImageClassifier(finetune_config())
    assert first.head.weight.equal(second.head.weight)
    other = finetune_config()
    other.training.seed = 1
    assert not first.head.weight.equal(ImageClassifier(other).head.weight)
    assert first.head.weight.shape == (CLASSES, 24)
