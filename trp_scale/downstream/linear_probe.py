"""Accuracy of a linear classifier on frozen features: a quick look at an encoder, not the papers' fine-tuning.

`trp-scale probe` with --method logistic, for runs that are compared with each other: on the run's own data.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from trp_scale.config import Config, RefusedError
from trp_scale.config.finetuning import FinetuneConfig
from trp_scale.distributed.groups import ALONE
from trp_scale.downstream.classification.task import open_labelled
from trp_scale.downstream.probe.arguments import LogisticSettings
from trp_scale.downstream.probe.classifiers import accuracy, logistic_regression, require_scikit_learn
from trp_scale.downstream.probe.encoder import BATCH, FrozenEncoder, encoder_config
from trp_scale.downstream.probe.features import LabelledFeatures, extract
from trp_scale.downstream.probe.images import open_probed
from trp_scale.downstream.separate_test import check_test
from trp_scale.downstream.trained_images import TrainedImages


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


def _settings(trained: TrainedImages, size: int) -> FinetuneConfig:
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


def check_probe(config: Config, size: int, test: Path | None = None) -> None:
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
