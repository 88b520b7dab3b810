"""What metrics.jsonl keeps of a run, and the history that is read from it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.unit.training.small_run import TASKS, record
from trp_scale.config import Config, RefusedError
from trp_scale.training.metrics import RunInfo, TaskRecord, read_history, worst_task
from trp_scale.training.observer import Observer
from trp_scale.training.report import report


def test_processors_are_not_what_a_step_costs_on_a_gpu(
    start: Callable[..., Observer], config: Config, info: RunInfo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start().step(record(1))
    assert read_history(tmp_path / "run").seconds_of_step == 0.75
    monkeypatch.setattr("trp_scale.training.observer.peak_memory_bytes", lambda on_gpu: 0)
    Observer(tmp_path / "gpu", config, TASKS, replace(info, device_name="NVIDIA H100 PCIe")).step(record(1))
    assert read_history(tmp_path / "gpu").processor_seconds is None
    assert read_history(tmp_path / "gpu").seconds_of_step == 0.5


def test_summary_and_report(start: Callable[..., Observer], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    observer = start()
    for step in range(1, 101):
        noun = TaskRecord(loss=6.0 if step <= 95 else 2.0, weight=0.75, count=10 if step <= 95 else 70)
        verb = TaskRecord(loss=7.5 if step == 1 else 3.0 - 0.01 * step, weight=0.25, count=40)
        tasks = dict(record(step).tasks) | {"noun": noun, "verb": verb}
        observer.step(record(step, tasks=tasks, step_seconds=0.5 if step < 100 else 50.0))
    summary = observer.close("finished")
    assert observer.close("again") == summary
    assert json.loads((tmp_path / "run" / "summary.json").read_text(encoding="utf-8")) == summary
    # The last tenth: five steps with 10 elements at 6.0, five with 70 at 2.0; a mean of means would be 4.0.
    assert summary["tasks"]["noun"] == {"start": 6.0, "end": pytest.approx(2.5), "weight": 0.75, "count": 400}
    assert summary["tasks"]["verb"]["end"] == pytest.approx(sum(3.0 - 0.01 * step for step in range(91, 101)) / 10)
    assert summary["worst_task"] == "noun"
    assert (summary["steps"], summary["tokens"], summary["exit_reason"]) == (100, 100_000, "finished")
    assert summary["tokens_per_second"] == pytest.approx(2000), "one slow step does not change a median"
    text = (tmp_path / "run" / "report.txt").read_text(encoding="utf-8")
    assert text == report(tmp_path / "run")
    printed = capsys.readouterr().out
    for part in ("noun", "6.0000", "2.5000", "-3.5000", "worst", "2,000 tokens/s", str(tmp_path / "run")):
        assert part in text.replace("\n", "")
    assert "Pre-training report" in printed
    assert text.count("noun worst") == 1 and "verb worst" not in text


def test_the_end_is_of_steps_not_of_lines(start: Callable[..., Observer], config: Config, tmp_path: Path) -> None:
    """Forty lines of 400 steps: the last tenth has four of them. Of a run of three steps it is the last one."""
    config.logging.every, config.training.steps = 10, 400
    observer = start()
    for step in range(1, 401):
        noun = TaskRecord(loss=float(step), weight=0.5, count=10)
        observer.step(record(step, tasks=dict(record(1).tasks) | {"noun": noun}))
    assert observer.close("finished")["tasks"]["noun"]["end"] == (370 + 380 + 390 + 400) / 4
    assert "steps 361 to 400" in " ".join(report(tmp_path / "run").split())


def test_a_rare_task_s_weight_is_of_the_steps_that_had_it(start: Callable[..., Observer], tmp_path: Path) -> None:
    observer = start()
    for step in range(1, 101):
        present = TaskRecord(loss=7.0, weight=0.5, count=2)
        verb = present if step == 95 else TaskRecord(loss=None, weight=0.0, count=0)
        tasks = dict(record(step).tasks) | {"verb": verb, "other": TaskRecord(loss=None, weight=0.0, count=0)}
        observer.step(record(step, tasks=tasks))
    summary = observer.close("finished")
    assert summary["tasks"]["verb"] == {"start": 7.0, "end": 7.0, "weight": 0.5, "count": 2}
    assert summary["tasks"]["other"] == {"start": None, "end": None, "weight": None, "count": 0}
    assert summary["worst_task"] == "noun", "two elements say too little"


def test_a_resumed_run_s_report_starts_at_the_first_step(
    start: Callable[..., Observer], info: RunInfo, tmp_path: Path
) -> None:
    observer = start()
    for step in range(1, 6):
        observer.step(record(step))
    observer.close("SIGTERM")
    info.start_step = 5
    observer = start()
    for step in range(6, 21):
        observer.step(record(step))
    assert observer.close("finished")["tasks"]["verb"]["start"] == pytest.approx(3.9)


def test_the_worst_task_is_one_of_enough_elements() -> None:
    losses = {"rare": 9.0, "hard": 5.0, "easy": 1.0, "outside": 8.0, "absent": None}
    counts = {"rare": 29, "hard": 30, "easy": 100, "outside": 100, "absent": 0}
    assert worst_task(losses, counts, {"outside"}) == "hard"
    assert worst_task(losses, {"hard": None, **dict.fromkeys(("rare", "easy"), 3)}, {"outside"}) == "hard"
    assert worst_task({"rare": 9.0, "rarer": 10.0}, {"rare": 3, "rarer": 1}) == "rarer", (
        "where none has as many, of all"
    )
    assert worst_task({"absent": None}, {"absent": 0}) is None


def test_a_directory_without_metrics_and_a_broken_line_are_named(tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match=str(tmp_path)):
        report(tmp_path)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\nnot json\n{"step": 3}\n', encoding="utf-8")
    with pytest.raises(RefusedError, match=r"metrics\.jsonl.* 2: "):
        report(tmp_path)
