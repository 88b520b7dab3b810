"""What all ranks must agree on before a step: counts of the global batch, requests to stop, unreadable blocks.

It travels in one small all-reduce on the host, so that reading the answer never waits for the accelerator. At start the
ranks compare their settings.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trp_scale.config import Config, RefusedError
from trp_scale.core.batch import Batch
from trp_scale.data.index import DataError
from trp_scale.distributed.groups import Group
from trp_scale.recipes.loader import flat, to_dict


@dataclass(kw_only=True)
class Agreed:
    """The same on every rank.

    Attributes:
        counts: [T] float64 on the host, elements of each task in the global batch.
        stop: some rank was asked to stop: this step is the last.
        new_corrupt: keys of blocks found unreadable in this global batch and not before.
    """

    counts: Tensor
    stop: bool
    new_corrupt: list[str]


def require_same_settings(world: Group, config: Config) -> None:
    """Check at start that all ranks were started with the same settings; others would lead them into different
    collectives, where they wait for each other.

    Raises:
        RefusedError: on every rank, naming each setting that differs and its value on each rank.
    """
    settings = world.gather_objects(flat(to_dict(config)))
    differing = [
        f"{name}: " + ", ".join(f"rank {rank} has {each.get(name)}" for rank, each in enumerate(settings))
        for name in dict.fromkeys(name for each in settings for name in each)
        if any(each.get(name) != settings[0].get(name) for each in settings)
    ]
    if differing:
        listed = "\n  ".join(differing)
        raise RefusedError(f"the ranks were started with different settings:\n  {listed}\nStart all with one command")


class StepAgreement:
    """One per run.

    Args:
        group: all ranks.
        max_corrupt_blocks: unreadable blocks allowed before the run stops on all ranks.
    """

    def __init__(self, group: Group, max_corrupt_blocks: int) -> None:
        self.group = group
        self.max_corrupt_blocks = max_corrupt_blocks
        self.corrupt: set[str] = set()

    def reach(self, counts: Tensor, window: Sequence[Batch], *, stop: bool) -> Agreed:
        """Sum counts over the ranks and hear every rank's wishes.

        Args:
            counts: [T] float64 on the host, of this rank's window.
            window: this rank's micro-batches.
            stop: this rank was asked to stop.

        Raises:
            DataError: on every rank, when more blocks than allowed could not be read; names them.
        """
        found = {key for micro in window for key in micro.corrupt} - self.corrupt
        answer = self.group.sum(
            torch.cat([counts, torch.tensor([float(stop), float(len(found))], dtype=torch.float64)])
        )
        new = self.count_corrupt(found) if answer[-1] > 0 else []
        return Agreed(counts=answer[:-2], stop=bool(answer[-2] > 0), new_corrupt=new)

    def count_corrupt(self, found: set[str]) -> list[str]:
        """Gather the blocks that could not be read, on all ranks together; rare, or after a validation.

        Args:
            found: keys this rank met; those known already do not count again.

        Returns:
            the new ones of all ranks, once each.

        Raises:
            DataError: on every rank, when there are now more than allowed.
        """
        new = sorted(set().union(*self.group.gather_objects(found)) - self.corrupt)
        self.corrupt.update(new)
        if len(self.corrupt) > self.max_corrupt_blocks:
            raise DataError(
                f"{len(self.corrupt)} blocks could not be read ({', '.join(sorted(self.corrupt))}); "
                f"--data.max_corrupt_blocks allows {self.max_corrupt_blocks}; "
                "trp-scale verify names the damaged bytes"
            )
        return new
