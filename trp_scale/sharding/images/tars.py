"""Tars of images: search by path, glob, braces, URL, folder or text file; listing of members from tar headers."""

from __future__ import annotations

import glob
import itertools
import os
import posixpath
import re
import tarfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, NamedTuple, cast

from trp_scale.config.files import read_lines
from trp_scale.errors import DataError, error_text, escape_name, quote, shorten
from trp_scale.storage.transfer import is_url, shared_remote

MAX_TARS = 1_000_000
"""Maximum tars of one pattern or text file."""

MAX_PATH_CHARS = 4096
"""Characters of a path or URL, as in Linux. A line of 20 KB before {000000..999999} took 20 GB."""

MAX_PATTERN_CHARS = 1 << 20
"""Characters of a pattern, which may list many names in braces."""

MAX_BRACES = 64
"""Opening braces of a pattern. Each one multiplies the number of choices to expand."""

_BRACES = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"(-?[0-9]{1,12})\.\.(-?[0-9]{1,12})(?:\.\.(-?[0-9]{1,12}))?")


def expand_braces(text: str) -> list[str]:
    """Expand {000..146} and {a,b} like a shell; other braces stay.

    Raises:
        DataError: the pattern or a result is too long, or there are too many results or braces.
    """
    if len(text) > MAX_PATTERN_CHARS:
        raise DataError(f"{shorten(text)}: {len(text)} characters, at most {MAX_PATTERN_CHARS} allowed in a pattern")
    if text.count("{") > MAX_BRACES:
        raise DataError(f"{shorten(text)}: {text.count('{')} pairs of braces, at most {MAX_BRACES} allowed")
    names = []
    for name in itertools.islice(_expand(text, 0), MAX_TARS + 1):
        if len(name) > MAX_PATH_CHARS:
            raise DataError(
                f"{shorten(name)}: {len(name)} characters, at most {MAX_PATH_CHARS} allowed in a path or URL"
            )
        names.append(name)
    if len(names) > MAX_TARS:
        raise DataError(f"{shorten(text)}: more than {MAX_TARS} tars; give a text file that lists them")
    return list(dict.fromkeys(names))


def _expand(text: str, start: int) -> Iterator[str]:
    match = _BRACES.search(text, start)
    if match is None:
        yield text
        return
    choices = _choices(match[1])
    if choices is None:  # literal, as in a shell
        yield from _expand(text, match.end())
        return
    for choice in choices:  # the recursion expands the braces around an inner pair
        yield from _expand(text[: match.start()] + choice + text[match.end() :], start)


def _choices(inner: str) -> Iterator[str] | None:
    """Expand the inside of braces; `None` if it is literal."""
    if "," in inner:
        return iter(inner.split(","))
    match = _RANGE.fullmatch(inner)
    if match is None:
        return None
    first, last, step = int(match[1]), int(match[2]), abs(int(match[3] or 1)) or 1
    padded = any(re.match(r"-?0\d", text) for text in match.groups()[:2])
    width = max(len(match[1]), len(match[2])) if padded else 0
    numbers = range(first, last + 1, step) if first <= last else range(first, last - 1, -step)
    return (f"{number:0{width}d}" for number in numbers)


def find_tars(item: str) -> list[str]:
    """Return absolute paths or URLs of the tars of one pattern: a tar, a folder, a glob, braces, a URL of a tar or
    folder, or a text file with one tar per line.

    Raises:
        DataError: no tar exists, or a file is compressed or no tar.
        RemoteError: a URL cannot be listed.
    """
    names = [item] if os.path.exists(item) else expand_braces(item)  # noqa: PTH110 - any text
    tars = list(dict.fromkeys(tar for name in names for tar in _expand_name(name, item)))
    for tar in tars:
        if escape_name(tar) != tar:
            raise DataError(f"{escape_name(tar)}: a name that is not UTF-8 cannot be stored; rename it")
    return tars


def _expand_name(tar_name: str, item: str) -> list[str]:
    if tar_name.startswith("pipe:"):
        raise DataError(f"{tar_name}: programs are not started; give the path or URL of the tar")
    if is_url(tar_name):
        return [tar_name] if tar_name.endswith(".tar") else _list_remote_folder(tar_name.rstrip("/"))
    path = Path(tar_name)
    if path.is_dir():
        tars = [str(tar.absolute()) for tar in sorted(path.glob("*.tar")) if not tar.name.startswith(".")]
        if not tars:
            raise DataError(f"{tar_name}: no .tar in this folder; unpack compressed tars, they have no random access")
        return tars
    if path.suffix == ".tar" and (path.is_file() or not glob.has_magic(tar_name)):
        return [str(path.absolute())]  # may be missing; opening it then reports its name
    if path.is_file():
        return _read_list(path)
    tars = [str(Path(name).absolute()) for name in sorted(glob.glob(tar_name, recursive=True))]  # noqa: PTH207
    wrong = next((tar for tar in tars if not tar.endswith(".tar")), None)
    if wrong is not None:
        raise DataError(f"{wrong}: not an uncompressed .tar, as expected for {item}")
    if not tars:
        raise DataError(f"{tar_name}: no such file, and no file matches this pattern")
    return tars


def _list_remote_folder(url: str) -> list[str]:
    listed = shared_remote(url).list_files()
    if listed is None:
        raise DataError(f"{url}: this server cannot list files; give tars: {url}/train-{{000000..000146}}.tar")
    tars = sorted(name for name in listed if name.endswith(".tar") and "/" not in name and name[0] != ".")
    if not tars:
        raise DataError(f"{url}: no .tar among {len(listed)} files there")
    return [f"{url}/{name}" for name in tars]


def _read_list(path: Path) -> list[str]:
    """Return the tars listed in a text file. Paths are relative to its folder."""
    if path.name.endswith((".tar.gz", ".tgz", ".tar.zst", ".tar.bz2", ".tar.xz")):
        raise DataError(f"{path}: a compressed tar has no random access; unpack it to a .tar")
    lines = read_lines(path, DataError, what="a .tar, nor a text file that lists tars")
    names: list[str] = []
    for number, line in enumerate(lines, start=1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        for name in expand_braces(text):
            if not name.endswith(".tar") or name.startswith("pipe:") or "\0" in name:
                raise DataError(f"{path}, line {number}: {quote(name)} found, the path or URL of a .tar expected")
            names += [name] if is_url(name) else [str((path.parent / name).absolute())]
        if len(names) > MAX_TARS:
            raise DataError(f"{path}, line {number}: more than {MAX_TARS} tars up to this line; split the list")
    if not names:
        raise DataError(f"{path}: lists no tar; one path or URL of a .tar per line expected")
    return names


def unique_names(tars: list[str]) -> list[str]:
    """Return a unique name for each tar: its file name, prefixed with folders if file names repeat.

    Raises:
        DataError: two tars have the same path.
    """
    parts = [PurePosixPath(tar.partition("://")[2] if is_url(tar) else tar).parts for tar in tars]
    repeated = {name for name, count in Counter(part[-1] for part in parts).items() if count > 1}
    shared = [part for part in parts if part[-1] in repeated]
    depth = 0
    while shared and all(len(part) > depth + 1 for part in shared) and len({part[depth] for part in shared}) == 1:
        depth += 1
    names = ["-".join(part[depth:]) if part[-1] in repeated else part[-1] for part in parts]
    twice = next((name for name, count in Counter(names).items() if count > 1), None)
    if twice is not None:
        ours = [tar for tar, name in zip(tars, names, strict=True) if name == twice]
        raise DataError(f"{ours[0]} and {ours[1]}: both would be named {twice} in the data set; rename one")
    return names


MAX_HEADER_BYTES = 1 << 20
"""Bytes of a long name or of the records before a member. Real headers have about 10,000 bytes. A claimed size of 5e18
ended the process (out of memory), and global records copied to all members took 1 GB per MB of tar."""


class TarMember(NamedTuple):
    """One entry of a tar.

    Attributes:
        name: as stored.
        key: the name up to the first dot of the file name.
        suffix: the rest in lower case.
        offset, length: of the content.
        checksum: of the header.
        kind: "file" (contiguous content), "folder", "link", "sparse file" or "special file".
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
        """Whether the content can be read."""
        return self.kind == "file"

    @property
    def hidden(self) -> bool:
        """Whether the file or one of its folders starts with a dot, like files added by operating systems."""
        return any(part.startswith(".") and part not in (".", "..") for part in self.name.split("/"))


def tar_members(where: str, stream: BinaryIO) -> Iterator[TarMember]:
    """Yield all entries of a tar, also after an end mark (concatenated tars). The caller may seek `stream` in between.
    Links come last, resolved to their target in the tar; unresolved links keep the kind "link".

    Args:
        where: name of the tar for messages.

    Raises:
        DataError: the file is no tar, truncated or damaged.
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
    except (OSError, ValueError, OverflowError, tarfile.TarError) as error:  # invalid sizes raise the middle two
        raise DataError(
            f"{where}: not a tar that can be read to its end ({error_text(error)}); make or copy it again"
        ) from error


def _entries(stream: BinaryIO) -> Iterator[tarfile.TarInfo]:
    end = 0
    while True:
        stream.seek(end)
        with tarfile.open(fileobj=cast(BinaryIO, _Headers(stream)), mode="r:") as archive:
            while (entry := archive.next()) is not None:
                archive.members.clear()  # type: ignore[attr-defined]  # tarfile keeps all entries, 2 KB each
                end = archive.offset  # of the next entry
                yield entry
        stream.seek(end)  # tarfile does not report truncated tars
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
    """Yield the links with the content of their targets, from a second pass over all headers."""
    targets = {posixpath.normpath(link.name): target for link, target in links}
    ends = [target for _, target in links]
    for _ in range(40):  # chained links; Linux follows 40
        ends = [targets.get(end, end) for end in ends]
    wanted = set(ends)
    files = {name: _member(entry) for entry in _entries(stream) if (name := posixpath.normpath(entry.name)) in wanted}
    for (link, _), end in zip(links, ends, strict=True):
        file = files.get(end, link)
        yield link._replace(offset=file.offset, length=file.length, kind=file.kind if file.plain else "link")


class _Headers:
    """Stream that limits the size of headers that `tarfile` reads."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self.seek, self.tell = stream.seek, stream.tell

    def read(self, size: int) -> Any:
        if size > MAX_HEADER_BYTES:
            raise tarfile.ReadError(f"a header of {size} bytes at byte {self.tell()}, {MAX_HEADER_BYTES} allowed")
        return self._stream.read(size)
