"""Features of whole data sets, and the images that a probe learns from; classifiers on features, against scikit-learn
and arithmetic by hand."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.linear_model import LogisticRegression
from sklearn.neighbors import KNeighborsClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from tests.unit.data.images.stored import jpeg, sample, write_images
from tests.unit.evaluation.small_encoder import small_config, with_large_weights
from trp_scale.config import RefusedError
from trp_scale.distributed.groups import ALONE, Group
from trp_scale.evaluation.arguments import KnnSettings, LinearSettings, LogisticSettings, ProbeArguments
from trp_scale.evaluation.encoders import FrozenEncoder
from trp_scale.evaluation.probe import classifiers as module
from trp_scale.evaluation.probe.classifiers import (
    Features,
    LabelledFeatures,
    LinearProbe,
    accuracy_by_class,
    all_features,
    classify,
    extract,
    fit_fresh,
    fit_linear,
    logistic_regression,
    nearest_neighbours,
    shuffle,
    step_counts,
)
from trp_scale.finetuning.classification.task import LabelledImages, open_labelled
from trp_scale.models.patches import Pixels


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
    """Three steps with momentum: the matrix by trust 0.001 |W| / |g|, the bias as in plain gradient descent. The
    warm-up starts at 0."""
    settings = LinearSettings(epochs=4, warmup_epochs=2, batch_size=8, base_lr=6.4 * 256 / 8)
    probe = LinearProbe(5, 3, 8, settings, seed=0)
    norm, layer = probe.module
    assert not list(norm.parameters()) and norm.eps == 1e-6
    weight, bias = layer.weight.detach().double(), layer.bias.detach().double()
    assert 0.003 < float(weight.std()) < 0.03 and not bias.any()
    draws = torch.Generator().manual_seed(0)
    momentum: tuple[torch.Tensor, torch.Tensor] = (torch.zeros_like(weight), torch.zeros_like(bias))
    for lr in (0.0, 3.2, 6.4):
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


EPOCHS, WARM_UP, BATCH, BASE_LR = 4, 1, 16, 100.0


@pytest.fixture
def encoder() -> FrozenEncoder:
    encoder = FrozenEncoder(small_config(), pooling="class")
    with_large_weights(encoder.module).float()
    return encoder


def crops_and_classes(images: LabelledImages, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Images [E, n, 3, S, S] and classes [E, n] of all epochs, in training order."""
    source = images.random_crops(ALONE, 0.0, smallest=0.08, batch=8, seed=seed)
    rows = source.rows
    windows = [source.next_window()[0] for _ in range(-(-EPOCHS * rows // 8))]
    shown, labels = (torch.cat([window[name] for window in windows]) for name in ("images", "labels"))
    return shown[: EPOCHS * rows].unflatten(0, (EPOCHS, rows)), labels[: EPOCHS * rows].unflatten(0, (EPOCHS, rows))


def mae_by_loops(
    encoder: FrozenEncoder, images: LabelledImages, weight: torch.Tensor, features: Features, seed: int
) -> tuple[torch.Tensor, torch.Tensor, np.ndarray]:
    """MAE's linear probe in float64, from the description of its code: weight, bias, classes of `features`."""
    module = copy.deepcopy(encoder.module).double()
    mean, deviation = (
        torch.tensor(values, dtype=torch.float64).view(3, 1, 1)
        for values in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    )
    shown, labels = crops_and_classes(images, seed)
    weight, bias = weight.double(), torch.zeros(len(weight), dtype=torch.float64)
    speed = [torch.zeros_like(weight), torch.zeros_like(bias)]
    running = [torch.zeros(weight.shape[1], dtype=torch.float64), torch.ones(weight.shape[1], dtype=torch.float64)]
    peak, steps = BASE_LR * BATCH / 256, shown.shape[1] // BATCH
    for epoch in range(EPOCHS):
        for step in range(steps):
            rows = slice(step * BATCH, (step + 1) * BATCH)
            tokens = module((shown[epoch, rows].double() / 255 - mean) / deviation)[0][:, 0]
            now, variance = tokens.mean(0), tokens.var(0, unbiased=False)
            running = [0.9 * running[0] + 0.1 * now, 0.9 * running[1] + 0.1 * variance * BATCH / (BATCH - 1)]
            normed = (tokens - now) / (variance + 1e-6).sqrt()
            wrong = (normed @ weight.T + bias).softmax(1)
            wrong[torch.arange(BATCH), labels[epoch, rows]] -= 1
            gradient = wrong.T @ normed / BATCH
            speed[0] = 0.9 * speed[0] + 0.001 * weight.norm() / gradient.norm() * gradient
            speed[1] = 0.9 * speed[1] + wrong.mean(0)
            time = epoch + step / steps
            risen = time / WARM_UP
            lr = peak * (risen if risen < 1 else 0.5 + 0.5 * math.cos(math.pi * (time - WARM_UP) / (EPOCHS - WARM_UP)))
            weight, bias = weight - lr * speed[0], bias - lr * speed[1]
    tested = (torch.from_numpy(features).double() - running[0]) / (running[1] + 1e-6).sqrt()
    return weight, bias, (tested @ weight.T + bias).argmax(1).numpy()


def test_mae_s_protocol_is_an_independent_loop_in_float64(
    images: LabelledImages, encoder: FrozenEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """37 images: two steps of 16 an epoch, and five images that the epoch drops."""
    probes: list[LinearProbe] = []

    class Noted(LinearProbe):
        def __init__(self, *arguments: Any, **named: Any) -> None:
            super().__init__(*arguments, **named)
            self.first = self.module[1].weight.detach().clone()
            probes.append(self)

    monkeypatch.setattr("trp_scale.evaluation.probe.classifiers.LinearProbe", Noted)
    settings = LinearSettings(epochs=EPOCHS, warmup_epochs=WARM_UP, batch_size=20, base_lr=BASE_LR)
    unseen = 100 * np.random.default_rng(0).standard_normal((200, encoder.width)).astype(np.float32)

    def fit(seed: int) -> np.ndarray:
        answers = fit_fresh(encoder, images, unseen, settings, fraction=0.0, seed=seed, group=ALONE)
        assert answers is not None
        return answers

    answers, again, _ = fit(3), fit(3), fit(4)
    first, same, other = (probe.module[1] for probe in probes)
    weight, bias, expected = mae_by_loops(encoder, images, probes[0].first, unseen, 3)
    assert float((weight - probes[0].first).norm()) > 0.01 * float(weight.norm())
    torch.testing.assert_close(first.weight.double(), weight, rtol=1e-5, atol=1e-5 * float(weight.abs().max()))
    torch.testing.assert_close(first.bias.double(), bias, rtol=1e-5, atol=1e-5 * float(bias.abs().max()))
    assert (answers == expected).mean() > 0.99 and len(set(answers)) > 1
    assert torch.equal(first.weight, same.weight) and (answers == again).all()
    assert not torch.equal(first.weight, other.weight)


def test_a_forward_pass_of_more_images_than_a_step_is_refused(images: LabelledImages, encoder: FrozenEncoder) -> None:
    settings = LinearSettings(batch_size=7)
    with pytest.raises(RefusedError, match=r"--batch_size is 8 .*7 images"):
        fit_fresh(
            encoder, images, np.zeros((0, encoder.width), np.float32), settings, fraction=0.0, seed=0, group=ALONE
        )


def test_every_image_once_in_stored_order_on_any_number_of_ranks(images: LabelledImages) -> None:
    encoder = FrozenEncoder(small_config(), pooling="mean")
    read = extract(encoder, images.batches(ALONE))
    extracted, labels = read.features, read.labels
    assert extracted.shape == (37, 16) and extracted.dtype == np.float32
    assert labels.tolist() == [number % 3 for number in range(37)]
    for world in (2, 3):
        ranks = [Group("world", rank, world) for rank in range(world)]
        batches = sorted((batch for rank in ranks for batch in images.batches(rank)), key=lambda batch: batch.start)
        assert np.array_equal(extract(encoder, batches).features, extracted), world


def test_an_unreadable_image_is_refused(tmp_path: Path) -> None:
    samples = [sample(number, 16, 16) for number in range(9)]
    samples[4]["jpg"] = b"no image"
    images = open_labelled(small_config(), str(write_images(tmp_path / "data", [samples])))
    with pytest.raises(RefusedError, match=r"image-000000/n00004"):
        extract(FrozenEncoder(small_config(), pooling="mean"), images.batches(ALONE))


def test_features_that_are_not_finite_are_refused(images: LabelledImages) -> None:
    encoder = FrozenEncoder(small_config(), pooling="mean")
    with torch.no_grad():
        encoder.module.blocks[0].mlp.fc1.bias[0] = torch.nan  # type: ignore[union-attr, index]
    with pytest.raises(RefusedError, match="37 of 37"):
        extract(encoder, images.batches(ALONE))


def test_features_are_of_the_last_tokens(images: LabelledImages) -> None:
    config = small_config()
    batch = next(iter(images.batches(ALONE)))
    mean, first = (FrozenEncoder(config, pooling=pooling) for pooling in ("mean", "class"))
    with torch.no_grad():
        tokens = mean.module(Pixels()(batch["images"]))[0]
    assert torch.equal(mean(batch["images"]), tokens[:, 1:].mean(1))
    assert torch.equal(first(batch["images"]), tokens[:, 0])


def test_kept_features_are_found_again_and_by_nothing_else(
    images: LabelledImages, stored: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    honest = module.extract

    def counted(encoder: FrozenEncoder, *arguments: object) -> object:
        calls.append(encoder.pooling)
        return honest(encoder, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "extract", counted)
    config = small_config()

    def look(one: FrozenEncoder, where: LabelledImages = images) -> tuple[bool, np.ndarray]:
        extracted, cached = all_features(one, where, ALONE, tmp_path)
        assert extracted is not None
        return cached, extracted.features

    cached, first = look(FrozenEncoder(config, pooling="mean"))
    assert not cached
    cached, again = look(FrozenEncoder(config, pooling="mean"))
    assert cached and np.array_equal(first, again) and len(calls) == 1
    assert not look(FrozenEncoder(config, pooling="class"))[0]
    assert not look(FrozenEncoder(config, pooling="mean", seed=1))[0]
    wider = small_config()
    wider.crops.size = 32
    assert not look(FrozenEncoder(wider, pooling="mean"), open_labelled(wider, str(stored)))[0]
    centre = small_config()
    centre.augmentation.measured = "centre"
    assert not look(FrozenEncoder(centre, pooling="mean"), open_labelled(centre, str(stored)))[0]
    other = write_images(tmp_path / "other", [[sample(number, 20, 16) for number in range(36)]])
    assert not look(FrozenEncoder(config, pooling="mean"), open_labelled(config, str(other)))[0]
    assert len(calls) == 6

    (kept,) = (path for path in tmp_path.glob("*.safetensors") if np.array_equal(module._read(path).features, first))  # type: ignore[union-attr]
    kept.write_bytes(kept.read_bytes()[:100])
    cached, again = look(FrozenEncoder(config, pooling="mean"))
    assert not cached and np.array_equal(first, again)


def test_a_cache_that_cannot_be_written_is_refused_before_the_encoder_runs(
    images: LabelledImages, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "extract", lambda *arguments: pytest.fail("the encoder has run"))
    (tmp_path / "file").touch()
    encoder = FrozenEncoder(small_config(), pooling="mean")
    for cache in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(RefusedError, match=f"--cache {cache}:"):
            all_features(encoder, images, ALONE, cache)


def test_what_is_held_out_is_what_a_run_holds_out(images: LabelledImages) -> None:
    held = images.held_out(0.3)
    assert 0 < held.sum() < 37
    blocks = images.datasets[0].blocks
    assert {int(held[first : first + rows].sum()) for first, rows in zip(blocks.first, blocks.rows, strict=True)} <= {
        0,
        *blocks.rows.tolist(),
    }
    features = extract(FrozenEncoder(small_config(), pooling="mean"), images.batches(ALONE)).features
    unseen = extract(
        FrozenEncoder(small_config(), pooling="mean"), images.batches(ALONE, images.held_blocks(0.3))
    ).features
    assert np.allclose(features[held], unseen, atol=1e-6)


def test_training_crops_leave_out_what_is_held_out(images: LabelledImages) -> None:
    """One epoch has all other images once, as crops that differ between epochs."""
    measured = {int(key) for batch in images.batches(ALONE, images.held_blocks(0.3)) for key in batch.keys if key >= 0}
    every = {int(key) for batch in images.batches(ALONE) for key in batch.keys if key >= 0}
    source = images.random_crops(ALONE, 0.3, smallest=0.08, batch=8, seed=3)
    assert source.rows == len(every) - len(measured)
    windows = [source.next_window()[0] for _ in range(-(-2 * source.rows // 8))]
    keys = torch.cat([window.keys for window in windows]).tolist()
    assert set(keys[: source.rows]) == every - measured and len(set(keys[: source.rows])) == source.rows
    shown = torch.cat([window["images"] for window in windows])
    assert not torch.equal(shown[0], shown[keys.index(keys[0], 1)])


def test_half_of_the_crops_are_mirrored(tmp_path: Path) -> None:
    """Images that are dark on the left and bright on the right."""
    ramp = Image.fromarray(np.repeat(np.linspace(0, 255, 16, dtype=np.uint8)[None], 16, axis=0)).convert("RGB")
    samples = [sample(number, 16, 16, jpg=jpeg(ramp)) for number in range(40)]
    images = open_labelled(small_config(), str(write_images(tmp_path / "data", [samples])))
    source = images.random_crops(ALONE, 0.0, smallest=0.5, batch=8, seed=0)
    shown = torch.cat([source.next_window()[0]["images"] for _ in range(25)]).double()  # five crops of each
    mirrored = shown[..., :8].mean((1, 2, 3)) > shown[..., 8:].mean((1, 2, 3))
    assert abs(float(mirrored.double().mean()) - 0.5) < 4 * 0.5 / 200**0.5
