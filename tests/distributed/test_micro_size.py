"""`batch.micro_size: auto` on two ranks: one number, whatever each has."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from tests.distributed.engine_layouts import ENGINE_FLAGS
from tests.grids import always
from tests.ranks import Ranks
from tests.runs import flags, pretrain_here
from trp_scale.checkpoint.format import read_full_state
from trp_scale.checkpoint.run_directory import newest_complete
from trp_scale.config.run_flags import parse
from trp_scale.distributed.environment import Environment
from trp_scale.pretraining.base import build_upstream
from trp_scale.training import micro_size


def chosen(words: list[str], rows: tuple[int, int]) -> tuple[int, str]:
    """What a rank takes that has room for its number of `rows`, and why."""
    config = parse(words).config
    sized = copy.deepcopy(config)
    sized.batch.micro_size = 1
    with Environment() as environment:
        upstream = build_upstream(sized, environment)
        need = micro_size.count_memory(upstream, sized, environment, "fsdp", None)
        free = int(need.step_bytes(rows[environment.info.rank]) / micro_size.SURE) + 1
        free -= int(micro_size.WORKSPACE / micro_size.SURE)
        with mock.patch.object(micro_size, "WORKSPACE", 0):
            choice = micro_size.choose(config, environment, build=build_upstream, engine_name="fsdp", free=free)
    return choice.rows, choice.why


@pytest.mark.parametrize("rows", [(4, 12), (12, 4)])
def test_the_rank_with_the_least_memory_decides(
    two_ranks: Ranks, text_dataset: Path, tmp_path: Path, rows: tuple[int, int]
) -> None:
    words = flags(text_dataset, tmp_path, batch__micro_size="auto", batch__global_size=24)
    first, second = two_ranks(chosen, words, rows)
    assert first == second
    assert first[0] == min(rows)
    assert "tried" not in first[1]


@pytest.mark.parametrize("layout", always(["fsdp", "zero2"], "zero2"))
def test_two_ranks_learn_what_one_does_and_a_run_keeps_its_number(
    two_ranks: Ranks, text_dataset: Path, tmp_path: Path, layout: str
) -> None:
    own = {"training__steps": 4, "optimizer__kind": "sgd", "optimizer__schedule": "constant", "model__dropout": 0.0}
    auto = {**own, "batch__micro_size": "auto"}
    assert pretrain_here(flags(text_dataset, tmp_path / "one", **own)) == 0
    assert set(two_ranks(pretrain_here, flags(text_dataset, tmp_path / "two", **auto, **ENGINE_FLAGS[layout]))) == {0}

    def size(name: str) -> Any:
        return json.loads((tmp_path / name / "environment.json").read_text())["micro_size"]

    assert (size("one"), size("two")) == (2, 4)
    paths = [newest_complete(tmp_path / name).path for name in ("one", "two")]
    theirs, ours = (read_full_state(path, state="weight") for path in paths if path is not None)
    for name, weight in ours.items():
        torch.testing.assert_close(weight, theirs[name], rtol=1e-5, atol=1e-5)
    # One rank could take 8, and goes on with 4; two ranks go on with 2, and four would have to choose anew.
    assert pretrain_here(flags(text_dataset, tmp_path / "two", **{**auto, "training__steps": 5})) == 0
    assert size("two") == 4
    longer = flags(text_dataset, tmp_path / "one", **{**auto, "training__steps": 5}, **ENGINE_FLAGS[layout])
    assert set(two_ranks(pretrain_here, longer)) == {0}
    assert size("one") == 2
