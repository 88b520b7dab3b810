"""Runs that go back, end by an error, lose their output, or begin with another run's weights."""

from __future__ import annotations

import json
import multiprocessing
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.grids import always
from tests.runs import flags, image_flags, lines, pretrain_here, start
from trp_scale.checkpoint.export import find_checkpoint
from trp_scale.checkpoint.format import read_full_state
from trp_scale.checkpoint.run_directory import checkpoints
from trp_scale.config import RefusedError
from trp_scale.config.run_flags import parse
from trp_scale.core.batch import TaskLosses
from trp_scale.distributed.environment import Environment
from trp_scale.exit_status import ExitStatus
from trp_scale.models.initialise import fill_module, without_content
from trp_scale.pretraining.base import build_upstream
from trp_scale.pretraining.pos_bert.objective import PosMaskedLanguageModelling
from trp_scale.training.observer import Observer
from trp_scale.training.pretrain import Rollback, Run, train_run


def test_the_run_before_is_gone_when_the_next_is_made() -> None:
    made: list[weakref.ref[object]] = []
    alive: list[bool] = []

    class Spiked:
        """As `trained` sees a run; a reference cycle, as a run and its trainer are."""

        def __init__(self, over: Rollback | None) -> None:
            self.rollback, self.itself = over, self
            self.sources = SimpleNamespace(cursors=lambda: {"train": 8})
            self.should_roll_back = over is None or over.rollbacks < 2

        def train(self, then: object) -> ExitStatus:
            return ExitStatus.DIVERGED if self.should_roll_back else ExitStatus.DONE

    def make(over: Rollback | None) -> Run:
        alive.append(any(each() is not None for each in made))
        run = Spiked(over)
        made.append(weakref.ref(run))
        return run  # type: ignore[return-value]

    last, status = train_run(make)
    assert (last.rollback, status) == (Rollback({"train": 8}, 2), ExitStatus.DONE)
    assert alive == [False] * 3


@pytest.mark.parametrize("reported", [True, False], ids=["", "and its report fails too"])
def test_loader_workers_end_with_it(
    text_dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reported: bool
) -> None:
    before = set(multiprocessing.active_children())
    working: list[int] = []

    losses = PosMaskedLanguageModelling.__call__

    def fail(*arguments: Any) -> TaskLosses:
        if not (
            workers := set(multiprocessing.active_children()) - before
        ):  # the count of FLOPs, before the first step
            return losses(*arguments)
        working.append(len(workers))
        raise ArithmeticError("on purpose")

    if not reported:
        monkeypatch.setattr(Observer, "close", lambda *_: 1 / 0)
    monkeypatch.setattr(PosMaskedLanguageModelling, "__call__", fail)
    with pytest.raises(ArithmeticError) as raised:
        pretrain_here(flags(text_dataset, tmp_path, data__workers=1))
    assert working == [1] and raised.value.__traceback__ is not None  # which holds on to all of the run's objects
    assert set(multiprocessing.active_children()) == before


@pytest.mark.parametrize("read", always([0, 1], 1), ids=["before the first line", "after a line"])
def test_it_goes_on_to_its_end_and_its_checkpoint(text_dataset: Path, tmp_path: Path, read: int) -> None:
    process = start(flags(text_dataset, tmp_path / "run", data__workers=1))
    assert process.stdout is not None
    for _ in range(read):
        assert process.stdout.readline()
    process.stdout.close()
    try:
        assert process.wait(timeout=240) == 0
    finally:
        process.kill()
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["exit_reason"] == "finished"
    assert [line["step"] for line in lines(tmp_path / "run")] == list(range(1, 9))
    assert [step for step, _ in checkpoints(tmp_path / "run")] == [8]


def test_a_run_with_learned_masks_goes_on_from_a_plain_one_and_back(image_dataset: Path, tmp_path: Path) -> None:
    runs = {name: tmp_path / name for name in ("plain", "masks", "again")}
    still = {"optimizer__lr": 1e-12, "training__steps": 2}
    pretrain_here(image_flags("mae_vit_b", image_dataset, runs["plain"], training__steps=3))
    learned = {"multilevel__kind": "head", "multilevel__network": "patchwise", "multilevel__unroll": 1}
    pretrain_here(
        image_flags("mae_vit_b", image_dataset, runs["masks"], model__weights=runs["plain"], **still, **learned)
    )
    pretrain_here(image_flags("mae_vit_b", image_dataset, runs["again"], model__weights=runs["masks"], **still))
    plain, masks, again = (read_full_state(find_checkpoint(run)) for run in runs.values())
    assert set(plain) == set(masks) == set(again)
    for name, value in plain.items():
        assert torch.allclose(masks[name], value, atol=1e-9) and torch.allclose(again[name], value, atol=1e-9), name
    assert "score.weight" in read_full_state(find_checkpoint(runs["masks"]), engine="masking_network")


def test_a_checkpoint_s_weights_are_read_one_by_one_when_a_rank_fills_its_pieces(
    image_dataset: Path, tmp_path: Path
) -> None:
    pretrain_here(image_flags("mae_vit_b", image_dataset, tmp_path / "one", training__steps=1))
    words = image_flags(
        "mae_vit_b", image_dataset, tmp_path / "two", model__weights=tmp_path / "one", batch__micro_size=1
    )
    config = parse(words).config
    with Environment() as environment:
        upstream = build_upstream(config, environment)
        module, whole = without_content(upstream.model), upstream.model()
        upstream.sources.close()
    stored = read_full_state(find_checkpoint(tmp_path / "one"))
    assert all(parameter.is_meta for parameter in module.parameters())
    for name, parameter in fill_module(module, torch.device("cpu")).named_parameters():
        assert torch.equal(parameter, stored[name]) and torch.equal(parameter, whole.get_parameter(name)), name


def test_another_model_s_weights_are_refused_by_name(image_dataset: Path, tmp_path: Path) -> None:
    pretrain_here(image_flags("mae_vit_b", image_dataset, tmp_path / "one", training__steps=1))
    other = image_flags(
        "mae_vit_b", image_dataset, tmp_path / "two", model__weights=tmp_path / "one", vision__decoder_layers=2
    )
    with pytest.raises(RefusedError, match=r"decoder_blocks\.1\.attn\.proj\.bias.*--model"):
        pretrain_here(other)
