"""Bytes of a DeepSpeed rank and collectives of a step, against sums made by hand."""

from __future__ import annotations

from collections import Counter
from typing import Any

from tests.unit.planning.small import ZERO
from tests.unit.planning.test_layouts import messages, sent, states
from trp_scale.planning.zero import DeepSpeedLayout

FP32 = 4


def zero(stage: int, **settings: Any) -> DeepSpeedLayout:
    return DeepSpeedLayout(engine="deepspeed", stage=stage, zero={**ZERO, **settings})


def test_zero_1_sends_each_bucket_to_its_owners() -> None:
    """Matrices are 40 + 3 x 16 = 88 numbers, 44 a rank; biases 12, 6 a rank.

    From last to first: bias 4, matrix 16, bias 4 fill a bucket of 24 (the next 16 would make 40); matrix 16, bias 4,
    matrix 16 the second of 36; the embedding's 40 go alone. The matrices at 40, 56 and 72 of the flat group: the first
    has 4 numbers on rank 0 and 12 on rank 1.
    """
    found = messages(zero(1))
    first = {1: 4 + 16 + 2, 0: 2}  # biases 8..12 and 4..8 of 12
    second = {1: 16 + 12, 0: 4 + 4}
    last = {0: 40}
    expected = [FP32 * size for bucket in (first, second, last) for size in bucket.values()]
    assert sent(found, "reduce") == sorted(expected)
    assert sum(each.size for each in found if each.kind == "reduce") == 400
    assert sent(found, "gather") == [48, 352]
    assert Counter(each.phase for each in found if each.kind == "reduce") == {"last": 5}


def test_zero_2_reduces_in_every_micro_batch() -> None:
    once, four = messages(zero(2)), messages(zero(2), accumulation=4)
    total = [sum(each.size * each.times for each in found if each.kind == "reduce") for found in (once, four)]
    assert total == [400, 1600]
    assert sent(four, "gather") == [48, 352]


def test_zero_3_gathers_blocks_and_keeps_the_last_for_its_backward_pass() -> None:
    """Biases of 4 stay on every rank, and are gathered after the update one by one. Forward 3 blocks and the embedding,
    backward 2 blocks. Gradients: 24, 36 and 40 numbers."""
    found = messages(zero(3))
    assert sent(found, "gather") == [16] * 3 + [64] * 5 + [160]
    assert sent(found, "scatter") == [96, 144, 160]
    assert len(messages(zero(3), accumulation=3)) == len(found)
    assert sum(each.times for each in messages(zero(3), accumulation=3) if each.kind == "scatter") == 9


def test_memory_of_zero() -> None:
    """Stage 1 and 2 keep the weights that forwards read, and a third of the masters with their moments on three ranks;
    stage 3 shares both."""
    assert states(zero(1), ranks=3)["moments"] == 400
    assert states(zero(1), ranks=3)["weights"] == 400
    assert states(zero(3), ranks=4)["weights"] == 100
    assert states(zero(3), ranks=4)["moments"] == 300


def test_offloaded_moments_are_on_the_host() -> None:
    layout = zero(3, offload_optimizer={"device": "cpu"}, offload_param={"device": "cpu"})
    found = states(layout, ranks=4)
    assert layout.offloads("optimizer") and layout.offloads("param")
    assert found["host"] == 300
    assert "moments" not in found and "weights" not in found
