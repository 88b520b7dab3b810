"""The checkpoint of the best figure stays, and a run ends where none better comes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from math import nan
from pathlib import Path
from typing import Any

import pytest

from tests.runs import flags, lines, pretrain_here
from tests.synthetic import Layout, small_config, trainer_for
from trp_scale.checkpoint.run_directory import checkpoints
from trp_scale.config import CheckpointConfig, RefusedError
from trp_scale.training import pretrain as training
from trp_scale.training.best import Best, build_best_tracker, of_validation


def test_less_is_better_of_losses_and_more_of_accuracies() -> None:
    loss, accuracy = Best(figure="validation.noun", patience=2), Best(figure="probes.knn", patience=0)
    judged = [loss.judge(step, {"validation.noun": value}) for step, value in enumerate((3.0, 2.0, 2.5, 1.0), 1)]
    assert judged == [True, True, False, True]
    judged = [accuracy.judge(step, {"probes.knn": value}) for step, value in enumerate((0.3, 0.2, 0.4), 1)]
    assert judged == [True, False, True]
    assert (loss.value, loss.step, loss.since) == (1.0, 4, 0)
    assert not loss.judge(5, {"validation.noun": nan}) and not loss.judge(6, {"probes.knn": 9.0})
    assert loss.since == 1, "only what was measured counts"
    assert loss.given_up() is None and not loss.judge(7, {"validation.noun": None})
    assert loss.given_up() == "no better validation.noun in 2 measurements: validation.noun 1.0000 at step 4"
    again = Best(figure="validation.noun", patience=2)
    again.load(json.loads(json.dumps(loss.state())))
    assert again == loss
    accuracy.load(loss.state())
    assert accuracy.step == 3, "of another figure nothing is known"


def test_the_figures_of_a_validation() -> None:
    tasks = {"a": {"loss": 1.0, "count": 2}, "b": {"loss": 3.0, "count": 1}, "c": {"loss": None, "count": 0}}
    found = of_validation({"loss": 2.0, "worst_task": "b", "tasks": tasks})
    assert found == {
        "validation.a": 1.0,
        "validation.b": 3.0,
        "validation.c": None,
        "validation.loss": 2.0,
        "validation.worst": 3.0,
    }
    assert of_validation({"loss": None, "worst_task": None, "tasks": {}})["validation.worst"] is None


def test_unknown_figures_are_refused_with_those_there_are() -> None:
    assert build_best_tracker(CheckpointConfig(), ["noun"], []) is None
    with pytest.raises(RefusedError, match=r"validation.noun\?.*validation.worst, validation.noun"):
        build_best_tracker(CheckpointConfig(best="validation.nuon"), ["noun"], [])
    assert build_best_tracker(CheckpointConfig(best="probes.knn", patience=3), [], ["probes.knn"]) == Best(
        figure="probes.knn", patience=3
    )


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Validations whose losses are given by the step."""
    losses: Iterator[float] = iter([5.0, 4.0, 4.5, 4.2, 3.0, 2.0, 2.5, 2.6])

    def validate(*arguments: Any, **named: Any) -> dict[str, Any]:
        loss = next(losses)
        return {"loss": loss, "worst_task": "noun", "tasks": {"noun": {"loss": loss, "count": 1}}}

    monkeypatch.setattr(training, "validate", validate)


def test_a_run_keeps_its_best_ends_and_goes_on(text_dataset: Path, tmp_path: Path, scripted: None) -> None:
    run = tmp_path / "run"
    changes = {"validation__every": 1, "checkpoint__best": "validation.worst", "checkpoint__keep": 1}
    assert pretrain_here(flags(text_dataset, run, **changes, checkpoint__patience=2)) == 0
    assert [step for step, _ in checkpoints(run)] == [2, 4], "the best, and the newest"
    stop = json.loads((run / "stop.json").read_text())
    assert stop["why"].startswith("no better validation.worst in 2 measurements") and not stop["again"]
    assert lines(run)[-1]["step"] == 4
    assert "best validation.worst 4.0000 at step 2: " in " ".join((run / "report.txt").read_text().split())
    assert pretrain_here(flags(text_dataset, run, **changes, checkpoint__patience=2)) == 0
    assert lines(run)[-1]["step"] == 4, "it has ended"
    assert pretrain_here(flags(text_dataset, run, **changes, checkpoint__patience=3)) == 0
    assert [step for step, _ in checkpoints(run)] == [6, 8]
    assert json.loads((run / "stop.json").read_text())["why"] == "finished"


def test_patience_that_runs_out_in_the_last_step_ends_a_finished_run(
    text_dataset: Path, tmp_path: Path, scripted: None
) -> None:
    run = tmp_path / "run"
    changes = {"validation__every": 1, "checkpoint__best": "validation.worst", "training__steps": 4}
    for _ in range(2):
        assert pretrain_here(flags(text_dataset, run, **changes, checkpoint__patience=2)) == 0
        assert json.loads((run / "stop.json").read_text())["why"] == "finished"
        assert json.loads((run / "summary.json").read_text())["exit_reason"] == "finished"


def test_a_step_that_a_hook_has_measured_is_read_before_it_is_kept_or_the_last() -> None:
    trainer = trainer_for(Layout(), small_config(Layout(), training={"steps": 6}))
    trainer.best = Best(figure="probes.knn", patience=2)
    figures = [0.1, 0.3, 0.2, 0.1]  # after each step
    trainer.hooks.measured = lambda: {"probes.knn": figures[len(trainer.history) - 1]}  # type: ignore[method-assign]
    unread: list[bool] = []
    trainer.control.save = lambda: unread.append(trainer.pending is not None)
    assert trainer.run().startswith("no better probes.knn in 2 measurements")
    assert trainer.state.step == 4 and trainer.pending is None
    assert unread == [False] * 3, "after steps 1 and 2, the best so far, and at the end"
    trainer.engine.close()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"checkpoint__best": "validation.loss", "validation__every": 0}, "--validation.every"),
        ({"checkpoint__patience": 3}, "--checkpoint.best"),
        ({"checkpoint__best": "probes.knn"}, "with --hooks probes"),
    ],
)
def test_what_cannot_be_kept_is_refused(changes: dict[str, Any], said: str, text_dataset: Path, tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match=said):
        pretrain_here(flags(text_dataset, tmp_path / "run", **changes))
