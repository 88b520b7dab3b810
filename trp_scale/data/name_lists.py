"""Text files that name classes: one name a line, in the order of their numbers."""

from __future__ import annotations

from pathlib import Path

from trp_scale.data.index import DataError


def read_names(flag: str, file: str) -> tuple[list[str], bytes]:
    """The names, and the file's content for a fingerprint.

    Args:
        flag: that the file was given with, for messages.
        file: its path; empty lines at its end do not count.

    Raises:
        DataError: the file cannot be read, holds no name, or a line between names is empty.
    """
    try:
        content = Path(file).read_bytes()
        names = [line.strip() for line in content.decode("utf-8").rstrip().splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{flag} {file}: not a text file that can be read ({error})") from error
    if not names:
        raise DataError(f"{flag} {file}: no name in it, one a line expected")
    if "" in names:
        raise DataError(f"{flag} {file}: line {names.index('') + 1} is empty; the place of a name is its number")
    return names, content
