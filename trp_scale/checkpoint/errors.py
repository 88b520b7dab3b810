"""The one error of this package."""

from __future__ import annotations


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written, read or used; the message names the file or tensor and what was expected."""
