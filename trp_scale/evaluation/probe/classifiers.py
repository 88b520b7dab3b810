"""Classifiers on frozen features.

linear: the probe of MAE, a batch norm without affine before one layer, learned by LARS (He et al. 2022, A.1).
logistic: logistic regression on standardised features, the fast probe.
neighbours: weighted nearest neighbours (Wu et al. 2018, 3.4; as DINO measures, Caron et al. 2021).
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trp_scale.config import OptimizerConfig, RefusedError
from trp_scale.data.hashing import Integers
from trp_scale.distributed.groups import Group
from trp_scale.evaluation.arguments import KnnSettings, LinearSettings, LogisticSettings, ProbeArguments
from trp_scale.evaluation.probe.features import Features, LabelledFeatures, extract
from trp_scale.finetuning.measurement import distinct
from trp_scale.models.initialise import initial_tensor
from trp_scale.training.loop import learning_rate

if TYPE_CHECKING:
    from trp_scale.evaluation.encoders import FrozenEncoder
    from trp_scale.evaluation.probe.images import ProbedImages

WEIGHT_DEVIATION = 0.01
"""Standard deviation of the layer's first weights."""

NORM_EPS = 1e-6
MOMENTUM = 0.9
LR_ROWS = 256
"""Images of a step for which linear.base_lr is the peak."""

Step = tuple[Tensor, Tensor]
"""Features [B, D] and classes [B] of one step."""


class LinearProbe:
    """Features [B, D] -> logits [B, K].

    LARS scales the step of the matrix by 0.001 |W| / |gradient|, and leaves the bias as it is; both have momentum 0.9
    and no decay. The batch norm keeps running statistics while it learns, and is measured by those.

    Args:
        width: D.
        classes: K.
        steps: in all.
        warmup_steps: of them, the first.
        lr: peak learning rate.
        seed: of the first weights.
    """

    def __init__(self, width: int, classes: int, *, steps: int, warmup_steps: int, lr: float, seed: int) -> None:
        from timm.optim import Lars

        layer = nn.Linear(width, classes)
        with torch.no_grad():
            layer.weight.copy_(initial_tensor(seed, "probe.weight", (classes, width), WEIGHT_DEVIATION))
            layer.bias.zero_()
        self.module = nn.Sequential(nn.BatchNorm1d(width, eps=NORM_EPS, affine=False), layer)
        groups = [{"params": [layer.weight], "always_adapt": True}, {"params": [layer.bias], "always_adapt": False}]
        self.optimizer = Lars(groups, lr=lr, momentum=MOMENTUM, weight_decay=0.0)
        self._schedule = OptimizerConfig(lr=lr, warmup_steps=warmup_steps, schedule="cosine", min_lr=0.0)
        self._steps, self._step = steps, 0

    def learn(self, features: Tensor, labels: Tensor) -> None:
        """Take one step on the mean cross-entropy."""
        self.module.train()
        loss = F.cross_entropy(self.module(features), labels)
        loss.backward()  # type: ignore[no-untyped-call]
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self._step, self._steps, self._schedule)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self._step += 1

    @torch.no_grad()
    def predict(self, features: Features) -> Integers:
        """[m] the class with the highest logit of each row of [m, D]."""
        self.module.eval()
        logits = [self.module(part) for part in torch.split(torch.from_numpy(features), 1 << 16)]
        predicted: Integers = torch.cat(logits).argmax(1).numpy().astype(np.int64)
        return predicted


def step_counts(rows: int, settings: LinearSettings) -> tuple[int, int, int]:
    """Images of a step, steps in all and steps of the warm-up, of so many training images."""
    size = min(settings.batch_size, rows)
    in_epoch = rows // size  # a last step with fewer images is left out, as in He et al.
    return size, in_epoch * settings.epochs, in_epoch * settings.warmup_epochs


def fit_linear(train: LabelledFeatures, features: Features, settings: LinearSettings, *, seed: int) -> Integers:
    """Learn from features that stay the same; [m] classes of `features` [m, D]."""
    size, steps, warmup = step_counts(len(train.labels), settings)
    probe = LinearProbe(
        train.features.shape[1],
        int(train.labels.max()) + 1,
        steps=steps,
        warmup_steps=warmup,
        lr=settings.base_lr * size / LR_ROWS,
        seed=seed,
    )
    for batch, labels in shuffle(train, size, settings.epochs, seed):
        probe.learn(batch, labels)
    return probe.predict(features)


def shuffle(train: LabelledFeatures, size: int, epochs: int, seed: int) -> Iterator[Step]:
    """Steps of `size` rows, in a new order in every epoch."""
    for epoch in range(epochs):
        order = np.random.default_rng((seed, epoch)).permutation(len(train.labels))
        for first in range(0, len(order) - size + 1, size):
            rows = order[first : first + size]
            yield torch.from_numpy(train.features[rows]), torch.from_numpy(train.labels[rows])


def require_scikit_learn() -> None:
    """Raises:
    RefusedError: it is not installed."""
    if importlib.util.find_spec("sklearn") is None:
        raise RefusedError("a logistic probe needs scikit-learn: pip install 'trp-scale[evaluation]'")


def logistic_regression(train: LabelledFeatures, features: Features, settings: LogisticSettings) -> Integers:
    """[m] the most probable class of each row of `features` [m, D]."""
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


CHUNK = 1024
"""Images whose neighbours are looked for at once."""


def nearest_neighbours(train: LabelledFeatures, features: Features, settings: KnnSettings) -> Integers:
    """[m] the class with most of the vote: of the k training images with the largest cosine, each votes for its class
    with exp(cosine / temperature). Where there are fewer than k, all vote.

    Args:
        train: who votes.
        features: [m, D].
        settings: k and temperature.
    """
    known = F.normalize(torch.from_numpy(train.features), dim=1)  # [n, D]
    labels = torch.from_numpy(train.labels)
    classes, k = int(labels.max()) + 1, min(settings.k, len(labels))
    accuracies = []
    for part in torch.split(torch.from_numpy(features), CHUNK):
        cosines, nearest = (F.normalize(part, dim=1) @ known.T).topk(k, dim=1)  # [c, k]
        # The largest is taken off: a low temperature would overflow.
        votes = ((cosines - cosines[:, :1]) / settings.temperature).double().exp()
        scores = votes.new_zeros(len(part), classes).scatter_add_(1, labels[nearest], votes)  # [c, K]
        accuracies.append(scores.argmax(dim=1))
    predicted: Integers = torch.cat(accuracies).numpy().astype(np.int64)
    return predicted


Classify = Callable[[LabelledFeatures, Features, ProbeArguments, int], Integers]
"""Learn from labelled features; the classes [m] of others [m, D]. The last argument is the seed."""

CLASSIFIERS: dict[str, Classify] = {
    "logistic": lambda train, features, arguments, seed: logistic_regression(train, features, arguments.logistic),
    "linear": lambda train, features, arguments, seed: fit_linear(train, features, arguments.linear, seed=seed),
    "knn": lambda train, features, arguments, seed: nearest_neighbours(train, features, arguments.knn),
}
"""By --method."""


def classify(train: LabelledFeatures, features: Features, arguments: ProbeArguments, seed: int) -> Integers:
    """[m] classes of `features` [m, D] by --method.

    Raises:
        RefusedError: the training images are all of one class.
    """
    if len(np.unique(train.labels)) < 2:
        raise RefusedError(f"{arguments.data}: the training images are all of one class; a probe needs two")
    return CLASSIFIERS[arguments.method](train, features, arguments, seed)


def accuracy(predicted: Integers, labels: Integers) -> float:
    """Share of the rows that are right."""
    return float(np.mean(predicted == labels))


def accuracy_by_class(predicted: Integers, labels: Integers, names: tuple[str, ...]) -> dict[str, Any]:
    """Share of each class's rows that are right, by its name; of classes that have rows."""
    present, names = np.unique(labels).tolist(), tuple(distinct(names))
    return {names[label]: accuracy(predicted[labels == label], labels[labels == label]) for label in present}


SMALLEST_CROP = 0.08
"""Share of an image's area that a crop shows at least (Szegedy et al. 2015), as in He et al., A.1."""


def fit_fresh(
    encoder: FrozenEncoder,
    images: ProbedImages,
    features: Features,
    settings: LinearSettings,
    *,
    fraction: float,
    seed: int,
    group: Group,
) -> Integers | None:
    """Learn from crops; [m] classes of `features` [m, D], on rank 0 alone. All ranks run the encoder; rank 0 learns.

    Steps go across the end of an epoch, and are of whole forward passes on every rank: linear.batch_size is rounded
    down to those. Where that gives the same size, any number of ranks learns the same.

    Args:
        images: learned from, but for what is held out.
        features: measured.
        fraction: share that is held out.
    """
    micro, world = images.config.batch.micro_rows, group.size
    rows = int((~images.held_out(fraction)).sum())
    size, _, _ = step_counts(rows, settings)
    size = max(micro * world, size - size % (micro * world))
    steps = max(1, round(settings.epochs * rows / size))
    probe = LinearProbe(
        encoder.width,
        len(images.classes),
        steps=steps,
        warmup_steps=round(settings.warmup_epochs * rows / size),
        lr=settings.base_lr * size / LR_ROWS,
        seed=seed,
    )
    source = images.random_crops(group, fraction, smallest=SMALLEST_CROP, batch=size, seed=seed)
    try:
        for _ in range(steps):
            step = extract(encoder, source.next_window(), group)
            if group.rank == 0:
                probe.learn(torch.from_numpy(step.features), torch.from_numpy(step.labels))
    finally:
        source.close()
    return probe.predict(features) if group.rank == 0 else None
