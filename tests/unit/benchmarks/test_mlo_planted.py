"""benchmarks/mlo_planted.py: a row for each seed (the figures are in test_planted_problem.py)."""

from __future__ import annotations

import pytest

from benchmarks.mlo_planted import Options, main, outcome


def test_both_runs_of_a_seed_start_from_the_same_weights_and_differ_after_it() -> None:
    at_once, later = outcome(0, steps=1), outcome(0, steps=3)
    assert at_once[0] == later[0]
    assert 0.0 <= later[4] <= 1.0 and later[3] == later[2] - later[1]


def test_the_table_has_a_row_for_each_seed(capsys: pytest.CaptureFixture[str]) -> None:
    main(Options(seeds=2, steps=1))
    rows = [line.split("│")[1].strip() for line in capsys.readouterr().out.splitlines() if line.startswith("│")]
    assert rows == ["0", "1", "mean"]
