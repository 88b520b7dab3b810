"""Actions in which the failure of one rank is the failure of all: no rank is left waiting in a collective."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from trp_scale.checkpoint.errors import CheckpointError
from trp_scale.distributed.groups import Group

T = TypeVar("T")


def together(group: Group, what: str, action: Callable[[], T]) -> list[T]:
    """Run `action` on every rank and gather the results; `action` itself must not use collectives of the group.

    Returns:
        the result of each rank, on every rank.
    Raises:
        CheckpointError: on every rank, when it failed on any: names `what`, the ranks and their messages.
    """
    result: T | None = None
    cause: Exception | None = None
    try:
        result = action()
    except Exception as error:  # whatever it is, the other ranks must hear of it before this one leaves
        cause = error
    gathered = group.gather_objects((None if cause is None else _message(cause), result))
    failures = [f"rank {rank}: {failed}" for rank, (failed, _) in enumerate(gathered) if failed is not None]
    if failures:
        listed = "; ".join(failures)
        raise CheckpointError(f"{what} failed on {len(failures)} of {group.size} ranks: {listed}") from cause
    return [value for _, value in gathered]  # type: ignore[misc]


def _message(error: Exception) -> str:
    return str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"


def on_rank_zero(group: Group, what: str, action: Callable[[], T]) -> T:
    """Run `action` on rank 0 only; every rank gets its result, or its error as a CheckpointError."""
    return together(group, what, lambda: action() if group.rank == 0 else None)[0]  # type: ignore[return-value]


def check_shared_directory(run_dir: Path, group: Group) -> None:
    """Check that every rank sees the run directory that rank 0 sees, before anything is written into it.

    Raises:
        CheckpointError: on every rank, naming the ranks that see another directory or none.
    """
    token = secrets.token_hex(16)

    def leave_token() -> tuple[str, str]:
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
            "the run directory must be on storage that all ranks share (--run_dir)"
        )
