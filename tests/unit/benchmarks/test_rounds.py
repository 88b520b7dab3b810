"""Ratios of alternating measurements."""

from __future__ import annotations

import pytest

from benchmarks.rounds import Measured, alternate, pair_ratio, print_ratios


def test_what_disturbs_both_of_a_pair_cancels() -> None:
    base = [1.0, 10.0, 2.0, 40.0, 3.0]
    times = [1.1 * one for one in base]
    ratio = pair_ratio(times, base)
    assert (ratio.median, ratio.lower, ratio.upper) == pytest.approx((1.1, 1.1, 1.1))


def test_the_interval_holds_the_middle_of_the_ratios() -> None:
    ratio = pair_ratio([1.0 + 0.01 * number for number in range(51)], [1.0] * 51)
    assert ratio.median == pytest.approx(1.25)
    # Of 51 fair coins, between 19 and 32 show heads with 95 %: (51 - 1.96 sqrt 51) / 2 = 18.5.
    assert (ratio.lower, ratio.upper) == pytest.approx((1.18, 1.32))
    few = pair_ratio([1.0, 3.0, 2.0], [1.0, 1.0, 1.0])
    assert (few.median, few.lower, few.upper) == (2.0, 1.0, 3.0)


def test_every_candidate_is_called_in_every_round(capsys: pytest.CaptureFixture[str]) -> None:
    calls: list[str] = []
    measured = alternate({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, rounds=3, warmup=1)
    assert "".join(calls) == "ab" + "ab" + "ba" + "ab"
    assert all(len(one.walls) == len(one.cpus) == 3 for one in measured.values())
    print_ratios("", {"a": Measured(walls=(3.0,), cpus=(2.0,)), "b": Measured(walls=(2.0,), cpus=(4.0,))}, "b")
    printed = capsys.readouterr().out
    assert "1.500 (1.500 to 1.500)" in printed and "0.500 (0.500 to 0.500)" in printed
