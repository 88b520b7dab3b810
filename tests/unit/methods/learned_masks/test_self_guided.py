"""Masks from the encoder's clusters against eigenvectors in float64, and on every engine."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from tests.grids import always
from tests.parity.compare import too_far
from tests.ranks import Ranks
from tests.synthetic import TWO_RANKS, Layout, Result
from tests.synthetic_images import image_config, image_trainer, run_images
from trp_scale.config.images import PatchSplit
from trp_scale.methods.learned_masks.self_guided import EDGE, cosine_similarity, object_cluster, select_cluster
from trp_scale.pretraining.base import DataFacts
from trp_scale.pretraining.mae.upstream import ImageUpstream

OBJECT = 20
"""Patches of the object in `scene`, of 64."""


def scene(seed: int) -> tuple[Tensor, Tensor]:
    """Return features [4, 64, 24] of an object before a background, and the patches of the object, [4, 64] bool."""
    generator = torch.Generator().manual_seed(seed)
    is_object = torch.zeros(4, 64, dtype=torch.bool)
    for row in is_object:
        row[torch.randperm(64, generator=generator)[:OBJECT]] = True
    kinds = torch.randn(2, 24, generator=generator)
    noise = torch.randn(4, 64, 24, generator=generator)
    return kinds[is_object.long()] + 0.4 * noise, is_object


@pytest.mark.parametrize("seed", range(5))
def test_the_cluster_is_a_side_of_the_normalised_cut(seed: int) -> None:
    similarity = cosine_similarity(scene(seed)[0])
    clusters = object_cluster(similarity)
    for image, cluster in zip(similarity.double().numpy(), clusters.numpy(), strict=True):
        weights = np.maximum(image, EDGE)
        roots = np.sqrt(weights.sum(1))
        cut = np.linalg.eigh(weights / np.outer(roots, roots))[1][:, -2] / roots
        expected = (cut > 0) == (cut[np.abs(cut).argmax()] > 0)
        assert (cluster == expected).all()


def test_the_object_is_masked_but_for_the_hints() -> None:
    features, is_object = scene(0)
    split = PatchSplit(patches=64, visible=64 - OBJECT)
    whole, hinted = select_cluster(features, split, 0.0), select_cluster(features, split, 0.2)
    for number, row in enumerate(is_object):
        members = set(row.nonzero().flatten().tolist())
        masked = set(whole.masked[number].tolist())
        assert masked == members
        assert len(masked - set(hinted.masked[number].tolist())) == 4
    for selection in (whole, hinted):
        together = torch.cat([selection.visible, selection.masked], dim=1).sort(dim=1).values
        assert torch.equal(together, torch.arange(64).expand(4, -1))
        assert torch.equal(selection.masked, selection.masked.sort(dim=1).values)
        assert selection.masked.shape == (4, OBJECT)


def changes(**masks: Any) -> dict[str, dict[str, Any]]:
    return {"multilevel": {"kind": "self_guided", "start": 0.0, **masks}, "training": {"steps": 4}}


@lru_cache
def reference() -> Result:
    return run_images(Layout(micro_size=2), changes())


@pytest.mark.parametrize("layout", always(["whole", *TWO_RANKS], "whole", "fsdp", "zero2"))
def test_every_split_and_engine_gives_the_same_weights(two_ranks: Ranks, layout: str) -> None:
    if layout == "whole":
        ours: Result = run_images(Layout(micro_size=8), changes())
    else:
        ours = two_ranks(run_images, TWO_RANKS[layout], changes())[0]
    assert ours.moved and too_far(ours, reference()) == []


def test_masks_are_the_loader_s_until_the_start_and_then_depend_on_the_encoder() -> None:
    layout = Layout(micro_size=8)
    trainer, _ = image_trainer(layout, image_config(layout, **changes(start=0.5)))
    random, _ = image_trainer(layout, image_config(layout, training={"steps": 4}))
    for step in range(4):
        trainer.train_step()
        random.train_step()
        ours, theirs = trainer.history[-1].loss, random.history[-1].loss
        assert (ours == theirs) == (step < 2), step


def test_the_flops_include_the_pass_over_whole_images() -> None:
    layout = Layout(micro_size=8)
    counts = []
    for kind in (changes(), {"training": {"steps": 4}}):
        config = image_config(layout, vision={"positions": "absolute"}, **kind)
        trainer, _ = image_trainer(layout, config)
        with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
            trainer.train_step()
        measured = sum(counter.get_flop_counts()["MaskedAutoencoder"].values())
        counts.append((measured, ImageUpstream.outline(config, DataFacts()).step_flops(1)))
    (ours, stated), (random, stated_random) = counts
    assert ours - random == pytest.approx(stated - stated_random, rel=1e-12)
    assert stated > stated_random
