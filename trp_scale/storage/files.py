"""Writing that survives a crash: data reaches the disk before a name points to it.

A file is written under a hidden temporary name in its directory. No two writers choose the same, on however many hosts.
Such a file belongs to its writer. Nobody else can tell whether the writer lives, so leftovers are removed only where no
writer can be left: by the run that has a data set for itself, or by `trp-scale merge`.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
import socket
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from trp_scale.errors import CheckpointError, RefusedError


def sync_directory(directory: Path) -> None:
    """Flush the directory's entries: without it a renamed file can be gone after a power cut."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def temporary_beside(path: Path) -> Path:
    """A hidden name in the directory of `path`: .NAME.HOST-PROCESS-RANDOM.tmp"""
    host = re.sub(r"[^A-Za-z0-9-]", "-", socket.gethostname())[:40]
    # Host and process are for the user. They are not enough: containers share both.
    return path.with_name(f".{path.name}.{host}-{os.getpid()}-{secrets.token_hex(6)}.tmp")


def remove_leftovers(directory: Path) -> None:
    """Remove the temporary files and directories of writers that have ended."""
    for leftover in directory.glob(".*.tmp"):
        if leftover.is_dir():
            shutil.rmtree(leftover, ignore_errors=True)
        else:
            leftover.unlink(missing_ok=True)


@contextlib.contextmanager
def atomic_write(path: Path, *, durable: bool = True) -> Iterator[IO[bytes]]:
    """Context with a binary stream to write `path` through; the file appears, whole, when the context ends.

    After an error the former file remains.

    Args:
        path: in a directory that exists.
        durable: flush to the disk, so that the file survives a power cut; False for what is written often.
    """
    temporary = temporary_beside(path)
    try:
        with temporary.open("wb") as stream:
            yield stream
            if durable:
                stream.flush()
                os.fsync(stream.fileno())
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    if durable:
        sync_directory(path.parent)


def write_text(path: Path, text: str, *, durable: bool = True) -> None:
    """Write UTF-8 text by `atomic_write`."""
    with atomic_write(path, durable=durable) as stream:
        stream.write(text.encode())


def json_text(path: Path, document: Mapping[str, Any], *, sort_keys: bool = False) -> str:
    """Indented JSON, for a file.

    Raises:
        CheckpointError: the document holds something that is not a JSON value; names the file.
    """
    try:
        return json.dumps(document, indent=1, sort_keys=sort_keys, ensure_ascii=False) + "\n"
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: {error}; only JSON values may be stored here") from error


def write_json(path: Path, document: Mapping[str, Any], *, sort_keys: bool = False) -> None:
    """Write indented JSON by `atomic_write`.

    Raises:
        CheckpointError: the document holds something that is not a JSON value.
    """
    write_text(path, json_text(path, document, sort_keys=sort_keys))


def private_directory(name: str, variable: str) -> Path:
    """Return the directory NAME-USER among the temporary files; it is made if it does not exist.

    Args:
        name: what it is for.
        variable: environment variable that chooses another directory, for the message.

    Raises:
        RefusedError: it belongs to another user, or others may read it.
    """
    directory = Path(tempfile.gettempdir()) / f"{name}-{os.getuid()}"
    directory.mkdir(mode=0o700, exist_ok=True)
    status = directory.lstat()
    if status.st_uid != os.getuid() or status.st_mode & 0o077 or directory.is_symlink():
        raise RefusedError(
            f"{directory}: not a directory that belongs to this user alone; remove it, or set {variable}"
        )
    return directory
