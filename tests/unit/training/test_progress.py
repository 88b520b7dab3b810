"""Live display on a terminal, plain lines elsewhere."""

from __future__ import annotations

import io
import os
import re
from pathlib import Path

import pytest
from rich.console import Console
from rich.text import Text

from tests.unit.training.small_run import record
from trp_scale.config import Config, RefusedError
from trp_scale.training.metrics import RunInfo, TaskRecord
from trp_scale.training.progress import (
    HORIZON,
    POINTS,
    LiveDisplay,
    PlainDisplay,
    SparkLine,
    open_display,
)


def terminal(width: int = 100) -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=width, height=40, color_system=None)


def output(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", console.file.getvalue())


def test_plain_lines_come_every_ten_seconds_and_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    console = Console(file=io.StringIO(), force_terminal=False, width=80)
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    display = PlainDisplay(20, RunInfo(positions_per_step=1000), console=console)
    tasks = {"noun": {"loss": 5.0, "accuracy": 0.061}}
    for step in range(1, 21):
        now[0] += 3.0 if step > 1 else 43.0
        if step in (4, 12):
            display.add_line({"step": step, "validation": {"loss": 5.25 - 0.01 * step, "tasks": tasks}})
        display.update(record(step), 2000.0, "noun")
    text = output(console)
    assert text.count("noun 6.1%") == 1, "what is as before is not said again"
    assert text.count("held out 5.2100 at step 4") == text.count("held out 5.1300 at step 12") == 1
    shown = [int(found) for found in re.findall(r"^step (\d+)/20", output(console), flags=re.MULTILINE)]
    assert shown == [1, 5, 9, 13, 17, 20]
    first, second = output(console).splitlines()[:2]
    assert "loss 4.9000" in first
    assert "worst noun 5.9000" in first
    assert "2,000 tokens/s" in first
    assert first.endswith("elapsed 0:00:43"), "the pace of a step that compiled says nothing"
    assert "elapsed 0:00:55  left 0:00:45" in second


def test_messages_of_a_log_are_not_broken_or_read_as_markup() -> None:
    console = Console(file=io.StringIO(), force_terminal=False, width=80)
    text = "[bold]block[/bold] " + "x" * 200
    PlainDisplay(20, RunInfo(positions_per_step=1000), console=console).message(text)
    assert output(console) == text + "\n"


def test_live_display_shows_tasks_speed_and_steps(info: RunInfo) -> None:
    console = terminal()
    display = LiveDisplay(20, info, console)
    absent = dict(record(7).tasks) | {"verb": TaskRecord(loss=None, weight=0.0, count=0)}
    display.update(record(7, tasks=absent), 2000.0, "noun")
    display.message("block b7 could not be read")
    display.close()
    text = output(console)
    for part in ("7/20", "loss 4.3000", "worst noun 5.3000", "2,000 tokens/s", "0.7500", "block b7 could not be read"):
        assert part in text
    assert re.search(r"^verb +- ", text, flags=re.MULTILINE)


@pytest.mark.parametrize(("wish", "live"), [("live", True), ("plain", False), ("off", False), ("", False)])
def test_the_variable_overrides_the_terminal(
    wish: str, live: bool, config: Config, info: RunInfo, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRP_SCALE_PROGRESS", wish)
    display = open_display(config, info, Path("run"))
    try:
        assert isinstance(display, LiveDisplay) is live
    finally:
        display.close()


@pytest.mark.parametrize("fault", ["closed pipe", "full disk"])
@pytest.mark.parametrize("live", [False, True])
def test_output_that_cannot_be_written_to_is_given_up_with_one_notice(
    fault: str,
    live: bool,
    config: Config,
    info: RunInfo,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    if fault == "closed pipe":
        reader, writer = os.pipe()
        os.close(reader)
    else:
        writer = os.open("/dev/full", os.O_WRONLY)
    monkeypatch.setenv("TRP_SCALE_PROGRESS", "live" if live else "plain")
    with os.fdopen(writer, "w") as output:
        monkeypatch.setattr("sys.stdout", output)
        display = open_display(config, info, Path("run"))
        display.update(record(1), 2000.0, "noun")
        display.message("step 1: a notice")
        display.show("a table")
        display.close()
        print("of a library", flush=True)
        monkeypatch.undo()
    (notice,) = caplog.messages
    assert "run/metrics.jsonl" in notice


def test_a_table_in_a_log_is_not_cut(config: Config, info: RunInfo, capsys: pytest.CaptureFixture[str]) -> None:
    display = open_display(config, info, Path("run"))
    display.show(Text("x" * 99))
    assert "x" * 99 in capsys.readouterr().out.splitlines()


def test_logging_progress_false_leaves_messages(
    config: Config, info: RunInfo, capsys: pytest.CaptureFixture[str]
) -> None:
    config.logging.progress = False
    display = open_display(config, info, Path("run"))
    display.update(record(1), 2000.0, "noun")
    display.message("stopped")
    printed = capsys.readouterr().out
    assert "step 1/" not in printed
    assert "stopped" in printed


def test_a_wrong_variable_is_refused(config: Config, info: RunInfo, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRP_SCALE_PROGRESS", "fancy")
    with pytest.raises(RefusedError, match=r"TRP_SCALE_PROGRESS .*'fancy'"):
        open_display(config, info, Path("run"))


def test_a_curve_is_an_average_without_the_bias_of_its_start() -> None:
    curve, values = SparkLine(), [4.0, 2.0, 7.0, 1.0]
    for value in values:
        curve.add(value)
    keep = 1 - 1 / HORIZON
    weights = [keep**age for age in range(len(values))][::-1]
    assert curve.now == pytest.approx(sum(w * v for w, v in zip(weights, values, strict=True)) / sum(weights))
    assert curve.points[0] == curve.first == 4.0 and curve.change == curve.now - 4.0


def test_a_curve_of_any_length_has_few_points_at_even_distances() -> None:
    curve = SparkLine()
    for step in range(10_000):
        curve.add(float(step))
    assert POINTS // 2 <= len(curve.points) < POINTS
    gaps = {round(later - earlier) for earlier, later in zip(curve.points[5:], curve.points[6:], strict=False)}
    assert len(gaps) == 1
    assert curve.now == pytest.approx(10_000 - HORIZON, abs=1)
    drawn = curve.draw(24)
    assert len(drawn) == 24 and (drawn[0], drawn[-1]) == ("▁", "█") and list(drawn) == sorted(drawn)


def test_a_curve_is_drawn_from_the_lowest_to_the_highest() -> None:
    assert SparkLine(points=[1.0, 2.0, 3.0]).draw(3) == "▁▅█"
    assert SparkLine(points=[5.0, 5.0]).draw(2) == "▁▁" and SparkLine().draw(2) == ""


def test_it_tells_what_lines_of_metrics_say() -> None:
    display = PlainDisplay(
        0, RunInfo(positions_per_step=1000, shown={"adversary": ("norm", "effect", "saturated")}), lines=False
    )
    display.update(record(1), 2000.0, "noun")
    assert display.describe_step() == "loss 4.9000  lr 1.00e-03  worst noun 5.9000  2,000 tokens/s"
    assert list(display.describe_lines()) == []
    display.add_line({"step": 1, "peak_memory_bytes": 3 << 30, "data_wait_share": 0.021})
    display.add_line({"step": 2, "validation": {"loss": 5.25}, "adversary": {"norm": 0.123456, "effect": None}})
    assert list(display.describe_lines()) == [
        "held out 5.2500 at step 2  memory 3.0 GiB  waits for data 2%",
        "adversary: norm 0.1235",
    ]
    tasks = {"noun": {"loss": 5.0, "accuracy": 0.061}, "verb": {"loss": 4.0, "accuracy": None}, "next": {"loss": 0.7}}
    display.add_line({"step": 2, "validation": {"loss": 5.25, "tasks": tasks | {"adverb": {"accuracy": 0.5}}}})
    display.add_line({"step": 3, "validation": None, "adversary": {}})
    assert len(list(display.describe_lines())) == 3, "what was known stays"
    assert list(display.describe_lines())[1] == "right of those held out: noun 6.1%  adverb 50.0%"
    display.add_line({"step": 8, "validation": {"loss": 5.0, "tasks": {"noun": {"loss": 5.0, "accuracy": 0.07}}}})
    assert list(display.describe_lines())[1] == "right of those held out: noun 7.0%"


def test_the_worst_task_has_its_change_and_images_are_images() -> None:
    display = PlainDisplay(0, RunInfo(positions_per_step=1000, images_per_step=10))
    for step in range(1, 4):
        display.update(record(step), 2000.0, "noun")
    change = display.curves["noun"].change
    assert f"worst noun {5.9 + change:.4f} ({change:+.4f})  20 images/s" in display.describe_step() and change < 0
