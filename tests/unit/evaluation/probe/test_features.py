"""Features of whole data sets: which rows, which encoder, and what is kept."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tests.runs import image_flags, pretrain_here
from tests.unit.data.images.stored import jpeg, sample, write_images
from tests.unit.evaluation.probe.small_encoder import small_config, stripe_detector, striped_images
from trp_scale.config import RefusedError
from trp_scale.distributed.groups import ALONE, Group
from trp_scale.evaluation.encoders import FrozenEncoder, encoder_config
from trp_scale.evaluation.figures.trained_images import load_trained_images
from trp_scale.evaluation.probe import features as module
from trp_scale.evaluation.probe.arguments import ProbeArguments
from trp_scale.evaluation.probe.classifiers import accuracy, classify
from trp_scale.evaluation.probe.features import all_features, extract
from trp_scale.evaluation.probe.images import ProbedImages, open_probed
from trp_scale.models.patches import Pixels


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """37 images of three classes in two shards: no whole number of batches."""
    samples = [sample(number, 20, 16) for number in range(37)]
    return write_images(tmp_path_factory.mktemp("stored") / "data", [samples[:25], samples[25:]])


@pytest.fixture
def images(stored: Path) -> ProbedImages:
    return open_probed(small_config(), str(stored))


def test_every_image_once_in_stored_order_on_any_number_of_ranks(images: ProbedImages) -> None:
    encoder = FrozenEncoder(small_config(), pooling="mean")
    found, labels = extract(encoder, images.batches(ALONE))
    assert found.shape == (37, 16) and found.dtype == np.float32
    assert labels.tolist() == [number % 3 for number in range(37)]
    for world in (2, 3):
        ranks = [Group("world", rank, world) for rank in range(world)]
        batches = sorted((batch for rank in ranks for batch in images.batches(rank)), key=lambda batch: batch.start)
        assert np.array_equal(extract(encoder, batches)[0], found), world


def test_features_that_are_not_finite_are_refused(images: ProbedImages) -> None:
    encoder = FrozenEncoder(small_config(), pooling="mean")
    with torch.no_grad():
        encoder.module.blocks[0].mlp.fc1.bias[0] = torch.nan  # type: ignore[union-attr, index]
    with pytest.raises(RefusedError, match="37 of 37"):
        extract(encoder, images.batches(ALONE))


def test_features_are_of_the_last_tokens(images: ProbedImages) -> None:
    config = small_config()
    batch = next(iter(images.batches(ALONE)))
    mean, first = (FrozenEncoder(config, pooling=pooling) for pooling in ("mean", "class"))
    with torch.no_grad():
        tokens = mean.module(Pixels()(batch["images"]))[0]
    assert torch.equal(mean(batch["images"]), tokens[:, 1:].mean(1))
    assert torch.equal(first(batch["images"]), tokens[:, 0])


@pytest.mark.parametrize(
    "flags", [{}, {"vision__positions": "absolute", "adversary__kind": "none"}], ids=["relative", "absolute"]
)
def test_they_are_what_the_pre_training_s_own_model_gives(
    image_dataset: Path, tmp_path: Path, flags: dict[str, object]
) -> None:
    """Of a run of AdPE, on images twice as large as its crops: relative positions, and fixed ones recomputed."""
    run = tmp_path / "run"
    assert (
        pretrain_here(
            image_flags(
                "adpe_tiny",
                image_dataset,
                run,
                crops__size=16,
                vision__patch_size=4,
                training__steps=2,
                optimizer__lr=0.05,
                **flags,
            )
        )
        == 0
    )
    trained = load_trained_images(run)
    config = encoder_config(str(run), size=32)
    encoder = FrozenEncoder(config, pooling="mean")
    pixels = torch.randint(0, 256, (3, 3, 32, 32), dtype=torch.uint8)
    run_config = trained.config
    run_config.crops.size, run_config.crops.count = 32, 1
    model = type(trained.model)(run_config)
    model.load_state_dict(trained.model.state_dict())
    fields = {"images": pixels[:, None]}
    patches = trained.objective.patches(module.Batch(fields=fields, keys=torch.arange(3), start=0))  # [3, N, P]
    every = torch.arange(patches.shape[1]).expand(3, -1)
    with torch.no_grad():
        expected = model.eval().features(patches, every)[:, 1:].mean(1)
    assert torch.allclose(encoder(pixels), expected, atol=1e-5)


def test_kept_features_are_found_again_and_by_nothing_else(
    images: ProbedImages, stored: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    honest = module.extract

    def counted(encoder: FrozenEncoder, *arguments: object) -> object:
        calls.append(encoder.pooling)
        return honest(encoder, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "extract", counted)
    config = small_config()

    def look(one: FrozenEncoder, where: ProbedImages = images) -> tuple[bool, np.ndarray]:
        found, cached = all_features(one, where, ALONE, tmp_path)
        assert found is not None
        return cached, found.features

    cached, first = look(FrozenEncoder(config, pooling="mean"))
    assert not cached
    cached, again = look(FrozenEncoder(config, pooling="mean"))
    assert cached and np.array_equal(first, again) and len(calls) == 1
    assert not look(FrozenEncoder(config, pooling="class"))[0]
    assert not look(FrozenEncoder(config, pooling="mean", seed=1))[0]
    wider = small_config()
    wider.crops.size = 32
    assert not look(FrozenEncoder(wider, pooling="mean"), open_probed(wider, str(stored)))[0]
    centre = small_config()
    centre.augmentation.measured = "centre"
    assert not look(FrozenEncoder(centre, pooling="mean"), open_probed(centre, str(stored)))[0]
    other = write_images(tmp_path / "other", [[sample(number, 20, 16) for number in range(36)]])
    assert not look(FrozenEncoder(config, pooling="mean"), open_probed(config, str(other)))[0]
    assert len(calls) == 6

    (kept,) = (path for path in tmp_path.glob("*.safetensors") if np.array_equal(module._read(path).features, first))  # type: ignore[union-attr]
    kept.write_bytes(kept.read_bytes()[:100])
    cached, again = look(FrozenEncoder(config, pooling="mean"))
    assert not cached and np.array_equal(first, again)


def test_a_cache_that_cannot_be_written_is_refused_before_the_encoder_runs(
    images: ProbedImages, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "extract", lambda *arguments: pytest.fail("the encoder has run"))
    (tmp_path / "file").touch()
    encoder = FrozenEncoder(small_config(), pooling="mean")
    for cache in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(RefusedError, match=f"--cache {cache}:"):
            all_features(encoder, images, ALONE, cache)


def test_what_is_held_out_is_what_a_run_holds_out(images: ProbedImages) -> None:
    held = images.held_out(0.3)
    assert 0 < held.sum() < 37
    blocks = images.opened.datasets[0].blocks
    assert {int(held[first : first + rows].sum()) for first, rows in zip(blocks.first, blocks.rows, strict=True)} <= {
        0,
        *blocks.rows.tolist(),
    }
    features = extract(FrozenEncoder(small_config(), pooling="mean"), images.batches(ALONE))[0]
    unseen = extract(FrozenEncoder(small_config(), pooling="mean"), images.once(images.held_blocks(0.3), ALONE))[0]
    assert np.allclose(features[held], unseen, atol=1e-6)


def test_training_sources_leave_out_what_is_held_out(images: ProbedImages) -> None:
    """One epoch of each: all other images once, whole or as crops that differ between epochs."""
    measured = {int(key) for batch in images.once(images.held_blocks(0.3), ALONE) for key in batch.keys if key >= 0}
    every = {int(key) for batch in images.batches(ALONE) for key in batch.keys if key >= 0}
    whole, crops = images.in_order(ALONE, 0.3), images.random_crops(ALONE, 0.3, smallest=0.08, batch=8, seed=3)
    for source in (whole, crops):
        assert source.rows == len(every) - len(measured)
        windows = [source.next_window()[0] for _ in range(-(-2 * source.rows // 8))]
        keys = torch.cat([window.keys for window in windows]).tolist()
        assert set(keys[: source.rows]) == every - measured and len(set(keys[: source.rows])) == source.rows
        shown = torch.cat([window["images"] for window in windows])
        again = keys.index(keys[0], 1)
        assert torch.equal(shown[0], shown[again]) is (source is whole)


def test_half_of_the_crops_are_mirrored(tmp_path: Path) -> None:
    """Images that are dark on the left and bright on the right."""
    ramp = Image.fromarray(np.repeat(np.linspace(0, 255, 16, dtype=np.uint8)[None], 16, axis=0)).convert("RGB")
    samples = [sample(number, 16, 16, jpg=jpeg(ramp)) for number in range(40)]
    images = open_probed(small_config(), str(write_images(tmp_path / "data", [samples])))
    source = images.random_crops(ALONE, 0.0, smallest=0.5, batch=8, seed=0)
    shown = torch.cat([source.next_window()[0]["images"] for _ in range(25)]).double()  # five crops of each
    mirrored = shown[..., :8].mean((1, 2, 3)) > shown[..., 8:].mean((1, 2, 3))
    assert abs(float(mirrored.double().mean()) - 0.5) < 4 * 0.5 / 200**0.5


@pytest.mark.parametrize("method", ["logistic", "linear", "knn"])
def test_an_encoder_that_knows_the_classes_beats_random_weights(tmp_path: Path, method: str) -> None:
    """Faint stripes in noise: weights that look for them against three draws of random ones."""
    config = small_config()
    train = open_probed(config, str(striped_images(tmp_path / "train", 160, 0)))
    test = open_probed(config, str(striped_images(tmp_path / "test", 120, 1)))
    arguments = ProbeArguments(from_="x", data="y", method=method)  # type: ignore[arg-type]
    arguments.linear.batch_size, arguments.linear.base_lr = 40, 40.0

    def reached(encoder: FrozenEncoder) -> float:
        (features, labels), (unseen, answers) = (extract(encoder, each.batches(ALONE)) for each in (train, test))
        known = module.LabelledFeatures(features=features, labels=labels)
        return accuracy(classify(known, unseen, arguments, 0), answers)

    informed = reached(FrozenEncoder(config, pooling="mean", weights=stripe_detector(config)))
    drawn = [reached(FrozenEncoder(config, pooling="mean", seed=seed)) for seed in range(3)]
    assert informed > 0.9 and informed > max(drawn) + 0.1, (informed, drawn)
