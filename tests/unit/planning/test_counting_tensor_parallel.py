"""A rank's part of a model, and what it sums with others, against what can be written down."""

from __future__ import annotations

from collections import Counter

import pytest
from torch import nn

from tests.grids import always
from trp_scale.config import RefusedError
from trp_scale.config.loader import load_recipe
from trp_scale.models.tensor_plan import TensorPlan, declared_plan
from trp_scale.planning.counting import Counted, degrees
from trp_scale.pretraining.base import DataFacts


@pytest.fixture(scope="module")
def tiny() -> Counted:
    """3 heads of 64; 4 layers at 192."""
    config = load_recipe("pos_bert_tiny")
    config.training.precision = "fp32"
    return Counted(config, DataFacts(length=64, vocabulary=8064))


def test_a_third_of_the_matrices_and_all_of_the_rest(tiny: Counted) -> None:
    model = tiny.config.model  # type: ignore[attr-defined]
    width, hidden, layers, words = model.hidden_size, model.intermediate_size, model.layers, 8064
    block = 3 * (width + 1) * width + width * width + (width + 1) * hidden + hidden * width
    cut = layers * block + (width + 1) * words
    assert tiny.over(3, False).parameters == tiny.parameters - cut + cut // 3
    assert tiny.over(1, False) is tiny


def test_sums_of_a_text_model(tiny: Counted) -> None:
    """Each layer sums its two products' outputs, and the gradient of what two products read: [R, L, D] in fp32. The
    last one's queries are [R, 1 + M, D], as are its outputs; its keys and values read all. Words' embeddings are
    summed, and three numbers of each masked word."""
    rows, layers, width = 5, tiny.config.model.layers, tiny.config.model.hidden_size  # type: ignore[attr-defined]
    batch = tiny.outline.rows(rows)
    masked = batch["labels"].shape[1]
    whole, chosen = 4 * rows * 64 * width, 4 * rows * (1 + masked) * width
    expected = Counter(
        {
            ("forward", whole): 1 + 2 * (layers - 1),
            ("backward", whole): 2 * (layers - 1) + 1,
            ("forward", chosen): 2,
            ("backward", chosen): 2,
            ("backward", 4 * rows * masked * width): 1,
            ("forward", 4 * rows * masked): 3,
        }
    )
    assert Counter((each.phase, each.size) for each in tiny.over(3, False).tensor_sums(rows, False)) == expected


def test_ranks_that_split_tokens_keep_their_own_and_gather_twice() -> None:
    """Four heads on two ranks, no dropout. Of each block but the last a rank keeps half of four tensors [R, L, D] less:
    what entered two products, and the inputs of two norms, with their means and deviations. It gathers what products
    read in both passes, and the gradients of their outputs; sums are scattered."""
    config = load_recipe("pos_bert_tiny")
    config.training.precision = "fp32"
    config.model.heads, config.model.hidden_size, config.model.dropout = 4, 128, 0.0
    counted, rows = Counted(config, DataFacts(length=64, vocabulary=8000)), 5
    whole, split = counted.over(2, False), counted.over(2, True)
    blocks, numbers = config.model.layers - 1, 64 * 128
    less = whole.saved("none", False).row - split.saved("none", False).row
    assert less == blocks * (4 * 4 * numbers + 4 * 4 * 64) / 2
    sums = Counter((each.phase, each.kind, each.size) for each in split.tensor_sums(rows, False))
    size = 4 * rows * numbers
    assert sums[("forward", "gather", size)] == 2 * blocks + 1  # the stream, before the last block
    assert sums[("forward", "scatter", size)] == sums[("backward", "scatter", size)] == 2 * blocks
    assert sums[("backward", "gather", size)] == 4 * blocks + 1
    assert counted.partial(split) == blocks * 6 * 128  # two norms, and two biases of rows


def other_half(tokens: int) -> int:
    """What a rank of two has not; it has one more where they are odd."""
    return tokens // 2


def test_ranks_split_the_tokens_of_an_autoencoder() -> None:
    """13 in the encoder, 50 in the decoder, whose last block ends with the 37 masked ones. A token is in four tensors
    [D] and four numbers of norms; half of those are before the last block's attention."""
    counted = Counted(load_recipe("mlo_mae_tiny"), DataFacts())
    model, vision = counted.config.model, counted.config.vision  # type: ignore[attr-defined]
    whole, split, rows = counted.over(2, False), counted.over(2, True), 4
    half = 2 * vision.decoder_hidden_size + 2
    numbers = model.layers * (4 * model.hidden_size + 4) * other_half(13)
    numbers += (vision.decoder_layers - 1) * 2 * half * other_half(50) + half * (other_half(50) + other_half(37))
    assert whole.saved("none", False).row - split.saved("none", False).row == 4 * numbers
    widths = model.layers * model.hidden_size + vision.decoder_layers * vision.decoder_hidden_size
    assert counted.partial(split) == 6 * widths  # two norms, and two biases of rows
    noted = split.tensor_sums(rows, False)
    sums = Counter((each.phase, each.kind) for each in noted)
    blocks, stacks = model.layers + vision.decoder_layers, 2
    # Tokens are split, and whole again, once in each stack, and once more where the last block goes on with its end.
    assert sums[("forward", "gather")] == 2 * blocks + stacks + 1
    assert sums[("backward", "gather")] == 4 * blocks + stacks + 1
    assert sums[("forward", "scatter")] == sums[("backward", "scatter")] == 2 * blocks
    assert set(sums) == {(phase, kind) for phase in ("forward", "backward") for kind in ("gather", "scatter")}
    # 13 tokens travel as 14, and 37 as 38.
    sent = [(14, model.hidden_size), *((tokens, vision.decoder_hidden_size) for tokens in (38, 50))]
    assert {each.size for each in noted} == {4 * rows * tokens * width for tokens, width in sent}


@pytest.mark.exhaustive  # tests/parity/test_sequence_parallel_images.py splits them
def test_ranks_split_the_tokens_of_a_multi_modal_autoencoder() -> None:
    """33 tokens in the encoder; 64 places in each of three decoders, from the queries of their cross-attention on."""
    counted = Counted(load_recipe("mm_mae_tiny"), DataFacts())
    model, vision, tasks = counted.config.model, counted.config.vision, 3  # type: ignore[attr-defined]
    whole, split, width = counted.over(2, False), counted.over(2, True), vision.decoder_hidden_size
    numbers = model.layers * (4 * model.hidden_size + 4) * other_half(33)
    numbers += tasks * (1 + vision.decoder_layers) * (4 * width + 4) * other_half(64)
    assert whole.saved("none", False).row - split.saved("none", False).row == 4 * numbers
    assert counted.partial(split) == 6 * (
        model.layers * model.hidden_size + tasks * (1 + vision.decoder_layers) * width
    )
    sums = Counter((each.phase, each.kind) for each in split.tensor_sums(4, False))
    assert sums[("backward", "all-reduce")] == tasks  # what keys and values read, which is whole


def test_a_model_without_blocks_to_split_is_refused() -> None:
    config = load_recipe("pos_bert_tiny")
    config.model.layers = 1
    with pytest.raises(RefusedError, match="BertForMaskedPositions has no blocks whose tokens can be split"):
        assert Counted(config, DataFacts(length=64, vocabulary=8064)).over(3, True).parameters


@pytest.mark.parametrize("name", always(["adpe_tiny", "mm_mae_tiny", "mlo_mae_tiny"], "mlo_mae_tiny"))
def test_image_models_are_cut_too(name: str) -> None:
    """Two sums in each pass of a block with 4 heads, besides those of relative positions and cross-attention."""
    counted = Counted(load_recipe(name), DataFacts())
    part = counted.over(2, False)
    assert sum(part.blocks) < 0.6 * sum(counted.blocks)
    assert part.saved("none", False).row < 0.75 * counted.saved("none", False).row
    phases = Counter(each.phase for each in part.tensor_sums(4, False))
    assert phases["forward"] >= 2 * len(counted.blocks) and phases["backward"] >= 2 * len(counted.blocks)
    forward, whole = (each.passes("none", False, False)["forward"].total_flops(4) for each in (part, counted))
    assert 0.45 < forward / whole < 0.8


def test_numbers_of_ranks_divide_the_gpus_a_node_and_the_model() -> None:
    plan = TensorPlan(divided={"--model.heads": 12, "--model.intermediate_size": 48})
    assert list(degrees(plan, 16, 8)) == [1, 2, 4]
    assert list(degrees(plan, 6, 6)) == [1, 2, 3, 6]
    assert list(degrees(plan, 2, 8)) == [1, 2]


def test_a_model_without_a_plan_is_refused() -> None:
    with pytest.raises(RefusedError, match="Linear has no tensor_plan"):
        declared_plan(nn.Linear(2, 2))
