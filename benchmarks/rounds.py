"""Alternating measurement: A, B, A, B, ... in one process, so that a noisy machine disturbs both alike; and
measurement on several ranks."""

from __future__ import annotations

import os
import socket
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.multiprocessing as multiprocessing
from rich.console import Console
from rich.table import Table

Answer = TypeVar("Answer")


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Seconds of a call in each round: on the clock, and of processor time."""

    walls: tuple[float, ...]
    cpus: tuple[float, ...]

    @property
    def wall(self) -> float:
        return statistics.median(self.walls)

    @property
    def cpu(self) -> float:
        return statistics.median(self.cpus)


@dataclass(frozen=True, kw_only=True)
class PairRatio:
    """Ratio of two candidates within the same round, over all rounds: what disturbs both of a pair cancels.

    Attributes:
        median, lower, upper: the median of the ratios, and its 95 % interval by order statistics (no distribution is
            assumed; the whole range where there are fewer than six rounds).
    """

    median: float
    lower: float
    upper: float

    def __str__(self) -> str:
        return f"{self.median:.3f} ({self.lower:.3f} to {self.upper:.3f})"


def pair_ratio(times: Sequence[float], base: Sequence[float]) -> PairRatio:
    """Return the ratios of `times` to `base`, round by round."""
    ratios = sorted(first / second for first, second in zip(times, base, strict=True))
    count = len(ratios)
    beyond = max(0, int((count - 1.96 * count**0.5) / 2))  # of the binomial with p = 1/2, normal approximation
    return PairRatio(median=statistics.median(ratios), lower=ratios[beyond], upper=ratios[count - 1 - beyond])


def time_call(call: Callable[[], object]) -> tuple[float, float]:
    """Return seconds of a call on the clock and of processor time."""
    _synchronise()
    began, began_cpu = time.perf_counter(), time.process_time()
    call()
    _synchronise()
    return time.perf_counter() - began, time.process_time() - began_cpu


def alternate(
    candidates: Mapping[str, Callable[[], Any]],
    *,
    rounds: int,
    warmup: int = 2,
    timer: Callable[[Callable[[], Any]], tuple[float, float]] = time_call,
) -> dict[str, Measured]:
    """Call every candidate once a round, in turn; each round begins with the next candidate.

    Args:
        candidates: calls by name.
        rounds: measured calls of each.
        warmup: calls of each before that.
        timer: makes a call and returns its seconds on the clock and of processor time.
    """
    for _ in range(warmup):
        for call in candidates.values():
            call()
    laps: dict[str, list[tuple[float, float]]] = {name: [] for name in candidates}
    order = list(candidates.items())
    for number in range(rounds):
        first = number % len(order)
        for name, call in order[first:] + order[:first]:
            laps[name].append(timer(call))
    return {
        name: Measured(walls=tuple(wall for wall, _ in seconds), cpus=tuple(cpu for _, cpu in seconds))
        for name, seconds in laps.items()
    }


def _synchronise() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def print_ratios(
    title: str, measured: Mapping[str, Measured], base: str, columns: Mapping[str, Mapping[str, str]] | None = None
) -> None:
    """Print a row for each candidate: its time, and the median ratio to `base` in the same round with its interval.

    Args:
        columns: further columns; a cell for each candidate by name.
    """
    table = Table(title=title, caption="intervals: 95 % of the median ratio of a round")
    columns = columns or {}
    for name in ("", "ms", f"over {base}", "by processor time", *columns):
        table.add_column(name, justify="right" if name else "left")
    for name, candidate in measured.items():
        clock = pair_ratio(candidate.walls, measured[base].walls)
        processor = pair_ratio(candidate.cpus, measured[base].cpus)
        cells = (column.get(name, "") for column in columns.values())
        table.add_row(name, f"{candidate.wall * 1e3:.1f}", str(clock), str(processor), *cells)
    Console(width=160).print(table)


def on_ranks(world: int, measure: Callable[..., Answer], *arguments: object) -> list[Answer]:
    """Return `measure(*arguments)` of each rank, in fresh processes of one thread whose ranks are in their environment.

    Raises:
        SystemExit: a rank failed.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    os.environ["OMP_NUM_THREADS"] = "1"  # read when the processes below start
    context = multiprocessing.get_context("spawn")
    answers = context.SimpleQueue()
    values = {"WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    ranks = [values | {"RANK": rank, "LOCAL_RANK": rank} for rank in range(world)]
    processes = [context.Process(target=_start, args=(rank, measure, arguments, answers)) for rank in ranks]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    if failed := [process.exitcode for process in processes if process.exitcode]:
        raise SystemExit(f"a rank of {world} ended with {failed}")
    by_rank = dict(answers.get() for _ in processes)
    return [by_rank[rank] for rank in range(world)]


def _start(rank: dict[str, object], measure: Callable[..., Any], arguments: tuple[object, ...], answers: Any) -> None:
    if rank["WORLD_SIZE"] != 1:
        os.environ.update({name: str(value) for name, value in rank.items()})
    torch.set_num_threads(1)
    answers.put((rank["RANK"], measure(*arguments)))
