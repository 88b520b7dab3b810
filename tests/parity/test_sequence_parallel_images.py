"""Invariant 1 of image models whose tokens are split over the ranks that share matrices. A class token and 16 patches,
or 4, or 8 visible ones, or 9 places of a decoder: two ranks never have equally many."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from tests.distributed.engine_layouts import needs_megatron
from tests.distributed.test_precision import LOSSES, TRAVELLED, apart
from tests.grids import always
from tests.parity import test_learned_masks, test_modalities, test_second_levels
from tests.parity.compare import kept_bytes, run_alone, steps_too_far
from tests.parity.test_modalities import BALANCING, differences, sometimes_absent
from tests.parity.test_sequence_parallel import CUT, SPLIT, layout
from tests.parity.test_tensor_parallel import IMAGES, image_differences
from tests.ranks import Ranks
from tests.synthetic import Layout, Result, data_group
from tests.synthetic_images import CROPS, batch, image_config, make_image_engine, run_images
from tests.synthetic_masks import run_masks
from tests.synthetic_modalities import run_modalities
from trp_scale.pretraining.mae.upstream import MaskedPatchReconstruction

pytestmark = needs_megatron


@pytest.mark.parametrize("name", always(IMAGES, "relative_coordinate"))
def test_two_ranks_that_split_tokens_give_the_autoencoder_and_the_adversary_of_one(two_ranks: Ranks, name: str) -> None:
    first, second = two_ranks(run_images, layout(SPLIT), IMAGES[name])
    assert first.moved and image_differences(first, name) == []
    if first.vector is not None:
        assert torch.equal(first.vector, second.vector)


def modalities(balancing: str) -> dict[str, Any]:
    """8 of 27 tokens are visible, and each decoder has 9 places."""
    found = test_modalities.changes(balancing)
    return {**found, "modalities": {**found["modalities"], "visible_tokens": 8}, "crops": {"size": 12}}


def agree(ours: Result, balancing: str) -> None:
    theirs: Result = run_alone(run_modalities, modalities(balancing), sometimes_absent)
    assert ours.moved and differences(ours, theirs) == steps_too_far(ours, theirs) == []


@pytest.mark.parametrize("balancing", always(BALANCING, "gradnorm"))
def test_two_ranks_that_split_tokens_give_the_multi_modal_autoencoder_of_one(two_ranks: Ranks, balancing: str) -> None:
    agree(two_ranks(run_modalities, layout(SPLIT), modalities(balancing), sometimes_absent)[0], balancing)


@pytest.mark.exhaustive
@pytest.mark.parametrize("level", test_second_levels.LEVELS)
def test_two_ranks_that_split_tokens_learn_the_masks_of_one(two_ranks: Ranks, level: str) -> None:
    """The masking network is whole, with all its tokens; a second encoder's are split."""
    test_second_levels.agree(two_ranks(run_masks, layout(SPLIT), test_second_levels.changes(level, 4))[0], level)


@pytest.mark.exhaustive
@pytest.mark.parametrize("variant", ["flattened", "look ahead"])
def test_two_ranks_that_split_tokens_learn_masks_by_a_head_too(two_ranks: Ranks, variant: str) -> None:
    test_learned_masks.agree(two_ranks(run_masks, layout(SPLIT), test_learned_masks.changes(variant))[0], variant)


@pytest.mark.exhaustive
@pytest.mark.parametrize("shard_moments", [True, False])
def test_four_ranks_split_images_tokens_and_the_batch(four_ranks: Ranks, shard_moments: bool) -> None:
    own = layout({**SPLIT, "shard_moments": shard_moments})
    for name in ("MAE", "relative_coordinate", "relative_embedding"):
        assert image_differences(four_ranks(run_images, own, IMAGES[name])[0], name) == []
    agree(four_ranks(run_modalities, own, modalities("gradnorm"), sometimes_absent)[0], "gradnorm")


@pytest.mark.exhaustive
@pytest.mark.parametrize(("weights", "name"), [("fp32", "MAE+"), ("bf16", "MAE+"), ("bf16", "MAE")])
def test_bf16_follows_plain_bf16(two_ranks: Ranks, weights: str, name: str) -> None:
    settings = {**IMAGES[name], "training": {"precision": "bf16", "weights": weights}}
    ours = two_ranks(run_images, layout(SPLIT), settings)[0]
    losses, ways = apart(ours, run_images(Layout(), settings))
    assert losses < LOSSES and ways < TRAVELLED


VISIBLE_ONLY = {"tokens": "visible", "positions": "absolute"}


def of_an_encoder_s_block(own: Layout, vision: dict[str, Any]) -> int:
    """That one more block keeps."""
    return kept_by_images(own, {"layers": 3}, vision) - kept_by_images(own, {"layers": 2}, vision)


def of_a_decoder_s_block(own: Layout, vision: dict[str, Any]) -> int:
    one, more = ({**vision, "decoder_layers": layers} for layers in (2, 3))
    return kept_by_images(own, {}, more) - kept_by_images(own, {}, one)


def kept_by_images(own: Layout, model: dict[str, Any], vision: dict[str, Any]) -> int:
    config = image_config(own, model=model, vision=vision)
    engine = make_image_engine(own, config, data_group(config))
    engine.train(True)
    return kept_bytes(engine, partial(MaskedPatchReconstruction(config.objective, 4), batch=batch(range(8))))


@pytest.mark.parametrize(
    ("of_a_block", "vision", "tokens", "width"),
    [
        (of_an_encoder_s_block, VISIBLE_ONLY, 5, 32),
        *(
            pytest.param(*case, marks=pytest.mark.exhaustive)
            for case in (
                (of_an_encoder_s_block, {"positions": "relative"}, 17, 32),
                (of_a_decoder_s_block, VISIBLE_ONLY, 17, 16),
            )
        ),
    ],
)
def test_a_block_keeps_a_rank_s_own_tokens_of_what_is_not_cut(
    two_ranks: Ranks, of_a_block: Any, vision: dict[str, Any], tokens: int, width: int
) -> None:
    """What entered the queries, keys and values, and the feed-forward; the inputs of two norms, with their means and
    deviations. One rank has one token more, the other a zero in its place."""
    cut, split = (two_ranks(of_a_block, layout(own), vision)[0] for own in (CUT, SPLIT))
    rows, own = 8 * CROPS, (tokens + 1) // 2
    assert cut - split == 4 * rows * (4 * width + 4) * (tokens - own)
