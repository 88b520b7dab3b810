"""What is counted of a model without content is what the model made whole has and does."""

from __future__ import annotations

import pytest
import torch

from tests.settings import changed
from trp_scale.config.loader import load_recipe
from trp_scale.core.pieces import STATE_NAMES
from trp_scale.engines.optimizer import build_optimizer, empty_state
from trp_scale.planning.clusters import GPUS, Cluster
from trp_scale.planning.counting import Counted
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
