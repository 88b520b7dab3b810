"""What a grid leaves to the exhaustive run, and what it never leaves out."""

from __future__ import annotations

from tests.grids import grid


def test_each_value_is_always_run_and_no_combination_is_lost() -> None:
    made = grid("abc", range(5), [True, False])
    always = [each.values for each in made if not each.marks]
    assert len({each.values for each in made}) == 3 * 5 * 2 and len(always) == 5
    for place, axis in enumerate(("abc", range(5), [True, False])):
        assert {values[place] for values in always} == set(axis)
