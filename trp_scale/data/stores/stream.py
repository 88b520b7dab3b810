"""A file under a URL, read from its first byte to its last in large requests, with leaps over what nobody wants."""

from __future__ import annotations

import io
from typing import Any, BinaryIO, cast

from trp_scale.data.stores.external import Place
from trp_scale.storage.transfer import PIECE, is_url, shared_remote

_BUFFER = 1 << 16


def open_stream(source: Place) -> BinaryIO:
    """A file where it lies, not by way of the cache.

    Raises:
        OSError: a local file cannot be opened.
    """
    if not is_url(source.place):
        return open(source.place, "rb")  # noqa: PTH123 - a place is text
    return cast(BinaryIO, io.BufferedReader(_Pieces(source), _BUFFER))


class _Pieces(io.RawIOBase):
    """The bytes of a file; one piece of it is held."""

    def __init__(self, source: Place) -> None:
        directory, _, self._name = source.place.rpartition("/")
        self._remote = shared_remote(directory)
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
            content = self._remote.read_range(self._name, self._at, end, self._size)
            self._piece, self._first = content, self._at if len(content) == end - self._at else 0
        start = self._at - self._first
        found = self._piece[start : start + len(buffer)]
        buffer[: len(found)] = found
        self._at += len(found)
        return len(found)
