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
    with pytest.raises(
        RefusedError, match="does not divide over 3 ranks x micro-batch 32: ranks that do: 1, 2, 4, 8;"
    ) as error:
        check_partition(256, 32, 3)
    assert "on 3 ranks: none" in str(error.value)
    with pytest.raises(RefusedError, match="ranks that do: none; micro-batches that do on 2 ranks: 1, 2, 3, 6 "):
        check_partition(12, 5, 2)


def test_a_global_batch_smaller_than_one_round_is_refused() -> None:
    with pytest.raises(RefusedError, match="ranks that do: 1, 2"):
        check_partition(8, 4, 4)


@pytest.mark.parametrize(
    ("sizes", "name"), [((0, 1, 1), "global_size"), ((1, 0, 1), "micro_size"), ((1, 1, 0), "world")]
)
def test_sizes_are_positive(sizes: tuple[int, int, int], name: str) -> None:
    with pytest.raises(RefusedError, match=name):
        check_partition(*sizes)
