"""Whole runs on real rows: the weights are the same whether ranks count as of one machine or of two, whose rows are
sorted by block (plan.ByBlock)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from tests.distributed.test_resume import RUNS
from tests.parity.compare import RELATIVE, without_gradient
from tests.ranks import Ranks
from tests.runs import lines, pretrain_here
from trp_scale.checkpoint.format import read_full_state
from trp_scale.checkpoint.run_directory import checkpoint_path


def on_a_machine_of_its_own(arguments: list[str]) -> tuple[int, bool]:
    """A run of this rank, as a launcher starts it with one rank on each machine; and whether rows were sorted."""
    from trp_scale.data.plan import ByBlock

    sorted_batches = []
    real = ByBlock._batch

    def counted(self: ByBlock, number: int) -> Any:
        sorted_batches.append(number)
        return real(self, number)

    alone = mock.patch.dict(os.environ, LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    with alone, mock.patch.object(ByBlock, "_batch", counted):
        return pretrain_here(arguments), bool(sorted_batches)


def with_gradient(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Without the key's part of a bias of queries, keys and values (compare.py: `without_gradient`)."""
    third = len(tensor) // 3
    return torch.cat([tensor[:third], tensor[2 * third :]]) if name.endswith("qkv.bias") else tensor


@pytest.mark.parametrize("recipe", ["pos_bert_tiny", pytest.param("adpe_tiny", marks=pytest.mark.exhaustive)])
def test_the_weights_are_those_of_one_machine(
    recipe: str, request: pytest.FixtureRequest, two_ranks: Ranks, tmp_path: Path
) -> None:
    dataset: Path = request.getfixturevalue("text_dataset" if recipe == "pos_bert_tiny" else "image_dataset")
    changes: dict[str, Any] = {"engine": "ddp", "training__steps": 8, "optimizer__schedule": "constant"}
    changes |= {"model__dropout": 0.0} if recipe == "pos_bert_tiny" else {}
    one, two = (RUNS[recipe](dataset, tmp_path / name, **changes) for name in ("one", "two"))
    assert two_ranks(pretrain_here, one) == [0, 0]
    assert two_ranks(on_a_machine_of_its_own, two) == [(0, True), (0, True)]
    ours, theirs = (read_full_state(checkpoint_path(tmp_path / name, 8)) for name in ("two", "one"))
    assert ours.keys() == theirs.keys()
    for name in theirs:
        if not without_gradient(name):
            mine, other = with_gradient(name, ours[name]), with_gradient(name, theirs[name])
            assert float((mine - other).norm()) <= RELATIVE * float(other.norm()), name
    for mine, other in zip(lines(tmp_path / "two"), lines(tmp_path / "one"), strict=True):
        assert mine["loss"] == pytest.approx(other["loss"], rel=1e-5)
        for task, values in other["tasks"].items():
            assert mine["tasks"][task]["count"] == values["count"], "the same rows"
