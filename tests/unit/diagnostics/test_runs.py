"""`trp-scale runs`: every state of a run, what is skipped, and the width of the table."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from tests.unit.reporting.small_runs import FAILED, FINISHED, image_lines, line, task, text_lines, write
from trp_scale.cli import main as cli
from trp_scale.console import Table
from trp_scale.diagnostics.runs import find_runs, list_runs, read_row
from trp_scale.distributed.liveness import Lease
from trp_scale.errors import ExitStatus, RefusedError
from trp_scale.training.metrics import read_history

SLOW = {"why": "SIGTERM (rank 0)", "status": 0, "step": 20, "advice": "resume it"}
DIVERGED = {"why": "too many skipped steps", "status": int(ExitStatus.DIVERGED), "step": 20}


def rows(table: Table) -> list[list[str]]:
    return [[cell.text for cell in row] for row in list(table.cells())[1:]]


def worst_of(run: Path) -> tuple[object, object]:
    row = read_row(run, "run")
    return row[4], getattr(row[5], "order", None)


def end(run: Path) -> Path:
    """summary.json as the run's observer writes it."""
    history = read_history(run)
    tasks = {name: {"end": entry.end, "count": entry.count} for name, entry in history.tasks.items()}
    summary = {"exit_reason": "finished", "steps": history.last_step, "worst_task": history.worst_task, "tasks": tasks}
    (run / "summary.json").write_text(json.dumps(summary), encoding="utf-8")
    return run


@pytest.fixture
def parent(tmp_path: Path) -> Path:
    """A run of each state, the oldest first."""
    parent = tmp_path / "runs"
    for name, stop in (("done", FINISHED), ("broken", FAILED), ("halted", SLOW), ("wild", DIVERGED), ("killed", None)):
        write(parent / name, text_lines(), recipe="pos_bert_tiny", stop=stop)
    write(parent / "sweep" / "seed_0", image_lines(), recipe="mae_tiny", stop=FINISHED)
    end(parent / "done")
    for age, name in enumerate(("sweep/seed_0", "killed", "wild", "halted", "broken", "done")):
        for path in (parent / name).iterdir():
            os.utime(path, (time.time() - 7200 * age - 100,) * 2)
    return parent


def test_runs_of_every_state_are_listed_newest_first(parent: Path) -> None:
    listed = rows(list_runs(parent))
    assert [(row[0], row[2], row[-1]) for row in listed] == [
        ("sweep/seed_0", "finished", "2 min"),
        ("killed", "end not known", "2 h"),
        ("wild", "diverged", "4 h"),
        ("halted", "stopped", "6 h"),
        ("broken", "failed", "8 h"),
        ("done", "finished", "10 h"),
    ]
    assert {row[1] for row in listed} == {"pos_bert_tiny", "mae_tiny"} and {row[3] for row in listed} == {"20/20"}


def test_the_worst_task_is_that_of_the_report_or_of_the_last_line(parent: Path) -> None:
    history = read_history(parent / "done")
    assert history.worst_task is not None
    assert worst_of(parent / "done") == (history.worst_task, history.tasks[history.worst_task].end)
    last = list(text_lines())[-1]["tasks"]
    assert worst_of(parent / "killed") == ("noun", last["noun"]["loss"])


def test_a_run_that_goes_on_after_its_summary_shows_the_last_line(parent: Path) -> None:
    run = end(write(parent / "more", text_lines(5), recipe="pos_bert_tiny"))
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(line(6, {"noun": task(3.25)})) + '\n{"step": 7, "tor')
    with Lease(run):
        assert read_row(run, "more")[2:4] == ["running", "6/5"]
        assert worst_of(run) == ("noun", 3.25)


def test_damaged_and_foreign_directories_are_counted(parent: Path) -> None:
    (parent / "other" / "deep").mkdir(parents=True)
    write(parent / "torn", text_lines(), recipe="pos_bert_tiny")
    (parent / "torn" / "config.yaml").write_text("a: [", encoding="utf-8")
    write(parent / "odd", text_lines(), recipe="pos_bert_tiny")
    (parent / "odd" / "metrics.jsonl").write_text('{"step": 1, "tasks": [3]}\n', encoding="utf-8")
    (parent / "hydra").mkdir()
    (parent / "hydra" / "config.yaml").write_text("lr: 1\n", encoding="utf-8")
    table = list_runs(parent)
    assert len(table.rows) == 6 and list(table.notes) == ["directories skipped: 3 damaged, 1 without a run"]


def test_what_is_inside_a_run_is_not_searched(parent: Path) -> None:
    write(parent / "done" / "checkpoints" / "copy", text_lines(), recipe="pos_bert_tiny")
    assert len(list(find_runs(parent))) == 6
    assert rows(list_runs(parent / "done"))[0][0] == "."


def test_the_table_fits_80_columns(
    parent: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (parent / "done").rename(parent / "pos_bert_tiny-20260101-120000")
    monkeypatch.chdir(parent.parent)
    assert cli.main(["runs"]) == 0
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= 80
    assert all(word in printed for word in ("noun", "finished", "diverged"))


def test_no_such_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match="nowhere"):
        list_runs(tmp_path / "nowhere")
