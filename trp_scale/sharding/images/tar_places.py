"""Find tars by paths, globs, braces, URLs, folders, and text files that list them."""

from __future__ import annotations

import glob
import itertools
import os
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from trp_scale.config.json_files import read_lines
from trp_scale.errors import DataError, escape_name, quote, shorten
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
    listed = shared_remote(url).listed()
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
