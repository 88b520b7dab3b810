"""Stores of tars: a data set asks its store to open them, whether they are local files or fetched through the cache."""

from __future__ import annotations

import logging
import os
from abc import abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from trp_scale.errors import DataError, RefusedError
from trp_scale.storage.cache import Cache

logger = logging.getLogger(__name__)

PARTS = "TRP_SCALE_CACHE_PARTS"
"""Environment variable: whether the cache holds blocks in place of whole tars: auto (where it cannot hold the data
set), always or never."""

PART_MARK = "@"
"""Between the name of a tar and the bytes of it that a file of the cache holds."""


class StoredPart(NamedTuple):
    """Tar of `size` bytes that stores a block, or a `part` of its bytes. `tar` is its path in the data set's folder."""

    tar: Path
    size: int
    part: range | None = None

    @property
    def wanted(self) -> range:
        """Bytes of the tar to read."""
        return range(self.size) if self.part is None else self.part


class TarStore:
    """Opens the tars of one folder; this class, those that are files in it.

    Args:
        directory: the folder, DATASET/shards or DATASET/MODALITY.

    Attributes:
        uses_cache: whether tars may be fetched through the cache.
    """

    uses_cache = False

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._exceeds_cache: dict[int, bool] = {}

    def open(self, stored: StoredPart) -> int:
        """Return a descriptor of a tar, or of a file with a part of its bytes; one under a URL is fetched first if the
        cache does not hold it.

        Raises:
            OSError: it cannot be opened.
            DataError: it does not exist, or has been replaced.
            RemoteError: it cannot be fetched, or there is no room for it.
        """
        return os.open(stored.tar, os.O_RDONLY)

    def size(self, tar: Path) -> int | None:
        """Bytes of a tar; `None` if they are known only when it is fetched.

        Raises:
            DataError: it does not exist, or has been replaced.
        """
        try:
            return tar.stat().st_size
        except OSError as error:
            raise DataError(f"{tar}: cannot be read ({error.strerror})") from error

    def is_remote(self, tar: Path) -> bool:
        """Whether a tar is stored under a URL."""
        return False

    def drop(self, stored: StoredPart, inode: int) -> bool:
        """Remove a damaged copy from the cache, so that it is fetched again; `False` if the tar is a local file.

        Args:
            inode: of the copy, which the caller holds open or mapped.
        """
        return False

    def is_local(self, stored: StoredPart) -> bool:
        """Whether a tar, or a part, need not be fetched; the cache then removes others before it."""
        return True

    def prefetch(self, stored: StoredPart) -> None:
        """Fetch a tar, or a part, that will be opened, unless another process does; it is tried once.

        Raises:
            RefusedError: it cannot be fetched, or there is no room for it.
        """

    def room(self) -> int:
        """Bytes that the cache may take; 0: nothing is fetched."""
        return 0

    def where(self, tar: Path) -> str:
        """Path or URL of a tar, for messages."""
        return str(tar)

    def reads_parts(self, tar: Path, total: int) -> bool:
        """Whether the cache holds blocks of a tar in place of the whole: a block of each tar is read at a time, so
        that whole tars of a data set of `total` bytes that it cannot hold would come and go.

        Raises:
            RefusedError: the environment variable has another value.
        """
        choice = os.environ.get(PARTS) or "auto"
        if choice not in ("auto", "always", "never"):
            raise RefusedError(f"{PARTS}: {choice!r} found; auto, always and never are allowed")
        if choice == "never" or not self.is_remote(tar):
            return False
        if total not in self._exceeds_cache:  # once in a process: the room changes with the disk
            self._exceeds_cache[total] = total > self.room()
        return choice == "always" or self._exceeds_cache[total]


class CachedStore(TarStore):
    """Tars that are stored elsewhere and go through the cache."""

    uses_cache = True

    @property
    @abstractmethod
    def cache(self) -> Cache: ...

    @abstractmethod
    def cached_path(self, tar: Path) -> Path:
        """Path of the whole tar in the cache."""

    @abstractmethod
    def fetcher(self, stored: StoredPart, *, retry: bool) -> Callable[[int], None]:
        """Return a function that writes the wanted bytes into a descriptor."""

    def _path(self, stored: StoredPart) -> Path:
        path, part = self.cached_path(stored.tar), stored.part
        return path if part is None else path.with_name(f"{path.stem}{PART_MARK}{part.start}-{part.stop}{path.suffix}")

    def open(self, stored: StoredPart) -> int:
        return self.cache.open(self._path(stored), len(stored.wanted), self.fetcher(stored, retry=True))

    def drop(self, stored: StoredPart, inode: int) -> bool:
        self.cache.drop(self._path(stored), inode)
        logger.warning("%s: the copy in the cache is damaged; it is fetched again", self.where(stored.tar))
        return True

    def is_local(self, stored: StoredPart) -> bool:
        return self.cache.keep(self._path(stored))

    def prefetch(self, stored: StoredPart) -> None:
        self.cache.fetch_ahead(self._path(stored), len(stored.wanted), self.fetcher(stored, retry=False))

    def room(self) -> int:
        return self.cache.bound()
