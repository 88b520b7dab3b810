"""Windows of two sources at once, for a step with a task on each (MLO-MAE eq. 5)."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

from trp_scale.core.batch import Batch


class Windows(Protocol):
    """An endless source."""

    def next_window(self) -> list[Batch]: ...


class JoinedWindows:
    """This rank's micro-batches of the next global batch of one source, and after them those of another, which are
    marked as joined. Both sources keep their own cursors.

    The first ones use every parameter of the model: engines need that of a window's first micro-batch.

    Args:
        own: the window's own source.
        joined: the other.
    """

    def __init__(self, own: Windows, joined: Windows) -> None:
        self.own, self.joined = own, joined

    def next_window(self) -> list[Batch]:
        """The micro-batches of both."""
        return [*self.own.next_window(), *(replace(micro, joined=True) for micro in self.joined.next_window())]
