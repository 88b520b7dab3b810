"""The report: its table, what got better and worse and where weights explain it, and what hooks have to say."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from tests.unit.training.small_run import record
from trp_scale.config import Config
from trp_scale.training.metrics import RunHistory, RunInfo, TaskHistory, TaskRecord
from trp_scale.training.observer import Observer
from trp_scale.training.report import describe_changes, report


def history(*tasks: tuple[str, float, float, float, int], outside: set[str] | None = None) -> RunHistory:
    """Of (name, start, end, weight, elements)."""
    found = RunHistory(outside_tasks=outside or set())
    found.tasks = {
        name: TaskHistory(start=start, end=end, weight=weight, count=count) for name, start, end, weight, count in tasks
    }
    return found


def test_better_and_worse_by_the_size_of_the_change() -> None:
    found = history(("a", 9.0, 8.0, 0.7, 100), ("b", 5.0, 7.0, 0.0, 100), ("c", 5.0, 4.5, 0.3, 100))
    assert describe_changes(found) == [
        "better: 2 of 3 tasks: a -1.0000, c -0.5000",
        "the price: b +2.0000, with less than an even share of the weight",
    ]


def test_a_heavy_task_that_got_worse_is_not_explained_away() -> None:
    found = history(("a", 9.0, 9.5, 0.7, 100), ("b", 5.0, 4.0, 0.3, 100))
    assert describe_changes(found)[1] == "worse: 1: a +0.5000"
    found = history(*((name, 5.0, 6.0, weight, 50) for name, weight in (("a", 0.8), ("b", 0.1), ("c", 0.1))))
    assert describe_changes(found)[1].endswith("; 2 of them have less than an even share of the weight")


def test_few_elements_outside_tasks_and_single_ones_are_no_news() -> None:
    few = ("b", 5.0, 7.0, 0.0, 3)
    assert describe_changes(history(("a", 9.0, 8.0, 1.0, 100), few)) == []
    found = history(
        ("a", 9.0, 8.0, 0.5, 100), ("c", 2.0, 1.0, 0.5, 100), ("other", 3.0, 4.0, 0.2, 100), outside={"other"}
    )
    assert describe_changes(found) == ["better: 2 of 2 tasks: a -1.0000, c -1.0000"]
    rare = history(("a", 9.0, 8.0, 0.5, 100), ("c", 2.0, 1.0, 0.5, 100), few)
    assert describe_changes(rare) == ["better: 2 of 2 tasks with 30 elements or more: a -1.0000, c -1.0000"]
    many = history(*((name, 2.0, 1.0, 0.2, 50) for name in "abcde"))
    assert describe_changes(many) == ["better: 5 of 5 tasks: a -1.0000, b -1.0000, c -1.0000, ..."]


def test_equal_weights_are_not_called_less_than_even() -> None:
    """Also where a rare task, which is not put into words, has its share too."""
    rare = ("rare", 5.0, 7.0, 1 / 3, 3)
    found = history(("a", 9.0, 9.5, 1 / 3, 100), ("b", 5.0, 4.0, 1 / 3 + 1e-12, 100), rare)
    assert describe_changes(found)[1] == "worse: 1: a +0.5000"
    scaled = history(("a", 9.0, 9.5, 1.2, 100), ("b", 5.0, 4.0, 0.8, 100))  # weights of Uncertainty do not add up to 1
    assert describe_changes(scaled)[1] == "worse: 1: a +0.5000"


def test_held_out_accuracies_have_a_column(tmp_path: Path) -> None:
    tasks = {name: {"loss": 4.5, "weight": 0.5, "count": 3} for name in ("noun", "verb")}
    held_out = {"loss": 5.0, "tasks": {"noun": {"loss": 5.25, "count": 7, "accuracy": 0.125}, "verb": {"loss": 4.75}}}
    line = {"step": 1, "loss": 4.5, "peak_memory_bytes": 1, "tasks": tasks, "validation": held_out}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(line) + "\n", encoding="utf-8")
    head, noun, verb = (
        next(line for line in report(tmp_path).splitlines() if word in line) for word in ("task  ", "noun ", "verb ")
    )
    assert head.split()[-2:] == ["out", "accuracy"]
    assert noun.split()[-2:] == ["5.2500", "12.5%"]
    assert verb.split()[-2:] == ["4.7500", "-"]
    del held_out["tasks"]["noun"]["accuracy"]  # type: ignore[index]
    (tmp_path / "metrics.jsonl").write_text(json.dumps(line) + "\n", encoding="utf-8")
    assert "accuracy" not in report(tmp_path)


def test_a_killed_run_has_a_report(start: Callable[..., Observer], tmp_path: Path) -> None:
    start().step(record(1))
    text = report(tmp_path / "run")
    assert "steps 1 (no summary.json: still running, or killed)" in text


def test_a_hook_s_notice_is_in_the_report_while_the_last_line_has_it(
    start: Callable[..., Observer], tmp_path: Path
) -> None:
    observer = start()
    observer.step(record(1, hooks={"adversary": {"notice": "the adversary hardly acts"}}))
    assert "Adversary: the adversary hardly acts." in report(tmp_path / "run")
    observer.step(record(2, hooks={"adversary": {"norm": 1.0}}))
    assert "hardly acts" not in report(tmp_path / "run")


def test_the_report_says_whose_masks_the_learned_ones_are(start: Callable[..., Observer], tmp_path: Path) -> None:
    observer = start()
    observer.step(record(1, hooks={"multilevel": {"lessons": 0}}))
    assert "Learned masks: 0 lessons" in report(tmp_path / "run")
    overlaps = {"lessons": 3, "overlap_untrained": 0.25, "overlap_last": 0.875}
    observer.step(record(2, hooks={"multilevel": overlaps}))
    text = " ".join(report(tmp_path / "run").split())
    assert "Learned masks: 25.0% " in text and ", 87.5% " in text and " 3" in text
    observer.validation(2, {"loss": 0.5, "tasks": {"noun": {"loss": 0.5, "count": 100}}})
    text = " ".join(report(tmp_path / "run").split())
    assert "random masks, no weights) is 0.500 " in text
    observer.step(record(3))
    assert "Learned masks" not in report(tmp_path / "run")


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
