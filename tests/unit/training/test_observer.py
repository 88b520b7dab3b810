"""The run directory that an observer leaves behind."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.unit.training.small_run import TASKS, record
from trp_scale.config import Config, RefusedError
from trp_scale.training.metrics import read_history, worst_task
from trp_scale.training.observer import Observer
from trp_scale.training.records import RunInfo, TaskRecord
from trp_scale.training.report import report, report_table


def lines_of(run_dir: Path) -> list[dict[str, Any]]:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    text = (run_dir / "metrics.jsonl").read_text(encoding="utf-8")
    return [json.loads(line, parse_constant=refuse) for line in text.splitlines()]


def test_a_line_has_every_field_and_is_there_at_once(start: Callable[..., Observer], tmp_path: Path) -> None:
    observer = start()
    observer.step(record(1, hooks={"minimax": {"effective_elements": 7.5}}))
    (line,) = lines_of(tmp_path / "run")
    assert line["step"] == 1
    assert line["loss"] == pytest.approx(4.9)
    assert (line["lr"], line["grad_norm"], line["applied"]) == (1e-3, 1.0, True)
    assert line["tasks"]["verb"] == {"loss": pytest.approx(3.9), "weight": 0.25, "count": 10}
    assert (line["step_seconds"], line["data_wait_seconds"], line["data_wait_share"]) == (0.5, 0.1, 0.2)
    assert line["processor_seconds"] == 0.75
    assert line["tokens_per_second"] == pytest.approx(2000)
    assert line["model_flops"] == 2e9
    assert line["model_flops_utilisation"] is None
    assert line["peak_memory_bytes"] > 10**6
    assert line["minimax"] == {"effective_elements": 7.5}


def test_skipped_steps_are_strict_json_and_always_logged(
    start: Callable[..., Observer], config: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config.logging.every = 10
    observer = start()
    observer.step(record(1))
    broken = {name: TaskRecord(loss=math.nan, weight=math.inf, count=1) for name in ("noun", "verb", "other")}
    observer.step(record(2, loss=math.nan, grad_norm=math.inf, applied=False, tasks=broken))
    observer.step(record(3))
    first, second = lines_of(tmp_path / "run")
    assert (first["step"], second["step"]) == (1, 2)
    assert second["loss"] is None
    assert second["grad_norm"] is None
    assert second["tasks"]["noun"] == {"loss": None, "weight": None, "count": 1}
    assert second["applied"] is False
    assert observer.close("finished")["skipped_steps"] == 1
    assert "step 2 skipped: loss nan and gradient norm inf" in capsys.readouterr().out


def test_absent_tasks_are_listed_and_forgotten_ones_refused(start: Callable[..., Observer], tmp_path: Path) -> None:
    observer = start()
    tasks = dict(record(1).tasks)
    observer.step(record(1, tasks=tasks | {"verb": TaskRecord(loss=None, weight=0.0, count=0)}))
    assert lines_of(tmp_path / "run")[0]["tasks"]["verb"] == {"loss": None, "weight": 0.0, "count": 0}
    with pytest.raises(ValueError, match=r"step 2.*'verb'"):
        observer.step(record(2, tasks={"noun": tasks["noun"], "other": tasks["other"]}))


def test_times_are_means_over_the_steps_of_a_line(
    start: Callable[..., Observer], config: Config, tmp_path: Path
) -> None:
    config.logging.every = 4
    observer = start()
    for step in range(1, 9):
        assert observer.wants(step) is (step in (1, 4, 8))
        observer.step(record(step, step_seconds=float(step), processor_seconds=2.0 * step))
    assert [line["step"] for line in lines_of(tmp_path / "run")] == [1, 4, 8]
    assert [line["step_seconds"] for line in lines_of(tmp_path / "run")] == [1.0, 3.0, 6.5]
    assert [line["processor_seconds"] for line in lines_of(tmp_path / "run")] == [2.0, 6.0, 13.0]


def test_processors_are_not_what_a_step_costs_on_a_gpu(
    start: Callable[..., Observer], config: Config, info: RunInfo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start().step(record(1))
    assert read_history(tmp_path / "run").seconds_of_step == 0.75
    monkeypatch.setattr("trp_scale.training.observer.peak_memory_bytes", lambda on_gpu: 0)
    Observer(tmp_path / "gpu", config, TASKS, replace(info, device_name="NVIDIA H100 PCIe")).step(record(1))
    assert read_history(tmp_path / "gpu").processor_seconds is None
    assert read_history(tmp_path / "gpu").seconds_of_step == 0.5


def test_the_share_of_waiting_is_of_all_steps_logged_or_not(
    start: Callable[..., Observer], config: Config, tmp_path: Path
) -> None:
    config.logging.every = 4
    observer = start()
    for step in range(1, 9):
        observer.step(record(step, step_seconds=2.0 if step == 1 else 1.0, data_wait_seconds=0.1 * (step in (2, 8))))
    assert [line["data_wait_share"] for line in lines_of(tmp_path / "run")] == pytest.approx([0.0, 0.1 / 3, 0.1 / 4])
    assert observer.close("finished")["data_wait_share"] == pytest.approx(0.2 / 9)
    assert "waited for data: 2.2% of the steps' time (rank 0, loader workers: 0)" in report(tmp_path / "run")


def test_a_resumed_run_logs_the_steps_that_an_uninterrupted_one_does(
    start: Callable[..., Observer], config: Config, info: RunInfo, tmp_path: Path
) -> None:
    config.logging.every = 4
    info.start_step = 6
    observer = start()
    for step in (7, 8, 9):
        observer.step(record(step))
    assert [line["step"] for line in lines_of(tmp_path / "run")] == [8]


def test_validation_is_part_of_its_step(start: Callable[..., Observer], config: Config, tmp_path: Path) -> None:
    config.validation.every = 2
    config.logging.every = 100
    observer = start()
    losses = {"loss": 3.0, "tasks": {"noun": {"loss": 3.5, "count": 100}}}
    for step in (1, 2, 3):
        observer.step(record(step))
        if step == 2:
            observer.validation(step, losses)
    lines = lines_of(tmp_path / "run")
    assert [line["step"] for line in lines] == [1, 2]
    assert lines[1]["validation"] == losses
    assert lines[1]["loss"] == pytest.approx(4.8)
    assert observer.close("finished")["validation"] == losses
    assert "held-out loss (mean of the balanced tasks): 3.0000 at step 2" in report(tmp_path / "run")


def test_a_validation_that_never_came_loses_no_line(
    start: Callable[..., Observer], config: Config, tmp_path: Path
) -> None:
    config.validation.every = 1
    observer = start()
    observer.step(record(1))
    observer.step(record(2))
    observer.close("SIGTERM")
    assert [line["step"] for line in lines_of(tmp_path / "run")] == [1, 2]


def test_a_resumed_run_appends_after_a_torn_line(start: Callable[..., Observer], tmp_path: Path) -> None:
    start().step(record(1))
    with (tmp_path / "run" / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"step": 2, "los')
    start().step(record(2))
    assert [line["step"] for line in lines_of(tmp_path / "run")] == [1, 2]


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
    assert "worst task noun: loss 2.5000, weight 0.7500; at the start verb: 7.5000" in text
    printed = capsys.readouterr().out
    for part in ("noun", "6.0000", "2.5000", "-3.5000", "worst", "2,000 tokens/s", str(tmp_path / "run")):
        assert part in text.replace("\n", "")
    assert "Pre-training report" in printed
    (marked,) = [line for line in text.splitlines() if line.endswith(" worst")]
    assert marked.split()[0] == "noun"


def test_the_end_has_what_a_hook_last_said_and_a_single_task_in_words(
    config: Config, info: RunInfo, tmp_path: Path
) -> None:
    observer = Observer(tmp_path, config, ("noun",), replace(info, shown={"adversary": ("norm", "effect")}))
    for step, norm in ((1, 0.1), (2, 0.25)):
        tasks = {"noun": TaskRecord(loss=4.0 / step, weight=1.0, count=40)}
        hooks = {"adversary": {"norm": norm, "effect": None, "kind": "pixels"}}
        observer.step(record(step, loss=4.0 / step, tasks=tasks, hooks=hooks))
    assert observer.close("finished")["hooks"] == ["adversary: norm 0.25"]
    lines = report(tmp_path).splitlines()
    assert "adversary: norm 0.25" in lines and "loss 4.0000 -> 2.0000: better by 50%" in lines


def test_held_out_accuracies_have_a_column(tmp_path: Path) -> None:
    tasks = {name: {"loss": 4.5, "weight": 0.5, "count": 3} for name in ("noun", "verb")}
    held_out = {"loss": 5.0, "tasks": {"noun": {"loss": 5.25, "count": 7, "accuracy": 0.125}, "verb": {"loss": 4.75}}}
    line = {"step": 1, "loss": 4.5, "peak_memory_bytes": 1, "tasks": tasks, "validation": held_out}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(line) + "\n", encoding="utf-8")
    head, noun, verb = (
        next(line for line in report(tmp_path).splitlines() if word in line) for word in ("task  ", "noun ", "verb ")
    )
    assert head.split()[-2:] == ["out", "right"]
    assert noun.split()[6:8] == ["5.2500", "12.5%"]
    assert verb.split()[6:8] == ["4.7500", "-"]
    del held_out["tasks"]["noun"]["accuracy"]  # type: ignore[index]
    (tmp_path / "metrics.jsonl").write_text(json.dumps(line) + "\n", encoding="utf-8")
    assert "right" not in report(tmp_path)


def test_a_narrow_terminal_shows_which_task_is_the_worst(tmp_path: Path) -> None:
    tasks = {name: {"loss": loss, "weight": 0.5, "count": 3} for name, loss in (("noun", 4.5), ("next_sentence", 0.7))}
    held_out = {"loss": 5.0, "tasks": {"noun": {"loss": 11.25, "accuracy": 0.125}}}
    line = {"step": 1, "loss": 4.5, "peak_memory_bytes": 1, "tasks": tasks, "validation": held_out}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(line) + "\n", encoding="utf-8")
    console = Console(file=io.StringIO(), width=80, force_terminal=False)
    with console.capture() as capture:
        console.print(report_table(tmp_path))
    assert "noun" in capture.get() and [line for line in capture.get().splitlines() if line.rstrip().endswith(" worst")]


def test_the_end_is_of_steps_not_of_lines(start: Callable[..., Observer], config: Config, tmp_path: Path) -> None:
    """Forty lines of 400 steps: the last tenth has four of them. Of a run of three steps it is the last one."""
    config.logging.every, config.training.steps = 10, 400
    observer = start()
    for step in range(1, 401):
        noun = TaskRecord(loss=float(step), weight=0.5, count=10)
        observer.step(record(step, tasks=dict(record(1).tasks) | {"noun": noun}))
    assert observer.close("finished")["tasks"]["noun"]["end"] == (370 + 380 + 390 + 400) / 4
    text = " ".join(report(tmp_path / "run").split())
    assert "mean over the run's last tenth, steps 361 to 400, of which 4 are logged, where the task was there" in text


def test_the_end_of_a_run_of_three_steps_is_its_last(start: Callable[..., Observer], tmp_path: Path) -> None:
    observer = start()
    for step in (1, 2, 3):
        noun = TaskRecord(loss=float(step), weight=0.5, count=10)
        observer.step(record(step, tasks=dict(record(1).tasks) | {"noun": noun}))
    assert observer.close("finished")["tasks"]["noun"]["end"] == 3.0
    assert "the run's last tenth, step 3, where" in " ".join(report(tmp_path / "run").split())


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


def test_a_killed_run_has_a_report(start: Callable[..., Observer], tmp_path: Path) -> None:
    start().step(record(1))
    text = report(tmp_path / "run")
    assert "steps 1 (no summary.json: still running, or killed)" in text


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


@pytest.mark.parametrize(("factor", "diverged"), [(2.0, False), (9.9, False), (10.1, True)])
def test_losses_far_above_their_start_are_no_result(
    start: Callable[..., Observer], tmp_path: Path, factor: float, diverged: bool
) -> None:
    observer = start()
    for step in (1, 2, 3):
        tasks = {
            name: replace(task, loss=task.loss * (factor if step == 3 else 1.0))
            for name, task in record(1).tasks.items()
            if task.loss is not None
        }
        observer.step(record(step, tasks=tasks))
    why = observer.diverged()
    assert bool(why) == diverged
    assert not why or why == "diverged: the tasks' mean loss was 6.267, and is 63.29 from step 3 on"
    observer.close("finished")


def test_one_skipped_step_at_the_end_is_no_divergence(start: Callable[..., Observer]) -> None:
    observer = start()
    for step in (1, 2, 3):
        observer.step(record(step, **({"loss": math.nan, "applied": False} if step == 3 else {})))
    assert not observer.diverged()
    observer.step(record(4, loss=math.nan, applied=False))
    observer.step(record(5, loss=math.inf, applied=False))
    assert observer.diverged() == "diverged: 3 of 5 steps were skipped, and no loss is finite from step 5 on"
    observer.close("finished")


def test_other_ranks_do_nothing(start: Callable[..., Observer], tmp_path: Path, config: Config) -> None:
    config.logging.tensorboard = True
    observer = start(enabled=False)
    observer.step(record(1))
    observer.validation(1, {"loss": 1.0})
    observer.message("hello")
    assert observer.close("finished") == {}
    assert not (tmp_path / "run").exists()


def test_a_hook_cannot_take_a_field_s_name(start: Callable[..., Observer]) -> None:
    with pytest.raises(ValueError, match="'loss'"):
        start().step(record(1, hooks={"loss": {"value": 1.0}}))


def test_a_hook_s_notice_is_in_the_report_while_the_last_line_has_it(
    start: Callable[..., Observer], tmp_path: Path
) -> None:
    observer = start()
    observer.step(record(1, hooks={"adversary": {"notice": "the adversary hardly acts"}}))
    assert "note: the adversary hardly acts" in report(tmp_path / "run")
    observer.step(record(2, hooks={"adversary": {"norm": 1.0}}))
    assert "note:" not in report(tmp_path / "run")


def test_the_report_says_whose_masks_the_learned_ones_are(start: Callable[..., Observer], tmp_path: Path) -> None:
    observer = start()
    observer.step(record(1, hooks={"multilevel": {"lessons": 0}}))
    assert "learned masks: 0 lessons" in report(tmp_path / "run")
    overlaps = {"lessons": 3, "overlap_untrained": 0.25, "overlap_last": 0.875}
    observer.step(record(2, hooks={"multilevel": overlaps}))
    text = " ".join(report(tmp_path / "run").split())
    assert (
        "learned masks: 25.0% of the patches are those of the untrained network, 87.5% those before the last of 3"
        in text
    )
    observer.validation(2, {"loss": 0.5, "tasks": {"noun": {"loss": 0.5, "count": 100}}})
    text = " ".join(report(tmp_path / "run").split())
    assert "held-out loss (mean of the balanced tasks; random masks, no weights): 0.5000" in text
    observer.step(record(3))
    assert "learned masks" not in report(tmp_path / "run")


def test_the_worst_task_is_one_of_enough_elements() -> None:
    losses = {"rare": 9.0, "hard": 5.0, "easy": 1.0, "outside": 8.0, "absent": None}
    counts = {"rare": 29, "hard": 30, "easy": 100, "outside": 100, "absent": 0}
    assert worst_task(losses, counts, {"outside"}) == "hard"
    assert worst_task(losses, {"hard": None, **dict.fromkeys(("rare", "easy"), 3)}, {"outside"}) == "hard"
    assert worst_task({"rare": 9.0, "rarer": 10.0}, {"rare": 3, "rarer": 1}) == "rarer", (
        "where none has as many, of all"
    )
    assert worst_task({"absent": None}, {"absent": 0}) is None


def test_a_stopped_run_says_how_far_it_is_and_how_it_goes_on(start: Callable[..., Observer], tmp_path: Path) -> None:
    observer = start()
    observer.step(record(1))
    observer.close("Ctrl-C", {"goes_on": "run/checkpoints/step_00000001; go on from it with: trp-scale pretrain"})
    lines = report(tmp_path / "run").splitlines()
    assert "steps 1 of 20 (Ctrl-C)" in lines
    assert "newest checkpoint: run/checkpoints/step_00000001; go on from it with: trp-scale pretrain" in lines


def test_the_table_fits_80_columns(config: Config, info: RunInfo, tmp_path: Path) -> None:
    """With every column, the longest of our names, and as many elements as a long run has."""
    names = ("interjection", "next_sentence")
    observer = Observer(tmp_path / "run", config, names, info)
    tasks = {name: TaskRecord(loss=10.0, weight=0.5, count=123_456_789) for name in names}
    observer.step(record(1, tasks=tasks))
    held_out = {name: {"loss": 10.0, "count": 9, "accuracy": 1.0} for name in names}
    observer.validation(1, {"loss": 1.0, "tasks": held_out})
    table = [line for line in report(tmp_path / "run").splitlines() if line.startswith((" ", "─"))]
    assert len(table) == 5 and max(map(len, table)) <= 80 and "123.5M" in table[-1]


def test_a_directory_without_metrics_is_named(tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match=str(tmp_path)):
        report(tmp_path)


def test_a_broken_line_is_named(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\nnot json\n{"step": 3}\n', encoding="utf-8")
    with pytest.raises(RefusedError, match="line 2: not JSON"):
        report(tmp_path)


def test_a_task_that_min_count_keeps_out_is_not_the_worst(start: Callable[..., Observer], tmp_path: Path) -> None:
    observer = start()
    tasks = {"noun": TaskRecord(loss=6.0, weight=0.0, count=1), "verb": TaskRecord(loss=4.0, weight=1.0, count=30)}
    observer.step(record(1, tasks=dict(record(1).tasks) | tasks))
    assert observer.close("finished")["worst_task"] == "verb"


def test_use_of_the_cache_is_in_lines_and_report(config: Config, tmp_path: Path) -> None:
    """Lines say what was done since the last one; the report has the sum, and nothing where data is local."""
    uses = iter([{"found": 3, "fetched": 1, "fetched_bytes": 10**9, "ahead": 2, "ahead_bytes": 10**9}, {}] * 2)
    observer = Observer(tmp_path / "run", config, TASKS, RunInfo(positions_per_step=10), cache_use=lambda: next(uses))
    for step in (1, 2, 3):
        observer.step(record(step))
    first, second, third = lines_of(tmp_path / "run")
    assert first["cache"]["found"] == third["cache"]["found"] == 3 and "cache" not in second
    assert observer.close("finished")["cache"]["ahead_bytes"] == 2 * 10**9
    text = " ".join(report(tmp_path / "run").split())
    assert "cache: 75.0% of 8 tars or blocks opened were there; 6 fetched, 4 of them ahead, 4.000 GB (rank 0)" in text
    local = Observer(tmp_path / "local", config, TASKS, RunInfo(positions_per_step=10))
    local.step(record(1))
    assert local.close("finished")["cache"] is None and "cache: " not in report(tmp_path / "local")
