"""Validation is over the whole held-out split, without dropout, the same on all layouts, and no part of training. So
are probes while an encoder trains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoints import stored_state, unequal
from tests.distributed.engine_layouts import ENGINE_FLAGS, on_each_rank
from tests.grids import always
from tests.ranks import Ranks
from tests.runs import essence, flags, image_flags, lines, pretrain_here
from tests.synthetic import Layout
from tests.unit.data.loaded import table_of
from tests.unit.evaluation.small_encoder import striped_images
from trp_scale.checkpoint.format import read_full_state
from trp_scale.checkpoint.run_directory import checkpoint_path
from trp_scale.config.run_flags import parse
from trp_scale.data.plan import held_out
from trp_scale.pretraining.base import open_sources
from trp_scale.pretraining.pos_bert.model import BertForMaskedPositions
from trp_scale.pretraining.pos_bert.upstream import PosMaskedLanguageModelling

CHANGES: dict[str, Any] = {
    "model__dropout": 0.1,
    "training__steps": 4,
    "data__validation_fraction": 0.15,
    "batch__micro_size": 4,
}


def run(layout: Layout, arguments: list[str]) -> int:
    return pretrain_here(arguments)


def metrics_of(two_ranks: Ranks, name: str, dataset: Path, run_dir: Path, **changes: Any) -> list[dict[str, Any]]:
    """metrics.jsonl of a run on the engine `name`."""
    arguments = flags(dataset, run_dir, **CHANGES, **ENGINE_FLAGS[name], **changes)
    assert set(on_each_rank(two_ranks, name, run, arguments)) == {0}
    return lines(run_dir)


def computed_anew(dataset: Path, checkpoint: Path) -> tuple[list[float], list[float]]:
    """[T] mean losses and counts over the held-out rows, in one batch, by the model alone without dropout."""
    config = parse(flags(dataset, checkpoint, **CHANGES)).config
    rows = open_sources(config, rank=0, world=1).validation.rows
    config.batch.micro_size = config.batch.global_size = rows
    sources = open_sources(config, rank=0, world=1)
    (batch,) = sources.validation.windows()
    module = BertForMaskedPositions(config.model, vocab_size=sources.meta.vocab_size, seed=0)
    module.load_state_dict(read_full_state(checkpoint))
    module.eval()
    with torch.no_grad():
        losses = PosMaskedLanguageModelling(config.objective, sources.meta.groups, config.model.hidden_size)(
            module, batch
        )
    return (losses.sums / losses.counts.clamp(min=1)).tolist(), losses.counts.tolist()


@pytest.mark.parametrize("name", always(["plain", "fsdp", "zero0", "zero2", "zero3"], "plain", "fsdp"))
def test_losses_are_those_of_the_held_out_rows(two_ranks: Ranks, text_dataset: Path, tmp_path: Path, name: str) -> None:
    last = metrics_of(two_ranks, name, text_dataset, tmp_path, validation__every=4)[-1]
    _, blocks = table_of(text_dataset)
    chosen = held_out(blocks.identities, CHANGES["data__validation_fraction"], where="")
    rows = int(blocks.rows[chosen].sum())
    assert rows % CHANGES["batch__micro_size"] != 0, "the last micro-batch should not be full"
    tasks = last["validation"]["tasks"]
    assert tasks["next_sentence"]["count"] == rows
    means, counts = computed_anew(text_dataset, checkpoint_path(tmp_path, 4))
    assert [task["count"] for task in tasks.values()] == counts
    for (task, found), mean, count in zip(tasks.items(), means, counts, strict=True):
        assert found["loss"] == (pytest.approx(mean, rel=1e-6) if count else None), task


def test_two_ranks_see_the_losses_of_one(two_ranks: Ranks, text_dataset: Path, tmp_path: Path) -> None:
    """The learning rate is tiny: the split is compared, not how far apart rounding takes two trainings."""
    still = {"optimizer__lr": 1e-9, "validation__every": 2}
    ours = metrics_of(two_ranks, "fsdp", text_dataset, tmp_path / "fsdp", **still)
    theirs = metrics_of(two_ranks, "plain", text_dataset, tmp_path / "plain", **still)
    for line, other in zip(ours, theirs, strict=True):
        assert ("validation" in line) is (line["step"] in (2, 4))
        if "validation" not in line:
            continue
        mine, expected = line["validation"], other["validation"]
        assert mine["loss"] == pytest.approx(expected["loss"], rel=1e-6)
        for task, values in expected["tasks"].items():
            assert mine["tasks"][task]["count"] == values["count"]
            loss = values["loss"]
            assert mine["tasks"][task]["loss"] == (None if loss is None else pytest.approx(loss, rel=1e-6)), task
            assert mine["tasks"][task]["accuracy"] == values["accuracy"]


@pytest.mark.parametrize("name", always(["plain", "fsdp", "zero2", "zero3"], "plain", "zero2"))
def test_training_goes_on_as_if_nothing_had_been_validated(
    two_ranks: Ranks, text_dataset: Path, tmp_path: Path, name: str
) -> None:
    without = metrics_of(two_ranks, name, text_dataset, tmp_path / "without")
    between = metrics_of(two_ranks, name, text_dataset, tmp_path / "with", validation__every=2, checkpoint__every=2)
    assert ["validation" in line for line in between] == [False, True, False, True]
    assert [essence(line) for line in between] == [essence(line) for line in without]
    assert unequal(*(stored_state(checkpoint_path(tmp_path / name, 4)) for name in ("with", "without"))) == []


PROBED: dict[str, Any] = {
    "crops__size": 16,
    "vision__patch_size": 4,
    "training__steps": 3,
    "data__validation_fraction": 0.25,
    "training__precision": "fp32",
    "hooks": "probes",
    "probes__every": 3,
}


@pytest.mark.parametrize("name", always(["fsdp", "zero0", "zero2", "zero3"], "fsdp", "zero2"))
def test_probes_of_two_ranks_find_what_one_finds(two_ranks: Ranks, tmp_path: Path, name: str) -> None:
    data = striped_images(tmp_path / "data", 64, 0)
    found = {}
    for each in ("plain", name):
        arguments = image_flags("mae_vit_b", data, tmp_path / each, **PROBED, **ENGINE_FLAGS[each])
        assert set(on_each_rank(two_ranks, each, run, arguments)) == {0}
        (found[each],) = (line["probes"] for line in lines(tmp_path / each) if "probes" in line)
    ours, theirs = found[name], found["plain"]
    for figure in ("step", "knn", "linear", "rows", "measured"):
        assert ours[figure] == theirs[figure], figure
    assert ours["rank_me"] == pytest.approx(theirs["rank_me"], rel=1e-4)
