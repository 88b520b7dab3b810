"""The members of a WebDataset tar by key and suffix, from its headers alone."""

from __future__ import annotations

import posixpath
import tarfile
from collections.abc import Iterator
from typing import Any, BinaryIO, NamedTuple, cast

from trp_scale.errors import DataError, error_text

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
        kind: "file" (its content lies in one piece), "folder", "link", "sparse file" or "special file".
    """

    name: str
    key: str
    suffix: str
    offset: int
    length: int
    checksum: int
    kind: str

    @property
    def plain(self) -> bool:
        """Whether it has content that can be read."""
        return self.kind == "file"

    @property
    def hidden(self) -> bool:
        """Whether its name or that of a folder around it begins with a dot, as those that systems add."""
        return any(part.startswith(".") and part not in (".", "..") for part in self.name.split("/"))


def tar_members(where: str, stream: BinaryIO) -> Iterator[TarMember]:
    """All entries of a tar, also behind an end mark: tars may be joined. `stream` may be moved between two of them.
    Links within the tar come last, as the files that they lead to; those that lead to none stay links.

    Args:
        where: the tar's name in messages.

    Raises:
        DataError: not a tar, or one that is cut short or damaged.
    """
    links: list[tuple[TarMember, str]] = []
    try:
        for entry in _entries(stream):
            member = _member(entry)
            if member.kind == "link":
                folder = posixpath.dirname(entry.name) if entry.issym() else ""
                links.append((member, posixpath.normpath(posixpath.join(folder, entry.linkname))))
            else:
                yield member
        if links:
            yield from _resolve_links(stream, links)
    except DataError:
        raise
    except (OSError, ValueError, OverflowError, tarfile.TarError) as error:  # numbers that no file has, too
        raise DataError(
            f"{where}: not a tar that can be read to its end ({error_text(error)}); make or copy it anew"
        ) from error


def _entries(stream: BinaryIO) -> Iterator[tarfile.TarInfo]:
    end = 0
    while True:
        stream.seek(end)
        with tarfile.open(fileobj=cast(BinaryIO, _Headers(stream)), mode="r:") as archive:
            while (entry := archive.next()) is not None:
                archive.members.clear()  # type: ignore[attr-defined]  # else it keeps all of them, 2 KB each
                end = archive.offset  # of what follows the entry
                yield entry
        stream.seek(end)  # tarfile takes a cut tar for a shorter one
        if stream.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
            raise tarfile.ReadError(f"no end mark at byte {end}")
        end += tarfile.BLOCKSIZE
        while (block := stream.read(tarfile.BLOCKSIZE)) and not any(block):
            end += tarfile.BLOCKSIZE
        if not block:
            return


def _member(entry: tarfile.TarInfo) -> TarMember:
    folder, slash, file = entry.name.removeprefix("./").rpartition("/")
    stem, _, suffix = file.partition(".")
    kinds = {"folder": entry.isdir(), "link": entry.issym() or entry.islnk(), "sparse file": entry.issparse()}
    kind = next((kind for kind, is_it in kinds.items() if is_it), "file" if entry.isreg() else "special file")
    return TarMember(
        name=entry.name,
        key=folder + slash + stem,
        suffix=suffix.lower(),
        offset=entry.offset_data,
        length=entry.size,
        checksum=entry.chksum,
        kind=kind,
    )


def _resolve_links(stream: BinaryIO, links: list[tuple[TarMember, str]]) -> Iterator[TarMember]:
    """The links with the content that they lead to, which takes a second look at all headers."""
    targets = {posixpath.normpath(link.name): target for link, target in links}
    ends = [target for _, target in links]
    for _ in range(40):  # links that lead to links, as many as Linux follows
        ends = [targets.get(end, end) for end in ends]
    wanted = set(ends)
    files = {name: _member(entry) for entry in _entries(stream) if (name := posixpath.normpath(entry.name)) in wanted}
    for (link, _), end in zip(links, ends, strict=True):
        file = files.get(end, link)
        yield link._replace(offset=file.offset, length=file.length, kind=file.kind if file.plain else "link")


class _Headers:
    """Headers of a tar for `tarfile`, without the contents of members."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self.seek, self.tell = stream.seek, stream.tell

    def read(self, size: int) -> Any:
        if size > LONGEST_HEADER:
            raise tarfile.ReadError(f"a header of {size} bytes at byte {self.tell()}, {LONGEST_HEADER} allowed")
        return self._stream.read(size)
