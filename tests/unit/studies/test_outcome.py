"""What a study states, and by which rule."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from tests.runs import Refused
from tests.unit.studies.study_files import document, graph_of, run_here
from trp_scale.cli.main import main
from trp_scale.reporting.paired_tests import Difference, PairedTest, Spread
from trp_scale.reporting.results import SeedResult, TaskResult, join
from trp_scale.storage.files import write_json
from trp_scale.studies.execute import STUDY_FILE, Claim
from trp_scale.studies.graph import Graph
from trp_scale.studies.outcome import JudgeRow, VariantResult, describe_outcome, read_outcome, verdict
from trp_scale.studies.report import write_report


def cell(mean: float, corrected: float | None) -> VariantResult:
    test = PairedTest(seeds=5, p=0.01, test="t")
    return VariantResult(
        spread=Spread(mean=0.5, half=0.1, between=None, within=None, runs=5),
        difference=Difference(value=mean, error=0.05, test=test, corrected=corrected),
    )


def row(lower_is_better: bool) -> TaskResult:
    seed = SeedResult(task="t", metric="m", split="test", lower_is_better=lower_is_better, seed=0, metrics={"m": 0.5})
    return join([seed])


@pytest.mark.parametrize(
    ("mean", "corrected", "lower", "printed"),
    [
        (0.2, 0.049, False, "better"),
        (-0.2, 0.049, False, "worse"),
        (0.2, 0.049, True, "worse"),
        (-0.2, 0.049, True, "better"),
        (0.2, 0.05, False, "no difference seen"),
        (0.2, None, False, ""),
    ],
)
def test_the_verdict_is_a_rule(mean: float, corrected: float | None, lower: bool, printed: str) -> None:
    assert verdict(cell(mean, corrected), row(lower)) == printed


def run(tmp_path: Path, **scale: object) -> Graph:
    graph = graph_of(tmp_path, document(seeds=4, **scale))
    run_here(graph)
    return graph


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory) -> Graph:
    return run(tmp_path_factory.mktemp("judged"))


def test_worst_and_average_are_over_the_tasks_of_each_run(judged: Graph) -> None:
    outcome = read_outcome(judged)
    worst = outcome.figures[JudgeRow("glue", "worst")]["plain"]
    assert worst[2] == [
        pytest.approx(0.9 - 0.3 - 0.1 + 0.02 + 0.002 + 0.0005)
    ]  # the mean of two judgings of the hard task
    average = outcome.figures[JudgeRow("glue", "average")]["plain"]
    assert average[2] == [pytest.approx(0.9 - 0.15 - 0.1 + 0.02 + 0.002 + 0.0005)]


def test_the_report_states_the_outcome_and_has_every_table(tmp_path: Path) -> None:
    graph = run(tmp_path, variant_settings={"slow": {"optimizer.lr": 0.002}})
    text = write_report(graph, tmp_path / "report", "trp-scale study run x")
    assert "slow: better than plain by +0." in text
    assert "Pre-training pays here: plain over untrained +0.1" in text
    assert "tuning of runs | none" in text
    for title in ("Figures: glue", "Differences to the baseline", "What the paper prints", "Cost", "How it was run"):
        assert f"## {title}" in text
        assert f"<h2>{title}" in (tmp_path / "report" / "report.html").read_text()
        assert rf"\caption{{{title}" in (tmp_path / "report" / "report.tex").read_text()
    assert (tmp_path / "report" / "outcome.png").read_bytes().startswith(b"\x89PNG")
    figures = json.loads((tmp_path / "report" / "figures.json").read_text())
    assert {entry["row"] for entry in figures["figures"]} == {"easy", "hard", "average", "worst"}


@pytest.mark.exhaustive
def test_differences_may_be_taken_from_another_variant_at_equal_steps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], refused: Refused
) -> None:
    own = {"slow": {"optimizer.lr": 0.002, "masking.ratio": 2}}
    graph = run(tmp_path, variant_settings=own, budgets=["steps", "time"])
    claim = Claim(study=str(tmp_path / "study.yaml"), scale="cpu", inputs={"text": str(tmp_path)})
    write_json(graph.directory / STUDY_FILE, asdict(claim))
    words = ["study", "report", str(tmp_path / "study")]
    assert main(words) == 0 and "slow, equal time" in capsys.readouterr().out
    assert main([*words, "--baseline", "slow"]) == 0
    printed = capsys.readouterr().out
    assert "plain: worse than slow by -0." in printed and "equal time" not in printed
    assert "--baseline slow (the study's: plain)" in printed
    assert re.search(r"\| plain \| 100 \| [\d.]+ \| [\d.]+ \|", printed), "a variant before the baseline has a ratio"
    assert (tmp_path / "study" / "report_against_slow" / "README.md").is_file()
    assert "--baseline scratch: allowed: plain, slow" in refused(*words, "--baseline", "scratch")


def test_a_ground_that_is_seen_on_average_alone_is_said_so(judged: Graph) -> None:
    graph, outcome = judged, read_outcome(judged)
    outcome.outcome = JudgeRow("glue", "hard")
    cells, ground = outcome.cells, graph.study.ground

    def state(hard: Difference, average: Difference) -> str:
        for row, difference in (("hard", hard), ("average", average)):
            key = JudgeRow("glue", row)
            cells[key][ground] = replace(cells[key][ground], difference=difference)
        return "\n".join(describe_outcome(graph, outcome))

    def lead(p: float, value: float = -0.05, error: float = 0.1) -> Difference:
        return Difference(value=value, error=error, test=PairedTest(seeds=5, p=p, test="t"))

    text = state(lead(0.3), lead(0.004))
    assert "does not pay here" in text and "average over the tasks: +0.0500 (p 0.004)." in text
    assert "on average" not in state(lead(0.3), lead(0.02))
    assert "Pre-training" not in state(lead(1.0, value=0.0, error=0.0), lead(0.02))


def test_equal_figures_make_no_difference(judged: Graph) -> None:
    printed = "\n".join(describe_outcome(judged, read_outcome(judged)))
    assert "slow: no difference to plain seen" in printed


def test_a_failure_is_in_the_report(tmp_path: Path) -> None:
    graph = graph_of(tmp_path)
    run_here(graph, fails=["runs/slow"])
    text = write_report(graph, tmp_path / "report", "trp-scale study run x")
    assert "failed: runs/slow/seed\\_1" in text
    assert "this was to fail" in text
    assert "not run for runs/slow/seed\\_0" in text


def test_a_scale_with_other_judges_has_its_own_outcome(tmp_path: Path) -> None:
    graph = graph_of(tmp_path, document(outcome={"judges": ["glue"], "row": "hard"}))
    run_here(graph)
    assert graph.study.outcome.row == "worst"
    assert read_outcome(graph).outcome == JudgeRow("glue", "hard")


def test_a_second_measurement_of_one_variants_task_does_not_take_the_outcome_from_the_others(tmp_path: Path) -> None:
    """As a probe has it, of a run with learned masks alone."""
    graph = graph_of(tmp_path, document(seeds=3))
    run_here(graph, own_head=True)
    outcome = read_outcome(graph)
    assert outcome.outcome == JudgeRow("glue", "easy")
    assert set(outcome.cells[outcome.outcome]) == {"scratch", "plain", "slow"}
    assert JudgeRow("glue", "average") not in outcome.figures
    assert outcome.figures[JudgeRow("glue", "own head")].keys() == {"slow"}
    assert any("no difference to plain" in line for line in describe_outcome(graph, outcome))


def test_a_task_with_too_few_rows_is_in_no_average_and_never_the_worst(tmp_path: Path) -> None:
    study = document(seeds=2)
    study["scales"]["cpu"]["judges"]["glue"]["left_out"] = ["hard"]
    graph = graph_of(tmp_path, study)
    run_here(graph)
    outcome = read_outcome(graph)
    assert set(outcome.figures) == {JudgeRow("glue", "easy"), JudgeRow("glue", "hard")}
    assert outcome.outcome == JudgeRow("glue", "easy")  # the worst of one task is that task
