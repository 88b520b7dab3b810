"""The refusal that a user sees, and the nearest known name in it."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class RefusedError(ValueError):
    """A setting, file or environment that a run cannot start with.

    The message is for the user: where, what was found, what is allowed. The command line shows it without a traceback
    and exits with status 2.
    """


def nearest(name: str, known: Iterable[str]) -> str:
    """The words "; did you mean X?" for the known name most like `name`, or nothing when none is like it."""
    found = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.5)
    return f"; did you mean {found[0]}?" if found else ""
