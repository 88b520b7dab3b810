"""Agreement of all ranks: on settings at the start; before each step on counts of the global batch, stop requests and
unreadable blocks.

The agreement travels in one small all-reduce on the host, so that reading the answer never waits for the accelerator.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trp_scale.config import Config, RefusedError
from trp_scale.config.loader import flat, to_dict
from trp_scale.core.batch import Batch
from trp_scale.distributed.groups import Group
from trp_scale.errors import UnreadableError

MOST_LISTED = 20
"""Unreadable blocks that a message names."""


@dataclass(kw_only=True)
class Agreed:
    """Agreement of a step, equal on every rank.

    Attributes:
        counts: [T] float64 on the host, elements of each task in the global batch.
        stop: some rank was asked to stop: this step is the last.
        without_rows: some rank was, and has no rows for this step: the step is not made.
        new_corrupt: why blocks of this global batch could not be read, by key; those that were not known before.
        written: every rank's part of the checkpoint that is under way is over.
    """

    counts: Tensor
    stop: bool
    new_corrupt: Mapping[str, str]
    without_rows: bool = False
    written: bool = False


def require_same_settings(world: Group, config: Config) -> None:
    """Check at start that all ranks were started with the same settings; others would lead them into different
    collectives, where they wait for each other.

    Raises:
        RefusedError: on every rank, naming each setting that differs and its value on each rank.
    """
    settings = world.gather_objects(flat(to_dict(config)))
    differing = [
        f"{name}: " + ", ".join(f"rank {rank} has {values.get(name)}" for rank, values in enumerate(settings))
        for name in dict.fromkeys(name for values in settings for name in values)
        if any(values.get(name) != settings[0].get(name) for values in settings)
    ]
    if differing:
        listed = "\n  ".join(differing)
        raise RefusedError(f"the ranks were started with different settings:\n  {listed}\nStart all with one command")


class StepAgreement:
    """One per run.

    Args:
        group: all ranks.
        max_corrupt_blocks: unreadable blocks allowed before the run stops on all ranks.
        max_corrupt_steps: steps in a row allowed that each meet such blocks.
        copies: ranks that read the same rows, as those of a tensor parallel group do.
    """

    def __init__(self, group: Group, max_corrupt_blocks: int, *, copies: int = 1, max_corrupt_steps: int = 10) -> None:
        self.group = group
        self.copies = copies
        self.max_corrupt_blocks, self.max_corrupt_steps = max_corrupt_blocks, max_corrupt_steps
        self.steps_in_a_row = 0
        self.corrupt: set[str] = set()

    def reach(self, counts: Tensor, window: Sequence[Batch], *, stop: bool, written: bool = False) -> Agreed:
        """Sum counts over the ranks and hear every rank's wishes.

        Args:
            counts: [T] float64 on the host, of this rank's window.
            window: this rank's micro-batches.
            stop: this rank was asked to stop.
            written: this rank's part of the checkpoint that is under way is over.

        Raises:
            UnreadableError: on every rank, when more blocks than allowed could not be read, or in more steps in a row;
                names them.
        """
        unreadable = {
            key: micro.reasons.get(key, "") for micro in window for key in micro.corrupt if key not in self.corrupt
        }
        values = [float(stop), float(not window), float(written), float(len(unreadable))]
        answer = self.group.sum(torch.cat([counts, torch.tensor(values, dtype=torch.float64)]))
        stops, without, parts, corrupt = answer[-4:].tolist()
        new = self.count_corrupt(unreadable) if corrupt > 0 else {}
        self.steps_in_a_row = self.steps_in_a_row + 1 if new else 0
        if self.steps_in_a_row > self.max_corrupt_steps:
            raise UnreadableError(
                f"{self.steps_in_a_row} steps in a row met unreadable blocks, the last one {_join_reasons(new)}; "
                f"--reliability.max_corrupt_steps allows {self.max_corrupt_steps}: is the storage there?"
            )
        return Agreed(
            counts=answer[:-4] / self.copies,
            stop=stops > 0,
            without_rows=without > 0,
            new_corrupt=new,
            written=parts == self.group.size,
        )

    def is_stop_requested(self, stop: bool) -> bool:
        """Whether some rank was asked to stop."""
        return bool(self.group.sum(torch.tensor(float(stop), dtype=torch.float64)) > 0)

    def reason(self, own_reason: str | None) -> str:
        """Return why the ranks stop, once they agreed to: the reason of the first rank that has one."""
        reasons = self.group.gather_objects(own_reason)
        rank, reason = next((entry for entry in enumerate(reasons) if entry[1]), (0, None))
        if reason is None:
            return "asked to stop"
        return reason if self.group.size == 1 else f"{reason} (rank {rank})"

    def count_corrupt(self, unreadable: Mapping[str, str]) -> dict[str, str]:
        """Gather the blocks that could not be read, on all ranks together; rare, or after a validation.

        Args:
            unreadable: why, by the keys this rank met; those known already do not count again.

        Returns:
            the new ones of all ranks, by key, in order.

        Raises:
            UnreadableError: on every rank, when there are now more than allowed.
        """
        of_all = {key: why for reasons in self.group.gather_objects(dict(unreadable)) for key, why in reasons.items()}
        new = {key: of_all[key] for key in sorted(of_all) if key not in self.corrupt}
        self.corrupt.update(new)
        if len(self.corrupt) > self.max_corrupt_blocks:
            others = sorted(self.corrupt - new.keys())
            reasons = _join_reasons({**dict.fromkeys(others, ""), **new})
            raise UnreadableError(
                f"{len(self.corrupt)} blocks could not be read ({reasons}); "
                f"--data.max_corrupt_blocks allows {self.max_corrupt_blocks}; "
                "trp-scale verify names the damaged bytes"
            )
        return new


def _join_reasons(reasons: Mapping[str, str]) -> str:
    """Keys with their reasons, as many as a person reads."""
    shown = [f"{key}: {why}" if why else key for key, why in list(reasons.items())[-MOST_LISTED:]]
    return ", ".join(shown) + (f" and {len(reasons) - MOST_LISTED} more" if len(reasons) > MOST_LISTED else "")
