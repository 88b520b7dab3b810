"""Alternating measurement: A, B, A, B, ... in one process, so that a noisy machine disturbs both alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Medians over the rounds, in seconds of one call: on the clock, and of processor time."""

    wall: float
    cpu: float


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
    return {name: Measured(wall=statistics.median(wall[name]), cpu=statistics.median(cpu[name])) for name in candidates}


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
