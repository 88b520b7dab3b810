"""Runs that go back, end by an error, lose their output, or begin with another run's weights; their loader workers; and
second levels from the command line, beside an adversary and U-MAE's uniformity."""

from __future__ import annotations

import json
import multiprocessing
import time
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.grids import always
from tests.runs import flags, image_flags, lines, pretrain_here, start
from tests.unit.data.images.stored import sample, write_images
from trp_scale.checkpoint.document import read_document
from trp_scale.checkpoint.export import find_checkpoint
from trp_scale.checkpoint.format import read_full_state
from trp_scale.checkpoint.run_directory import checkpoints
from trp_scale.config import RefusedError
from trp_scale.config.loader import load_recipe
from trp_scale.config.run_flags import parse
from trp_scale.core.batch import Batch, TaskLosses
from trp_scale.data.fetch import Fetcher, MicroBatches
from trp_scale.distributed import environment
from trp_scale.distributed.environment import Environment
from trp_scale.errors import ExitStatus
from trp_scale.models.initialise import build_with_initialisers, fill_module
from trp_scale.pretraining.base import build_upstream
from trp_scale.pretraining.pos_bert.upstream import PosMaskedLanguageModelling
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


@pytest.mark.parametrize(
    ("read", "workers"), always([(0, 1), (1, 1), (1, 0)], (1, 0)), ids=["before the first line", "after a line", ""]
)
def test_it_goes_on_to_its_end_and_its_checkpoint(text_dataset: Path, tmp_path: Path, read: int, workers: int) -> None:
    process = start(flags(text_dataset, tmp_path / "run", data__workers=workers))
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


STILL = {"optimizer__lr": 1e-20, "optimizer__beta1": 1 - 1e-10, "optimizer__beta2": 1 - 1e-10}


def test_a_new_run_takes_weights_and_moments_and_counts_its_own_steps(text_dataset: Path, tmp_path: Path) -> None:
    """With still moments a step leaves them as they came; the first run has a hook with vectors, the second none."""
    first, second = tmp_path / "first", tmp_path / "second"
    pretrain_here(flags(text_dataset, first, training__steps=3, hooks="weight_average"))
    wsd = {"optimizer__schedule": "wsd", "optimizer__decay_steps": 2, "optimizer__warmup_steps": 0}
    pretrain_here(flags(text_dataset, second, training__steps=2, **STILL, **wsd, **{"from": first}))
    document = read_document(find_checkpoint(second))
    assert (document.step, document.optimizer_steps, document.cursors["train"]) == (2, 5, 16)
    for state in ("weight", "exp_avg", "exp_avg_sq"):
        before = read_full_state(find_checkpoint(first), state)
        for name, tensor in read_full_state(find_checkpoint(second), state).items():
            torch.testing.assert_close(tensor, before[name], rtol=1e-6, atol=1e-9)
    assert [line["lr"] for line in lines(second)] == pytest.approx([1e-20, 1e-20 * (1 - 0.5**0.5)])
    pretrain_here(flags(text_dataset, second, training__steps=3, **STILL, **wsd, **{"from": first}))  # resumes
    assert read_document(find_checkpoint(second)).optimizer_steps == 6


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"from": "none"}, ["--from none"]),
        ({"from": ".", "model.weights": "other"}, ["--from .", "--model.weights is other"]),
        ({"from": ".@average"}, ["--from .@average"]),
    ],
)
def test_a_start_without_moments_is_refused(
    text_dataset: Path, tmp_path: Path, changes: dict[str, str], words: list[str]
) -> None:
    with pytest.raises(RefusedError) as refused:
        pretrain_here(flags(text_dataset, tmp_path / "run", **changes))
    assert all(word in str(refused.value) for word in words)


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
        module, whole = build_with_initialisers(upstream.model), upstream.model()
        upstream.sources.close()
    stored = read_full_state(find_checkpoint(tmp_path / "one"))
    assert all(parameter.is_meta for parameter in module.parameters())
    for name, parameter in fill_module(module, torch.device("cpu")).named_parameters():
        assert torch.equal(parameter, stored[name]) and torch.equal(parameter, whole.get_parameter(name)), name


CPUS = 2


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Loader workers of each source that a run opens, on a machine of 2 CPUs."""
    monkeypatch.setattr(environment, "cpus_of_rank", lambda world: CPUS)
    found: list[int] = []
    make = MicroBatches.__init__

    def watched(self: MicroBatches, *arguments: object, workers: int, **others: object) -> None:
        found.append(workers)
        make(self, *arguments, workers=workers, **others)  # type: ignore[arg-type]

    monkeypatch.setattr(MicroBatches, "__init__", watched)
    return found


def test_workers_are_capped_and_change_nothing(
    text_dataset: Path, tmp_path: Path, started: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    losses = []
    for asked in (0, 64):
        run_dir = tmp_path / str(asked)
        changes = {"data__workers": asked, "training__steps": 3, "validation__every": 3}
        assert pretrain_here(flags(text_dataset, run_dir, **changes)) == 0
        losses.append([(line["loss"], line["tasks"], line.get("validation")) for line in lines(run_dir)])
        assert load_recipe(run_dir / "config.yaml").data.workers == asked
        summary = json.loads((run_dir / "summary.json").read_text())
        assert (summary["loader_workers"], summary["loader_workers_asked"]) == (min(asked, CPUS), asked)
    assert losses[0] == losses[1]
    assert started == [0, 0, 1, CPUS], "validation, then training, of each run"
    assert "--data.workers 64: 2 " in capsys.readouterr().out
    assert "--data.workers" not in (tmp_path / "0" / "report.txt").read_text()
    assert "loader workers: 0)" in (tmp_path / "0" / "report.txt").read_text()
    assert "loader workers: 2 of 64" in (tmp_path / "64" / "report.txt").read_text()


@pytest.mark.exhaustive
def test_what_learned_masks_share_is_the_capped_number(data: Path, tmp_path: Path, started: list[int]) -> None:
    masks = {"multilevel__network": "patchwise", "multilevel__kind": "head", "multilevel__unroll": 1}
    argv = image_flags("mae_vit_b", data, tmp_path / "run", training__steps=1, data__workers=12, **masks)
    assert pretrain_here(argv) == 0
    assert started == [1, 1, 1], "each source has at least one"


STEPS = 4


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """60 images of 3 classes in blocks of 2."""
    samples = [sample(number, 40, 40) for number in range(60)]
    return write_images(tmp_path_factory.mktemp("images") / "data", [samples], rows_per_block=2)


def level_flags(data: Path, run_dir: Path, level: str, **changes: object) -> list[str]:
    settings = {
        "multilevel__network": "patchwise",
        "multilevel__kind": level,
        "multilevel__unroll": 2,
        "training__steps": STEPS,
        "checkpoint__every": STEPS,
        "data__validation_fraction": 0.2,
        "validation__every": STEPS,
        **changes,
    }
    return image_flags("mae_vit_b", data, run_dir, **settings)


def test_joint_steps_leave_two_tasks_and_three_cursors(data: Path, tmp_path: Path) -> None:
    others = {"objective__uniformity": 0.01, "adversary__kind": "pixels", "adversary__eps": 0.03}
    assert pretrain_here(level_flags(data, tmp_path, "joint", multilevel__gamma=0.25, **others)) == 0
    document = read_document(tmp_path / "checkpoints" / f"step_{STEPS:08d}")
    size = document.config["batch"]["global_size"]
    crops = document.config["crops"]["count"]
    assert document.cursors == {
        "train": STEPS * size,
        "downstream_train": STEPS * size,
        "downstream_validation": STEPS // 2 * size,
    }
    rows = json.loads((tmp_path / "summary.json").read_text())["rows"]
    assert rows.keys() == {"train", "validation", "downstream_train", "downstream_validation"}
    assert f"rows: train {rows['train']}, downstream_train" in (tmp_path / "report.txt").read_text()
    found = lines(tmp_path)
    for line in found:
        tasks = line["tasks"]
        assert {name: task["weight"] for name, task in tasks.items()} == {
            "reconstruction": 0.25,
            "uniformity": 0.01,
            "classification": 1.0,
        }
        assert tasks["classification"]["count"] == tasks["uniformity"]["count"] == size * crops
        assert line["loss"] == pytest.approx(sum(task["weight"] * task["loss"] for task in tasks.values()), rel=1e-9)
    validation = found[-1]["validation"]
    assert validation["tasks"]["classification"] == {"loss": None, "count": 0}
    assert validation["loss"] == validation["tasks"]["reconstruction"]["loss"] is not None


def test_a_step_counts_its_waiting_for_every_source(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of the loop for D_u, and that of the hook for D_tr and D_val."""
    spent: list[float] = []
    fetch = Fetcher.__getitems__

    def slowly(self: Fetcher, positions: range) -> Batch:
        began = time.perf_counter()
        time.sleep(0.02)
        batch = fetch(self, positions)
        spent.append(time.perf_counter() - began)
        return batch

    monkeypatch.setattr(Fetcher, "__getitems__", slowly)
    assert pretrain_here(level_flags(data, tmp_path, "head", validation__every=0)) == 0
    assert len(spent) == 2 * (STEPS + STEPS // 2 + STEPS // 2), "two micro-batches a window: of D_u, D_tr, D_val"
    waited = sum(line["data_wait_seconds"] for line in lines(tmp_path))
    seconds = sum(line["step_seconds"] for line in lines(tmp_path))
    assert sum(spent) <= waited < seconds
    share = waited / seconds
    assert json.loads((tmp_path / "summary.json").read_text())["data_wait_share"] == pytest.approx(share)
    assert f"waited for data: {share:.1%}" in (tmp_path / "report.txt").read_text()


def test_a_fine_tuned_encoder_is_in_the_checkpoint(data: Path, tmp_path: Path) -> None:
    assert pretrain_here(level_flags(data, tmp_path, "fine_tuning", multilevel__proximity=10.0)) == 0
    document = read_document(tmp_path / "checkpoints" / f"step_{STEPS:08d}")
    first = {name for name in document.tensors if not name.startswith(("fine_tuned.", "masking_network."))}
    assert {name for name in document.tensors if name.startswith("fine_tuned.")} == {f"fine_tuned.{n}" for n in first}
    assert document.engine_state["fine_tuned.optimizer_steps"] == STEPS // 2
    assert all(line["multilevel"]["distance"] > 0 for line in lines(tmp_path)[-1:])
