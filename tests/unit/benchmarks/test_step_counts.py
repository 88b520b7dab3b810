"""What a step asks of its device: counted right, and no more than the kept table says."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks.step_counts import count_recorded, counted, counted_graphs, tiny_workload
from tests.grids import always
from trp_scale.models.counting import RecordsOperations

KEPT = Path(__file__).parent / "step_counts.json"
REWRITE = (
    "python benchmarks/step_counts.py --json --models bert_base_128 mae_vit_b mm_mae_vit_b adpe_vit_b "
    "> tests/unit/benchmarks/step_counts.json"
)
TABLE = json.loads(KEPT.read_text(encoding="utf-8"))
PINNED = re.findall(
    r"^torch==([0-9.]+)", (KEPT.parents[3] / "constraints.txt").read_text(encoding="utf-8"), flags=re.M
)[-1]
of_the_pinned_torch = pytest.mark.skipif(
    torch.__version__.partition("+")[0] != PINNED,
    reason=f"the counts are of torch {PINNED}: other versions split operations in other ways",
)


def test_operations_and_their_bytes() -> None:
    layer = nn.Linear(4, 3)
    inputs = torch.zeros(2, 4)
    with RecordsOperations() as counter:
        hidden = layer(inputs)  # reads 2 x 4, 3 x 4 and 3 numbers, writes 2 x 3; the weight's transpose is a view
        kept = hidden.view(6)[1:]  # views
        torch.empty(100)  # memory without content
        kept.mul_(2.0)  # reads and writes 5
    assert count_recorded(counter.recorded).operations == {"forward": 2, "backward": 0, "update": 0}
    assert count_recorded(counter.recorded).moved["forward"] == 4 * (8 + 12 + 3 + 6) + 4 * (5 + 5)
    assert count_recorded(counter.recorded).flops == 2 * 2 * 4 * 3


def test_a_list_of_tensors_is_one_operation() -> None:
    parameters = [nn.Parameter(torch.zeros(size)) for size in (2, 5)]
    optimizer = torch.optim.AdamW(parameters, fused=True)
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    with RecordsOperations() as counter:
        torch._foreach_norm(parameters)  # reads 7 numbers, writes 2
    assert len(counter.recorded) == 1
    assert count_recorded(counter.recorded).moved["forward"] == 4 * (7 + 2)
    with RecordsOperations() as counter:
        optimizer.step()
    # Its counts of steps go up in an operation of their own. Of four lists all are read, and may be written.
    assert len(counter.recorded) == 2
    assert count_recorded(counter.recorded).moved["forward"] == pytest.approx(4 * 7 * (4 + 4), abs=40)


def test_fused_operations_read_once_and_write_what_is_still_needed() -> None:
    values, matrix = torch.zeros(8, 8), torch.zeros(8, 8)
    with RecordsOperations(fused=True) as counter:
        kept = (values * 2.0 + values).sum(1)  # reads 64 once, writes 8
        matrix @ matrix  # reads twice 64, writes 64
        values.exp()  # is dropped: reads 64
    assert kept.shape == (8,)
    assert count_recorded(counter.recorded).operations["forward"] == 3
    assert count_recorded(counter.recorded).moved["forward"] == 4 * (64 + 8 + 3 * 64 + 64)
    assert {operation.name for operation in counter.recorded} == {"add + mul + sum", "mm", "exp"}


@pytest.mark.exhaustive
def test_fused_bert_keeps_its_arithmetic_and_moves_less() -> None:
    fused, eager = counted("bert_base_128", fused=True), TABLE["bert_base_128"]
    assert fused.flops == eager["flops"] and fused.saved == eager["saved"]
    for phase in ("forward", "backward"):
        assert fused.operations[phase] < 0.5 * eager["operations"][phase]
        assert fused.moved[phase] < 0.9 * eager["moved"][phase]


@pytest.mark.exhaustive
def test_selective_checkpointing_repeats_no_product_and_full_repeats_all() -> None:
    found = {how: counted("bert_base_128", checkpointing=how) for how in ("selective", "full")}
    none = TABLE["bert_base_128"]
    assert found["selective"].flops == none["flops"] < 0.8 * found["full"].flops
    assert none["operations"]["backward"] < found["selective"].operations["backward"]
    assert found["selective"].operations["backward"] < found["full"].operations["backward"]


@pytest.mark.parametrize(
    ("name", "forward", "saved"),
    always([("bert_base_128", 350, 1.38e9), ("mae_vit_b", 310, 2.65e9)]),
)
def test_bf16_weights_take_fewer_operations_and_bytes(name: str, forward: int, saved: float) -> None:
    found = counted(name, weights="bf16")
    assert found.operations["forward"] <= forward < TABLE[name]["operations"]["forward"]
    assert found.saved <= saved < TABLE[name]["saved"]
    assert found.flops == TABLE[name]["flops"]


@of_the_pinned_torch
@pytest.mark.parametrize("name", always(TABLE, "bert_base_128"))
def test_no_step_asks_for_more_than_is_kept(name: str) -> None:
    found, kept = counted(name), TABLE[name]
    grown = [
        f"{name}, {what}, {phase}: {number:,} where {kept[what][phase]:,} are kept"
        for what, numbers in (("operations", found.operations), ("moved", found.moved))
        for phase, number in numbers.items()
        if number > kept[what][phase]
    ]
    if found.saved > kept["saved"]:
        grown.append(f"{name}, bytes saved for the backward pass: {found.saved:,} where {kept['saved']:,} are kept")
    assert grown == [], f"if it is meant: {REWRITE}"
    assert found.flops == pytest.approx(kept["flops"], rel=1e-3)


@pytest.fixture
def without_graphs() -> Iterator[None]:
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("without_graphs")
@pytest.mark.parametrize("name", always(["pos_bert_tiny", "adpe_tiny", "mm_mae_tiny"]))
def test_a_whole_forward_pass_with_its_losses_is_one_graph(name: str) -> None:
    found = counted_graphs(tiny_workload(name), "whole")
    assert (found.graphs, found.surplus, found.outside) == (1, 0, 0)
    assert found.inside > 100


@pytest.mark.usefixtures("without_graphs")
def test_what_is_not_in_a_graph_is_seen() -> None:
    plain, blocks = (counted_graphs(tiny_workload("pos_bert_tiny"), how) for how in ("none", "blocks"))
    assert (plain.graphs, plain.inside, blocks.graphs) == (0, 0, 2)
    assert 0 < blocks.outside < plain.outside and blocks.inside > 0
