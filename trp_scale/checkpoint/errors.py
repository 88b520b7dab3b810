"""The two errors of this package."""

from __future__ import annotations

from trp_scale.config import RefusedError


class CheckpointError(RefusedError):
    """A checkpoint cannot be read or used; the message names the file or tensor and what was expected."""


class RankError(RuntimeError):
    """Something failed on at least one rank that is no mistake of the user's; raised on all ranks, naming those."""
