"""Where the tars of a folder lie: in it, under the URL that it is a mirror of, or elsewhere, each at a place of its
own."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import IO, NamedTuple, Protocol

from trp_scale.data.stores.external import find_places
from trp_scale.data.stores.mirror import find_mirror
from trp_scale.errors import RefusedError

logger = logging.getLogger(__name__)

PARTS = "TRP_SCALE_CACHE_PARTS"
"""Environment variable: whether the cache holds blocks in place of whole tars: auto (where it cannot hold the data
set), always or never."""


class StoredPart(NamedTuple):
    """Tar that stores a block, of `size` bytes, or a `part` of its bytes."""

    tar: Path
    size: int
    part: range | None = None


class TarStore(Protocol):
    """Opens tars that do not lie in their folder."""

    def open(self, tar: Path, size: int, part: range | None = None) -> int:
        """A descriptor of a tar, or of a file with a part of its bytes; one under a URL is fetched first if the cache
        does not hold it.

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

    def fetches(self, tar: Path) -> bool:
        """Whether a tar lies under a URL."""
        ...

    def drop(self, tar: Path, part: range | None, inode: int) -> None:
        """Remove the cached copy of a tar, or of a part, which is wrong, so that it is fetched again."""
        ...

    def keep(self, tar: Path, part: range | None = None) -> bool:
        """Whether a tar, or a part, need not be fetched; of those in the cache others go before it."""
        ...

    def fetch_ahead(self, tar: Path, size: int, part: range | None = None) -> None:
        """Fetch a tar, or a part, that will be opened, unless another process does; it is tried once.

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
    """Return the store that opens the tars of a folder; `None` if they are local files."""
    return find_places(directory) or find_mirror(directory)


def reads_parts(tar: Path, total: int) -> bool:
    """Whether the cache holds blocks of a tar in place of the whole: a block of each tar is read at a time, so that of
    a data set of `total` bytes that it cannot hold whole tars would come and go.

    Raises:
        RefusedError: the environment variable has another value.
    """
    choice = os.environ.get(PARTS) or "auto"
    if choice not in ("auto", "always", "never"):
        raise RefusedError(f"{PARTS}: {choice!r} found; auto, always and never are allowed")
    store = find_store(tar.parent)
    if store is None or choice == "never" or not store.fetches(tar):
        return False
    return choice == "always" or total > store.room()


def open_tar(tar: Path, size: int, part: range | None = None) -> IO[bytes]:
    """A tar, opened where it lies; or a file with a part of its bytes, of one for which `reads_parts`.

    Args:
        tar: its path in its folder.
        size: its bytes.
        part: bytes that are wanted; None: all.

    Raises:
        OSError: it cannot be opened.
        DataError, RemoteError: as `TarStore.open`.
    """
    return os.fdopen(tar_descriptor(find_store(tar.parent), tar, size, part), "rb", buffering=0)


def drop_cached(stored: StoredPart, inode: int) -> bool:
    """Remove a cached copy that is damaged, so that it is fetched again; `False` if the tar is not under a URL.

    Args:
        inode: of the copy, which the caller holds open or mapped.
    """
    store = find_store(stored.tar.parent)
    if store is None or not store.fetches(stored.tar):
        return False
    store.drop(stored.tar, stored.part, inode)
    logger.warning("%s: the copy in the cache is damaged; it is fetched again", store.where(stored.tar))
    return True


def tar_descriptor(store: TarStore | None, tar: Path, size: int, part: range | None = None) -> int:
    """Open a tar of a folder whose store is known, like `open_tar`."""
    return os.open(tar, os.O_RDONLY) if store is None else store.open(tar, size, part)
