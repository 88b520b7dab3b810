"""What is fuzzed: a reader, the sound files that it reads, and how they are damaged."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Target:
    """A file that is damaged.

    Attributes:
        path: of the sound file.
        kind: of its content, as `mutations.mutated` has it.
        within: takes what is mutated out of the file's content; with `joined`. None: all of it.
        joined: makes the file's content of the mutated part and the sound content, checksums and all.
        after: mends other files that hold checksums of this one, once it is written.
    """

    path: Path
    kind: str
    within: Callable[[bytes], bytes] | None = None
    joined: Callable[[bytes, bytes], bytes] | None = None
    after: Callable[[], None] | None = None


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
    wait: float = 8.0


def of_content(path: Path, kind: str, content: bytes, read: Callable[[bytes], Any], **repairs: Any) -> Case:
    """A reader of bytes in memory."""
    path.write_bytes(content)
    return Case(targets=[Target(path=path, kind=kind, **repairs)], read=lambda: read(path.read_bytes()))


def repaired(mend: Callable[[bytes], bytes]) -> Callable[[bytes, bytes], bytes]:
    """`joined` of a file that is mutated as a whole and mended."""
    return lambda mutated, _: mend(mutated)


def whole(content: bytes) -> bytes:
    """`within` of such a file."""
    return content
