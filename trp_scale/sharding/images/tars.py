"""Tars of images: find them by paths, globs, braces, URLs, folders and text files; list the members of one by key and
suffix, from its headers alone."""

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

from trp_scale.config.json_files import read_lines
from trp_scale.errors import DataError, error_text, escape_name, quote, shorten
from trp_scale.storage.transfer import is_url, shared_remote

MOST = 1_000_000
"""Tars of one pattern, or of one text file."""

LONGEST = 4096
"""Characters of a path or a URL, as in Linux. A line of 20 KB before {000000..999999} took 20 GB."""

LONGEST_PATTERN = 1 << 20
"""Characters of a pattern, which may list many names in braces."""

MOST_BRACES = 64
"""Opening braces of a pattern: each may be looked at again for each of its choices."""

_BRACES = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"(-?[0-9]{1,12})\.\.(-?[0-9]{1,12})(?:\.\.(-?[0-9]{1,12}))?")


def expand_braces(text: str) -> list[str]:
    """{000..146} and {a,b}, as a shell expands them; other braces stay.

    Raises:
        DataError: more than MOST results, one longer than LONGEST, more than LONGEST_PATTERN or than MOST_BRACES.
    """
    if len(text) > LONGEST_PATTERN:
        raise DataError(f"{shorten(text)}: {len(text)} characters, a pattern has at most {LONGEST_PATTERN}")
    if text.count("{") > MOST_BRACES:
        raise DataError(f"{shorten(text)}: {text.count('{')} pairs of braces, at most {MOST_BRACES} are expanded")
    names = []
    for name in itertools.islice(_expand(text, 0), MOST + 1):
        if len(name) > LONGEST:
            raise DataError(f"{shorten(name)}: {len(name)} characters, a path or a URL has at most {LONGEST}")
        names.append(name)
    if len(names) > MOST:
        raise DataError(f"{shorten(text)}: more than {MOST} tars; give a text file that lists them")
    return list(dict.fromkeys(names))


def _expand(text: str, start: int) -> Iterator[str]:
    match = _BRACES.search(text, start)
    if match is None:
        yield text
        return
    choices = _choices(match[1])
    if choices is None:  # as a shell leaves it
        yield from _expand(text, match.end())
        return
    for choice in choices:  # what is around an inner pair is met again
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
    """Absolute paths or URLs of the tars behind one pattern: a tar, a folder of them, a glob, braces, a URL of a tar or
    of a folder, or a text file with one of these a line.

    Raises:
        DataError: there are none, or one is compressed or no tar.
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
        raise DataError(f"{tar_name}: starts a program; give the path or the URL that it reads")
    if is_url(tar_name):
        return [tar_name] if tar_name.endswith(".tar") else _of_remote_folder(tar_name.rstrip("/"))
    path = Path(tar_name)
    if path.is_dir():
        tars = [str(tar.absolute()) for tar in sorted(path.glob("*.tar")) if not tar.name.startswith(".")]
        if not tars:
            raise DataError(f"{tar_name}: no .tar in it; compressed ones are not read, as no image could be read alone")
        return tars
    if path.suffix == ".tar" and (path.is_file() or not glob.has_magic(tar_name)):
        return [str(path.absolute())]  # looked for when it is read: a tar of the braces that is missing is named
    if path.is_file():
        return _of_list(path)
    tars = [str(Path(name).absolute()) for name in sorted(glob.glob(tar_name, recursive=True))]  # noqa: PTH207
    wrong = next((tar for tar in tars if not tar.endswith(".tar")), None)
    if wrong is not None:
        raise DataError(f"{wrong}: an uncompressed .tar expected of {item}")
    if not tars:
        raise DataError(f"{tar_name}: no such file, and no file matches it as a pattern")
    return tars


def _of_remote_folder(url: str) -> list[str]:
    listed = shared_remote(url).list_files()
    if listed is None:
        raise DataError(f"{url}: this server lists no files; give the tars, as {url}/train-{{000000..000146}}.tar")
    tars = sorted(name for name in listed if name.endswith(".tar") and "/" not in name and name[0] != ".")
    if not tars:
        raise DataError(f"{url}: no .tar among {len(listed)} files there")
    return [f"{url}/{name}" for name in tars]


def _of_list(path: Path) -> list[str]:
    """The tars that a text file lists; paths are relative to its folder."""
    if path.name.endswith((".tar.gz", ".tgz", ".tar.zst", ".tar.bz2", ".tar.xz")):
        raise DataError(f"{path}: an uncompressed .tar expected, as no image of a compressed one could be read alone")
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
        if len(names) > MOST:
            raise DataError(
                f"{path}, line {number}: more than {MOST} tars up to here; give several lists, one at a time"
            )
    if not names:
        raise DataError(f"{path}: lists no tar; the path or URL of one a line expected")
    return names


def unique_names(tars: list[str]) -> list[str]:
    """Return a unique name for each tar in a data set: its own, with folders before it where names repeat.

    Raises:
        DataError: two tars that no folder tells apart.
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
        raise DataError(f"{ours[0]} and {ours[1]}: both would be {twice} in the data set; rename one")
    return names


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
