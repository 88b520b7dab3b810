"""Seconds of the parts of a step."""

from __future__ import annotations

import pytest

from tests.unit.planning.small import H100, fsdp_on, of_four_heads
from trp_scale.planning.clusters import Cluster
from trp_scale.planning.counting import Counted
from trp_scale.planning.layouts import LayoutChoice
from trp_scale.planning.plan import make_plans


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
