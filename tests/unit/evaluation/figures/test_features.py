"""Similarity within and between classes, against every pair one by one."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.metrics.pairwise import cosine_similarity

from trp_scale.config import RefusedError
from trp_scale.evaluation.figures.features import class_similarity


def test_against_every_pair() -> None:
    draw = np.random.default_rng(0)
    labels = draw.integers(0, 4, 60)
    labels[:3] = 9  # a class with few images, and numbers with gaps
    features = (draw.normal(size=(60, 5)) + 1.0).astype(np.float32)
    similar = cosine_similarity(features.astype(np.float64))
    first, second = np.triu_indices(60, k=1)
    same = labels[first] == labels[second]
    intra, inter = similar[first, second][same].mean(), similar[first, second][~same].mean()
    found = class_similarity(features, labels)
    assert (found.intra, found.inter) == pytest.approx((intra, inter), rel=1e-12)
    assert found.ratio == pytest.approx(intra / inter, rel=1e-12)


def test_closed_forms() -> None:
    """Two classes on axes 60 degrees apart: 1 within, 1/2 between, whatever the lengths."""
    features = np.array([[2.0, 0.0], [0.5, 0.0], [0.5, 0.75**0.5], [3.0, 108.0**0.5 / 2]])
    found = class_similarity(features, np.array([0, 0, 1, 1]))
    assert (found.intra, found.inter, found.ratio) == pytest.approx((1.0, 0.5, 2.0))


def test_a_quotient_of_a_negative_similarity_is_not_given() -> None:
    found = class_similarity(np.array([[1.0, 0.0], [1.0, 0.0], [-1.0, 0.1]]), np.array([0, 0, 1]))
    assert found.inter < 0 and found.ratio is None and found.intra == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("labels", "words"), [([1, 1, 1], "3 images of 1 classes"), ([0, 1, 2], "3 images of 3 classes; allowed: two")]
)
def test_pairs_of_both_kinds_are_needed(labels: list[int], words: str) -> None:
    with pytest.raises(RefusedError, match=words):
        class_similarity(np.eye(3), np.array(labels))


@pytest.mark.parametrize("value", [0.0, np.nan, np.inf])
def test_a_representation_without_a_direction_is_refused(value: float) -> None:
    with pytest.raises(RefusedError, match="zero or not finite"):
        class_similarity(np.array([[1.0, 0.0], [value, 0.0], [0.0, 1.0]]), np.array([0, 0, 1]))
