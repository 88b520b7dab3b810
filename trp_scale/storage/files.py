"""Writing that survives a crash: data reaches the disk before a name points to it."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trp_scale.errors import CheckpointError


def sync_directory(directory: Path) -> None:
    """Flush the directory's entries: without it a renamed file can be gone after a power cut."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def json_text(path: Path, document: Mapping[str, Any]) -> str:
    """Indented JSON, for a file.

    Raises:
        CheckpointError: the document holds something that is not a JSON value; names the file.
    """
    try:
        return json.dumps(document, indent=1, ensure_ascii=False) + "\n"
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: {error}; only JSON values may be stored here") from error


def write_text(path: Path, text: str) -> None:
    """Write under a hidden name, flush, rename. Storage that refuses it is left as it was."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def write_json(path: Path, document: Mapping[str, Any]) -> None:
    """Write indented JSON under a hidden name, flush it, rename it.

    Raises:
        CheckpointError: the document holds something that is not a JSON value.
    """
    write_text(path, json_text(path, document))
