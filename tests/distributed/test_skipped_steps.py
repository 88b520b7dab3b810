"""What a skipped step leaves behind where the contract's test, on the shipped configurations, cannot see it."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch

from tests.distributed.engine_layouts import AND_SHARED_MOMENTS, LAYOUTS, on_each_rank
from tests.distributed.engine_probe import Probe
from tests.distributed.test_engine_contract import after_two_steps
from tests.ranks import Ranks
from tests.synthetic import Layout

ADDED_TO: dict[str, tuple[str, dict[str, Any]]] = {
    "offload": ("fp32", {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}),
    "fp32 sums": ("bf16", {"data_types": {"grad_accum_dtype": "fp32"}}),
}
"""Precision and DeepSpeed's configuration where the sums of a window begin with what is there."""


@pytest.mark.parametrize(("stage", "what"), [(1, "offload"), (2, "offload"), (2, "fp32 sums")])
def test_a_skipped_step_leaves_no_trace_where_zero_1_or_2_adds_to_what_it_finds(
    two_ranks: Ranks, stage: int, what: str
) -> None:
    """Without offload and with sums in the type of the weights, what a skip left could not be told from the weights:
    DeepSpeed sums a window in `param.grad`, `param.grad_accum` or `all_grad_tensors`, hands the sums over to
    `averaged_gradients` at its end, where they replace what was there, and empties the former. Two settings add to
    what they find: offload, unless `micro_step_id` was set back, and stage 2 with fp32 sums of bf16 gradients."""
    precision, document = ADDED_TO[what]
    layout = Layout(engine="deepspeed", stage=stage, document=deepcopy(document))
    layout.document.setdefault("zero_optimization", {})["stage"] = stage
    expected = two_ranks(after_two_steps, layout, "nothing", precision)
    for found, wanted in zip(two_ranks(after_two_steps, layout, "skips", precision), expected, strict=True):
        assert found[1:] == wanted[1:]
        assert [key for key, value in wanted[0].items() if not torch.equal(found[0][key], value)] == []


def norm_after_a_skip(layout: Layout) -> tuple[float, float]:
    """The gradient's norm before a skip, and that of what is left."""
    probe = Probe(layout)
    norm = probe.skip(0)
    left = float(probe.engine.check_gradients())
    probe.engine.close()
    return norm, left


@pytest.mark.parametrize("name", [*LAYOUTS, AND_SHARED_MOMENTS])
def test_a_skip_drops_the_gradients_themselves(two_ranks: Ranks, name: str) -> None:
    """Also where the next window would replace them: nobody may read them, and their memory is free until then."""
    for norm, left in on_each_rank(two_ranks, name, norm_after_a_skip):
        assert norm > 0.0
        assert left == 0.0
