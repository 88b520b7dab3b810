"""The classifiers on features, against scikit-learn and arithmetic by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.neighbors import KNeighborsClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from trp_scale.config import RefusedError
from trp_scale.evaluation.arguments import KnnSettings, LinearSettings, LogisticSettings, ProbeArguments
from trp_scale.evaluation.probe.classifiers import (
    LinearProbe,
    accuracy_by_class,
    classify,
    fit_linear,
    logistic_regression,
    nearest_neighbours,
    shuffle,
    step_counts,
)
from trp_scale.evaluation.probe.features import LabelledFeatures


def clusters(rows: int, seed: int, spread: float = 1.0) -> LabelledFeatures:
    """Three overlapping clouds in 12 dimensions."""
    draws = np.random.default_rng(seed)
    centres = np.random.default_rng(99).standard_normal((3, 12))
    labels = draws.integers(3, size=rows)
    features = centres[labels] + spread * draws.standard_normal((rows, 12))
    return LabelledFeatures(features=features.astype(np.float32), labels=labels)


@pytest.mark.parametrize(("k", "temperature"), [(1, 0.07), (20, 0.07), (20, 1.0), (7, 0.2)])
def test_nearest_neighbours_are_those_of_scikit_learn(k: int, temperature: float) -> None:
    """Also over several chunks: 1500 rows."""
    train, test = clusters(200, 0), clusters(1500, 1)
    reference = KNeighborsClassifier(
        k, metric="cosine", algorithm="brute", weights=lambda distances: np.exp((1 - distances) / temperature)
    )
    expected = reference.fit(train.features.astype(np.float64), train.labels).predict(test.features.astype(np.float64))
    answers = nearest_neighbours(train, test.features, KnnSettings(k=k, temperature=temperature))
    assert (answers == expected).mean() > 0.998  # ties of float32
    uniform = KNeighborsClassifier(k, metric="cosine", algorithm="brute").fit(train.features, train.labels)
    if (k, temperature) == (20, 0.07):
        assert (answers != uniform.predict(test.features)).any(), "nearer images should have more of the vote"


def test_fewer_images_than_neighbours_and_a_low_temperature() -> None:
    train = LabelledFeatures(features=np.array([[1, 0], [0.9, 0.1], [0, 1]], np.float32), labels=np.array([0, 0, 1]))
    near = np.array([[0.1, 1.0], [1.0, 0.2]], np.float32)
    assert nearest_neighbours(train, near, KnnSettings(k=20, temperature=1e-4)).tolist() == [1, 0]
    assert nearest_neighbours(train, near, KnnSettings(k=20, temperature=1e6)).tolist() == [0, 0]  # all have one vote


def test_the_logistic_probe_is_scikit_learn_s() -> None:
    train, test = clusters(150, 2), clusters(80, 3)
    for penalty in (1.0, 1e-3):
        pipeline = make_pipeline(StandardScaler(), LogisticRegression(C=penalty, max_iter=1000))
        expected = pipeline.fit(train.features, train.labels).predict(test.features)
        assert (logistic_regression(train, test.features, LogisticSettings(inverse_penalty=penalty)) == expected).all()


def test_a_step_of_lars_in_float64() -> None:
    """Two steps with momentum: the matrix by trust 0.001 |W| / |g|, the bias as in plain gradient descent."""
    probe = LinearProbe(5, 3, steps=4, warmup_steps=2, lr=6.4, seed=0)
    norm, layer = probe.module
    assert not list(norm.parameters()) and norm.eps == 1e-6
    weight, bias = layer.weight.detach().double(), layer.bias.detach().double()
    assert 0.003 < float(weight.std()) < 0.03 and not bias.any()
    draws = torch.Generator().manual_seed(0)
    momentum: tuple[torch.Tensor, torch.Tensor] = (torch.zeros_like(weight), torch.zeros_like(bias))
    for lr in (3.2, 6.4):
        features, labels = 3 + 2 * torch.randn(8, 5, generator=draws), torch.randint(3, (8,), generator=draws)
        probe.learn(features, labels)
        wide = features.double()
        normed = (wide - wide.mean(0)) / (wide.var(0, unbiased=False) + 1e-6).sqrt()
        chances = (normed @ weight.T + bias).softmax(1) - torch.eye(3, dtype=torch.float64)[labels]
        of_weight, of_bias = chances.T @ normed / 8, chances.mean(0)
        trust = 0.001 * weight.norm() / of_weight.norm()
        momentum = (0.9 * momentum[0] + trust * of_weight, 0.9 * momentum[1] + of_bias)
        weight, bias = weight - lr * momentum[0], bias - lr * momentum[1]
    assert torch.allclose(layer.weight.detach().double(), weight, rtol=1e-4, atol=1e-7)
    assert torch.allclose(layer.bias.detach().double(), bias, rtol=1e-4, atol=1e-7)


def test_the_linear_probe_is_measured_by_running_statistics() -> None:
    """One image alone gets the class it gets among others."""
    train = clusters(120, 4, spread=0.3)
    settings = LinearSettings(epochs=60, batch_size=40, base_lr=40.0)
    answers = fit_linear(train, train.features, settings, seed=0)
    assert (answers == train.labels).mean() > 0.9
    one = fit_linear(train, train.features[:1], settings, seed=0)
    assert one[0] == answers[0]
    again, other = (fit_linear(train, clusters(300, 5, 3.0).features, settings, seed=seed) for seed in (0, 1))
    assert (again != other).any()


def test_the_protocol_of_imagenet() -> None:
    """He et al., A.1: batch 16384, 90 epochs of which 10 warm up, lr 0.1 for 256 images: 6.4."""
    settings = LinearSettings()
    size, steps, warmup = step_counts(1_281_167, settings)
    assert (size, steps, warmup) == (16384, 78 * 90, 78 * 10)
    assert math.isclose(settings.base_lr * size / 256, 6.4)
    assert step_counts(1000, settings) == (1000, 90, 10)


def test_every_epoch_has_an_order_of_its_own() -> None:
    """All rows but those of a last step that is not whole; the same ones for the same seed."""
    train = LabelledFeatures(features=np.arange(50, dtype=np.float32)[:, None], labels=np.arange(50))

    def orders(seed: int) -> list[list[int]]:
        steps = [labels for _, labels in shuffle(train, 8, 2, seed)]
        assert [len(step) for step in steps] == [8] * 12
        return [torch.cat(steps[:6]).tolist(), torch.cat(steps[6:]).tolist()]

    first, second = orders(3)
    assert len(set(first)) == len(set(second)) == 48 and first != second
    assert orders(3) == [first, second] and orders(4)[0] != first
    assert all(features[:, 0].tolist() == labels.tolist() for features, labels in shuffle(train, 8, 1, 3))


def test_one_class_is_refused_by_every_method() -> None:
    train = LabelledFeatures(features=np.eye(3, dtype=np.float32), labels=np.zeros(3, np.int64))
    for method in ("logistic", "linear", "knn"):
        arguments = ProbeArguments(from_="x", data="here", method=method)  # type: ignore[arg-type]
        with pytest.raises(RefusedError, match=r"^here:"):
            classify(train, train.features, arguments, 0)


def test_accuracy_of_each_class_that_has_images() -> None:
    labels, predicted = np.array([0, 0, 2, 2]), np.array([0, 1, 2, 2])
    assert accuracy_by_class(predicted, labels, ("ant", "bee", "cat")) == {"ant": 0.5, "cat": 1.0}
    assert accuracy_by_class(predicted, labels, ("crane", "bee", "crane")) == {"crane (0)": 0.5, "crane (2)": 1.0}
