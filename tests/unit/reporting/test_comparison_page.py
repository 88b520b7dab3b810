"""Runs of pre-training and of downstream tasks in one table or on one page, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.runs import Refused
from tests.unit.reporting.small_runs import FINISHED, HOSTILE, curve_traces, image_lines, line, task, text_lines, write
from tests.unit.reporting.test_run import Read, check_plots, figures_of, titles_of
from trp_scale.cli import main as cli
from trp_scale.config import RefusedError
from trp_scale.console import figure_text
from trp_scale.reporting.comparison_page import compare, training_table
from trp_scale.reporting.record import read_run
from trp_scale.training.metrics import read_history


def results(run: Path, values: list[float]) -> Path:
    run.mkdir(parents=True, exist_ok=True)
    one = {
        "task": "classification",
        "metric": "accuracy",
        "split": "test",
        "lower_is_better": False,
        "seeds": list(range(len(values))),
        "values": values,
        "mean": sum(values) / len(values),
        "spread": 0.01,
        "metrics": {"accuracy": values},
    }
    content = {"recipe": "classification_tiny", "encoder": HOSTILE, "tasks": [one]}
    (run / "results.json").write_text(json.dumps(content), encoding="utf-8")
    return run


def compared(capsys: pytest.CaptureFixture[str], page: Path, *words: object) -> str:
    assert cli.main(["compare", *map(str, words), "--html", str(page)]) == 0
    printed = capsys.readouterr().out
    assert printed.splitlines()[-1] == str(page)
    return printed


def test_curves_of_pre_training_lie_over_each_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = write(tmp_path / "one", text_lines(), recipe="pos_bert_tiny", stop=FINISHED)
    other = write(tmp_path / "other", text_lines(12), recipe="pos_bert_tiny")
    page = tmp_path / "pages" / "compared.html"
    printed = compared(capsys, page, one, other)
    assert len(printed.splitlines()) == 1  # no results: no table of them
    text = page.read_text(encoding="utf-8")
    check_plots(text)
    read = Read(text)
    assert read.sections == ["end", "curves", "settings"]
    noun = figures_of(text)[titles_of(text).index("noun: training loss")]
    assert [(trace["name"], len(trace["x"])) for trace in curve_traces(noun)] == [("one", 20), ("other", 12)]
    assert "its elements" in read.words, "the worst task's loss stands beside what it is the mean of"
    assert "training.steps" in read.words and "model.layers" not in read.words
    assert "finished" in read.words and "end not known" in read.words


def test_results_and_curves_where_there_are_such(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write(tmp_path / "run", image_lines())
    judged, better = results(tmp_path / "judged", [0.5, 0.6, 0.55]), results(tmp_path / "better", [0.7, 0.82, 0.76])
    page = tmp_path / "compared.html"
    printed = compared(capsys, page, judged, better, run)
    assert cli.main(["compare", str(judged), str(better)]) == 0
    assert printed == capsys.readouterr().out + f"{page}\n"
    text = page.read_text(encoding="utf-8")
    read = Read(text)
    assert read.sections == ["results", "end", "curves"] and "better less judged" in read.words
    assert HOSTILE not in text and HOSTILE in read.words


def test_a_run_has_one_name_on_the_whole_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = results(tmp_path / "a" / "x", [0.5, 0.6, 0.55]), results(tmp_path / "c" / "y", [0.7, 0.82, 0.76])
    write(tmp_path / "b" / "x", image_lines())
    page = tmp_path / "compared.html"
    compared(capsys, page, first, tmp_path / "b" / "x", second)
    assert "c/y less a/x" in Read(page.read_text(encoding="utf-8")).words


def test_a_task_that_one_run_lacks_has_a_line_less(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = write(tmp_path / "one", (line(step, {"a": task(1.0), "b": task(2.0)}) for step in (1, 2)))
    other = write(tmp_path / "other", (line(step, {"a": task(1.0)}) for step in (1, 2)))
    compared(capsys, tmp_path / "page.html", one, other)
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert [len(figure["data"]) for figure in figures_of(text)] == [2, 1]


def test_what_cannot_be_compared_is_refused(tmp_path: Path, refused: Refused) -> None:
    run = write(tmp_path / "run", image_lines(2))
    (tmp_path / "empty").mkdir()
    for words, message in (
        ([run, tmp_path / "empty"], "empty has neither results.json nor metrics.jsonl"),
        ([run, run], "run is given twice"),
    ):
        assert message in refused("compare", *words, "--html", tmp_path / "page.html")
    assert f"--html {run} cannot be written" in refused("compare", run, "--html", run)
    assert "empty" in refused("compare", run, tmp_path / "empty")


def rows_of(**runs: Path) -> dict[str, list[str]]:
    table = training_table({name: read_run(path) for name, path in runs.items()})
    return {cells[0].text: [cell.text for cell in cells[1:]] for cells in table.cells()}


def test_runs_of_pre_training_are_a_table_of_80_columns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = write(tmp_path / "pos_bert_tiny-20260101-120000", text_lines(), recipe="pos_bert_tiny", stop=FINISHED)
    other = write(tmp_path / "pos_bert_tiny-20260102-120000", text_lines(12), recipe="pos_bert_tiny")
    assert cli.main(["compare", str(one), str(other)]) == 0
    printed = capsys.readouterr().out
    assert max(map(len, printed.replace(str(tmp_path), "").splitlines())) <= 80
    rows = rows_of(a=one, b=other)
    assert rows["end"] == ["finished", "end not known"] and rows["steps"] == ["20", "12"]
    worst = read_history(one).tasks["noun"].end
    assert rows["noun"][0] == f"{figure_text(worst)} worst" and rows["worst task"][0] == figure_text(worst)
    assert rows["tokens/s"] == ["1,010", "1,006"]


def test_images_have_images_per_second_and_figures_of_results_are_refused(tmp_path: Path) -> None:
    run = write(tmp_path / "run", image_lines(), recipe="mae_tiny", stop=FINISHED)
    rows = rows_of(run=run)
    assert rows["images/s"] == ["40.50"] and "tokens/s" not in rows and "worst task" not in rows
    with pytest.raises(RefusedError, match=r"figures\.csv"):
        compare([run], csv=tmp_path / "figures.csv")
