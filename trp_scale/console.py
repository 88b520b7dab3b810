"""Standard output of work that must come to its end, whoever reads what it says."""

from __future__ import annotations

import logging
import os
import re
from typing import Any, TextIO

logger = logging.getLogger(__name__)

_STYLES = r"\x1b\[[0-9;]*m|\x1b\[(?:1A|2K|\?25[lh])"
"""Sequences by which rich colours text and redraws a display."""
_CONTROL = r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff]"


class EscapedStream:
    """Standard output or error of a command. Control characters are escaped: texts of files and names of paths may hold
    sequences that change the terminal's title, clipboard or lines. So are bytes of a name that are not UTF-8.

    Args:
        stream: that is written to; styles of our own pass if it is a terminal.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        styles = _STYLES if stream.isatty() else "(?!)"
        self._pattern = re.compile(f"({styles})|{_CONTROL}")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write the text escaped; return the number of characters of the text."""
        self._stream.write(self._pattern.sub(lambda match: match[1] or ascii(match[0])[1:-1], text))
        return len(text)


class Outlet:
    """Standard output for as long as it can be written to; then silence.

    Its reader (head, tee, a terminal) may go, or its disk fill up, in the middle of the work. The work goes on: nobody
    has asked it to stop, and all that it would say is in its directory. (rich would end the process.)

    Args:
        stream: standard output; its file descriptor leads to nothing from then on, so that no line of a library ends
            the work either.
        notice: what goes on, and where to see it; for the log.
    """

    def __init__(self, stream: TextIO, notice: str) -> None:
        self._stream, self._notice = stream, notice

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)  # what rich asks of a file: isatty, encoding, fileno

    def write(self, text: str) -> int:
        try:
            self._stream.write(text)
        except OSError as error:
            self._fall_silent(error)
        return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            self._fall_silent(error)

    def _fall_silent(self, error: OSError) -> None:
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, self._stream.fileno())
        os.close(nothing)
        logger.warning("standard output cannot be written to (%s); %s", error.strerror, self._notice)
