"""Standard output of work that must come to its end, whoever reads what it says."""

from __future__ import annotations

import logging
import os
from typing import Any, TextIO

logger = logging.getLogger(__name__)


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
