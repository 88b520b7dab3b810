"""Accuracy of a linear classifier on frozen features: a quick look at an encoder, not the papers' fine-tuning."""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from trp_scale.batch import Batch
from trp_scale.config import Config, CropsConfig, RefusedError
from trp_scale.data.sources import open_sources
from trp_scale.evaluation.separate_test import all_of, check_test
from trp_scale.evaluation.trained_images import TrainedImages
from trp_scale.models.mae import MaskedAutoencoder

BATCH = 64
"""Images of one forward pass."""

Features = npt.NDArray[np.float32]
Labels = npt.NDArray[np.int64]


def linear_probe(trained: TrainedImages, *, size: int, most: int = 20_000, test: Path | None = None) -> float:
    """Accuracy on held-out images of a logistic regression fitted to features of training images. Of a run with learned
    masks all training images take part, D_val's too.

    A feature is the mean of the encoder's patch tokens of the whole, unmasked image at size x size pixels, without an
    adversary. MAE+ is trained on small crops and used on whole images (AdPE 3.2), so its grid is larger here.

    Args:
        trained: the encoder, and the run's data.
        size: side of the images in pixels.
        most: training images at most, the first of the order.
        test: directory of a data set of the same classes, on all of whose images accuracy is measured; None = on the
            run's held-out images.
    Raises:
        RefusedError: as `check_probe`, or the training images are all of one class.
    """
    check_probe(trained.config, size, test)
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    config = whole_images(trained.config, size)
    model = MaskedAutoencoder(config).eval()
    model.load_state_dict(trained.model.state_dict())
    sources = trained.open_sources(config)
    try:
        rows = min(most, sources.train.rows)
        windows = (sources.train.next_window()[0] for _ in range(-(-rows // BATCH)))
        features, labels = extract(trained, model, windows)
        unseen = sources.validation.windows() if test is None else all_of(config, test)
        held_out, answers = extract(trained, model, unseen)
    finally:
        sources.close()
    if len(np.unique(labels[:rows])) < 2:
        raise RefusedError(f"{config.data.path}: the training images are all of one class; a linear probe needs two")
    classifier = make_pipeline(StandardScaler(), LogisticRegression(max_iter=1000))
    classifier.fit(features[:rows], labels[:rows])
    return float(classifier.score(held_out, answers))


def check_probe(config: Config, size: int, test: Path | None = None) -> None:
    """Refuse what a linear probe cannot measure, before anything is trained for it.

    Raises:
        RefusedError: no classes in the data, nothing held out and no test set, a test set as `check_test` refuses, a
            size that patches do not fill, or scikit-learn is not installed.
    """
    if importlib.util.find_spec("sklearn") is None:
        raise RefusedError("a linear probe needs scikit-learn: pip install 'trp-scale[evaluation]'")
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
    sources = open_sources(whole_images(config, size), rank=0, world=1)
    suffixes = sources.meta.suffixes
    sources.close()
    if "cls" not in suffixes:
        raise RefusedError(f"{config.data.path}: the images have no classes; a linear probe needs them")
    if test is not None:
        check_test(config, test)


def whole_images(config: Config, size: int) -> Config:
    """The run's settings with the whole of each image as its one crop, squashed to a square (of one longer than 4:3 the
    largest central part of that ratio), in batches of one process."""
    config = copy.deepcopy(config)
    config.crops = CropsConfig(
        size=size, min_scale=1.0, max_scale=1.0, flip=0.0, interpolation=config.crops.interpolation
    )
    config.batch.global_size = config.batch.micro_size = BATCH
    config.masking.network = "none"  # all that is not held out is in one source
    config.data.workers = 0
    return config


@torch.no_grad()
def extract(trained: TrainedImages, model: MaskedAutoencoder, batches: Iterator[Batch]) -> tuple[Features, Labels]:
    """[n, D] features and [n] labels of the rows that are there."""
    features, labels = [], []
    for batch in batches:
        patches = trained.objective.patches(batch)  # [R, N, P]
        every = torch.arange(patches.shape[1]).expand(len(patches), -1)
        tokens = model.features(patches, every)[:, 1:].mean(1)  # [R, D]
        there = batch["row_weights"] > 0
        features.append(tokens[there].float().numpy())
        labels.append(batch["labels"][there].numpy())
    return np.concatenate(features), np.concatenate(labels)
