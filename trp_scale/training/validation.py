"""Losses over the held-out rows: sums and counts over the whole split, so that they do not depend on the ranks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from trp_scale.core.batch import Batch
from trp_scale.core.engine import Trains
from trp_scale.core.objective import Objective


@torch.no_grad()
def validate(engine: Trains, objective: Objective, batches: Iterable[Batch], corrupt: set[str]) -> dict[str, Any]:
    """Mean loss of each task over the split, without dropout; all ranks call it with as many batches.

    Args:
        corrupt: keys of blocks that could not be read are added to it.

    Returns:
        {"loss": mean over the balanced tasks that occur, or where none is balanced over all that do; None if none does,
         "worst_task": the balanced task with the largest loss,
         "tasks": {name: {"loss": mean over its elements or None, "count": elements}}}
    """
    engine.train(False)
    size = len(objective.tasks)
    sums = torch.zeros(2, size, dtype=torch.float64, device=engine.device)
    for batch in batches:
        corrupt.update(batch.corrupt)
        losses = objective(engine, batch.to(engine.device))
        sums += torch.stack([losses.sums, losses.counts])
    engine.train(True)
    totals, counts = engine.data_group.sum(sums).tolist()
    tasks = {
        name: {"loss": total / count if count else None, "count": int(count)}
        for name, total, count in zip(objective.tasks, totals, counts, strict=True)
    }
    places = objective.balanced or range(size)
    balanced = {name: tasks[name]["loss"] for name in (objective.tasks[place] for place in places)}
    known = {name: loss for name, loss in balanced.items() if loss is not None}
    return {
        "loss": sum(known.values()) / len(known) if known else None,
        "worst_task": max(known, key=lambda name: known[name]) if known else None,
        "tasks": tasks,
    }
