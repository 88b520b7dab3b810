"""Bytes of a rank and collectives of a step, against sums made by hand."""

from __future__ import annotations

import pytest

from tests.settings import changed
from tests.unit.planning.small import counted
from trp_scale.planning.counting import Collective
from trp_scale.planning.layouts import (
    DdpLayout,
    FsdpLayout,
    Layout,
    MegatronLayout,
    PlainLayout,
    memory,
    traffic,
)


def sent(found: list[Collective], kind: str) -> list[int]:
    """Sizes of the collectives of one kind, each as often as it is made, but for the small sums of each step."""
    small = {8 * 4, 16 * 2, 8} if kind == "all-reduce" else set()
    return sorted(
        size for each in found for size in [each.size] * each.times if each.kind == kind and size not in small
    )


def messages(layout: Layout, *, ranks: int = 2, accumulation: int = 1) -> list[Collective]:
    return traffic(counted(), layout, ranks=ranks, micro=5, accumulation=accumulation)


def states(layout: Layout, *, ranks: int, accumulation: int = 1) -> dict[str, float]:
    """What is not 0 beside activations and workspace."""
    found = vars(memory(counted(), layout, ranks=ranks, micro=5, accumulation=accumulation))
    return {name: size for name, size in found.items() if size and name not in ("activations", "workspace")}


def test_one_rank_sends_nothing() -> None:
    assert not messages(PlainLayout(engine="plain"), ranks=1)


def test_ddp_sums_all_gradients_once_whatever_the_accumulation() -> None:
    """100 numbers fit into one bucket."""
    for accumulation in (1, 4):
        assert sent(messages(DdpLayout(engine="ddp"), accumulation=accumulation), "all-reduce") == [400]
    assert sent(messages(DdpLayout(engine="ddp", sent=2)), "all-reduce") == [200]


@pytest.mark.parametrize(
    ("layout", "sizes"), [(DdpLayout(engine="ddp"), [192]), (FsdpLayout(engine="fsdp"), [96] * 2)], ids=["ddp", "fsdp"]
)
def test_muon_sends_the_matrices_of_the_blocks(layout: Layout, sizes: list[int]) -> None:
    """3 blocks of 16 numbers in fp32; shards go to their owners and back, replicas get all of the others' results."""
    run = counted()
    run.config.optimizer.kind = "muon"
    found = traffic(run, layout, ranks=2, micro=5, accumulation=1)
    assert sent([each for each in found if each.phase == "update"], "gather") == sizes


def test_fsdp_gathers_blocks_twice_and_the_rest_once_in_each_micro_batch() -> None:
    """2 x 3 blocks of 20 numbers and once 40; gradients of each unit once a window."""
    once = messages(FsdpLayout(engine="fsdp"))
    assert sent(once, "gather") == [80] * 6 + [160]
    assert sent(once, "scatter") == [80] * 3 + [160]
    twice = messages(FsdpLayout(engine="fsdp", read=2), accumulation=2)
    assert sent(twice, "gather") == [40] * 12 + [80] * 2
    assert sent(twice, "scatter") == [80] * 3 + [160]


def test_fsdp_in_groups_gathers_inside_them_and_sums_each_part_between_them() -> None:
    """8 ranks in groups of 4: two copies, a quarter of each unit's gradient goes between them."""
    found = messages(FsdpLayout(engine="fsdp", shard_ranks=4), ranks=8)
    assert {(each.ranks, each.apart) for each in found if each.kind in ("gather", "scatter")} == {(4, 1)}
    between = [each for each in found if each.apart == 4]
    assert [(each.kind, each.ranks, each.phase) for each in between] == [("all-reduce", 2, "last")] * 4
    assert [each.size for each in between] == [20] * 3 + [40]
    alone = messages(FsdpLayout(engine="fsdp", shard_ranks=8), ranks=8)
    assert all(each.apart == 1 for each in alone)


def test_ranks_that_share_matrices_sum_in_every_pass_and_others_once_a_window() -> None:
    """One of two ranks has 50 numbers, and sums 8 bytes of each of 5 rows in each pass of 3 blocks. Of four ranks two
    split the batch: each gets the sums of its rows of the 50, and gathers the others'."""
    for accumulation in (1, 4):
        found = messages(MegatronLayout(engine="megatron", tensor=2), ranks=4, accumulation=accumulation)
        assert sent(found, "all-reduce") == [40] * 6 * accumulation
        assert sent(found, "scatter") == sent(found, "gather") == [200]
        groups = {(each.kind, each.size): (each.ranks, each.apart) for each in found}
        assert groups[("all-reduce", 40)] == (2, 1) and groups[("all-reduce", 8)] == (4, 1)
        assert groups[("scatter", 200)] == groups[("gather", 200)] == (2, 2)
        assert all(each.hides == (each.size != 40) for each in found)
        assert {each.phase for each in found if each.kind == "gather"} == {"update"}
    whole = messages(MegatronLayout(engine="megatron", tensor=2, shard_moments=False, sent=2), ranks=4)
    assert sent(whole, "all-reduce") == [40] * 6 + [100] and not sent(whole, "gather")
    split = messages(MegatronLayout(engine="megatron", tensor=2, split=True), ranks=4)
    assert sent(split, "all-reduce") == [28] + [40] * 6  # the gradients of 7 numbers are each rank's own tokens'
    alone = messages(MegatronLayout(engine="megatron", tensor=2), ranks=2)
    assert sent(alone, "all-reduce") == [40] * 6 and {each.ranks for each in alone if each.phase != "start"} == {2}


def test_memory_of_whole_weights() -> None:
    """100 parameters: weights, gradients and two moments of 4 bytes each."""
    assert states(PlainLayout(engine="plain"), ranks=1) == {"weights": 400, "gradients": 400, "moments": 800}
    assert states(PlainLayout(engine="plain", read=2), ranks=1)["weights"] == 600  # the rounded copy beside the masters


def test_memory_of_ddp_has_the_buckets_beside_gradients() -> None:
    found = states(DdpLayout(engine="ddp", sent=2), ranks=8, accumulation=2)
    assert found == {"weights": 400, "gradients": 400, "moments": 800, "buckets": 200}


def test_memory_of_fsdp_is_shared_by_the_ranks_but_for_what_is_gathered() -> None:
    """The rest of 40 and two blocks of 20 are whole in a pass."""
    found = states(FsdpLayout(engine="fsdp", read=2), ranks=4)
    assert (found["weights"], found["moments"]) == (100, 200)
    assert found["gathered"] == 2 * (40 + 2 * 20)
    assert found["buckets"] == 4 * 2 * 20  # sums of two blocks; those of the rest are 4 x 40, where 160 were gathered
    whole = states(FsdpLayout(engine="fsdp"), ranks=4, accumulation=2)
    assert whole["gradients"] == 100 + 400  # micro-batches are added up whole


def test_memory_of_fsdp_in_groups_is_shared_by_the_group() -> None:
    found = states(FsdpLayout(engine="fsdp", shard_ranks=2), ranks=8)
    assert (found["weights"], found["moments"]) == (200, 400)
    assert found["gradients"] == 200 + 4 * 40


def test_what_fsdp_offloads_is_on_the_host() -> None:
    """Weights, gradients and two moments of 4 bytes over 4 ranks; what micro-batches add up stays."""
    found = states(FsdpLayout(engine="fsdp", offload=True), ranks=4, accumulation=2)
    assert found == {"gradients": 400, "host": 400, "gathered": 4 * (40 + 2 * 20), "buckets": 4 * 2 * 20}


def test_memory_of_captured_graphs() -> None:
    """Static gradients of 4 bytes, sharded by FSDP2, and a quarter of the 10 bytes of 5 rows; 0 without capture."""
    model = counted()
    config = changed(model.config, training={"capture": "on"})
    model.config = config
    for layout, gradients in ((PlainLayout(engine="plain"), 400), (FsdpLayout(engine="fsdp"), 100)):
        ranks = 400 // gradients
        size = memory(model, layout, ranks=ranks, micro=5, accumulation=1)
        assert size.captured == gradients + 0.25 * 10 * 5
        uncaptured = memory(counted(), layout, ranks=ranks, micro=5, accumulation=1)
        assert uncaptured.captured == 0 and size.device == uncaptured.device + size.captured


def test_memory_of_cut_matrices_is_of_a_rank_s_part_and_moments_of_its_rows() -> None:
    """50 numbers: weights, gradients and the flat bucket of 4 bytes each; moments of half of them; the sums of half of
    the bucket, and the whole of it while new weights are gathered."""
    found = states(MegatronLayout(engine="megatron", tensor=2), ranks=4)
    assert found == {"weights": 200, "gradients": 200, "moments": 200, "buckets": 200 + 100 + 200}
    whole = states(MegatronLayout(engine="megatron", tensor=2, shard_moments=False), ranks=4)
    assert whole == {"weights": 200, "gradients": 200, "moments": 400, "buckets": 200}
    half = states(MegatronLayout(engine="megatron", tensor=2, read=2), ranks=4)
    assert half["weights"] == 100 + 100  # what forwards read, and masters of half of the rows
    assert states(MegatronLayout(engine="megatron", tensor=2), ranks=2) == {
        "weights": 200,
        "gradients": 200,
        "moments": 400,
    }
    taken = memory(counted(network=7), MegatronLayout(engine="megatron", tensor=2), ranks=4, micro=5, accumulation=1)
    assert taken.activations == 400 + 5 * 6
    # The network, its gradient and its first weights are whole on each rank, its moments are shared.
    assert taken.masks == 4 * 7 * (1 + 1 + 1 + 2 / 2)
    assert taken.hooks == 2 * 4 * 50 / 2


def test_activations_grow_with_the_micro_batch_and_masks_with_their_network() -> None:
    taken = memory(counted(network=7), PlainLayout(engine="plain"), ranks=1, micro=5, accumulation=1)
    assert taken.activations == 1000 + 5 * 10
    assert taken.masks == 20 * 7
    assert taken.hooks == 2 * 400  # a copy of the weights and a direction
    assert taken.device == pytest.approx(sum(size for name, size in vars(taken).items() if name != "host"))
