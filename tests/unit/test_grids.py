"""What a grid leaves to the exhaustive run, and what it never leaves out."""

from __future__ import annotations

import pytest

from tests.grids import always, grid


def test_each_value_is_always_run_and_no_combination_is_lost() -> None:
    made = grid("abc", range(5), [True, False])
    kept = [each.values for each in made if not each.marks]
    assert len({each.values for each in made}) == 3 * 5 * 2 and len(kept) == 5
    for place, axis in enumerate(("abc", range(5), [True, False])):
        assert {values[place] for values in kept} == set(axis)


def test_the_named_values_are_always_run_and_none_is_lost() -> None:
    made = always([("ddp", 1), ("fsdp", 1), ("fsdp", 2)], ("fsdp", 1))
    assert [each.values for each in made] == [("ddp", 1), ("fsdp", 1), ("fsdp", 2)]
    assert [bool(each.marks) for each in made] == [True, False, True]
    with pytest.raises(ValueError, match=r"no values of this test: .*zero1"):
        always(["ddp", "fsdp"], "zero1")
