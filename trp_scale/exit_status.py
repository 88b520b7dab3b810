"""The exit statuses that all commands share. Batch scripts and schedulers read them; `trp-scale --help` lists them."""

from __future__ import annotations

from enum import IntEnum


class ExitStatus(IntEnum):
    """How a command ended.

    Attributes:
        meaning: in a line.
        advice: what a person does; of a run it stands in its stop.json.
    """

    meaning: str
    advice: str

    def __new__(cls, value: int, meaning: str, advice: str) -> ExitStatus:
        status = int.__new__(cls, value)
        status._value_ = value
        status.meaning, status.advice = meaning, advice
        return status

    __str__ = int.__repr__  # as from Python 3.11 on

    DONE = 0, "done, or stopped when it was asked to, with a checkpoint", "the same command goes on from here"
    FAILED = (
        1,
        "an error ended it; of verify, doctor and study: what they looked at is not in order",
        "read the error; the same command goes on from the newest checkpoint",
    )
    REFUSED = (
        2,
        "refused: the command, the settings, the data or the directory; told in one line",
        "change what the message says; nothing was trained since the newest checkpoint",
    )
    DIVERGED = (
        3,
        "the numbers went wrong: steps skipped, spikes gone back from, or a run that diverged",
        "look at the loss and the data before it is started again: --optimizer.lr, --optimizer.clipping, or an earlier "
        "checkpoint (--resume)",
    )
    HUNG = (
        4,
        "it hung, and the watchdog ended it",
        "look at hangs/ for the rank that is late, and at its host; the same command goes on from the newest "
        "checkpoint",
    )
    STORAGE = (
        5,
        "what it makes could not be written: no room, or the storage refuses",
        "make room on the disk of the run directory, or look whether it can be written to; the same command goes on "
        "from the newest checkpoint",
    )
    INTERRUPTED = 130, "Ctrl-C; of a run the second one", "the same command goes on from the newest checkpoint"

    @property
    def is_fault(self) -> bool:
        """Whether another start of the same command may end better, with nothing changed."""
        return self in (ExitStatus.FAILED, ExitStatus.HUNG)
