"""`examples/theory.py` prints and draws TRP's statements, and they hold where they are proved."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from PIL import Image

from examples import theory
from examples.theory import Findings

STEPS = 1000


@pytest.fixture(scope="module")
def findings() -> Findings:
    return Findings.measure(STEPS)


def test_the_script_prints_the_numbers_and_draws_them(
    findings: Findings, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Findings, "measure", lambda steps: findings)
    theory.main(["--output", str(tmp_path / "new" / "theory.png"), "--steps", str(STEPS)])
    printed = capsys.readouterr().out
    for name in ("Theorem 3.1", "Proposition 5.1", "Remark 5.2", "Proposition 5.3", f"alpha {findings.slope:.3f}"):
        assert name in printed
    last = findings.excesses[-1]
    row = next(line for line in printed.splitlines() if re.match(r" +1,000 ", line))
    assert row.split() == ["1,000", *(f"{value:.4g}" for value in last[1:])]
    with Image.open(tmp_path / "new" / "theory.png") as picture:
        assert picture.size == (1100, 800) and len(picture.convert("RGB").getcolors(1 << 24)) > 100


def test_the_theorem_s_alpha_keeps_the_bound_and_its_rate_and_others_break_it(findings: Findings) -> None:
    assert [row.steps for row in findings.excesses] == [32, 100, 316, 1000]
    assert all(row.theorem <= row.bound == pytest.approx(2 / row.steps**0.5) for row in findings.excesses)
    assert -0.75 < findings.slope < -0.4
    assert all(row.uniform > row.one > row.bound for row in findings.excesses[1:])


def test_the_maximum_is_the_best_start_for_the_worst_downstream_task(findings: Findings) -> None:
    for row in findings.starts:
        assert row.maximum == pytest.approx(1.0, abs=1e-9)
        assert 1.0 < row.one < row.uniform


def test_the_average_falls_behind_as_tasks_are_added(findings: Findings) -> None:
    for row in findings.gaps:
        assert row.uniform == pytest.approx(row.closed, rel=0.01)
        assert 1.0 <= row.theorem < row.one < row.uniform
    first, last = findings.gaps[0], findings.gaps[-1]
    assert last.uniform / first.uniform > 0.5 * last.tasks / first.tasks


def test_descent_stays_within_its_radius_for_the_promised_step_sizes(findings: Findings) -> None:
    largest = {row.eta: max(row.shares) for row in findings.radii}
    assert all(share <= 1 for eta, share in largest.items() if eta <= 1) and min(largest) <= 1
    assert largest[2.1] > 1, "a step size that diverges would be noticed"


def test_too_few_steps_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refusal:
        theory.main(["--steps", "9", "--output", str(tmp_path / "x.png")])
    assert refusal.value.code == 2
    assert "--steps is 9" in capsys.readouterr().err
    assert not (tmp_path / "x.png").exists()
