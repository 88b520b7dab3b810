"""Collectives over a named group of ranks, which do nothing in a world of one. Actions that fail on one rank fail on
all ranks, so that no rank waits in a collective.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist
from torch import Tensor

from trp_scale.config import RefusedError
from trp_scale.errors import CheckpointError, ExitStatus, exit_status_and_message

T = TypeVar("T")


@dataclass(frozen=True)
class Group:
    """Group of ranks.

    Attributes:
        name: data, tensor or world.
        rank: rank of this process in the group.
        handle: torch's process group; None: the default group, or no group if size is 1.
    """

    name: str
    rank: int = 0
    size: int = 1
    handle: dist.ProcessGroup | None = None

    def sum(self, value: Tensor) -> Tensor:
        """Sum over the ranks, as a detached tensor; `value` has the same shape and type on every rank."""
        result = value.detach().clone()
        if self.size > 1:
            dist.all_reduce(result, op=dist.ReduceOp.SUM, group=self.handle)
        return result

    def max(self, value: Tensor) -> Tensor:
        """Elementwise maximum over the ranks."""
        result = value.detach().clone()
        if self.size > 1:
            dist.all_reduce(result, op=dist.ReduceOp.MAX, group=self.handle)
        return result

    def gather_objects(self, value: T) -> list[T]:
        """Return the `value` of every rank, in rank order. Slow: for start-up checks and checkpoints only."""
        if self.size == 1:
            return [value]
        values: list[T | None] = [None] * self.size
        dist.all_gather_object(values, value, group=self.handle)
        return values  # type: ignore[return-value]

    def broadcast_object(self, value: T) -> T:
        """Return rank 0's `value` on every rank."""
        return self.gather_objects(value)[0]

    def barrier(self) -> None:
        """Wait for all ranks of the group."""
        if self.size > 1:
            dist.barrier(group=self.handle)

    def require_equal(self, value: object, what: str) -> None:
        """Check that `value` is equal on all ranks.

        Raises:
            RuntimeError: on every rank, with `what` and the value of each rank.
        """
        values: Sequence[object] = self.gather_objects(value)
        if any(other != values[0] for other in values):
            listed = ", ".join(f"rank {rank}: {other!r}" for rank, other in enumerate(values))
            raise RuntimeError(f"{what} is not the same on all ranks of the {self.name} group: {listed}")


ALONE = Group("data")
"""Group of this process only."""


class StorageError(CheckpointError):
    """Storage failed (full, read-only or broken), and nothing else; a retry may succeed."""

    status = ExitStatus.STORAGE


class RankError(RuntimeError):
    """An unexpected error on at least one rank; raised on all ranks, with the failed ranks in its message."""


@dataclass(frozen=True)
class Failure:
    """Error of a rank, as sent to the other ranks.

    Attributes:
        refused: the message needs no traceback.
        complete: the message needs no rank and action as prefix.
        storage: storage failed.
        status: exit status of a refusal.
    """

    message: str
    refused: bool
    complete: bool
    storage: bool = False
    status: ExitStatus = ExitStatus.REFUSED

    @classmethod
    def from_error(cls, error: Exception) -> Failure:
        if isinstance(error, RefusedError):
            storage, status = isinstance(error, StorageError), exit_status_and_message(error)[0]
            return cls(str(error), refused=True, complete=True, storage=storage, status=status)
        storage = isinstance(error, OSError)
        return cls(f"{type(error).__name__}: {error}", refused=storage, complete=False, storage=storage)


def run_on_all_ranks(group: Group, what: str, action: Callable[[], T]) -> list[T]:
    """Run `action` on every rank and return the results of all ranks; `action` must not use collectives of the group.

    Raises (on every rank):
        StorageError: all failures are OSErrors.
        CheckpointError: all failures are refusals (RefusedError) or OSErrors.
        RankError: any other error, with `what`, the ranks and their messages.
    """
    result: T | None = None
    cause: Exception | None = None
    try:
        result = action()
    except Exception as error:  # the other ranks must receive any error before this rank exits
        cause = error
    gathered = group.gather_objects((None if cause is None else Failure.from_error(cause), result))
    failures = {rank: failure for rank, (failure, _) in enumerate(gathered) if failure is not None}
    if failures:
        messages = {failure.message for failure in failures.values()}
        refused: type[CheckpointError] = (
            StorageError if all(failure.storage for failure in failures.values()) else CheckpointError
        )
        kind = refused if all(failure.refused for failure in failures.values()) else RankError
        listed = "; ".join(f"rank {rank}: {failure.message}" for rank, failure in failures.items())
        text = f"{what} failed on {len(failures)} of {group.size} ranks: {listed}"
        if len(messages) == 1 and all(failure.complete for failure in failures.values()):
            kind, text = refused, messages.pop()
        failure = kind(text)
        if isinstance(failure, CheckpointError) and all(f.status is ExitStatus.FAILED for f in failures.values()):
            failure.status = ExitStatus.FAILED
        raise failure from cause
    return [value for _, value in gathered]  # type: ignore[misc]


def on_every_rank(group: Group, what: str, action: Callable[[], T]) -> T:
    """Run `action` on every rank and return this rank's result, which is not sent; errors as of `run_on_all_ranks`."""
    results: list[T] = []
    run_on_all_ranks(group, what, lambda: results.append(action()))
    return results[0]


def on_rank_zero(group: Group, what: str, action: Callable[[], T]) -> T:
    """Run `action` on rank 0 only; every rank gets its result, or its error as `run_on_all_ranks` raises it."""
    return run_on_all_ranks(group, what, lambda: action() if group.rank == 0 else None)[0]  # type: ignore[return-value]


def check_shared_directory(run_dir: Path, group: Group) -> None:
    """Check that all ranks see the same run directory.

    Raises (on every rank):
        RefusedError: `run_dir` is a file.
        CheckpointError: some ranks see another directory or none.
    """
    token = secrets.token_hex(16)

    def leave_token() -> tuple[str, str]:
        if run_dir.exists() and not run_dir.is_dir():
            raise RefusedError(f"{run_dir} is a file; allowed: a directory")
        run_dir.mkdir(parents=True, exist_ok=True)
        (run_dir / f".same_directory_{token}").write_text(token, encoding="ascii")
        return f".same_directory_{token}", token

    name, content = on_rank_zero(group, f"writing into {run_dir}", leave_token)
    path = run_dir / name
    try:
        seen = path.read_text(encoding="ascii") == content
    except OSError:
        seen = False
    blind = [rank for rank, sees in enumerate(group.gather_objects(seen)) if not sees]
    if group.rank == 0:
        path.unlink(missing_ok=True)
    if blind:
        raise CheckpointError(
            f"{run_dir}: ranks {blind} do not see the file that rank 0 wrote there; "
            "set --run_dir to storage that all ranks share"
        )
