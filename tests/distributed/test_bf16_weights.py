"""bf16 weights over fp32 masters: --training.weights bf16 on plain, ddp and FSDP2, and DeepSpeed's own (a configuration
without torch_autocast). A run is held to the one in fp32, by a bound for each model."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.checkpoints import unequal
from tests.distributed.test_precision import apart
from tests.grids import always
from tests.ranks import Ranks
from tests.runs import essence, flags, lines, pretrain_here
from tests.synthetic import (
    Layout,
    Result,
    SyntheticSource,
    data_group,
    make_engine,
    refusal,
    run,
    small_config,
    small_engine,
)
from tests.synthetic_images import run_images
from tests.synthetic_modalities import run_modalities
from trp_scale.config import RefusedError
from trp_scale.distributed.groups import ALONE

BF16: dict[str, Any] = {"training": {"precision": "bf16"}}
LOSSES = 2e-2
"""Largest relative difference of a loss from plain bf16 autocast: weights are rounded to the 8 bits of bf16."""


def kinds(stage: int) -> tuple[set[torch.dtype], set[torch.dtype]]:
    """Types of the module's weights and of the pieces that a checkpoint would hold."""
    layout = Layout(engine="deepspeed", stage=stage)
    engine = small_engine(layout, **BF16)
    weights = {parameter.dtype for parameter in engine.module.parameters()}
    pieces = {tensor.dtype for piece in engine.pieces() for tensor in piece.tensors.values()}
    engine.close()
    return weights, pieces


@pytest.mark.parametrize("stage", always([1, 2, 3], 2))
def test_losses_follow_plain_and_master_weights_are_fp32(two_ranks: Ranks, stage: int) -> None:
    for weights, pieces in two_ranks(kinds, stage):
        assert weights == {torch.bfloat16}
        assert pieces == {torch.float32}
    ours = two_ranks(run, Layout(engine="deepspeed", stage=stage), BF16)[0]
    theirs = run(Layout(), BF16)
    assert ours.moved
    for mine, other in zip(ours.steps, theirs.steps, strict=True):
        assert mine.applied
        assert mine.loss == pytest.approx(other.loss, rel=LOSSES)
        assert mine.grad_norm == pytest.approx(other.grad_norm, rel=0.1)


def test_an_optimizer_of_deepspeed_that_is_not_known_here_is_refused_by_name(two_ranks: Ranks) -> None:
    """fp32 sums of bf16 gradients on stage 1: DeepSpeed goes over to a class of another layout."""
    named = ("zero_optimization.stage 1", "grad_accum_dtype fp32", "BF16_Optimizer", "torch_autocast")
    layout = Layout(engine="deepspeed", stage=1, document={"data_types": {"grad_accum_dtype": "fp32"}})
    for message in two_ranks(refusal, layout, **BF16):
        assert all(name in message for name in named)


ROUNDED: dict[str, Any] = {"precision": "bf16", "weights": "bf16"}
SENT: dict[str, Any] = {**ROUNDED, "gradients": "bf16"}
LAYOUTS = ("ddp", "fsdp")

ADVERSARY: dict[str, Any] = {"adversary": {"kind": "relative_embedding", "norm": "l2", "lr": 300.0, "eps": 0.2}}
RUNS: dict[str, tuple[Callable[..., Result], dict[str, Any]]] = {
    "PoS-BERT": (run, {}),
    "MAE+": (run_images, {}),
    "AdPE": (run_images, ADVERSARY),
    "MM-MAE": (run_modalities, {}),
}
FROM_FP32 = {"PoS-BERT": (3e-4, 0.05), "MAE+": (2e-3, 0.05), "AdPE": (2e-3, 0.05), "MM-MAE": (5e-3, 0.05)}
"""Bounds: largest relative difference of a step's loss from that of the run in fp32, and distance of the weights over
the distance travelled."""


@lru_cache
def alone(model: str, micro_size: int = 2, **training: str) -> Result:
    """The run on the plain engine."""
    function, changes = RUNS[model]
    return function(Layout(micro_size=micro_size), {**changes, "training": training})


@pytest.mark.parametrize("model", always(RUNS, "AdPE"))
def test_bf16_weights_are_as_near_to_fp32_as_autocast_is(model: str) -> None:
    exact, autocast, ours = alone(model), alone(model, precision="bf16"), alone(model, **ROUNDED)
    losses, weights = apart(ours, exact)
    assert ours.moved
    assert 1e-6 < losses < FROM_FP32[model][0] and 1e-4 < weights < FROM_FP32[model][1]
    assert apart(ours, autocast)[1] > 1e-4, "this was autocast"
    assert losses < 5 * apart(autocast, exact)[0] and weights < 2 * apart(autocast, exact)[1]
    assert all(tensor.dtype == torch.float32 for tensor in ours.weights.values())


@pytest.mark.parametrize("model", always(RUNS, "PoS-BERT", "AdPE"))
def test_the_number_of_micro_batches_changes_roundings_alone(model: str) -> None:
    whole = alone(model, micro_size=8, **ROUNDED)
    losses, weights = apart(whole, alone(model, **ROUNDED))
    assert losses < FROM_FP32[model][0] and weights < FROM_FP32[model][1]


@pytest.mark.parametrize(
    ("model", "layout", "gradients"),
    always(
        product(RUNS, LAYOUTS, ["fp32", "bf16"]),
        *(("PoS-BERT", "ddp", "fp32"), ("AdPE", "fsdp", "bf16")),
    ),
)
def test_two_ranks_are_as_near_to_fp32_as_one(two_ranks: Ranks, model: str, layout: str, gradients: str) -> None:
    function, changes = RUNS[model]
    ours = two_ranks(function, Layout(engine=layout), {**changes, "training": {**ROUNDED, "gradients": gradients}})[0]
    losses, weights = apart(ours, alone(model))
    assert ours.moved
    assert losses < FROM_FP32[model][0] and weights < FROM_FP32[model][1]


@pytest.mark.parametrize("layout", always(LAYOUTS, "ddp"))
def test_gradients_of_fp32_weights_can_be_sent_in_bf16(two_ranks: Ranks, layout: str) -> None:
    ours = two_ranks(run, Layout(engine=layout), {"training": {"gradients": "bf16"}})[0]
    losses, weights = apart(ours, alone("PoS-BERT"))
    assert losses < 3e-4 and 1e-4 < weights < 0.05


def test_steps_too_small_for_bf16_are_not_lost() -> None:
    """A hundred steps, each a tenth of what bf16 can tell apart at the weights' size."""
    layout = Layout()
    config = small_config(layout, training=ROUNDED, optimizer={"kind": "sgd"})
    engine, _ = make_engine(layout, config, ALONE)
    (name, own), read = next(iter(engine.named_parameters())), next(iter(engine.module.parameters()))  # type: ignore[attr-defined]
    for piece in engine.pieces():
        piece.tensors["weight"].fill_(1.0)
    engine.after_load(0)
    for _ in range(100):
        engine.backward(sum((p.sum() for p in engine.module.parameters()), torch.zeros(())), last=True)
        engine.check_gradients()
        engine.step(2.0**-11)
    assert read.dtype == torch.bfloat16 and own.dtype == torch.float32
    expected = torch.full_like(own, 1 - 100 * 2.0**-11)
    torch.testing.assert_close(own.detach(), expected, rtol=1e-6, atol=0)
    assert torch.equal(read, own.bfloat16()) and not torch.equal(read, torch.ones_like(read)), name


def weights_after_an_interruption(layout: Layout) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Weights after a step that follows a window that was dropped, and after the step alone."""
    found = []
    for interrupted in (True, False):
        engine, objective = make_engine(layout, small_config(layout, training=SENT), data_group())
        window = SyntheticSource(small_config(layout, training=SENT), data_group()).next_window()
        if interrupted:
            engine.backward(objective(engine, window[0]).sums.sum(), last=False)
            objective(engine, window[1]).sums.sum().backward()  # type: ignore[no-untyped-call]  # as if the engine's own had failed at its end
            engine.discard_gradients()
        for number, micro in enumerate(window):
            engine.backward(objective(engine, micro).sums.sum() / 100, last=number == len(window) - 1)
        engine.check_gradients()
        engine.step(1e-3)
        found.append(engine.full_weights())
        engine.close()
    return found[0], found[1]


@pytest.mark.parametrize("layout", always(LAYOUTS, "fsdp"))
def test_a_dropped_window_leaves_nothing_behind(two_ranks: Ranks, layout: str) -> None:
    after, clean = two_ranks(weights_after_an_interruption, Layout(engine=layout))[0]
    assert unequal(after, clean) == []


@pytest.mark.parametrize("engine", always(["plain", "ddp", "fsdp"], "fsdp"))
def test_two_halves_are_the_whole_bit_for_bit(
    two_ranks: Ranks, text_dataset: Path, tmp_path: Path, engine: str
) -> None:
    changes: dict[str, Any] = {f"training__{name}": value for name, value in SENT.items()}
    changes |= {"model__dropout": 0.1, "optimizer__schedule": "constant", "engine": engine}
    for name, steps in (("whole", 4), ("halves", 2), ("halves", 4)):
        arguments = flags(text_dataset, tmp_path / name, training__steps=steps, **changes)
        _ = pretrain_here(arguments) if engine == "plain" else two_ranks(pretrain_here, arguments)
    mine, theirs = ([essence(line) for line in lines(tmp_path / name)] for name in ("halves", "whole"))
    assert len(mine) == 4 and mine == theirs


def test_what_cannot_be_is_refused(text_dataset: Path, tmp_path: Path) -> None:
    for changes, message in (
        ({"training__weights": "bf16"}, r"--training\.weights .*bf16 .*--training\.precision fp32"),
        (
            {"training__gradients": "bf16", "ds_config": "ds_configs/zero2.json"},
            "communication_data_type .*--ds_config",
        ),
        (
            {"training__weights": "bf16", "training__precision": "bf16", "ds_config": "ds_configs/zero2.json"},
            r"--training\.weights .*bf16.* bf16\.enabled .*--ds_config",
        ),
    ):
        with pytest.raises(RefusedError, match=message):
            pretrain_here(flags(text_dataset, tmp_path / "run", **changes))
    assert not (tmp_path / "run").exists()
