"""Which layouts fit, in which order they come, what is refused, and the seconds of the parts of a step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.grids import always
from tests.unit.planning.small import H100, fsdp_on, of_four_heads
from trp_scale.config.loader import load_recipe, to_dict
from trp_scale.errors import RefusedError
from trp_scale.planning.clusters import Cluster
from trp_scale.planning.command import best_on
from trp_scale.planning.counting import Counted
from trp_scale.planning.layouts import FsdpLayout, LayoutChoice, MegatronLayout
from trp_scale.planning.plan import ClusterPlan, fitting, make_plans, nearest_that_fits, refusal
from trp_scale.pretraining.base import DataFacts

SMALL = replace(H100, name="small", memory=3 * 2**30)
"""So little that micro-batches and layouts matter to a tiny model."""


@pytest.fixture(scope="module")
def counted() -> Counted:
    config = load_recipe("pos_bert_tiny")
    config.batch.global_size, config.batch.micro_size, config.training.precision = 4096, "auto", "bf16"
    config.model.layers, config.data.path = 2, "(none)"
    return Counted(config, DataFacts(length=64, vocabulary=8000))


def test_the_fastest_layout_comes_first(counted: Counted) -> None:
    plans = make_plans(counted, Cluster(gpu=H100, gpus=8))
    assert {plan.layout.name for plan in plans} >= {"ddp", "fsdp", "ZeRO-1", "ZeRO-2", "ZeRO-3", "ZeRO-3 offload"}
    assert all(plan.fits for plan in plans)
    assert [plan.seconds for plan in plans] == sorted(plan.seconds for plan in plans)
    for plan in plans:
        assert plan.micro * plan.accumulation * 8 == 4096


def test_the_largest_micro_batch_that_fits_is_taken(counted: Counted) -> None:
    (whole,) = fitting(make_plans(counted, Cluster(gpu=H100, gpus=8), LayoutChoice(engine="ddp")))
    assert (whole.micro, whole.accumulation) == (512, 1)
    parts = fitting(make_plans(counted, Cluster(gpu=SMALL, gpus=8), LayoutChoice(engine="ddp")))[0]
    assert parts.accumulation > 1
    assert parts.memory.device <= 0.8 * SMALL.memory
    again = parts.memory.activations + counted.saved("none", False).row * parts.micro
    assert parts.memory.device - parts.memory.activations + again > 0.8 * SMALL.memory  # twice as many would not fit


def test_what_does_not_fit_is_refused_with_the_nearest_that_does(counted: Counted) -> None:
    tiny = replace(SMALL, memory=2 * 2**30)
    cluster = Cluster(gpu=tiny, gpus=8)
    plans = make_plans(counted, cluster)
    assert not fitting(plans)
    nearest = nearest_that_fits(counted, cluster)
    assert nearest is not None and nearest.cluster.gpus == 8 and nearest.cluster.gpu.name == "a100-40"
    message = str(refusal(counted, plans))
    assert message.startswith("no layout fits on 8 x small: ")
    assert "the nearest that fits: --gpus 8 --gpu a100-40" in message


def test_a_batch_that_does_not_divide_is_refused_with_the_ranks_that_do(counted: Counted) -> None:
    with pytest.raises(RefusedError, match=r"batch 4096.*over 12"):
        make_plans(counted, Cluster(gpu=H100, gpus=12))


def test_the_curve_has_a_plan_or_a_reason_for_each_number(counted: Counted) -> None:
    found = best_on(counted, H100, [8, 64, 100])
    assert isinstance(found[100], RefusedError)
    eight, many = found[8], found[64]
    assert isinstance(eight, ClusterPlan) and isinstance(many, ClusterPlan)
    assert many.rows_a_second < 8 * eight.rows_a_second


def test_commands_name_what_the_plan_fixes(counted: Counted) -> None:
    plans = {plan.layout.name: plan for plan in make_plans(counted, Cluster(gpu=H100, gpus=16))}
    assert plans["fsdp"].command("R") == (
        "torchrun --nnodes 2 --rdzv_backend c10d --rdzv_endpoint HOST:29500 --nproc_per_node 8 launch/pretrain.py "
        "--engine fsdp --recipe R --batch.micro_size 256 --data.path DATA"
    )
    assert (
        plans["ZeRO-2"]
        .command("R")
        .startswith("deepspeed --hostfile HOSTFILE launch/pretrain.py --ds_config ds_configs/zero2.json --recipe R")
    )
    (alone, *_) = fitting(make_plans(counted, Cluster(gpu=H100, gpus=1)))
    assert alone.command("R").startswith("trp-scale pretrain --recipe R --batch.micro_size")
    assert not alone.messages and alone.step is not None and alone.step.exposed == 0


@pytest.mark.exhaustive
def test_all_numbers_of_ranks_that_can_share_matrices_are_planned() -> None:
    """8 divides the GPUs and not the heads."""
    plans = make_plans(of_four_heads(), Cluster(gpu=H100, gpus=16), LayoutChoice(engine="megatron"))
    by_name = {plan.layout.name: plan for plan in plans}
    assert set(by_name) == {"megatron TP 1", "megatron TP 2", "megatron TP 4"}
    for plan in plans:
        assert isinstance(plan.layout, MegatronLayout)
        assert plan.micro * plan.accumulation * 16 // plan.layout.tensor == 4096
    assert by_name["megatron TP 4"].command("R") == (
        "torchrun --nnodes 2 --rdzv_backend c10d --rdzv_endpoint HOST:29500 --nproc_per_node 8 launch/pretrain.py "
        f"--engine megatron --recipe R --batch.micro_size {by_name['megatron TP 4'].micro} "
        "--megatron.tensor_parallel 4 --data.path DATA"
    )
    weights = [by_name[f"megatron TP {ranks}"].memory.weights for ranks in (1, 2, 4)]
    assert weights[0] > 1.8 * weights[1] > 3.4 * weights[2]


@pytest.mark.parametrize(
    ("megatron", "message"),
    [({"tensor_parallel": 3}, "--megatron.tensor_parallel is 3; allowed .* on 16 GPUs in nodes of 8: 1, 2, 4")],
)
def test_what_cannot_be_cut_is_refused(megatron: dict[str, Any], message: str) -> None:
    with pytest.raises(RefusedError, match=message):
        make_plans(of_four_heads(**megatron), Cluster(gpu=H100, gpus=16), LayoutChoice(engine="megatron"))


def test_the_command_says_that_tokens_are_split() -> None:
    counted = of_four_heads(tensor_parallel=2, sequence_parallel=True)
    (plan,) = make_plans(counted, Cluster(gpu=H100, gpus=8), LayoutChoice(engine="megatron"))
    assert plan.layout.name == "megatron TP 2 SP"
    assert "--megatron.tensor_parallel 2 --megatron.sequence_parallel True" in plan.command("R")


LARGER = {
    "pos_bert_1b": (1.2e9, "pos_bert_large", {"batch"}),
    "pos_bert_3b": (3.0e9, "pos_bert_1b", set()),
    "mae_vit_h": (6.3e8, "mae_vit_l", {"vision"}),
    "mae_vit_g": (1.8e9, "mae_vit_h", set()),
    "mm_mae_vit_l": (3.0e8, "mm_mae_vit_b_in1k_1600", set()),
    "mlo_mae_vit_l": (3.0e8, "mlo_mae_imagenet", set()),
}
"""Parameters of the encoder's blocks, about, the recipe that each extends, and what else differs than the model, the
steps and the optimizer."""


@pytest.mark.parametrize("name", always(LARGER, "pos_bert_1b", "mm_mae_vit_l"))
def test_a_larger_recipe_has_the_size_of_its_name(name: str) -> None:
    blocks, base, others = LARGER[name]
    config, smaller = load_recipe(name), load_recipe(base)
    different = {section for section in to_dict(config) if to_dict(config)[section] != to_dict(smaller)[section]}
    assert different - {"model", "training", "optimizer"} == others
    encoder = sum(Counted(config, DataFacts()).blocks[: config.model.layers])
    assert encoder == pytest.approx(blocks, rel=0.07)


def test_fsdp_is_planned_with_one_copy_and_with_one_on_each_node() -> None:
    for gpus, groups in ((16, {0, 8}), (8, {0})):
        assert {plan.layout.shard_ranks for plan in fsdp_on(gpus) if isinstance(plan.layout, FsdpLayout)} == groups
    (stated,) = fsdp_on(16, shard_ranks=4)
    assert "--engine fsdp --recipe R" in stated.command("R") and " --fsdp.shard_ranks 4 " in stated.command("R")
    with pytest.raises(RefusedError, match=r"--fsdp.shard_ranks.*is 3.*the 16"):
        fsdp_on(16, shard_ranks=3)


def test_a_disk_is_not_planned() -> None:
    with pytest.raises(RefusedError, match=r"--fsdp.offload_directory /local: .*allowed in a plan: --fsdp.offload wi"):
        fsdp_on(8, offload=True, offload_directory="/local")


def test_ranks_of_more_nodes_wait_longer_for_the_slowest(counted: Counted) -> None:
    for nodes, doublings in ((1, 0), (16, 4)):
        plan = make_plans(counted, Cluster(gpu=H100, gpus=8 * nodes), LayoutChoice(engine="ddp"))[0]
        assert plan.step is not None
        step = plan.step
        assert step.waiting == pytest.approx(0.015 * doublings * (step.compute + step.update + step.exposed))
        assert step.seconds >= step.compute + step.update + step.exposed + step.waiting


def test_sums_over_ranks_that_share_matrices_hide_behind_nothing() -> None:
    counted, cluster = of_four_heads(tensor_parallel=2), Cluster(gpu=H100, gpus=2)
    counted.config.batch.micro_size = 4096
    (plan,) = make_plans(counted, cluster, LayoutChoice(engine="megatron"))
    assert plan.step is not None and plan.accumulation == 1
    late = [each for each in plan.messages if each.phase != "start"]
    assert {each.ranks for each in late} == {2}
    assert plan.step.exposed == pytest.approx(sum(each.times * cluster.seconds(each.kind, each.size) for each in late))


def test_an_offloaded_update_takes_the_hosts_cores_and_the_link() -> None:
    """An eighth of the parameters: 10^9 a second updated, and 20 GB/s for their gradients and, for both passes of each
    micro-batch, their weights."""
    (plan,) = fsdp_on(8, offload=True)
    (kept,) = fsdp_on(8)
    assert plan.step is not None and kept.step is not None
    own = kept.memory.weights / 4
    expected = own / 1e9 + own * 4 * (2 * plan.accumulation + 1) / 20e9
    assert plan.step.update == pytest.approx(expected)
    assert plan.memory.weights == 0 and plan.memory.host == pytest.approx(16 * own)
    assert plan.command("R").endswith("--fsdp.offload True --data.path DATA")
