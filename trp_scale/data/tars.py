"""Stores of tars: a data set opens its tars through a store, as local files or through the cache.

External tars come from others and are read where they are stored, on local disks or under URLs:

DATASET/
  dataset.json
  shards/places.json            path or URL of each tar, its bytes and its version
  shards/NAME.index.json        index, as for other tars
  shards/index.bin

A tar under a URL goes through the cache. Its name in the cache contains the version, so that a changed tar gets another
name.
"""

from __future__ import annotations

import datetime
import hashlib
import io
import logging
import os
import re
from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

from trp_scale.config.schema import FileName, Whole
from trp_scale.data.index import read_fields, write_json
from trp_scale.data.raw_files import open_regular
from trp_scale.errors import DataError, RefusedError, quote
from trp_scale.storage.cache import Cache, cache_root, shared_cache
from trp_scale.storage.transfer import PIECE, Remote, is_url, shared_remote, url_directory

logger = logging.getLogger(__name__)

PARTS = "TRP_SCALE_CACHE_PARTS"
"""Environment variable: whether the cache holds blocks instead of whole tars: auto (if the data set exceeds the cache),
always or never."""

PART_MARK = "@"
"""Separator of tar name and byte range in the name of a cached part."""


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
    """Opens the tars of one folder. This class opens local files.

    Args:
        directory: folder, DATASET/shards or DATASET/MODALITY.

    Attributes:
        uses_cache: whether tars may be fetched through the cache.
    """

    uses_cache = False

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._exceeds_cache: dict[int, bool] = {}

    def open(self, stored: StoredPart) -> int:
        """Return a descriptor of a tar, or of a file with a part of its bytes; fetch it first if necessary.

        Raises:
            OSError: the tar cannot be opened.
            DataError: the tar is missing, or has been replaced.
            RemoteError: the tar cannot be fetched, or the cache is too small.
        """
        return os.open(stored.tar, os.O_RDONLY)

    def size(self, tar: Path) -> int | None:
        """Return the bytes of a tar; `None` if they are unknown until it is fetched.

        Raises:
            DataError: the tar is missing, or has been replaced.
        """
        try:
            return tar.stat().st_size
        except OSError as error:
            raise DataError(f"{tar}: cannot be read ({error.strerror})") from error

    def is_remote(self, tar: Path) -> bool:
        """Whether a tar is stored under a URL."""
        return False

    def drop(self, stored: StoredPart, inode: int) -> bool:
        """Remove a damaged copy from the cache, so that it is fetched again; `False` for a local file.

        Args:
            inode: inode of the copy, which the caller holds open or mapped.
        """
        return False

    def is_local(self, stored: StoredPart) -> bool:
        """Whether a tar, or a part, need not be fetched; marks the copy in the cache as recently used."""
        return True

    def prefetch(self, stored: StoredPart) -> None:
        """Fetch a tar, or a part, that will be opened, unless another process does; one attempt.

        Raises:
            RefusedError: the tar cannot be fetched, or the cache is too small.
        """

    def room(self) -> int:
        """Return the capacity of the cache in bytes; 0 if nothing is fetched."""
        return 0

    def where(self, tar: Path) -> str:
        """Path or URL of a tar, for messages."""
        return str(tar)

    def reads_parts(self, tar: Path, total: int) -> bool:
        """Whether the cache holds blocks of a tar instead of the whole tar.

        Reading takes one block of a tar at a time. If the data set (`total` bytes) exceeds the cache, whole tars would
        be fetched and removed again and again.

        Raises:
            RefusedError: the environment variable has another value.
        """
        choice = os.environ.get(PARTS) or "auto"
        if choice not in ("auto", "always", "never"):
            raise RefusedError(f"{PARTS}: {choice!r} found; auto, always and never are allowed")
        if choice == "never" or not self.is_remote(tar):
            return False
        if total not in self._exceeds_cache:  # once per process: the capacity changes with the disk
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


PLACES = "places.json"


@dataclass(frozen=True, kw_only=True)
class ExternalTar:
    """Location of an external tar.

    Attributes:
        place: absolute path or URL.
        size: bytes when the tar was indexed.
        version: changes with the content: time of the last write, or the server's version.
    """

    place: str
    size: Whole
    version: str


def stat_tar(place: str) -> ExternalTar:
    """Return the current state of a tar.

    Raises:
        DataError: the tar is missing.
        RemoteError: the server cannot be reached.
    """
    if is_url(place):
        remote, name = _split_url(place)
        stored = remote.stat_file(name)
        return ExternalTar(place=place, size=stored.size, version=stored.version)
    try:
        with open_regular(place) as stream:
            status = os.fstat(stream.fileno())
    except OSError as error:
        raise DataError(f"{place}: cannot be read ({error.strerror})") from error
    return ExternalTar(place=place, size=status.st_size, version=str(status.st_mtime_ns))


def _split_url(url: str) -> tuple[Remote, str]:
    """Split the URL of a file into its directory and name."""
    directory, _, name = url.rpartition("/")
    return shared_remote(directory), name


def write_places(directory: Path, places: Mapping[str, ExternalTar]) -> None:
    """Write places.json: locations of the tars of a folder, by their names in the data set."""
    write_json(directory / PLACES, {"format": 1, "tars": {name: vars(entry) for name, entry in places.items()}})


class ExternalTars(CachedStore):
    """Opens external tars.

    Args:
        directory: folder shards/ of the data set.
        tars: locations by name.
    """

    def __init__(self, directory: Path, tars: Mapping[str, ExternalTar]) -> None:
        super().__init__(directory)
        self.tars = tars

    @property
    def cache(self) -> Cache:
        return shared_cache(cache_root())

    def cached_path(self, tar: Path) -> Path:
        known = self._known_tar(tar)
        directory, _, name = known.place.rpartition("/")
        digest = hashlib.blake2b(f"{known.size} {known.version}".encode(), digest_size=6).hexdigest()
        return url_directory(directory, self.cache.root) / f"{Path(name).stem}-{digest}.tar"

    def open(self, stored: StoredPart) -> int:
        if self.is_remote(stored.tar):
            return super().open(stored)
        known = self._known_tar(stored.tar)
        self._refuse_changed(known, stat_tar(known.place))
        try:
            return os.open(known.place, os.O_RDONLY)
        except OSError as error:
            raise DataError(f"{known.place}: cannot be opened ({error.strerror})") from error

    def fetcher(self, stored: StoredPart, *, retry: bool) -> Callable[[int], None]:
        known = self._known_tar(stored.tar)
        remote, name = _split_url(known.place)
        reader = remote if retry else remote.once()

        def fetch(descriptor: int) -> None:
            reader.read_into(descriptor, name, len(stored.wanted), start=stored.wanted.start)
            now = reader.stat_file(name)  # after the read: it may have been replaced during it
            self._refuse_changed(known, ExternalTar(place=known.place, size=now.size, version=now.version))

        return fetch

    def is_remote(self, tar: Path) -> bool:
        return is_url(self._known_tar(tar).place)

    def drop(self, stored: StoredPart, inode: int) -> bool:
        return self.is_remote(stored.tar) and super().drop(stored, inode)

    def is_local(self, stored: StoredPart) -> bool:
        return not self.is_remote(stored.tar) or super().is_local(stored)

    def room(self) -> int:
        return super().room() if any(is_url(tar.place) for tar in self.tars.values()) else 0

    def size(self, tar: Path) -> int | None:
        known = self._known_tar(tar)
        if is_url(known.place):  # the download compares it
            return None
        current = stat_tar(known.place)
        self._refuse_changed(known, current)
        return current.size

    def where(self, tar: Path) -> str:
        return self._known_tar(tar).place

    def _known_tar(self, tar: Path) -> ExternalTar:
        if tar.name not in self.tars:
            raise DataError(f"{self.directory / PLACES}: {tar.name} is missing; {self._advice}")
        return self.tars[tar.name]

    @property
    def _advice(self) -> str:
        return f"index the tars again: trp-scale index {self.directory.parent}"

    def _refuse_changed(self, known: ExternalTar, current: ExternalTar) -> None:
        if current.size != known.size:
            raise DataError(
                f"{known.place}: {current.size} bytes found, {known.size} bytes when it was indexed; {self._advice}"
            )
        if current.version != known.version:
            when = "" if is_url(known.place) else f" ({_time(known.version)} then, {_time(current.version)} now)"
            raise DataError(f"{known.place}: changed after it was indexed{when}; {self._advice}")


def _time(nanoseconds: str) -> str:
    return datetime.datetime.fromtimestamp(int(nanoseconds) / 1e9).isoformat(" ", "seconds")


def find_external_tars(directory: Path) -> ExternalTars | None:
    """Return the external tars of a folder; `None` if the folder contains its tars.

    Raises:
        DataError: places.json is damaged.
    """
    path = directory / PLACES
    if not path.exists():
        return None
    fields = read_fields(path, f"index the tars again: trp-scale index {path.parent.parent}")
    tars = fields.take("tars", dict[FileName, ExternalTar])
    for entry in tars.values():
        if "\0" in entry.place or not (is_url(entry.place) or entry.place.startswith("/")):
            raise fields.refusal(f"place {quote(entry.place)} found, an absolute path or a URL expected")
        if not is_url(entry.place) and not re.fullmatch(r"\d{1,19}", entry.version):
            raise fields.refusal(f"version {quote(entry.version)} found, the time of the last write expected")
    return ExternalTars(directory, tars)


def open_stream(source: ExternalTar) -> BinaryIO:
    """Open an external tar without the cache; a tar under a URL is read in large requests.

    Raises:
        OSError: a local file cannot be opened.
    """
    if not is_url(source.place):
        return open(source.place, "rb")  # noqa: PTH123 - a place is text
    return cast(BinaryIO, io.BufferedReader(_Pieces(source), 1 << 16))


class _Pieces(io.RawIOBase):
    """Stream over a remote file that buffers one piece."""

    def __init__(self, source: ExternalTar) -> None:
        self._remote, self._name = _split_url(source.place)
        self._size = source.size
        self._at = 0
        self._piece, self._first = b"", 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        self._at = base + offset
        return self._at

    def readinto(self, buffer: Any) -> int:
        if self._at >= self._size:
            return 0
        if not self._first <= self._at < self._first + len(self._piece):
            end = min(self._at + PIECE, self._size)
            self._piece = self._remote.read_range(self._name, self._at, end, self._size)
            self._first = self._at if len(self._piece) == end - self._at else 0
        start = self._at - self._first
        content = self._piece[start : start + len(buffer)]
        buffer[: len(content)] = content
        self._at += len(content)
        return len(content)
