"""What a step asks of its device: counted right, and no more than the kept table says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks.step_counts import CountsOperations, counted

KEPT = Path(__file__).parent / "step_counts.json"
REWRITE = (
    "python benchmarks/step_counts.py --json --models bert_base_128 mae_vit_b mm_mae_vit_b adpe_vit_b "
    "> tests/unit/benchmarks/step_counts.json"
)
TABLE = json.loads(KEPT.read_text(encoding="utf-8"))


def test_operations_and_their_bytes() -> None:
    layer = nn.Linear(4, 3)
    inputs = torch.zeros(2, 4)
    with CountsOperations() as counter:
        hidden = layer(inputs)  # reads 2 x 4, 3 x 4 and 3 numbers, writes 2 x 3; the weight's transpose is a view
        kept = hidden.view(6)[1:]  # views
        torch.empty(100)  # memory without content
        kept.mul_(2.0)  # reads and writes 5
    assert counter.counts.operations == {"forward": 2, "backward": 0, "update": 0}
    assert counter.counts.moved["forward"] == 4 * (8 + 12 + 3 + 6) + 4 * (5 + 5)
    assert counter.counts.flops == 2 * 2 * 4 * 3


def test_a_list_of_tensors_is_one_operation() -> None:
    parameters = [nn.Parameter(torch.zeros(size)) for size in (2, 5)]
    optimizer = torch.optim.AdamW(parameters, fused=True)
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    with CountsOperations() as counter:
        torch._foreach_norm(parameters)  # reads 7 numbers, writes 2
    assert sum(counter.counts.operations.values()) == 1
    assert counter.counts.moved["forward"] == 4 * (7 + 2)
    with CountsOperations() as counter:
        optimizer.step()
    # Its counts of steps go up in an operation of their own. Of four lists all are read, and may be written.
    assert sum(counter.counts.operations.values()) == 2
    assert counter.counts.moved["forward"] == pytest.approx(4 * 7 * (4 + 4), abs=40)


@pytest.mark.parametrize(("name", "forward", "saved"), [("bert_base_128", 350, 1.38e9), ("mae_vit_b", 345, 3.45e9)])
def test_bf16_weights_take_fewer_operations_and_bytes(name: str, forward: int, saved: float) -> None:
    found = counted(name, weights="bf16")
    assert found.operations["forward"] <= forward < TABLE[name]["operations"]["forward"]
    assert found.saved <= saved < TABLE[name]["saved"]
    assert found.flops == TABLE[name]["flops"]


@pytest.mark.parametrize("name", TABLE)
def test_no_step_asks_for_more_than_is_kept(name: str) -> None:
    """Counts of the pinned torch; other versions split operations in other ways."""
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
