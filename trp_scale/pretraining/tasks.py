"""Tasks by source: the rows of each member of a mixture are a task of their own (`objective.tasks`).

The mean loss of a source is over its own rows, so the share of a source in the batch changes how noisy its mean is, not
its weight.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trp_scale.config import RefusedError
from trp_scale.core.batch import Batch, membership
from trp_scale.data.mixture import parse_members
from trp_scale.data.plan import Addresses

SOURCE = "source"
"""Field of a batch: [R] int64, the number of each row's member of the mixture; only with tasks by source."""


def has_sources(config: Any) -> bool:
    """Whether `objective.tasks` separates sources."""
    return "sources" in config.objective.tasks


def source_names(config: Any) -> tuple[str, ...]:
    """Return the names of the sources that are separate tasks; empty if `objective.tasks` separates none.

    Raises:
        RefusedError: `data.path` has no mixture.
    """
    if not has_sources(config):
        return ()
    names = tuple(name for name, _, _ in parse_members(config.data.path))
    if len(names) < 2:
        raise RefusedError(
            f"--objective.tasks is {config.objective.tasks} but --data.path {config.data.path} has one data set; "
            "allowed: a mixture of two or more, such as 'books:0.7=DIR,wiki:0.3=DIR'"
        )
    return names


def source_field(config: Any, addresses: Addresses) -> dict[str, Tensor]:
    """Return the field SOURCE of the rows at `addresses`; nothing if `objective.tasks` separates no sources."""
    return {SOURCE: torch.from_numpy(addresses.member)} if has_sources(config) else {}


def blank_batch(config: Any, rows: int, fields: dict[str, Tensor]) -> Batch:
    """Return a batch of dummy rows with these fields, row weights, and SOURCE as `source_field`."""
    source = {SOURCE: torch.zeros(rows, dtype=torch.int64)} if has_sources(config) else {}
    fields = {**fields, "row_weights": torch.ones(rows), **source}
    return Batch(fields=fields, keys=torch.arange(rows), start=0)


def rows_by_source(batch: Batch, sources: int) -> Tensor:
    """Return [R, S] float64, 1 where a row is from a source."""
    return membership(batch[SOURCE], sources)


def join_names(sources: tuple[str, ...], tasks: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names of the tasks of each source, "SOURCE/TASK", source by source."""
    return tuple(f"{source}/{task}" for source in sources for task in tasks)
