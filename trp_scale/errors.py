"""User-visible errors, quoting in messages, nearest names, and exit statuses for batch scripts and schedulers."""

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
    """Exit status of a command.

    Attributes:
        meaning: description in one line.
        advice: what to do next; a run writes it to stop.json.
    """

    meaning: str
    advice: str

    def __new__(cls, value: int, meaning: str, advice: str) -> ExitStatus:
        status = int.__new__(cls, value)
        status._value_ = value
        status.meaning, status.advice = meaning, advice
        return status

    DONE = 0, "done, or stopped on request with a checkpoint", "the same command resumes from here"
    FAILED = (
        1,
        "an error; for verify, doctor and study: they found problems",
        "read the error; the same command resumes from the newest checkpoint",
    )
    REFUSED = (
        2,
        "refused command, settings, data or directory; the message says why",
        "change what the message names; nothing was trained since the newest checkpoint",
    )
    DIVERGED = (
        3,
        "diverged: too many skipped steps, or too many rollbacks after spikes",
        "check the loss and the data before a restart: --optimizer.lr, --optimizer.clipping, or an earlier checkpoint "
        "(--resume)",
    )
    HUNG = (
        4,
        "hung; the watchdog ended it",
        "hangs/ names the late rank: check its host; the same command resumes from the newest checkpoint",
    )
    STORAGE = (
        5,
        "storage: the disk is full or refuses to write",
        "free space on the disk of the run directory, or check that it can be written; the same command resumes from "
        "the newest checkpoint",
    )
    INTERRUPTED = 130, "Ctrl-C; for a run the second one", "the same command resumes from the newest checkpoint"

    @property
    def is_fault(self) -> bool:
        """Whether a restart of the same command may succeed without changes."""
        return self in (ExitStatus.FAILED, ExitStatus.HUNG)


class RefusedError(ValueError):
    """A setting, file or environment with which a run cannot start.

    The message is for the user: where, what was found, what is allowed. The command line shows it without a traceback.

    Attributes:
        status: exit status of the command.
    """

    status: ExitStatus = ExitStatus.REFUSED


class DataError(RefusedError):
    """Stored data is missing, damaged or of another format; the message names the file and the position."""


class UnreadableError(DataError):
    """More rows cannot be read than a running job allows: its storage or machine is at fault."""

    status = ExitStatus.FAILED


class CheckpointError(RefusedError):
    """A checkpoint cannot be read or used; the message names the file or tensor and what was expected."""


LONGEST_QUOTE = 200
"""Maximum characters of a quoted value; a file may contain one of any size."""

MOST_PROBLEMS = 40
"""Maximum number of wrong settings, lines or fields that one message lists."""

NO_ROOM = (os.strerror(errno.ENOSPC), os.strerror(errno.EDQUOT))
"""Texts of a full disk in messages of all libraries and of other ranks."""

DENIED = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST, errno.ENAMETOOLONG)
"""Permanent reasons why a path cannot be used."""

FAILING = (errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ENOTCONN, errno.EREMOTEIO)
"""Storage errors that may disappear until the next start."""

EXTRA_OF = {"deepspeed": "deepspeed", "timm": "vision", "torchvision": "vision"}
"""Extra that installs a package which whole modules need, without an own check of its presence."""

_QUOTE = reprlib.Repr()
_QUOTE.maxlevel = 4
_QUOTE.maxlist = _QUOTE.maxtuple = _QUOTE.maxset = _QUOTE.maxfrozenset = _QUOTE.maxdict = 16
_QUOTE.maxstring = _QUOTE.maxlong = _QUOTE.maxother = LONGEST_QUOTE


def quote(value: object) -> str:
    """Return the repr of a value for a message, shortened without building the whole repr: YAML aliases can expand a
    few bytes to a value of any size."""
    return shorten(_QUOTE.repr(value))


def shorten(text: str, most: int = LONGEST_QUOTE) -> str:
    """Return text of at most `most` characters; longer text ends in "..."."""
    return text if len(text) <= most else f"{text[: most - 3]}..."


def escape_name(text: str) -> str:
    """Return text that can be stored: bytes of a file name that are not UTF-8 become \\udcXX."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def can_be_written(text: str) -> bool:
    """Return whether text has no unpaired surrogates."""
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def error_text(error: BaseException) -> str:
    """Return the first line of another library's message, shortened, or the error's type."""
    lines = str(error).strip()[: 4 * LONGEST_QUOTE].splitlines()
    return shorten(lines[0] if lines else type(error).__name__)


FULL_BYTES = 64 << 20
"""Free space below which a disk counts as full: a failed write may have been removed already."""


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
    """Return the exit status and message of an error; the message is "" if the traceback is needed."""
    if any(words in str(error) for words in NO_ROOM):
        text = next((line for line in str(error).splitlines() if any(word in line for word in NO_ROOM)), "")
        where = "there" if text.endswith("'") else scarcest_space()  # a path in quotes, or none
        return ExitStatus.STORAGE, f"{shorten(text.strip())}; make room {where}; the same command goes on"
    if isinstance(error, RefusedError):
        failing = isinstance(error.__cause__, OSError) and error.__cause__.errno in FAILING
        return ExitStatus.FAILED if failing else error.status, str(error)
    if isinstance(error, OSError) and error.errno in (*DENIED, *FAILING) and isinstance(error.filename, str):
        reason = f"{shorten(error.filename)}: {error.strerror}"
        return ExitStatus.STORAGE, f"{reason}; give another path, or make this one usable"
    package = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    if (extra := EXTRA_OF.get(package)) is not None:
        return ExitStatus.REFUSED, f"this needs {package}, which is not installed: pip install 'trp-scale[{extra}]'"
    if isinstance(error, KeyboardInterrupt):
        return ExitStatus.INTERRUPTED, "interrupted by Ctrl-C"
    return ExitStatus.FAILED, ""


def finding(error: RefusedError) -> str:
    """Return a refusal without the advice after its first semicolon, which may name flags of another command."""
    return str(error).partition("; ")[0]


def listed_problems(problems: list[str]) -> str:
    """Return the first MOST_PROBLEMS problems, one per line."""
    lines = [f"  {problem}" for problem in problems[:MOST_PROBLEMS]]
    if len(problems) > MOST_PROBLEMS:
        lines.append(f"  and {len(problems) - MOST_PROBLEMS} more")
    return "\n".join(lines)


def nearest(name: str, known: Iterable[str]) -> str:
    """Return "; did you mean X?" for the known name most similar to `name`, or "" if none is similar."""
    matches = difflib.get_close_matches(name[:LONGEST_QUOTE], sorted(known), n=1, cutoff=0.5)
    return f"; did you mean {matches[0]}?" if matches else ""
