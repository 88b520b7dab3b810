"""Runs side by side: which figures may share a row, and three forms of the table."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.runs import Refused
from trp_scale.cli import main as cli
from trp_scale.config import RefusedError
from trp_scale.reporting.comparison import (
    Comparison,
    RowKey,
    compare_results,
    names,
    result_tables,
    to_csv,
    to_markdown,
)
from trp_scale.reporting.paired_tests import holm, paired_test
from trp_scale.reporting.results import (
    RESULTS_FILE,
    SPEED,
    Results,
    SeedResult,
    TaskResult,
    join,
    read_seed,
    write_results,
)


def count_p_values(comparison: Comparison) -> int:
    return sum(difference.test is not None for difference in comparison.all_differences)


def task(
    name: str,
    values: list[float],
    *,
    metric: str = "accuracy",
    split: str = "dev",
    lower_is_better: bool = False,
    seeds: Sequence[int] = range(9),
    details: Sequence[dict[str, Any]] = ({},) * 9,
    **more: Sequence[float],
) -> TaskResult:
    """Results of one task, by seed; `more` are further metrics."""
    kind: dict[str, Any] = {"metric": metric, "split": split, "lower_is_better": lower_is_better}
    figures = [dict(zip((metric, *more), row, strict=True)) for row in zip(values, *more.values(), strict=True)]
    rows = zip(seeds, figures, details, strict=False)
    return join([SeedResult(task=name, seed=seed, metrics=row, detail=detail, **kind) for seed, row, detail in rows])


def run(*tasks: TaskResult, encoder: str = "encoder") -> Results:
    return Results(recipe="recipe", encoder=encoder, tasks=list(tasks))


def key(name: str, metric: str = "accuracy", split: str = "dev", lower: bool = False) -> RowKey:
    return RowKey(name, metric, split, lower)


def text_of(comparison: Comparison, width: int = 200) -> str:
    console = Console(file=io.StringIO(), width=width)
    with console.capture() as capture:
        comparison.show(console)
    return capture.get()


def test_one_seed_is_not_tested() -> None:
    with pytest.raises(ValueError, match=r"1.*least 2"):
        paired_test([0.1], [0.2])
    comparison = compare_results({"a": run(task("cola", [0.1])), "b": run(task("cola", [0.4]))})
    (difference,) = comparison.differences[key("cola")]
    assert difference is not None and difference.test is None and difference.corrected is None
    assert difference.value == pytest.approx(0.3)
    assert "fewer than 2 common seeds" in text_of(comparison)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_figures_that_are_not_finite_are_not_tested(value: float) -> None:
    comparison = compare_results({"a": run(task("x", [0.1, 0.2, 0.4])), "b": run(task("x", [value, value, 0.3]))})
    (difference,) = comparison.differences[key("x")]
    assert difference is not None and difference.test is None and not difference.is_significant
    assert "figures that are not finite" in text_of(comparison)


def test_p_values_are_corrected_over_all_tests_of_the_table() -> None:
    a = run(task("cola", [0.50, 0.52, 0.49]), task("rte", [0.60, 0.61, 0.66]))
    b = run(task("cola", [0.58, 0.61, 0.56]), task("rte", [0.62, 0.60, 0.69]))
    comparison = compare_results({"a": a, "b": b, "c": a})
    cola, rte = comparison.differences[key("cola")], comparison.differences[key("rte")]
    raw = [difference.test.p for difference in (*cola, *rte) if difference is not None and difference.test is not None]
    assert len(raw) == count_p_values(comparison) == 4
    assert [difference.corrected for difference in (*cola, *rte) if difference is not None] == pytest.approx(holm(raw))
    assert cola[0] is not None and cola[0].corrected == pytest.approx(4 * min(raw))
    assert "Holm-corrected for 4 tests" in text_of(comparison)
    alone = compare_results({"a": run(a.tasks[0]), "b": run(b.tasks[0])})
    assert "one test, uncorrected" in text_of(alone)
    (difference,) = alone.differences[key("cola")]
    assert difference is not None and difference.test is not None and difference.corrected == difference.test.p


def test_only_seeds_that_both_have_are_paired() -> None:
    a = run(task("cola", [0.5, 0.6, 0.9], seeds=[0, 1, 7]))
    b = run(task("cola", [0.66, 0.51, 0.1], seeds=[1, 0, 8]))
    comparison = compare_results({"a": a, "b": b})
    (difference,) = comparison.differences[key("cola")]
    assert difference is not None and difference.test is not None
    assert difference.test == paired_test([0.5, 0.6], [0.51, 0.66])
    assert difference.value == pytest.approx((0.66 + 0.51 + 0.1) / 3 - 2 / 3)
    assert "seeds differ between runs (cola)" in text_of(comparison)


def test_another_split_or_metric_is_never_in_the_same_row() -> None:
    a = run(task("cola", [0.5, 0.6], metric="matthews"), task("sst2", [0.9, 0.8]))
    b = run(task("cola", [0.7, 0.6], metric="accuracy"), task("sst2", [0.7, 0.8], split="test"))
    comparison = compare_results({"a": a, "b": b})
    assert list(comparison.rows) == [key("cola", "matthews"), key("cola"), key("sst2"), key("sst2", split="test")]
    assert all(None in row for row in comparison.rows.values())
    assert all(row == [None] for row in comparison.differences.values())
    assert count_p_values(comparison) == 0
    printed = text_of(comparison)
    assert "cola is not compared between these rows: matthews on dev (a); accuracy on dev (b)" in printed
    assert "sst2 is not compared between these rows: accuracy on dev (a); accuracy on test (b)" in printed


def test_the_worst_is_named_among_figures_of_one_kind() -> None:
    tasks = [
        task("sst2", [0.9]),
        task("cola", [0.4], metric="matthews"),
        task("photos", [0.2], split="test"),
        task("near", [0.1], metric="rmse", lower_is_better=True),
        task("far", [3.5], metric="rmse", lower_is_better=True),
        task("corrupted", [77.0], metric="mce", lower_is_better=True),
    ]
    comparison = compare_results({"a": run(*tasks)})
    assert comparison.worst == {(key("cola", "matthews"), 0), (key("far", "rmse", lower=True), 0)}
    assert [(summary.task, summary.split, values) for summary, values in comparison.summaries.items()] == [
        ("average", "dev", [pytest.approx(0.65)]),
        ("worst", "dev", [0.4]),
    ]
    printed = text_of(comparison)
    assert "0.4000 (1) worst" in printed and "3.5000 (1) worst" in printed and "77.0000 (1) worst" not in printed
    assert "rmse (lower is better)" in printed


def test_what_a_constant_prediction_reaches_stands_before_the_runs() -> None:
    both = run(task("x", [0.9], constant_accuracy=[0.625]), task("y", [0.5]))
    lines = to_markdown(compare_results({"old": run(task("x", [0.7])), "new": both})).splitlines()
    assert lines[0] == "| task | metric | on | constant | old | new |"
    assert lines[2].startswith("| x | accuracy | dev | 0.6250 | 0.7000 (1) |")
    assert lines[3].startswith("| y | accuracy | dev | - | - |") and lines[4].startswith("| average |  | dev |  | - |")
    assert "constant" not in to_markdown(compare_results({"old": run(task("x", [0.7]))}))
    older = SeedResult(task="x", metric="a", split="dev", lower_is_better=False, seed=1, metrics={"a": 0.5})
    newer = replace(older, seed=0, metrics={"a": 0.5, "constant_a": 0.1})
    assert join([newer, older]).metrics == {"a": [0.5, 0.5]}


def test_a_run_without_a_task_has_no_average() -> None:
    comparison = compare_results({"a": run(task("x", [0.5]), task("y", [0.7])), "b": run(task("y", [0.6]))})
    assert list(comparison.summaries.values()) == [[pytest.approx(0.6), None], [0.5, None]]
    assert comparison.worst == {(key("x"), 0)}
    more = compare_results(
        {"a": run(task("x", [0.5]), task("y", [0.7]), task("z", [0.9])), "b": run(task("y", [0.6]), task("z", [0.9]))}
    )
    assert "it lacks x" in text_of(more)


def test_a_figure_that_is_there_twice_is_refused() -> None:
    with pytest.raises(RefusedError, match="b: cola, accuracy on dev"):
        compare_results({"b": run(task("cola", [0.5]), task("cola", [0.6]))})


def test_markdown_and_csv_say_what_the_table_says() -> None:
    a = run(task("cola", [0.50, 0.52, 0.51]), task("my_task", [0.9, 0.91, 0.92]), encoder="here|there")
    b = run(task("cola", [0.601, 0.629, 0.611]), task("my_task", [0.9, 0.91, 0.92]))
    comparison = compare_results({"a": a, "b": b})
    lines = to_markdown(comparison).splitlines()
    assert lines[0] == "| task | metric | on | a | b |"
    assert lines[1] == "| --- | --- | --- | ---: | ---: |"
    assert lines[2].startswith(
        "| cola | accuracy | dev | **0.5100 ± 0.0100 (3) worst** | **0.6137 ± 0.0142 (3) worst** |"
    )
    assert "| my\\_task | accuracy | dev | 0.9100 ± 0.0100 (3) |" in lines[3]
    assert lines[4:6] == ["| average |  | dev | 0.7100 | 0.7618 |", "| worst |  | dev | 0.5100 | 0.6137 |"]
    corrected = [
        difference.corrected for row in comparison.differences.values() for difference in row if difference is not None
    ]
    assert corrected[0] is not None and corrected[0] < 0.05
    assert f"| cola | accuracy | dev | **+0.1037 (p {corrected[0]:.4f}, n 3)** |" in lines
    assert "| my\\_task | accuracy | dev | +0.0000 (p 1.0000, n 3) |" in lines
    assert any("here\\|there" in line for line in lines)

    rows = list(csv.DictReader(io.StringIO(to_csv(comparison))))
    assert [(row["task"], row["run"], row["worst"]) for row in rows] == [
        ("cola", "a", "true"),
        ("cola", "b", "true"),
        ("my_task", "a", "false"),
        ("my_task", "b", "false"),
    ]
    assert [float(value) for value in rows[1]["values"].split()] == [0.601, 0.629, 0.611]
    assert float(rows[1]["p_holm"]) == corrected[0] and rows[1]["paired_seeds"] == "3"
    assert rows[0]["difference"] == rows[0]["p"] == "" and rows[0]["split"] == "dev"
    assert float(rows[1]["difference"]) == pytest.approx(0.10366666666666666)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], refused: Refused) -> None:
    for name, values in (("a", [0.5, 0.52]), ("b", [0.6, 0.61])):
        (tmp_path / name).mkdir()
        write_results(tmp_path / name / RESULTS_FILE, run(task("cola", values)))
    files = ["--markdown", str(tmp_path / "out" / "table.markdown"), "--csv", str(tmp_path / "out" / "table.csv")]
    assert cli.main(["compare", str(tmp_path / "a"), str(tmp_path / "b"), *files]) == 0
    printed = capsys.readouterr().out
    assert "0.5100 ± 0.0141 (2)" in printed and "b less a" in printed
    assert (tmp_path / "out" / "table.markdown").read_text().startswith("| task |")
    assert (tmp_path / "out" / "table.csv").read_text().count("\n") == 3
    assert f"{tmp_path / RESULTS_FILE}: missing" in refused("compare", tmp_path / "a", tmp_path)
    assert "is given twice" in refused("compare", tmp_path / "a", tmp_path / "b" / ".." / "a")


def test_a_figure_that_is_not_a_number_is_refused(tmp_path: Path) -> None:
    write_results(tmp_path / RESULTS_FILE, run(task("cola", [float("nan"), 0.5])))
    assert "NaN" in (tmp_path / RESULTS_FILE).read_text()
    assert cli.main(["compare", str(tmp_path)]) == 2


def test_results_of_something_else_are_refused(tmp_path: Path, refused: Refused) -> None:
    good = task("x", [0.5, 0.6])
    uneven, words = run(replace(good, seeds=[0, 0])), run(replace(good, values=["0.5", "0.6"]))  # type: ignore[list-item]
    for content in ({"tasks": [{"name": "x"}]}, {"tasks": 3}, [1], asdict(uneven), asdict(words)):
        (tmp_path / RESULTS_FILE).write_text(json.dumps(content))
        assert "is not written by trp-scale" in refused("compare", tmp_path)
    (tmp_path / "result.json").write_text("{}")
    with pytest.raises(RefusedError, match="not written by this version of trp-scale finetune"):
        read_seed(tmp_path / "result.json")


def test_files_in_place_of_directories_are_refused(tmp_path: Path, refused: Refused) -> None:
    write_results(tmp_path / RESULTS_FILE, run(task("cola", [0.5])))
    assert f"{tmp_path / RESULTS_FILE} is a file" in refused("compare", tmp_path / RESULTS_FILE)
    for flag, path in (("--markdown", tmp_path), ("--csv", tmp_path / RESULTS_FILE / "x.csv")):
        assert f"{path} cannot be written" in refused("compare", tmp_path, flag, path)


def test_names_are_as_long_as_they_must_be(tmp_path: Path) -> None:
    paths = [tmp_path / "x" / "mae" / "run", tmp_path / "y" / "mae" / "run"]
    assert names(paths) == ["x/mae/run", "y/mae/run"]
    assert names(paths[:1]) == ["run"]


def test_a_task_of_few_elements_is_not_the_worst() -> None:
    parts = {"matched": {"rows": 30}, "mismatched": {"rows": 40}}
    few = task("few", [0.1], details=[{"images": 12}])
    both = run(few, task("many", [0.5], details=[parts]), task("more", [0.9], details=[{"elements": 99}]))
    comparison = compare_results({"a": both})
    assert comparison.worst == {(key("many"), 0)} and list(comparison.summaries.values())[1] == [0.5]
    assert to_markdown(comparison).splitlines()[2:4] == [
        "| few | accuracy | dev | 12 | 0.1000 (1) |",
        "| many | accuracy | dev | 70 | **0.5000 (1) worst** |",
    ]
    assert [row["count"] for row in csv.DictReader(io.StringIO(to_csv(comparison)))] == ["12", "70", "99"]
    rare = compare_results({"a": run(few, task("fewer", [0.2], details=[{"images": 2}]))})
    assert rare.worst == {(key("few"), 0)}, "where none has as many, all count"


def test_precision_recall_and_speed_of_detection_have_a_table_and_no_test() -> None:
    """Means over seeds; a run without them has gaps. Damaged speeds are not shown."""

    ap: dict[str, Any] = {"metric": "AP", "split": "test"}
    further = {"precision50": [0.2, 0.3], "recall50": [0.25] * 2, "other50": [1.0] * 2}
    measured = task("voc", [0.4, 0.6], details=[{SPEED: 10.0}, {SPEED: 20.0}], **ap, **further)
    comparison = compare_results({"a": run(measured), "b": run(task("voc", [0.1, 0.2], **ap))})
    _, table, _ = result_tables(comparison)
    assert [[cell.text for cell in cells] for cells in table.cells()] == [
        ["detection of voc", "a", "b"],
        ["precision50", "0.2500", "-"],
        ["recall50", "0.2500", "-"],
        ["images/s", "15.000", "-"],
    ]
    assert list(comparison.rows) == [key("voc", "AP", "test")] and count_p_values(comparison) == 1
    (_,) = result_tables(compare_results({"a": run(task("voc", [0.4]))}))
    fast = task("voc", [0.4], details=[{SPEED: "fast"}], precision50=[0.2], **ap)
    _, damaged = result_tables(compare_results({"a": run(fast)}))
    assert "images/s" not in damaged.to_markdown().splitlines()[-3]
