"""Two ranks measure what one measures: exactly, where the last batch of the second is filled up."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.grids import always
from tests.ranks import Ranks
from tests.unit.data.images.stored import write_images
from tests.unit.evaluation.test_evaluate import reddish, trained, tuned_run
from tests.unit.finetuning.dense.test_task import flags as dense_flags
from trp_scale.cli import main as cli
from trp_scale.evaluation.probe.classifiers import _read
from trp_scale.reporting.results import read_results


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tuned_run(tmp_path_factory.mktemp("tuned"))


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """37 images: with micro-batches of 4 the last of rank 1 is all filling."""
    samples = [reddish(number) for number in range(200, 237)]
    return write_images(tmp_path_factory.mktemp("odd") / "data", [samples])


@pytest.mark.parametrize("what", always(["--data", "--robustness"], "--robustness"))
def test_two_ranks_measure_what_one_does(two_ranks: Ranks, tuned: Path, odd: Path, tmp_path: Path, what: str) -> None:
    value = str(odd) if what == "--data" else f"sketch={odd}"
    words = ["evaluate", "--run", str(tuned), what, value, "--micro_size", "4", "--output"]
    assert cli.main([*words, str(tmp_path / "one")]) == 0
    assert two_ranks(cli.main, [*words, str(tmp_path / "two")]) == [0, 0]
    one, two = (read_results(tmp_path / name) for name in ("one", "two"))
    assert one == two and 0 <= one.tasks[0].values[0] <= 1


def test_two_ranks_save_the_predictions_of_one(
    two_ranks: Ranks, tuned: Path, odd: Path, image_dataset: Path, tmp_path: Path
) -> None:
    """The bytes of the table of classes; of 96 maps in micro-batches of 5 the last is filled up."""
    short = {"downstream__epochs": 0, "training__steps": 1, "data__validation_fraction": 0.3}
    assert cli.main(["finetune", *dense_flags("segmentation", image_dataset, tmp_path / "run", **short)]) == 0
    for words in (
        ["--run", str(tuned), "--data", str(odd), "--micro_size", "4"],
        ["--run", str(tmp_path / "run"), "--micro_size", "5"],
    ):
        files = {name: tmp_path / name / words[1].replace("/", "_") for name in ("one", "two")}
        own = [["evaluate", *words, "--predictions", str(files[name])] for name in ("one", "two")]
        assert cli.main(own[0]) == 0
        assert two_ranks(cli.main, own[1]) == [0, 0]
        one, two = (
            {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*.*")} for root in files.values()
        )
        assert one == two and one


@pytest.mark.parametrize("kind", ["pos_bert", "modalities"])
def test_two_ranks_find_the_losses_of_one(
    two_ranks: Ranks, text_dataset: Path, image_dataset: Path, tmp_path: Path, kind: str
) -> None:
    """17 rows in micro-batches of 4: the last of rank 0 holds one, the last of rank 1 is all filling."""
    run = trained(kind, text_dataset if kind == "pos_bert" else image_dataset, tmp_path / "run")
    data = str(text_dataset if kind == "pos_bert" else image_dataset)
    for more in (["--data", data, "--rows", "17"], ["--micro_size", "3"]):
        words = ["evaluate", "--run", str(run), *more, "--output"]
        assert cli.main([*words, str(tmp_path / "one")]) == 0
        assert two_ranks(cli.main, [*words, str(tmp_path / "two")]) == [0, 0]
        one, two = (read_results(tmp_path / name) for name in ("one", "two"))
        assert [(task.task, task.detail) for task in one.tasks] == [(task.task, task.detail) for task in two.tasks]
        for first, second in zip(one.tasks, two.tasks, strict=True):
            assert second.mean == pytest.approx(first.mean, rel=1e-12)


def test_two_ranks_probe_as_one_does(two_ranks: Ranks, tuned: Path, odd: Path, tmp_path: Path) -> None:
    """The features to the bit, and a linear probe of fresh crops that learns on rank 0 alone."""
    source = str(tuned / "classification" / "seed_0")
    words = ["probe", "--from", source, "--data", str(tuned.parent / "data"), "--test", str(odd), "--batch_size", "4"]
    for method in (
        ["logistic"],
        ["linear", "--protocol", "mae", "--linear.epochs", "2", "--linear.batch_size", "16"],
    ):
        own = [*words, "--method", *method, "--linear.warmup_epochs", "1", "--workers", "0"]
        flags = {
            name: ["--run_dir", str(tmp_path / name / method[0]), "--cache", str(tmp_path / name)]
            for name in ("one", "two")
        }
        assert cli.main([*own, *flags["one"]]) == 0
        assert two_ranks(cli.main, [*own, *flags["two"]]) == [0, 0]
        one, two = (read_results(tmp_path / name / method[0]) for name in ("one", "two"))
        assert one == two
    kept = [sorted((tmp_path / name).glob("*.safetensors")) for name in ("one", "two")]
    assert [path.name for path in kept[0]] == [path.name for path in kept[1]] and len(kept[0]) == 3
    for ours, theirs in zip(*kept, strict=True):
        first, second = _read(ours), _read(theirs)
        assert first is not None and second is not None and len(first.labels) in (37, 90)
        assert np.array_equal(first.features, second.features) and np.array_equal(first.labels, second.labels)
