"""Several runs that differ in named settings, one after the other, and what each reached in how many hours.

AdPE's Figure 1 draws accuracy against hours for k = 1, 2, 4 crops and a lighter decoder. Here the accuracy is a linear
probe's, on the run's own held-out images or on a test set: it compares the runs of one sweep, and is not the paper's
figure. For MAE+ the probe sees whole images, whose outer positions were never trained and are not fine-tuned either."""

from __future__ import annotations

import itertools
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from trp_scale.checkpoint.document import read_document
from trp_scale.checkpoint.durable import write_json
from trp_scale.checkpoint.resume import check_settings
from trp_scale.checkpoint.run_directory import newest_complete
from trp_scale.config import Config, RefusedError
from trp_scale.config.images import ImagePretrainConfig
from trp_scale.data.images.kept_for_tests import check_test
from trp_scale.distributed.groups import ALONE
from trp_scale.downstream.classification.settings import ClassificationTaskConfig
from trp_scale.downstream.classification.task import open_labelled
from trp_scale.downstream.pictures import figure_class
from trp_scale.downstream.probe.arguments import LogisticSettings
from trp_scale.downstream.probe.classifiers import accuracy, logistic_regression, require_scikit_learn
from trp_scale.downstream.probe.encoder import BATCH, FrozenEncoder, encoder_config
from trp_scale.downstream.probe.features import LabelledFeatures, extract
from trp_scale.downstream.probe.images import open_probed
from trp_scale.downstream.trained_images import TrainedImages, load_trained_images
from trp_scale.observe.metrics import read_history
from trp_scale.observe.report import read_summary
from trp_scale.recipes.arguments import parse
from trp_scale.recipes.loader import to_dict
from trp_scale.upstreams.mae.settings import MaeConfig


def linear_probe(trained: TrainedImages, *, size: int, most: int = 20_000, test: Path | None = None) -> float:
    """Accuracy on held-out images of a logistic regression fitted to features of training images. Of a run with learned
    masks all training images take part, D_val's too.

    A feature is the mean of the encoder's patch tokens of the whole, unmasked image at size x size pixels, without an
    adversary. MAE+ is trained on small crops and used on whole images (AdPE 3.2), so its grid is larger here.

    Args:
        trained: the run, and its data.
        size: side of the images in pixels.
        most: training images at most, the first of the order.
        test: directory of a data set of the same classes, on all of whose images accuracy is measured; None = on the
            run's held-out images.
    Raises:
        RefusedError: as `check_probe`, an image that cannot be read, or the training images are all of one class.
    """
    check_probe(trained.config, size, test)
    trained.open_sources(trained.config).close()  # refuses data that the run has not learned from
    encoder = FrozenEncoder(config := _settings(trained, size), pooling="mean")
    images = open_probed(config, config.data.path)
    source = images.in_order(ALONE, config.data.validation_fraction)
    rows = min(most, source.rows)
    features, labels = extract(encoder, (source.next_window()[0] for _ in range(-(-rows // BATCH))))
    if len(np.unique(labels[:rows])) < 2:
        raise RefusedError(f"{config.data.path}: the training images are all of one class; a linear probe needs two")
    train = LabelledFeatures(features=features[:rows], labels=labels[:rows])
    if test is None:
        unseen, answers = extract(encoder, images.held_out_batches(config.data.validation_fraction))
    else:
        unseen, answers = extract(encoder, open_probed(config, str(test)).batches(ALONE))
    return accuracy(logistic_regression(train, unseen, LogisticSettings()), answers)


def _settings(trained: TrainedImages, size: int) -> ClassificationTaskConfig:
    """The run's encoder and data, whole images."""
    config = encoder_config(str(trained.checkpoint), size=size)
    config.data.path, config.data.validation_fraction = (
        trained.config.data.path,
        trained.config.data.validation_fraction,
    )
    config.data.blocks_per_group, config.training.seed = (
        trained.config.data.blocks_per_group,
        trained.config.training.seed,
    )
    config.crops.interpolation, config.augmentation.measured = trained.config.crops.interpolation, "whole"
    return config


def check_probe(config: ImagePretrainConfig, size: int, test: Path | None = None) -> None:
    """Refuse what a linear probe cannot measure, before anything is trained for it.

    Raises:
        RefusedError: no classes in the data, nothing held out and no test set, a test set as `check_test` refuses, a
            size that patches do not fill, or scikit-learn is not installed.
    """
    require_scikit_learn()
    if config.data.validation_fraction == 0 and test is None:
        raise RefusedError(
            "--data.validation_fraction is 0: nothing is held out to measure accuracy on; allowed, for example: 0.01, "
            "or another data set (sweep: --test DIR)"
        )
    if size < config.vision.patch_size or size % config.vision.patch_size:
        raise RefusedError(
            f"the probe's images are {size} pixels wide, allowed: multiples of --vision.patch_size "
            f"{config.vision.patch_size}"
        )
    open_labelled(config.data.path)
    if test is not None:
        check_test(config, test)


RESULT_FILE = "sweep.json"
PICTURE_FILE = "sweep.png"


@dataclass(frozen=True, kw_only=True)
class Point:
    """One run of a sweep.

    Attributes:
        name: of its directory.
        settings: what was varied, by `section.field`.
        hours: spent in training steps.
        loss: reconstruction loss at the end.
        accuracy: of the linear probe.
        size: side of the probe's images in pixels.
        test: data set that the accuracy is measured on; None = the run's held-out images.
    """

    name: str
    settings: dict[str, str]
    hours: float
    loss: float | None
    accuracy: float
    size: int
    test: str | None = None


def combinations(vary: Sequence[str]) -> list[dict[str, str]]:
    """["crops.count=1,2", "vision.decoder=linear"] -> one mapping for each combination.

    Raises:
        RefusedError: not of that form.
    """
    names, values = [], []
    for words in vary:
        name, equals, listed = words.partition("=")
        found = [value for value in listed.split(",") if value]
        if not equals or "." not in name or not found:
            raise RefusedError(f"--vary {words}: section.field=value,value expected, for example crops.count=1,2,4")
        names.append(name)
        values.append(found)
    if not names or len(set(names)) < len(names):
        raise RefusedError("--vary: name at least one setting, and each once; for example --vary crops.count=1,2,4")
    return [dict(zip(names, chosen, strict=True)) for chosen in itertools.product(*values)]


def sweep(
    *,
    recipe: str,
    run_dir: Path,
    vary: Sequence[str],
    flags: Sequence[str],
    launcher: str = "",
    probe_size: int = 0,
    test: Path | None = None,
) -> list[Point]:
    """Train each combination in run_dir/NAME, unless it is finished there, then measure and write all of them.

    Args:
        recipe: of all runs.
        run_dir: directory of the sweep.
        vary: see `combinations`.
        flags: of all runs, as for `trp-scale pretrain`.
        launcher: words before the run's own, such as "torchrun --nproc_per_node 8"; empty: this interpreter.
        probe_size: side of the probe's images in pixels; 0 = twice the crops' where all tokens are trained on (MAE+),
            else the crops'.
        test: data set that the accuracy is measured on; None = the runs' held-out images.

    Raises:
        RefusedError: settings that cannot be, a finished run of other settings, or data that a linear probe cannot
            use; found before the first run is started.
    """
    figure_class()
    chosen = combinations(vary)
    commands = [
        ["--recipe", recipe, "--run_dir", str(run_dir / name_of(settings)), *flags, *_as_flags(settings)]
        for settings in chosen
    ]
    for settings, command in zip(chosen, commands, strict=True):
        config = parse(command).config
        if not isinstance(config, ImagePretrainConfig):
            raise RefusedError(f"--recipe {recipe}: no run on images; allowed: a recipe of a masked autoencoder")
        check_probe(config, probe_size or default_size(config), test)
        _refuse_other_run(run_dir / name_of(settings), config)
    points = []
    for settings, command in zip(chosen, commands, strict=True):
        directory = run_dir / name_of(settings)
        _train(directory, command, launcher)
        points.append(_measured(directory, settings, probe_size, test))
        write_json(run_dir / RESULT_FILE, {"runs": [asdict(point) for point in points]})
    _draw(points, run_dir / PICTURE_FILE)
    return points


def name_of(settings: dict[str, str]) -> str:
    """crops.count=2,vision.decoder=linear: a directory's name that says what the run is."""
    return ",".join(f"{name}={value}" for name, value in settings.items()).replace("/", "-")


def default_size(config: ImagePretrainConfig) -> int:
    """Twice the crops' side where all tokens enter the encoder (MAE+), else the crops'."""
    all_tokens = isinstance(config, MaeConfig) and config.vision.tokens == "all"
    return config.crops.size * (2 if all_tokens else 1)


def _refuse_other_run(directory: Path, config: Config) -> None:
    """A directory of the sweep may hold this very run, begun or finished."""
    found = newest_complete(directory).path if directory.is_dir() else None
    if found is None:
        return
    stored = read_document(found).config
    check_settings(stored, to_dict(config))
    steps = stored["training"]["steps"]
    if steps != config.training.steps:
        raise RefusedError(
            f"{directory} holds a run of {steps} steps, --training.steps is {config.training.steps}; "
            "choose another --run_dir"
        )


def _as_flags(settings: dict[str, str]) -> list[str]:
    return [word for name, value in settings.items() for word in (f"--{name}", value)]


def _train(directory: Path, command: list[str], launcher: str) -> None:
    if read_summary(directory).get("exit_reason") == "finished":
        return
    words = [*(shlex.split(launcher) or [sys.executable]), "-m", "trp_scale", "pretrain", *command]
    status = subprocess.run(words, check=False).returncode
    if status or read_summary(directory).get("exit_reason") != "finished":
        raise RefusedError(
            f"{directory}: the run did not finish (exit status {status}); the same command goes on there"
        )


def _measured(directory: Path, settings: dict[str, str], probe_size: int, test: Path | None) -> Point:
    trained = load_trained_images(directory)
    size = probe_size or default_size(trained.config)
    history = read_history(directory)
    return Point(
        name=directory.name,
        settings=settings,
        hours=history.training_seconds / 3600,
        loss=history.loss_end,
        accuracy=linear_probe(trained, size=size, test=test),
        size=size,
        test=None if test is None else str(test),
    )


def table_of(points: Sequence[Point]) -> Table:
    """One row a run."""
    measured_on = next((f"images of {point.test}" for point in points if point.test), "held-out images")
    caption = (
        f"accuracy: linear probe on the {measured_on} (not the paper's fine-tuning; MAE+ meets a larger grid there "
        "than it was trained on); hours: in training steps"
    )
    table = Table(caption=caption, caption_justify="left")
    table.add_column("run")
    for name in ("hours", "loss", "accuracy"):
        table.add_column(name, justify="right")
    for point in points:
        loss = "-" if point.loss is None else f"{point.loss:.4f}"
        table.add_row(point.name, f"{point.hours:.4f}", loss, f"{point.accuracy:.1%}")
    return table


def print_table(points: Sequence[Point]) -> None:
    """To the terminal."""
    Console().print(table_of(points))


def _draw(points: Sequence[Point], path: Path) -> None:
    figure = figure_class()(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    axes.scatter([point.hours for point in points], [100 * point.accuracy for point in points], color="tab:red")
    for point in points:
        axes.annotate(point.name, (point.hours, 100 * point.accuracy), textcoords="offset points", xytext=(5, 4))
    axes.set(xlabel="hours of training", ylabel="accuracy of a linear probe (%)")
    figure.savefig(path, dpi=120)
