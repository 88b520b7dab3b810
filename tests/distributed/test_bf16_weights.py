"""DeepSpeed with bf16 weights (a configuration without torch_autocast): fp32 master weights, losses near plain's."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.ranks import Ranks
from tests.synthetic import Layout, data_group, make_engine, run, small_config
from trp_scale.config import RefusedError

BF16: dict[str, Any] = {"training": {"precision": "bf16"}}
LOSSES = 2e-2
"""Largest relative difference of a loss from plain bf16 autocast: weights are rounded to the 8 bits of bf16."""


def kinds(stage: int) -> tuple[set[torch.dtype], set[torch.dtype]]:
    """Types of the module's weights and of the pieces that a checkpoint would hold."""
    layout = Layout(engine="deepspeed", stage=stage)
    engine, _ = make_engine(layout, small_config(layout, **BF16), data_group())
    weights = {parameter.dtype for parameter in engine.module.parameters()}
    pieces = {tensor.dtype for piece in engine.pieces() for tensor in piece.tensors.values()}
    engine.close()
    return weights, pieces


@pytest.mark.parametrize("stage", [1, 2, 3])
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


def refusal(stage: int, document: dict[str, Any]) -> str:
    layout = Layout(engine="deepspeed", stage=stage, document=document)
    with pytest.raises(RefusedError) as refused:
        make_engine(layout, small_config(layout, **BF16), data_group())
    return str(refused.value)


def test_an_optimizer_of_deepspeed_that_is_not_known_here_is_refused_by_name(two_ranks: Ranks) -> None:
    """fp32 sums of bf16 gradients on stage 1: DeepSpeed goes over to a class of another layout."""
    for message in two_ranks(refusal, 1, {"data_types": {"grad_accum_dtype": "fp32"}}):
        assert "zero_optimization.stage 1" in message and "grad_accum_dtype fp32" in message
        assert "BF16_Optimizer" in message
        assert "torch_autocast" in message and 'grad_accum_dtype "auto"' in message
