"""`examples/theory.py` prints and draws TRP's statements, and they hold where they are proved."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
import torch
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
    for name in (
        "Theorem 3.1",
        "Proposition 5.1",
        "Remark 5.2",
        "Proposition 5.3",
        "Theorem 5.4",
        f"alpha {findings.slope:.3f}",
    ):
        assert name in printed
    last = findings.excesses[-1]
    row = next(line for line in printed.splitlines() if re.match(r" +1,000 ", line))
    assert row.split() == ["1,000", *(f"{value:.4g}" for value in last[1:])]
    with Image.open(tmp_path / "new" / "theory.png") as picture:
        assert picture.size == (1100, 1200) and len(picture.convert("RGB").getcolors(1 << 24)) > 100


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


def test_samples_stay_below_eq_13_and_its_bound_is_lower_from_the_maximum(findings: Findings) -> None:
    for row in findings.samples:
        risk = 1 / ((row.tasks - 1) ** 0.5 + 1) ** 2  # of the maximum, divided by A
        for bound, least in ((row.bound_maximum, risk), (row.bound_uniform, 0.25)):
            radius = (2 / (2 / (row.tasks - 1)) * least) ** 0.5
            net = math.log(1 + 16 * 3.8 / 0.01 * radius)
            assert bound == pytest.approx(8 * 1.9**2 / 0.01**2 * (net + math.log(2 / 0.05)))
        assert 1 < row.maximum <= row.uniform < row.bound_maximum < row.bound_uniform
    first, last = findings.samples[0], findings.samples[-1]
    gaps = [row.bound_uniform - row.bound_maximum for row in findings.samples]
    assert gaps == sorted(gaps) and last.bound_maximum / first.bound_maximum < 1.05 < 1.1 < last.bound_uniform / 3.48e6


def test_the_counted_samples_are_those_of_drawn_ones() -> None:
    """T = 3, the half of the first task: empirical minimisers of drawn samples, within the ball from the average."""
    first, second, a = 0.5, 0.25, 2.0
    needed = theory.count_samples(torch.tensor([first]).double(), torch.tensor([second]).double(), 0.5, a)
    optimum = first / (first + second)
    radius = (a * (first * 0.25 + second * 0.25)) ** 0.5
    generator = torch.Generator().manual_seed(0)
    failures = []
    for count in (needed - 1, needed):
        factors = 0.1 + 1.8 * torch.randint(2, (2, 100_000, count), generator=generator, dtype=torch.float64)
        one, other = first * factors[0].mean(1), second * factors[1].mean(1)
        points = (one / (one + other)).clamp(optimum - radius, optimum + radius)
        excess = (first + second) * (points - optimum).square()
        failures.append(float((excess > 0.01).double().mean()))
    assert failures[1] < 0.052 and failures[0] > 0.048 and needed > 5


def test_too_few_steps_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refusal:
        theory.main(["--steps", "9", "--output", str(tmp_path / "x.png")])
    assert refusal.value.code == 2
    assert "--steps is 9" in capsys.readouterr().err
    assert not (tmp_path / "x.png").exists()
