"""Probes while an encoder trains find the same on every engine, and on any number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.distributed.engine_layouts import ENGINE_FLAGS, on_each_rank
from tests.distributed.test_validation import run
from tests.grids import always
from tests.ranks import Ranks
from tests.runs import image_flags, lines
from tests.unit.evaluation.small_encoder import striped_images

CHANGES: dict[str, Any] = {
    "crops__size": 16,
    "vision__patch_size": 4,
    "training__steps": 3,
    "data__validation_fraction": 0.25,
    "training__precision": "fp32",
    "hooks": "probes",
    "probes__every": 3,
}


@pytest.mark.parametrize("name", always(["fsdp", "zero0", "zero2", "zero3"], "fsdp", "zero2"))
def test_two_ranks_find_what_one_finds(two_ranks: Ranks, tmp_path: Path, name: str) -> None:
    data = striped_images(tmp_path / "data", 64, 0)
    found = {}
    for each in ("plain", name):
        arguments = image_flags("mae_vit_b", data, tmp_path / each, **CHANGES, **ENGINE_FLAGS[each])
        assert set(on_each_rank(two_ranks, each, run, arguments)) == {0}
        (found[each],) = (line["probes"] for line in lines(tmp_path / each) if "probes" in line)
    ours, theirs = found[name], found["plain"]
    for figure in ("step", "knn", "linear", "rows", "measured"):
        assert ours[figure] == theirs[figure], figure
    assert ours["rank_me"] == pytest.approx(theirs["rank_me"], rel=1e-4)
