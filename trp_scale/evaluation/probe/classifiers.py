"""Features of all images of a data set, computed by all ranks and cached in a file, and classifiers on them.

linear: batch norm without affine parameters and one layer, trained by LARS (MAE: He et al. 2022, A.1, and main_linprobe
    of its authors)
logistic: logistic regression on standardised features
knn: weighted nearest neighbours (Wu et al. 2018, 3.4; DINO: Caron et al. 2021)
"""

from __future__ import annotations

import hashlib
import json
import logging
import tempfile
import time
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from safetensors.numpy import load_file, save
from torch import Tensor, nn

from trp_scale.checkpoint.document import reading_tensors
from trp_scale.config import OptimizerConfig, RefusedError
from trp_scale.config.flags import phase
from trp_scale.core.batch import Batch
from trp_scale.data.hashing import Integers
from trp_scale.distributed.groups import ALONE, Group, on_rank_zero
from trp_scale.errors import CheckpointError
from trp_scale.evaluation.arguments import KnnSettings, LinearSettings, LogisticSettings, ProbeArguments
from trp_scale.finetuning.measurement import GatheredRows, unique_names
from trp_scale.models.initialise import initial_tensor
from trp_scale.storage.files import atomic_write
from trp_scale.training.loop import learning_rate

if TYPE_CHECKING:
    from trp_scale.evaluation.encoders import FrozenEncoder
    from trp_scale.finetuning.classification.task import LabelledImages

logger = logging.getLogger(__name__)

Features = npt.NDArray[np.float32]


@dataclass(frozen=True, kw_only=True)
class LabelledFeatures:
    """Attributes: features: [n, D] fp32, in stored order; labels: [n] int64."""

    features: Features
    labels: Integers

    def take(self, rows: npt.NDArray[np.bool_]) -> LabelledFeatures:
        """Select the rows of a mask [n]."""
        return LabelledFeatures(features=self.features[rows], labels=self.labels[rows])


def extract(encoder: FrozenEncoder, batches: Iterable[Batch], group: Group = ALONE) -> LabelledFeatures:
    """Return features and classes of the rows of all ranks, in order, without padding rows. A micro-batch has the same
    rows on any number of ranks, so its features are bit-identical. Collective.

    Raises:
        RefusedError: on all ranks, for unreadable images or non-finite features, which some classifiers would accept.
    """
    rows, corrupt = GatheredRows(), set()
    for batch in batches:
        corrupt |= set(batch.corrupt)
        rows.add(batch, features=encoder(batch["images"]), labels=batch["labels"])
    if unread := sorted(set().union(*group.gather_objects(corrupt))):
        raise RefusedError(
            f"{len(unread)} images, {', '.join(unread[:3])}, cannot be read, but accuracy needs all images; copy or "
            "shard the data again"
        )
    gathered = rows.gather(group)
    features: Features = gathered["features"]
    if wrong := int((~np.isfinite(features).all(axis=1)).sum()):
        raise RefusedError(
            f"the features of {wrong} of {len(features)} images are not finite; check the training of the encoder"
        )
    return LabelledFeatures(features=features, labels=gathered["labels"])


def all_features(
    encoder: FrozenEncoder, images: LabelledImages, group: Group, cache: Path
) -> tuple[LabelledFeatures | None, bool]:
    """Return the features of all images, on rank 0 only, and whether they were cached. Collective. Raises
    RefusedError on all ranks, as `extract` or if the cache is not writable."""
    described = json.dumps([1, encoder.digest(), images.digest])  # 1: version of the cache
    key = hashlib.blake2b(described.encode(), digest_size=16).hexdigest()
    path = cache / f"{key}.safetensors"
    parts: list[LabelledFeatures] = []

    def read() -> bool:
        cached = _read(path)
        if cached is None:  # check that the cache is writable before the encoder runs for hours
            try:
                cache.mkdir(parents=True, exist_ok=True)
                with tempfile.TemporaryFile(dir=cache):
                    pass
            except OSError as error:
                raise RefusedError(f"--cache {cache}: not writable ({error.strerror}); give another") from error
        parts.extend([] if cached is None else [cached])
        return cached is not None

    def write() -> None:
        with atomic_write(path) as stream:
            stream.write(save({"features": np.ascontiguousarray(labelled.features), "labels": labelled.labels}))

    if on_rank_zero(group, f"reading {path}", read):
        return (parts[0] if parts else None), True
    labelled = extract(encoder, images.batches(group), group)
    on_rank_zero(group, f"writing {path}", write)
    return (labelled if group.rank == 0 else None), False


def _read(path: Path) -> LabelledFeatures | None:
    if not path.is_file():
        return None
    try:
        with reading_tensors(path):
            stored = LabelledFeatures(**load_file(path))
        features, labels = stored.features, stored.labels
        kinds = (features.dtype.str, features.ndim, labels.dtype.str, labels.ndim)
        if kinds != ("<f4", 2, "<i8", 1) or len(features) != len(labels):
            raise CheckpointError(f"{path}: contains no features")
    except CheckpointError as error:
        logger.warning("%s; the features are computed again", error)
        return None
    return stored


LR_ROWS = 256
"""Batch size that linear.base_lr refers to."""


class LinearProbe:
    """Linear probe: features [B, D] to logits [B, K].

    LARS scales the step of the weight by 0.001 |W| / |gradient| and leaves the bias unscaled; momentum is 0.9, without
    weight decay. The batch norm predicts with its running statistics. The learning rate rises from 0 at the first step
    to its peak at the first step after warm-up, then decays to 0 by a cosine.

    Args:
        width: D.
        classes: K.
        rows: number of training rows.
        pass_rows: rows of a forward pass of the encoder, which divide the batch size.
        seed: for the initial weights.

    Attributes:
        batch_size: rows of a step.
    """

    def __init__(
        self, width: int, classes: int, rows: int, settings: LinearSettings, *, seed: int, pass_rows: int = 1
    ) -> None:
        from timm.optim import Lars

        self.batch_size, self._steps, warmup_steps = step_counts(rows, settings, pass_rows)
        lr = settings.base_lr * self.batch_size / LR_ROWS

        layer = nn.Linear(width, classes)
        with torch.no_grad():
            layer.weight.copy_(initial_tensor(seed, "probe.weight", (classes, width), 0.01))
            layer.bias.zero_()
        self.module = nn.Sequential(nn.BatchNorm1d(width, eps=1e-6, affine=False), layer)
        groups = [{"params": [layer.weight], "always_adapt": True}, {"params": [layer.bias], "always_adapt": False}]
        self.optimizer = Lars(groups, lr=lr, momentum=0.9, weight_decay=0.0)
        self._schedule = OptimizerConfig(lr=lr, warmup_steps=warmup_steps, schedule="cosine", min_lr=0.0)
        self._step = 0

    def learn(self, features: Tensor, labels: Tensor) -> float:
        """Take one step on the mean cross-entropy; return it."""
        self.module.train()
        loss = F.cross_entropy(self.module(features), labels)
        loss.backward()  # type: ignore[no-untyped-call]
        # MAE's warm-up is one step behind that of pre-training.
        reached = self._step - (self._step < self._schedule.warmup_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(reached, self._steps, self._schedule)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self._step += 1
        return float(loss.detach())

    @torch.no_grad()
    def predict(self, features: Features) -> Integers:
        """Return the classes [m] of features [m, D]."""
        self.module.eval()
        logits = [self.module(part) for part in torch.split(torch.from_numpy(features), 1 << 16)]
        predicted: Integers = torch.cat(logits).argmax(1).numpy().astype(np.int64)
        return predicted


def step_counts(rows: int, settings: LinearSettings, pass_rows: int = 1) -> tuple[int, int, int]:
    """Return the batch size, a multiple of pass_rows, the number of steps, and the number of warm-up steps."""
    size = min(settings.batch_size, rows) // pass_rows * pass_rows
    in_epoch = rows // size  # the last incomplete batch is dropped, as in He et al.
    return size, in_epoch * settings.epochs, in_epoch * settings.warmup_epochs


def fit_linear(train: LabelledFeatures, features: Features, settings: LinearSettings, *, seed: int) -> Integers:
    """Train on cached features and return the classes [m] of `features` [m, D]."""
    classes = int(train.labels.max()) + 1
    probe = LinearProbe(train.features.shape[1], classes, len(train.labels), settings, seed=seed)
    for batch, labels in shuffle(train, probe.batch_size, settings.epochs, seed):
        probe.learn(batch, labels)
    return probe.predict(features)


def shuffle(train: LabelledFeatures, size: int, epochs: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield features [B, D] and classes [B] of batches of `size` rows, reshuffled in every epoch."""
    for epoch in range(epochs):
        order = np.random.default_rng((seed, epoch)).permutation(len(train.labels))
        for first in range(0, len(order) - size + 1, size):
            rows = order[first : first + size]
            yield torch.from_numpy(train.features[rows]), torch.from_numpy(train.labels[rows])


def logistic_regression(train: LabelledFeatures, features: Features, settings: LogisticSettings) -> Integers:
    """Fit a logistic regression and return the classes [m] of `features` [m, D]."""
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    classifier = make_pipeline(
        StandardScaler(), LogisticRegression(C=settings.inverse_penalty, max_iter=settings.iterations)
    )
    with warnings.catch_warnings():
        warnings.simplefilter("always", ConvergenceWarning)
        classifier.fit(train.features, train.labels)
    predicted: Integers = classifier.predict(features).astype(np.int64)
    return predicted


def nearest_neighbours(train: LabelledFeatures, features: Features, settings: KnnSettings) -> Integers:
    """Return the classes [m] of `features` [m, D] by vote: each of the k training images with the largest cosine
    votes with exp(cosine / temperature). All vote if there are fewer than k."""
    references = F.normalize(torch.from_numpy(train.features), dim=1)  # [n, D]
    labels = torch.from_numpy(train.labels)
    classes, k = int(labels.max()) + 1, min(settings.k, len(labels))
    accuracies = []
    for part in torch.split(torch.from_numpy(features), 1024):
        cosines, nearest = (F.normalize(part, dim=1) @ references.T).topk(k, dim=1)  # [c, k]
        # Subtract the largest cosine: a low temperature would overflow.
        votes = ((cosines - cosines[:, :1]) / settings.temperature).double().exp()
        scores = votes.new_zeros(len(part), classes).scatter_add_(1, labels[nearest], votes)  # [c, K]
        accuracies.append(scores.argmax(dim=1))
    predicted: Integers = torch.cat(accuracies).numpy().astype(np.int64)
    return predicted


def classify(train: LabelledFeatures, features: Features, arguments: ProbeArguments, seed: int) -> Integers:
    """Return the classes [m] of `features` [m, D] by --method. Raises RefusedError if the training images have one
    class."""
    if len(np.unique(train.labels)) < 2:
        raise RefusedError(f"{arguments.data}: all training images have the same class; a probe needs two classes")
    if arguments.method == "logistic":
        return logistic_regression(train, features, arguments.logistic)
    if arguments.method == "knn":
        return nearest_neighbours(train, features, arguments.knn)
    return fit_linear(train, features, arguments.linear, seed=seed)


def accuracy(predicted: Integers, labels: Integers) -> float:
    """Share of correct rows."""
    return float(np.mean(predicted == labels))


def accuracy_by_class(predicted: Integers, labels: Integers, names: tuple[str, ...]) -> dict[str, Any]:
    """Return the accuracy by name of each class that has rows."""
    present, names = np.unique(labels).tolist(), tuple(unique_names(names))
    return {names[label]: accuracy(predicted[labels == label], labels[labels == label]) for label in present}


def fit_fresh(
    encoder: FrozenEncoder,
    images: LabelledImages,
    features: Features,
    settings: LinearSettings,
    *,
    fraction: float,
    seed: int,
    group: Group,
) -> Integers | None:
    """Train on random crops and return the classes [m] of `features` [m, D], on rank 0 only. All ranks run the encoder;
    rank 0 trains.

    Each epoch drops its last incomplete batch. linear.batch_size is rounded down to whole forward passes on every rank;
    equal batch sizes give equal results on any number of ranks.

    Args:
        images: training images, except those that are held out.
        features: to classify.
        fraction: share that is held out.

    Raises:
        RefusedError: a forward pass of all ranks has more images than a step.
    """
    pass_rows = images.config.batch.micro_rows * group.size
    rows = int((~images.held_out(fraction)).sum())
    if (most := min(settings.batch_size, rows)) < pass_rows:
        raise RefusedError(
            f"--batch_size is {pass_rows // group.size} on {group.size} ranks, but a step has {most} images "
            f"(--linear.batch_size, or all {rows} training images); allowed: at most {most} images on all ranks"
        )
    probe = LinearProbe(encoder.width, len(images.classes), rows, settings, seed=seed, pass_rows=pass_rows)
    size = probe.batch_size
    # Crops have at least 0.08 of the image's area (Szegedy et al. 2015), as in He et al., A.1.
    source = images.random_crops(group, fraction, smallest=0.08, batch=size, seed=seed)
    try:
        for epoch in range(settings.epochs):
            began, losses = time.perf_counter(), []
            if source.cursor != epoch * rows:
                source.seek(epoch * rows)
            for _ in range(rows // size):
                step = extract(encoder, source.next_window(), group)
                if group.rank == 0:
                    losses.append(probe.learn(torch.from_numpy(step.features), torch.from_numpy(step.labels)))
            if group.rank == 0:
                speed = size * len(losses) / (time.perf_counter() - began)
                phase(
                    f"linear probe, seed {seed}: epoch {epoch + 1} of {settings.epochs}, loss {np.mean(losses):.4f}, "
                    f"{speed:,.0f} images/s"
                )
    finally:
        source.close()
    return probe.predict(features) if group.rank == 0 else None
