"""Whether two runs differ by more than their seeds do."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass

LEAST_SEEDS = 2
"""Fewest seeds of a paired test."""

ROUNDING = 1e-12
"""Differences that vary by less than this share of the largest figure are equal."""


@dataclass(frozen=True, kw_only=True)
class PairedTest:
    """A two-sided test of the differences, seed by seed.

    Attributes:
        seeds: n, that both runs have.
        p: not corrected.
        test: "t" the paired t-test; "sign" the sign test; "equal" nothing to test.
    """

    seeds: int
    p: float
    test: str


def can_test() -> bool:
    """Whether scipy is installed."""
    return importlib.util.find_spec("scipy") is not None


def paired_test(first: Sequence[float], second: Sequence[float]) -> PairedTest:
    """Paired t-test; where it is undefined, because all differences are the same, p is 1 if they are 0, and otherwise
    that of the exact sign test, 2^(1-n).

    Args:
        first, second: figures of the same seeds, two or more, all finite.
    """
    differences = [two - one for one, two in zip(first, second, strict=True)]
    count = len(differences)
    if count < LEAST_SEEDS:
        raise ValueError(f"{count} seeds that both runs have, at least {LEAST_SEEDS} allowed")
    size = ROUNDING * max(abs(value) for value in (*first, *second))
    if max(abs(difference) for difference in differences) <= size:
        return PairedTest(seeds=count, p=1.0, test="equal")
    if max(differences) - min(differences) <= size:
        return PairedTest(seeds=count, p=2.0 ** (1 - count), test="sign")
    from scipy.stats import ttest_rel

    return PairedTest(seeds=count, p=float(ttest_rel(second, first).pvalue), test="t")


def holm(values: Sequence[float]) -> list[float]:
    """Each p value corrected for there being several (Holm 1979), in the order given: the k-th smallest of m, from 0,
    times m - k, no smaller than the one before it, 1 at most."""
    corrected = [0.0] * len(values)
    largest = 0.0
    for rank, place in enumerate(sorted(range(len(values)), key=lambda place: values[place])):
        largest = max(largest, min(1.0, values[place] * (len(values) - rank)))
        corrected[place] = largest
    return corrected
