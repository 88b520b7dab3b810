"""Similarity within and between classes, against every pair one by one."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from sklearn.metrics.pairwise import cosine_similarity
from torch import Tensor

from tests.unit.evaluation.small_encoder import GRID, SIZE, small_config, with_large_weights
from trp_scale.config import RefusedError
from trp_scale.evaluation.figures.features import (
    attention_weights,
    class_similarity,
    default_positions,
    mean_distance,
    recorded_attention,
)
from trp_scale.models.vit import ImageEncoder


def test_against_every_pair() -> None:
    draw = np.random.default_rng(0)
    labels = draw.integers(0, 4, 60)
    labels[:3] = 9  # a class with few images, and numbers with gaps
    features = (draw.normal(size=(60, 5)) + 1.0).astype(np.float32)
    similar = cosine_similarity(features.astype(np.float64))
    first, second = np.triu_indices(60, k=1)
    same = labels[first] == labels[second]
    intra, inter = similar[first, second][same].mean(), similar[first, second][~same].mean()
    result = class_similarity(features, labels)
    assert (result.intra, result.inter) == pytest.approx((intra, inter), rel=1e-12)
    assert result.ratio == pytest.approx(intra / inter, rel=1e-12)


def test_a_quotient_of_a_negative_similarity_is_not_given() -> None:
    result = class_similarity(np.array([[1.0, 0.0], [1.0, 0.0], [-1.0, 0.1]]), np.array([0, 0, 1]))
    assert result.inter < 0 and result.ratio is None and result.intra == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("labels", "words"), [([1, 1, 1], "3 images of 1 classes"), ([0, 1, 2], "3 images of 3 classes")]
)
def test_pairs_of_both_kinds_are_needed(labels: list[int], words: str) -> None:
    with pytest.raises(RefusedError, match=words):
        class_similarity(np.eye(3), np.array(labels))


@pytest.mark.parametrize("value", [0.0, np.nan, np.inf])
def test_a_representation_without_a_direction_is_refused(value: float) -> None:
    with pytest.raises(RefusedError, match="zero or not finite"):
        class_similarity(np.array([[1.0, 0.0], [value, 0.0], [0.0, 1.0]]), np.array([0, 0, 1]))


KINDS = ("absolute", "relative")


def encoder_of(positions: str) -> ImageEncoder:
    encoder = with_large_weights(ImageEncoder(small_config(positions)))
    assert isinstance(encoder, ImageEncoder)
    return encoder


def entered(encoder: ImageEncoder, number: int, images: Tensor) -> tuple[Tensor, object]:
    """What goes into a block."""
    result: list[tuple[Tensor, object]] = []
    handle = encoder.blocks[number].register_forward_pre_hook(lambda _, arguments: result.append(arguments))
    encoder(images)
    handle.remove()
    return result[0]


@pytest.mark.parametrize("positions", KINDS)
@torch.no_grad()
def test_weighted_values_are_what_the_block_adds(positions: str) -> None:
    """Attention's own output, from torch's fused kernel inside the block, is the weighted sum of the values."""
    encoder, images = encoder_of(positions), torch.randn(2, 3, SIZE, SIZE, dtype=torch.float64)
    tokens, relative = entered(encoder, 1, images)
    block = encoder.blocks[1]
    context: list[Tensor] = []
    handle = block.attn.proj.register_forward_pre_hook(lambda _, arguments: context.append(arguments[0]))
    block(tokens, relative)
    handle.remove()
    weights = attention_weights(block, tokens, relative)
    assert weights.sum(-1) == pytest.approx(torch.ones(2, 2, 1 + GRID**2).numpy(), abs=1e-6)
    values = block.attn.qkv(block.norm1(tokens)).chunk(3, dim=-1)[2].unflatten(-1, (2, -1)).transpose(1, 2)
    weighted = (weights.double() @ values).transpose(1, 2).flatten(2)
    assert torch.allclose(weighted, context[0], atol=1e-6 * float(context[0].abs().max()), rtol=1e-5)


@torch.no_grad()
def test_every_pass_is_recorded_while_it_is_asked_for() -> None:
    encoder, images = encoder_of("absolute"), torch.randn(3, 3, SIZE, SIZE, dtype=torch.float64)
    plain = encoder(images)[0]
    with recorded_attention(encoder, 1) as result:
        assert torch.equal(encoder(images)[0], plain)
        encoder(images[:1])
    encoder(images)
    assert [one.shape for one in result] == [(3, 16, 16), (1, 16, 16)]
    tokens, relative = entered(encoder, 1, images)
    expected = attention_weights(encoder.blocks[1], tokens, relative).mean(1)[:, 1:, 1:]
    assert torch.equal(result[0], expected)
    assert (result[0].sum(-1) < 1).all(), "the class token has its share"


def test_distances_in_closed_form() -> None:
    grid = 5
    assert mean_distance(torch.eye(grid**2)) == 0.0
    right = torch.zeros(grid**2, grid**2)
    for patch in range(grid**2):
        row, column = divmod(patch, grid)
        right[patch, row * grid + (column + 1) % grid] = 0.5  # the rest goes to the class token
    # Four of five patches in a row look one patch to the right, the last one four to the left.
    assert mean_distance(right) == pytest.approx((4 * 1 + 4) / 5)
    every = [math.dist(divmod(i, grid), divmod(j, grid)) for i in range(grid**2) for j in range(grid**2)]
    assert mean_distance(torch.full((grid**2, grid**2), 0.01)) == pytest.approx(sum(every) / len(every))


def test_default_positions_lie_in_the_grid_and_in_the_middle() -> None:
    assert default_positions(14)[4] == (7, 7) and len(default_positions(14)) == 9
    for grid in range(1, 20):
        positions = default_positions(grid)
        assert len(set(positions)) == len(positions)
        assert all(0 <= place < grid for position in positions for place in position)
