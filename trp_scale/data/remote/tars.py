"""Where the tars of a folder lie: in it, under the URL that it is a mirror of, or elsewhere, each at a place of its
own."""

from __future__ import annotations

import os
from pathlib import Path
from typing import IO, Protocol

from trp_scale.data.remote.mirror import find_mirror
from trp_scale.data.remote.places import find_places


class TarStore(Protocol):
    """Opens tars that do not lie in their folder."""

    def open(self, tar: Path, size: int) -> int:
        """A descriptor of a tar; one under a URL is fetched first if the cache does not hold it.

        Raises:
            DataError: it is not there, or is another one now.
            RemoteError: it cannot be fetched, or there is no room for it.
        """
        ...

    def size(self, tar: Path) -> int | None:
        """Bytes of a tar; None if that is known when it is fetched only.

        Raises:
            DataError: it is not there.
        """
        ...

    def keep(self, tar: Path) -> bool:
        """Whether a tar need not be fetched; of those in the cache others go before it."""
        ...

    def fetch_ahead(self, tar: Path, size: int) -> None:
        """Fetch a tar that will be opened, unless another process does; it is tried once.

        Raises:
            RefusedError: it cannot be fetched, or there is no room for it.
        """
        ...

    def room(self) -> int:
        """Bytes that the cache may take; 0: nothing is fetched."""
        ...

    def where(self, tar: Path) -> str:
        """Path or URL of a tar, for messages."""
        ...


def find_store(directory: Path) -> TarStore | None:
    """Who opens the tars of a folder; None: they lie in it."""
    return find_places(directory) or find_mirror(directory)


def open_tar(tar: Path, size: int) -> IO[bytes]:
    """A tar, opened where it lies.

    Args:
        tar: its path in its folder.
        size: its bytes.

    Raises:
        OSError: it cannot be opened.
        DataError, RemoteError: as `TarStore.open`.
    """
    store = find_store(tar.parent)
    return tar.open("rb", buffering=0) if store is None else os.fdopen(store.open(tar, size), "rb", buffering=0)
