"""Grids of which every test run takes a diagonal, and `make test-exhaustive` the rest."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product
from typing import Any

import pytest


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
