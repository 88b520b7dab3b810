"""Errors that a user sees, how messages quote values and name the nearest known one, and exit statuses, which batch
scripts and schedulers read."""

from __future__ import annotations

import contextlib
import difflib
import errno
import os
import reprlib
import sys
import tempfile
from collections.abc import Iterable
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


class RefusedError(ValueError):
    """A setting, file or environment that a run cannot start with.

    The message is for the user: where, what was found, what is allowed. The command line shows it without a traceback.

    Attributes:
        status: that the command ends with.
    """

    status: ExitStatus = ExitStatus.REFUSED


class DataError(RefusedError):
    """Stored data is missing, damaged or of another format; the message names the file and the place."""


class UnreadableError(DataError):
    """More rows of a job that is under way cannot be read than it allows: its storage or machine is at fault."""

    status = ExitStatus.FAILED


class CheckpointError(RefusedError):
    """A checkpoint cannot be read or used; the message names the file or tensor and what was expected."""


LONGEST_QUOTE = 200
"""Characters of a value that a message quotes; a file may hold one of any size."""

MOST_PROBLEMS = 40
"""Wrong settings, lines or fields that one message lists."""

NO_ROOM = (os.strerror(errno.ENOSPC), os.strerror(errno.EDQUOT))
"""What every library says of a full disk, and another rank's message too."""

DENIED = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST, errno.ENAMETOOLONG)
"""Why a path cannot be used, whatever is done there."""

FAILING = (errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ENOTCONN, errno.EREMOTEIO)
"""Errors of storage that may be gone at the next start."""

EXTRA_OF = {"deepspeed": "deepspeed", "timm": "vision", "torchvision": "vision"}
"""The extra that installs a package which whole modules are built on: of which no place asks whether it is there."""

_QUOTE = reprlib.Repr()
_QUOTE.maxlevel = 4
_QUOTE.maxlist = _QUOTE.maxtuple = _QUOTE.maxset = _QUOTE.maxfrozenset = _QUOTE.maxdict = 16
_QUOTE.maxstring = _QUOTE.maxlong = _QUOTE.maxother = LONGEST_QUOTE


def quote(value: object) -> str:
    """Return the repr of a value for a message, shortened without building the whole repr: aliases of YAML make a value
    of any size out of a few bytes."""
    return shorten(_QUOTE.repr(value))


def shorten(text: str, most: int = LONGEST_QUOTE) -> str:
    """Return text of at most `most` characters; a longer one ends in "..."."""
    return text if len(text) <= most else f"{text[: most - 3]}..."


def escape_name(text: str) -> str:
    """Return text that can be stored: bytes of a file name that are not UTF-8 become \\udcXX."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def error_text(error: BaseException) -> str:
    """Return the first line of another library's message, shortened, or the error's name."""
    lines = str(error).strip()[: 4 * LONGEST_QUOTE].splitlines()
    return shorten(lines[0] if lines else type(error).__name__)


FULL_BYTES = 64 << 20
"""A disk with less free space counts as full: what did not fit has been removed again, perhaps."""


def scarcest_space() -> str:
    """Return the path with the least free space among those that this command may write to."""
    words = [word.partition("=")[2] or word for word in sys.argv[1:]]
    paths = [*words, os.environ.get("TRP_SCALE_CACHE") or ".", tempfile.gettempdir(), "/dev/shm", "."]
    free: dict[str, int] = {}
    for path in paths:
        with contextlib.suppress(OSError, ValueError):
            directory = path if os.path.isdir(path) else os.path.dirname(path)  # noqa: PTH112, PTH120 - any text
            if directory and os.access(directory, os.W_OK):
                disk = os.statvfs(directory)
                free[directory] = disk.f_frsize * disk.f_bavail
    path = min(free, key=lambda name: free[name])
    if free[path] > FULL_BYTES:
        return "where the command writes"
    hint = " (shared memory; docker: --shm-size)" if path == "/dev/shm" else ""
    return f"in {path}{hint}: {free[path] >> 10:,} KiB free"


def exit_status_and_message(error: BaseException) -> tuple[ExitStatus, str]:
    """Return the exit status of an error, and its message; "" if the traceback is needed."""
    if any(words in str(error) for words in NO_ROOM):
        text = next((line for line in str(error).splitlines() if any(word in line for word in NO_ROOM)), "")
        where = "there" if text.endswith("'") else scarcest_space()  # a path in quotes, or none
        return ExitStatus.STORAGE, f"{shorten(text.strip())}; make room {where}; the same command goes on"
    if isinstance(error, RefusedError):
        failing = isinstance(error.__cause__, OSError) and error.__cause__.errno in FAILING
        return ExitStatus.FAILED if failing else error.status, str(error)
    if isinstance(error, OSError) and error.errno in (*DENIED, *FAILING) and isinstance(error.filename, str):
        reason = f"{shorten(error.filename)}: {error.strerror}"
        return ExitStatus.STORAGE, f"{reason}; give another path, or see to it that this one can be used"
    package = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    if (extra := EXTRA_OF.get(package)) is not None:
        return ExitStatus.REFUSED, f"this needs {package}, which is not installed: pip install 'trp-scale[{extra}]'"
    if isinstance(error, KeyboardInterrupt):
        return ExitStatus.INTERRUPTED, "interrupted by Ctrl-C"
    return ExitStatus.FAILED, ""


def finding(error: RefusedError) -> str:
    """Return a refusal without the advice behind its first semicolon, which may name flags of another command."""
    return str(error).partition("; ")[0]


def listed_problems(problems: list[str]) -> str:
    """Return the first MOST_PROBLEMS problems, one a line."""
    lines = [f"  {problem}" for problem in problems[:MOST_PROBLEMS]]
    if len(problems) > MOST_PROBLEMS:
        lines.append(f"  and {len(problems) - MOST_PROBLEMS} more")
    return "\n".join(lines)


def nearest(name: str, known: Iterable[str]) -> str:
    """Return "; did you mean X?" for the known name most like `name`, or "" if none is like it."""
    matches = difflib.get_close_matches(name[:LONGEST_QUOTE], sorted(known), n=1, cutoff=0.5)
    return f"; did you mean {matches[0]}?" if matches else ""
