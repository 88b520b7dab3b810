"""The members of a WebDataset tar by key and suffix, from its headers alone."""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from typing import Any, BinaryIO, NamedTuple, cast

from trp_scale.data.index import DataError
from trp_scale.errors import said_by

LONGEST_HEADER = 1 << 20
"""Bytes of a long name, or of the records before a member. Those that exist have some 10,000; one that says 5e18 ended
the process for want of memory, and records that all later members repeat took 1 GB for each MB of the tar."""


class TarMember(NamedTuple):
    """One entry of a tar.

    Attributes:
        name: as it stands there.
        key: the name up to the first dot of its last part.
        suffix: the rest, in small letters.
        offset, length: of its content.
        checksum: of its header.
        plain: whether it is a file whose content lies in one piece: no folder, no link, not sparse.
    """

    name: str
    key: str
    suffix: str
    offset: int
    length: int
    checksum: int
    plain: bool


def tar_members(where: str, stream: BinaryIO) -> Iterator[TarMember]:
    """All entries of a tar. `stream` may be moved between two of them.

    Args:
        where: the tar's name in messages.

    Raises:
        DataError: not a tar, or one that is cut short or damaged.
    """
    try:
        with tarfile.open(fileobj=cast(BinaryIO, _Headers(stream)), mode="r:") as archive:
            end = 0
            while (entry := archive.next()) is not None:
                archive.members.clear()  # type: ignore[attr-defined]  # else it keeps all of them, 2 KB each
                end = archive.offset  # of what follows the entry
                folder, slash, file = entry.name.removeprefix("./").rpartition("/")
                stem, _, suffix = file.partition(".")
                yield TarMember(
                    name=entry.name,
                    key=folder + slash + stem,
                    suffix=suffix.lower(),
                    offset=entry.offset_data,
                    length=entry.size,
                    checksum=entry.chksum,
                    plain=entry.isreg() and not entry.issparse(),
                )
        stream.seek(end)  # tarfile takes a cut tar for a shorter one
        if stream.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
            raise tarfile.ReadError(f"no end mark at byte {end}")
    except DataError:
        raise
    except (OSError, ValueError, OverflowError, tarfile.TarError) as error:  # numbers that no file has, too
        raise DataError(
            f"{where}: not a tar that can be read to its end ({said_by(error)}); make or copy it anew"
        ) from error


class _Headers:
    """What tarfile reads of a tar, between the contents of its members."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self.seek, self.tell = stream.seek, stream.tell

    def read(self, size: int) -> Any:
        if size > LONGEST_HEADER:
            raise tarfile.ReadError(f"a header of {size} bytes at byte {self.tell()}, {LONGEST_HEADER} allowed")
        return self._stream.read(size)
