"""What is fuzzed: a reader, the sound files that it reads, and how they are damaged."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.faults.mutations import tar_repaired


@dataclass(frozen=True, kw_only=True)
class Target:
    """A file that is damaged.

    Attributes:
        path: of the sound file.
        kind: of its content, as `mutations.mutated` has it.
        within: takes what is mutated out of the file's content; with `joined`. None: all of it.
        joined: makes the file's content of the mutated part and the sound content, checksums and all.
    """

    path: Path
    kind: str
    within: Callable[[bytes], bytes] | None = None
    joined: Callable[[bytes, bytes], bytes] | None = None


@dataclass(frozen=True, kw_only=True)
class Case:
    """Sound files, and how they are read.

    Attributes:
        targets: one of them is damaged at a time.
        read: reads them; a documented error is raised, or nothing.
        renewed: a folder that reading changes: it is put back before each input.
    """

    targets: list[Target]
    read: Callable[[], Any]
    renewed: Path | None = None


@dataclass(frozen=True, kw_only=True)
class Reader:
    """One way in for files.

    Attributes:
        name: in the table.
        make: writes the sound files into an empty folder.
        documented: errors that it may raise.
        share: of the inputs, against the others'; slow ones get less.
        wait: seconds that one input may take.
    """

    name: str
    make: Callable[[Path], Case]
    documented: tuple[type[BaseException], ...]
    share: float = 1.0
    wait: float = 30.0


def of_content(path: Path, kind: str, content: bytes, read: Callable[[bytes], Any], **repairs: Any) -> Case:
    """A reader of bytes in memory."""
    path.write_bytes(content)
    return Case(targets=[Target(path=path, kind=kind, **repairs)], read=lambda: read(path.read_bytes()))


def of_contents(
    directory: Path, contents: Mapping[str, bytes], read: Callable[[str, bytes], Any], *, mend: Any = None
) -> Case:
    """A reader of several files' bytes, by name, of which it is given the one that is damaged.

    Args:
        mend: makes the checksums of a damaged PNG fit again; such files are damaged with it and without.
    """
    targets = []
    for name, content in contents.items():
        (directory / name).write_bytes(content)
        targets.append(Target(path=directory / name, kind="bytes"))
        if mend is not None and content.startswith(b"\x89PNG"):
            targets.append(Target(path=directory / name, kind="bytes", within=whole, joined=repaired(mend)))

    def read_changed() -> None:
        for name, content in contents.items():
            if (found := (directory / name).read_bytes()) != content:
                read(name, found)

    return Case(targets=targets, read=read_changed)


def files_below(path: Path) -> list[Target]:
    """All files of a directory, JSON by its structure."""
    files = sorted(each for each in path.rglob("*") if each.is_file())
    return [Target(path=each, kind="json" if each.suffix == ".json" else "bytes") for each in files]


def tensor_file(path: Path) -> list[Target]:
    """A file of safetensors: its bytes, and its header, which is JSON."""

    def header(content: bytes) -> bytes:
        return content[8 : 8 + int.from_bytes(content[:8], "little")]

    def with_header(found: bytes, content: bytes) -> bytes:
        return len(found).to_bytes(8, "little") + found + content[8 + int.from_bytes(content[:8], "little") :]

    return [Target(path=path, kind="bytes"), Target(path=path, kind="json", within=header, joined=with_header)]


def tar_file(path: Path) -> list[Target]:
    """A tar: its bytes, and with the checksums of its headers mended, its first one among them."""

    def with_first(header: bytes, content: bytes) -> bytes:
        return tar_repaired(header[:512].ljust(512, b"\0") + content[512:])

    return [
        Target(path=path, kind="bytes"),
        Target(path=path, kind="bytes", within=whole, joined=repaired(tar_repaired)),
        Target(path=path, kind="bytes", within=lambda content: content[:512], joined=with_first),
    ]


def repaired(mend: Callable[[bytes], bytes]) -> Callable[[bytes, bytes], bytes]:
    """`joined` of a file that is mutated as a whole and mended."""
    return lambda mutated, _: mend(mutated)


def whole(content: bytes) -> bytes:
    """`within` of such a file."""
    return content
