"""Tars that others made and that stay where they are: on this machine's disks, or under URLs.

DATASET/
  dataset.json
  shards/places.json            of each tar: its path or URL, its bytes, and a text that changes with its content
  shards/NAME.index.json        as of all tars
  shards/index.bin

A tar under a URL goes through the cache, beside those of mirrors; its version is part of its name there, so a changed
one is never taken for it.
"""

from __future__ import annotations

import datetime
import functools
import hashlib
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from trp_scale.config.schema import FileName, Whole
from trp_scale.data.index import read_fields, write_json
from trp_scale.data.raw_files import open_regular
from trp_scale.errors import DataError, quote
from trp_scale.storage.cache import cache_root, kept_as, shared_cache
from trp_scale.storage.transfer import Remote, is_url, shared_remote, url_directory

PLACES = "places.json"


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a tar lies.

    Attributes:
        place: an absolute path, or a URL.
        size: its bytes when it was indexed.
        version: changes with its content: when it was last written to, or what a server says.
    """

    place: str
    size: Whole
    version: str


def look_at(place: str) -> Place:
    """A tar as it is now.

    Raises:
        DataError: it is not there.
        RemoteError: it cannot be asked for.
    """
    if is_url(place):
        remote, name = _remote_of(place)
        stored = remote.stored(name)
        return Place(place=place, size=stored.size, version=stored.version)
    try:
        with open_regular(place) as stream:
            status = os.fstat(stream.fileno())
    except OSError as error:
        raise DataError(f"{place}: cannot be read ({error.strerror})") from error
    return Place(place=place, size=status.st_size, version=str(status.st_mtime_ns))


def _remote_of(url: str) -> tuple[Remote, str]:
    """The directory of a file, and the file's name there."""
    directory, _, name = url.rpartition("/")
    return shared_remote(directory), name


def write_places(directory: Path, places: Mapping[str, Place]) -> None:
    """Say where the tars of a folder lie, by the names that they have in the data set."""
    write_json(directory / PLACES, {"format": 1, "tars": {name: vars(entry) for name, entry in places.items()}})


@dataclass(frozen=True, kw_only=True)
class Places:
    """Opens the tars of a folder where they lie.

    Attributes:
        directory: the folder, shards/ of the data set.
        tars: by name.
    """

    directory: Path
    tars: Mapping[str, Place]

    def open(self, tar: Path, size: int, part: range | None = None) -> int:
        """A descriptor of a tar; one under a URL, or a part of it, is fetched first if the cache does not hold it.

        Raises:
            DataError: it is not there, or has changed since it was indexed.
            RemoteError: it cannot be fetched, or there is no room for it.
        """
        known = self._known(tar)
        if not is_url(known.place):
            self._refuse_changed(known, look_at(known.place))
            try:
                return os.open(known.place, os.O_RDONLY)
            except OSError as error:
                raise DataError(f"{known.place}: cannot be opened ({error.strerror})") from error
        cache = shared_cache(cache_root())
        wanted = range(size) if part is None else part
        fetch = self._fetch(known, *_remote_of(known.place), wanted)
        return cache.open(kept_as(_kept_as(known, cache.root), part), len(wanted), fetch)

    def fetches(self, tar: Path) -> bool:
        """Whether a tar lies under a URL."""
        return is_url(self._known(tar).place)

    def _fetch(self, known: Place, remote: Remote, name: str, wanted: range) -> Callable[[int], None]:
        def fetch(descriptor: int) -> None:
            remote.read_into(descriptor, name, len(wanted), start=wanted.start)
            now = remote.stored(name)  # after reading: it may have been replaced meanwhile
            self._refuse_changed(known, Place(place=known.place, size=now.size, version=now.version))

        return fetch

    def drop(self, tar: Path, part: range | None, inode: int) -> None:
        """Remove the cached copy of a tar, or of a part, which is wrong."""
        cache = shared_cache(cache_root())
        cache.drop(kept_as(_kept_as(self._known(tar), cache.root), part), inode)

    def keep(self, tar: Path, part: range | None = None) -> bool:
        """Whether a tar, or a part, is on this machine; of those in the cache others go before it."""
        known = self._known(tar)
        if not is_url(known.place):
            return True
        cache = shared_cache(cache_root())
        return cache.keep(kept_as(_kept_as(known, cache.root), part))

    def fetch_ahead(self, tar: Path, size: int, part: range | None = None) -> None:
        """Fetch a tar, or a part, that will be opened, unless another process does; it is tried once.

        Raises:
            DataError: it is not there, or has changed since it was indexed.
            RemoteError: it cannot be fetched, or there is no room for it.
        """
        known, cache = self._known(tar), shared_cache(cache_root())
        remote, name = _remote_of(known.place)
        wanted = range(size) if part is None else part
        fetch = self._fetch(known, remote.once(), name, wanted)
        cache.fetch_ahead(kept_as(_kept_as(known, cache.root), part), len(wanted), fetch)

    def room(self) -> int:
        """Bytes that the cache may take; 0 where no tar lies under a URL."""
        if not any(is_url(entry.place) for entry in self.tars.values()):
            return 0
        return shared_cache(cache_root()).bound()

    def size(self, tar: Path) -> int | None:
        """Bytes of a tar; None if it lies under a URL: then it is compared when it is fetched.

        Raises:
            DataError: it is not there, or has changed since it was indexed.
        """
        known = self._known(tar)
        if is_url(known.place):
            return None
        current = look_at(known.place)
        self._refuse_changed(known, current)
        return current.size

    def where(self, tar: Path) -> str:
        """Path or URL of a tar, for messages."""
        return self._known(tar).place

    def _known(self, tar: Path) -> Place:
        if tar.name not in self.tars:
            raise DataError(f"{self.directory / PLACES}: no {tar.name} there; {self._advice}")
        return self.tars[tar.name]

    @property
    def _advice(self) -> str:
        return f"index the tars again: trp-scale index {self.directory.parent}"

    def _refuse_changed(self, known: Place, current: Place) -> None:
        if current.size != known.size:
            raise DataError(
                f"{known.place}: {current.size} bytes found, {known.size} bytes when it was indexed; {self._advice}"
            )
        if current.version != known.version:
            when = "" if is_url(known.place) else f" ({_time(known.version)} then, {_time(current.version)} now)"
            raise DataError(f"{known.place}: it was written to after it was indexed{when}; {self._advice}")


def _time(nanoseconds: str) -> str:
    return datetime.datetime.fromtimestamp(int(nanoseconds) / 1e9).isoformat(" ", "seconds")


def _kept_as(known: Place, root: Path) -> Path:
    """The file of the cache that holds a tar."""
    directory, _, name = known.place.rpartition("/")
    digest = hashlib.blake2b(f"{known.size} {known.version}".encode(), digest_size=6).hexdigest()
    return url_directory(directory, root) / f"{Path(name).stem}-{digest}.tar"


def find_places(directory: Path) -> Places | None:
    """Return the places of a folder's external tars; `None` if it stores its tars itself."""
    path = directory / PLACES
    try:
        modified = path.stat().st_mtime_ns
    except OSError:
        return None
    return _read_places(path, modified)


@functools.lru_cache(maxsize=16)
def _read_places(path: Path, _: int) -> Places:
    fields = read_fields(path, f"index the tars again: trp-scale index {path.parent.parent}")
    tars = fields.take("tars", dict[FileName, Place])
    for entry in tars.values():
        if "\0" in entry.place or not (is_url(entry.place) or entry.place.startswith("/")):
            raise fields.refusal(f"place {quote(entry.place)} found, an absolute path or a URL expected")
        if not is_url(entry.place) and not re.fullmatch(r"\d{1,19}", entry.version):
            raise fields.refusal(f"version {quote(entry.version)} found, the time it was written to expected")
    return Places(directory=path.parent, tars=tars)
