"""The probe's methods, and the figures of their answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from trp_scale.config import RefusedError
from trp_scale.data.hashing import Integers
from trp_scale.downstream.probe.arguments import ProbeArguments
from trp_scale.downstream.probe.features import Features, LabelledFeatures
from trp_scale.downstream.probe.linear import fit_linear
from trp_scale.downstream.probe.logistic import logistic_regression
from trp_scale.downstream.probe.neighbours import nearest_neighbours
from trp_scale.downstream.task import distinct

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
