"""Group DRO's own ways, beside the reference run: its estimates, who takes part, and how small a share may be."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.unit.methods.balancing.toy import (
    ToyObjective,
    Twins,
    balancer,
    batch,
    given,
    stand_in_run,
    take_step,
    weigh_history,
)
from trp_scale.checkpoint.run_directory import adopt_unrecorded
from trp_scale.config.registry import make_settings
from trp_scale.core.batch import Batch
from trp_scale.core.hooks import build_hooks
from trp_scale.methods.balancing.global_losses import GroupDro
from trp_scale.pretraining.pos_bert.settings import PosBertConfig

THREE = ToyObjective(tasks=("a", "b", "c"))


def dro(**settings: Any) -> Any:
    return balancer(THREE, "group_dro", **{"rate": 0.5, "group_sizes": "batch", **settings})


def shares(powers: dict[int, float]) -> list[float]:
    total = sum(math.exp(power) for power in powers.values())
    return [math.exp(powers[t]) / total if t in powers else 0.0 for t in range(3)]


def test_lagged_weighs_a_batch_by_what_was_known_before_it_and_needs_no_pass_of_its_own() -> None:
    history = [{0: 1.0, 1: 2.0, 2: 4.0}, {0: 3.0, 1: 1.0}, {0: 1.0, 1: 1.0, 2: 1.0}]
    lagged = weigh_history(dro(estimate="lagged"), THREE, history)
    assert lagged[0] == pytest.approx([1 / 3] * 3)
    exact = weigh_history(dro(), THREE, [*history[:2], {0: 0.0, 1: 0.0, 2: 0.0}])
    assert lagged[2] == pytest.approx(exact[2], rel=1e-13)
    halves = [batch({0: [1.0], 1: [2.0]}), batch({0: [1.5], 2: [4.0]})]
    assert take_step(dro(estimate="lagged"), THREE, given, halves).passes == 2
    assert take_step(dro(), THREE, given, halves).passes == 4


def test_micro_weighs_each_micro_batch_by_itself_but_moves_by_the_global_batch() -> None:
    halves = [batch({0: [1.0], 1: [2.0]}), batch({0: [3.0], 2: [4.0]})]
    micro, exact = dro(estimate="micro"), dro()
    found = take_step(micro, THREE, given, halves).weights
    first, second = shares({0: 0.5, 1: 1.0}), shares({0: 1.5, 2: 2.0})
    assert found == pytest.approx([(one + two) / 2 for one, two in zip(first, second, strict=True)], rel=1e-14)
    take_step(exact, THREE, given, halves)
    assert micro.metrics()["shares"] == pytest.approx(exact.metrics()["shares"], rel=1e-14)


@pytest.mark.parametrize("absent", [{0: [1.0], 1: [3.0]}, {0: [1.0, 1.0], 1: [3.0, 3.0], 2: [9.0]}])
def test_a_task_that_takes_no_part_keeps_its_share(absent: dict[int, list[float]]) -> None:
    weigher = dro(min_count=2 if 2 in absent else 0)
    taken = take_step(weigher, THREE, given, [batch(absent)])
    assert taken.weights == pytest.approx(shares({0: 0.5, 1: 1.5}), rel=1e-14)
    found = weigher.metrics()["shares"]
    assert found["c"] == pytest.approx(1 / 3, rel=1e-14)
    assert found["a"] + found["b"] == pytest.approx(2 / 3, rel=1e-14)
    assert found["b"] / found["a"] == pytest.approx(math.exp(0.5 * 2.0), rel=1e-13)


def test_the_adjustment_is_of_the_elements_of_the_global_batch() -> None:
    window: list[Batch] = [batch({0: [1.0] * 4, 1: [1.0]}), batch({0: [1.0] * 5})]
    found = take_step(dro(adjustment=2.0), THREE, given, window).weights
    assert found == pytest.approx(shares({0: 0.5 * (1 + 2 / 3), 1: 0.5 * (1 + 2.0)}), rel=1e-14)
    twins = take_step(dro(adjustment=2.0), THREE, given, window, group=Twins()).weights
    assert twins == pytest.approx(shares({0: 0.5 * (1 + 2 / 18**0.5), 1: 0.5 * (1 + 2.0 / 2**0.5)}), rel=1e-14)


def test_the_adjustment_is_of_the_elements_of_the_training_set() -> None:
    """As in the code of Sagawa et al., where a group's size is that of the whole training set."""

    class Train:
        rows = 4096

        def first_rows(self, count: int) -> Batch:
            assert count == 2048
            return batch({0: [1.0] * 1536, 1: [1.0] * 512})

    settings = make_settings("balancer", "group_dro", rate=0.5, adjustment=2.0)
    sources = SimpleNamespace(train=Train())
    weigher = cast(GroupDro, build_hooks(replace(stand_in_run(settings, THREE), sources=sources)).balancer)
    found = take_step(weigher, THREE, given, [batch({0: [1.0] * 4, 1: [1.0]})]).weights
    assert found == pytest.approx(shares({0: 0.5 * (1 + 2 / 3072**0.5), 1: 0.5 * (1 + 2 / 1024**0.5)}), rel=1e-14)


def test_a_run_of_an_earlier_version_keeps_the_batch_s_sizes() -> None:
    config = PosBertConfig(balancer=make_settings("balancer", "group_dro"))
    adopt_unrecorded(config, {"balancer": {"kind": "group_dro"}, "optimizer": {"decay_end": "last_step"}})
    assert config.balancer.group_sizes == "batch"


def test_the_losses_are_scaled_and_smoothed_as_minimax_s_are() -> None:
    history = [{0: 2.0, 1: 4.0}, {0: 1.0, 1: 6.0}, {0: 2.0, 1: 2.0}]
    initial = weigh_history(dro(scale="initial"), THREE, history[:2])
    assert initial[0][:2] == pytest.approx([0.5, 0.5])
    assert initial[1] == pytest.approx(shares({0: 0.5 * 1.5, 1: 0.5 * 2.5}), rel=1e-14)
    smooth = weigh_history(dro(loss_ema=0.75), THREE, history)
    assert smooth[1] == pytest.approx(shares({0: 0.5 * (2 + 1.75), 1: 0.5 * (4 + 4.5)}), rel=1e-14)
    assert smooth[2] == pytest.approx(shares({0: 0.5 * (3.75 + 1.8125), 1: 0.5 * (8.5 + 3.875)}), rel=1e-14)


def test_a_share_too_small_for_a_float_comes_back() -> None:
    weigher = dro(rate=10.0)
    *_, fallen = weigh_history(weigher, THREE, [{0: 20.0, 1: 1.0}] * 6)
    assert fallen[1] == 0.0  # e^-1140
    back = weigh_history(weigher, THREE, [{0: 1.0, 1: 20.0}] * 6)[-1]
    assert back[:2] == pytest.approx([0.5, 0.5], rel=1e-9)
