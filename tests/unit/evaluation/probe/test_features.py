"""Features of whole data sets: which rows, which encoder, and what is kept; and the images that a probe learns from
(finetuning/classification/task.py: LabelledImages)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tests.unit.data.images.stored import jpeg, sample, write_images
from tests.unit.evaluation.small_encoder import small_config
from trp_scale.config import RefusedError
from trp_scale.distributed.groups import ALONE, Group
from trp_scale.evaluation.encoders import FrozenEncoder
from trp_scale.evaluation.probe import classifiers as module
from trp_scale.evaluation.probe.classifiers import all_features, extract
from trp_scale.finetuning.classification.task import LabelledImages, open_labelled
from trp_scale.models.patches import Pixels


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
        FrozenEncoder(small_config(), pooling="mean"), images.once(images.held_blocks(0.3), ALONE)
    ).features
    assert np.allclose(features[held], unseen, atol=1e-6)


def test_training_crops_leave_out_what_is_held_out(images: LabelledImages) -> None:
    """One epoch has all other images once, as crops that differ between epochs."""
    measured = {int(key) for batch in images.once(images.held_blocks(0.3), ALONE) for key in batch.keys if key >= 0}
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
