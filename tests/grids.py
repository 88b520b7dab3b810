"""Which of a test's parameters every run takes; `make test-exhaustive` takes the rest."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product
from typing import Any

import pytest


def always(values: Iterable[Any], *kept: Any) -> list[Any]:
    """The values as parameters of a test. Those in `kept` are always run, the others are marked exhaustive.

    Raises:
        ValueError: one in `kept` is no value.
    """
    rows = [value if isinstance(value, tuple) else (value,) for value in values]
    taken = [value if isinstance(value, tuple) else (value,) for value in kept]
    if missing := [value for value in taken if value not in rows]:
        raise ValueError(f"no values of this test: {missing}")
    return [pytest.param(*row, marks=() if row in taken else pytest.mark.exhaustive) for row in rows]


def grid(*axes: Iterable[Any]) -> list[Any]:
    """All combinations as parameters of a test. Each value of each axis is in a combination that is always run; the
    others are marked exhaustive."""
    values = [list(axis) for axis in axes]
    kept = {tuple(number % len(axis) for axis in values) for number in range(max(map(len, values)))}
    return [
        pytest.param(
            *(axis[place] for axis, place in zip(values, places, strict=True)),
            marks=() if places in kept else pytest.mark.exhaustive,
        )
        for places in product(*(range(len(axis)) for axis in values))
    ]
