"""Where a loader's time goes: shares of a profiled call, and what handing over to a worker's queue takes."""

from __future__ import annotations

import cProfile
import pstats
from collections.abc import Callable, Mapping

from trp_scale.data.sources import TrainSource


def breakdown(train: TrainSource, stages: Mapping[str, tuple[str, str]], rest: str) -> dict[str, float]:
    """Share of a profiled window's time by stage.

    Args:
        stages: file and function of each; none may call another.
        rest: name of what is in none of them.
    """
    profile = cProfile.Profile()
    profile.runcall(train.next_window)
    stats = pstats.Stats(profile).stats  # type: ignore[attr-defined]
    total = sum(own for _, _, own, _, _ in stats.values())
    seconds: dict[tuple[str, str], float] = {}
    for (file, _, name), (_, _, _, cumulated, _) in stats.items():
        # A plan's `locate` calls that of its orders, in the same file: the outer one counts for both.
        seconds[file, name] = max(cumulated, seconds.get((file, name), 0.0))
    shares = {stage: seconds.get(place, 0.0) / total for stage, place in stages.items()}
    return {**shares, rest: 1.0 - sum(shares.values())}


def handing_over(train: TrainSource) -> Callable[[], object]:
    """Packing and unpacking the batches of one window, as for a worker's queue."""
    window = train.next_window()
    return lambda: [batch.packed().unpacked() for batch in window]


def bytes_per_row(train: TrainSource) -> tuple[float, float]:
    """Of the tensors of one window, and of the buffers that they travel in."""
    window = train.next_window()
    rows = sum(batch.rows for batch in window)
    tensors = sum(tensor.nbytes for batch in window for tensor in (batch.keys, *batch.fields.values()))
    wires = [batch.packed().wire for batch in window]
    return tensors / rows, sum(wire.buffer.nbytes for wire in wires if wire is not None) / rows
