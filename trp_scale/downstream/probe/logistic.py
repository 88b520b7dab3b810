"""Logistic regression on standardised features: the fast probe."""

from __future__ import annotations

import importlib.util
import warnings

import numpy as np

from trp_scale.config import RefusedError
from trp_scale.data.hashing import Integers
from trp_scale.downstream.probe.arguments import LogisticSettings
from trp_scale.downstream.probe.features import Features, LabelledFeatures


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
