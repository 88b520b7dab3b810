"""What is counted of a model without content is what the model made whole has and does; a part of it on one rank, and
what the rank sums with others, are what can be written down."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import nn

from tests.grids import always
from tests.settings import changed
from trp_scale.config import RefusedError
from trp_scale.config.loader import load_recipe
from trp_scale.core.pieces import STATE_NAMES
from trp_scale.engines.optimizer import build_optimizer, empty_state
from trp_scale.models.tensor_plan import TensorPlan, declared_plan
from trp_scale.planning.clusters import GPUS, Cluster
from trp_scale.planning.counting import Counted, degrees
from trp_scale.planning.plan import make_plans
from trp_scale.pretraining.base import DataFacts
from trp_scale.pretraining.pos_bert.model import BertForMaskedPositions


@pytest.fixture(scope="module")
def tiny() -> Counted:
    return Counted(load_recipe("pos_bert_tiny"), DataFacts(length=64, vocabulary=1000))


def test_parameters_by_unit(tiny: Counted) -> None:
    model = BertForMaskedPositions(tiny.config.model, vocab_size=1000, seed=0)  # type: ignore[arg-type]
    assert tiny.parameters == sum(each.numel() for each in model.parameters())
    assert sum(tiny.blocks) + tiny.rest == tiny.parameters
    assert all(each.is_meta for each in tiny.model.parameters())


def test_arithmetic_of_the_passes_is_the_step_s(tiny: Counted) -> None:
    """The backward pass does twice the forward's; together they are the model FLOPs of a step, up to the heads' small
    products."""
    passes = tiny.passes("none", False, False)
    rows = tiny.config.batch.global_size
    forward, backward = (passes[name].total_flops(rows) for name in ("forward", "backward"))
    assert backward / forward == pytest.approx(2, rel=0.1)
    assert forward + backward == pytest.approx(tiny.step_flops(1), rel=0.1)


def test_checkpointing_saves_bytes_and_costs_a_forward_pass(tiny: Counted) -> None:
    whole, less = tiny.saved("none", False), tiny.saved("full", False)
    assert less.row < 0.7 * whole.row
    rows = 8
    once, twice = (tiny.passes(how, False, False)["backward"].total_flops(rows) for how in ("none", "full"))
    assert twice > 1.2 * once


def test_fused_operations_take_less_time(tiny: Counted) -> None:
    gpu = GPUS["h100"]
    eager, fused = (tiny.passes("none", False, each)["forward"] for each in (False, True))
    assert len(fused.moved) < len(eager.moved)
    assert fused.seconds(64, gpu, gpu.peak) < eager.seconds(64, gpu, gpu.peak)
    assert fused.seconds(64, gpu, gpu.peak) > fused.total_flops(64) / gpu.peak


@pytest.mark.parametrize("name", ["adpe_tiny", "mm_mae_tiny", "mlo_mae_tiny"])
def test_upstreams_on_images_say_what_their_runs_are_made_of(name: str) -> None:
    counted = Counted(load_recipe(name), DataFacts())
    assert counted.saved("none", False).row > 0
    assert counted.step_flops(1) > 0
    assert (counted.network > 0) == (name == "mlo_mae_tiny")
    assert not torch.cuda.is_initialized()


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_moments_are_those_of_the_optimizer(kind: str) -> None:
    config = changed(load_recipe("pos_modern_tiny"), optimizer={"kind": kind})
    counted = Counted(config, DataFacts(length=64, vocabulary=1000))
    optimizer = build_optimizer(counted.model, config.optimizer)
    states = [empty_state(optimizer, parameter) for parameter in counted.model.parameters()]
    moments = sum(state[name].numel() for state in states for name in STATE_NAMES if name in state)
    assert counted.moments == moments


def test_a_run_with_muon_is_planned_on_several_gpus() -> None:
    config = changed(load_recipe("pos_modern_tiny"), data={"path": "(none)"})
    counted = Counted(config, DataFacts(length=64, vocabulary=1000))
    plans = make_plans(counted, Cluster(gpu=GPUS["h100"], gpus=8))
    assert plans and not any("offload" in plan.layout.name for plan in plans)


@pytest.fixture(scope="module")
def three_heads() -> Counted:
    """3 heads of 64; 2 layers at 192."""
    config = load_recipe("pos_bert_tiny")
    config.training.precision, config.model.layers = "fp32", 2
    return Counted(config, DataFacts(length=64, vocabulary=8064))


def test_a_third_of_the_matrices_and_all_of_the_rest(three_heads: Counted) -> None:
    model = three_heads.config.model  # type: ignore[attr-defined]
    width, hidden, layers, words = model.hidden_size, model.intermediate_size, model.layers, 8064
    block = 3 * (width + 1) * width + width * width + (width + 1) * hidden + hidden * width
    cut = layers * block + (width + 1) * words
    assert three_heads.over(3, False).parameters == three_heads.parameters - cut + cut // 3
    assert three_heads.over(1, False) is three_heads


def test_sums_of_a_text_model(three_heads: Counted) -> None:
    """Each layer sums its two products' outputs, and the gradient of what two products read: [R, L, D] in fp32. The
    last one's queries are [R, 1 + M, D], as are its outputs; its keys and values read all. Words' embeddings are
    summed, and three numbers of each masked word."""
    rows, layers, width = 5, three_heads.config.model.layers, three_heads.config.model.hidden_size  # type: ignore[attr-defined]
    batch = three_heads.outline.rows(rows)
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
    assert Counter((each.phase, each.size) for each in three_heads.over(3, False).tensor_sums(rows, False)) == expected


def test_ranks_that_split_tokens_keep_their_own_and_gather_twice() -> None:
    """Four heads on two ranks, no dropout. Of each block but the last a rank keeps half of four tensors [R, L, D] less:
    what entered two products, and the inputs of two norms, with their means and deviations. It gathers what products
    read in both passes, and the gradients of their outputs; sums are scattered."""
    config = load_recipe("pos_bert_tiny")
    config.training.precision = "fp32"
    config.model.heads, config.model.hidden_size, config.model.dropout, config.model.layers = 4, 128, 0.0, 2
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
