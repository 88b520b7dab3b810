"""benchmarks/mlo_planted.py: a row for each seed, and what they say (the figures are in test_planted_problem.py)."""

from __future__ import annotations

import pytest

from benchmarks.mlo_planted import main, outcome


def test_both_runs_of_a_seed_start_from_the_same_weights_and_differ_after_it() -> None:
    at_once, later = outcome(0, steps=1), outcome(0, steps=3)
    assert at_once.untrained == later.untrained
    assert 0.0 <= later.share_before <= 1.0 and later.margin == later.learned - later.random


def test_the_table_has_a_row_for_each_seed(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--seeds", "2", "--steps", "1"])
    rows = [line.split("│")[1].strip() for line in capsys.readouterr().out.splitlines() if line.startswith("│")]
    assert rows == ["0", "1", "mean"]
