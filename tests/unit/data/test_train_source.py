"""Splitting a global batch."""

from __future__ import annotations

import pytest

from trp_scale.config import RefusedError
from trp_scale.data.train_source import check_partition


def test_accumulation_is_derived() -> None:
    assert check_partition(256, 32, 1) == 8
    assert check_partition(256, 32, 8) == 1
    assert check_partition(12, 2, 3) == 2


def test_message_names_what_does_divide() -> None:
    with pytest.raises(RefusedError, match=r": 1, 2, 4, 8;.*on 3 ranks: none"):
        check_partition(256, 32, 3)
    with pytest.raises(RefusedError, match=r": none;.*on 2 ranks: 1, 2, 3, 6 "):
        check_partition(12, 5, 2)
    with pytest.raises(RefusedError, match=": 1, 2"):  # smaller than one round
        check_partition(8, 4, 4)


@pytest.mark.parametrize(
    ("sizes", "name"), [((0, 1, 1), "global_size"), ((1, 0, 1), "micro_size"), ((1, 1, 0), "world")]
)
def test_sizes_are_positive(sizes: tuple[int, int, int], name: str) -> None:
    with pytest.raises(RefusedError, match=name):
        check_partition(*sizes)
