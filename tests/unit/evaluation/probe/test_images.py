"""Images that a probe learns from, and those that a run holds out."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from PIL import Image

from tests.unit.data.images.stored import jpeg, sample, write_images
from tests.unit.evaluation.small_encoder import small_config
from trp_scale.distributed.groups import ALONE
from trp_scale.evaluation.encoders import FrozenEncoder
from trp_scale.evaluation.probe.classifiers import extract
from trp_scale.evaluation.probe.images import ProbedImages, open_probed


def test_what_is_held_out_is_what_a_run_holds_out(images: ProbedImages) -> None:
    held = images.held_out(0.3)
    assert 0 < held.sum() < 37
    blocks = images.opened.datasets[0].blocks
    assert {int(held[first : first + rows].sum()) for first, rows in zip(blocks.first, blocks.rows, strict=True)} <= {
        0,
        *blocks.rows.tolist(),
    }
    features = extract(FrozenEncoder(small_config(), pooling="mean"), images.batches(ALONE)).features
    unseen = extract(
        FrozenEncoder(small_config(), pooling="mean"), images.once(images.held_blocks(0.3), ALONE)
    ).features
    assert np.allclose(features[held], unseen, atol=1e-6)


def test_training_crops_leave_out_what_is_held_out(images: ProbedImages) -> None:
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
    images = open_probed(small_config(), str(write_images(tmp_path / "data", [samples])))
    source = images.random_crops(ALONE, 0.0, smallest=0.5, batch=8, seed=0)
    shown = torch.cat([source.next_window()[0]["images"] for _ in range(25)]).double()  # five crops of each
    mirrored = shown[..., :8].mean((1, 2, 3)) > shown[..., 8:].mean((1, 2, 3))
    assert abs(float(mirrored.double().mean()) - 0.5) < 4 * 0.5 / 200**0.5
