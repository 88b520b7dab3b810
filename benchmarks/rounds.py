"""Alternating measurement: A, B, A, B, ... in one process, so that a noisy machine disturbs both alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Seconds of one call in each round: on the clock, and of processor time."""

    walls: tuple[float, ...]
    cpus: tuple[float, ...]

    @property
    def wall(self) -> float:
        """Median over the rounds."""
        return statistics.median(self.walls)

    @property
    def cpu(self) -> float:
        """Median over the rounds."""
        return statistics.median(self.cpus)


@dataclass(frozen=True, kw_only=True)
class PairRatio:
    """One candidate over another within the same round, over all rounds: what disturbs both of a pair cancels.

    Attributes:
        median, lower, upper: the median of the ratios, and its 95 % interval by order statistics (no distribution is
            assumed; the whole range where there are fewer than six rounds).
    """

    median: float
    lower: float
    upper: float


def pair_ratio(times: Sequence[float], base: Sequence[float]) -> PairRatio:
    """The ratios of `times` to `base`, round by round."""
    ratios = sorted(one / other for one, other in zip(times, base, strict=True))
    count = len(ratios)
    beyond = max(0, int((count - 1.96 * count**0.5) / 2))  # of the binomial with p = 1/2, normal approximation
    return PairRatio(median=statistics.median(ratios), lower=ratios[beyond], upper=ratios[count - 1 - beyond])


def alternate(candidates: Mapping[str, Callable[[], object]], *, rounds: int, warmup: int = 2) -> dict[str, Measured]:
    """Call every candidate once a round, in turn; each round begins with another one.

    Args:
        candidates: what to call, by name.
        rounds: how often each is measured.
        warmup: calls of each before that.
    """
    for _ in range(warmup):
        for call in candidates.values():
            call()
    wall: dict[str, list[float]] = {name: [] for name in candidates}
    cpu: dict[str, list[float]] = {name: [] for name in candidates}
    order = list(candidates.items())
    for number in range(rounds):
        first = number % len(order)
        for name, call in order[first:] + order[:first]:
            _synchronise()
            began, began_cpu = time.perf_counter(), time.process_time()
            call()
            _synchronise()
            wall[name].append(time.perf_counter() - began)
            cpu[name].append(time.process_time() - began_cpu)
    return {name: Measured(walls=tuple(wall[name]), cpus=tuple(cpu[name])) for name in candidates}


def _synchronise() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def print_ratios(measured: Mapping[str, Measured], base: str) -> None:
    """One line a candidate: time of a call, and the ratio to `base`."""
    for name, one in measured.items():
        other = measured[base]
        print(
            f"{name:<44} {one.wall * 1e3:9.1f} ms  {one.cpu * 1e3:9.1f} ms of processor  "
            f"ratio to {base}: {one.wall / other.wall:.3f} ({one.cpu / other.cpu:.3f} by processor time)"
        )


def print_pairs(measured: Mapping[str, Measured], base: str) -> None:
    """One line a candidate other than `base`: the median ratio to `base` in the same round, with its interval."""
    for name, one in measured.items():
        if name == base:
            continue
        clock = pair_ratio(one.walls, measured[base].walls)
        processor = pair_ratio(one.cpus, measured[base].cpus)
        print(
            f"{name} over {base}, {len(one.walls)} pairs: {clock.median:.4f} ({clock.lower:.4f} to {clock.upper:.4f}), "
            f"by processor time {processor.median:.4f} ({processor.lower:.4f} to {processor.upper:.4f})"
        )
