"""Directories written by datasets.save_to_disk. `datasets` is an extra, imported when one is opened."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from trp_scale.data.index import DataError

SAMPLED_BYTES = 65536


def is_dataset_directory(path: Path) -> bool:
    """Whether datasets.save_to_disk wrote this directory."""
    return (path / "state.json").exists() or (path / "dataset_dict.json").exists()


def load_dataset(path: str, split: str):  # type: ignore[no-untyped-def]  # `datasets` is an extra without types here
    """Open a directory written by datasets.save_to_disk.

    Raises:
        DataError: the extra is not installed, or the directory has no such split.
    """
    try:
        import datasets
    except ImportError as error:
        raise DataError(f"input {path}: reading a dataset directory needs `pip install trp-scale[datasets]`") from error
    loaded = datasets.load_from_disk(path)
    if isinstance(loaded, datasets.DatasetDict):
        if split not in loaded:
            raise DataError(f"input {path}: split {split!r} not found; --split may be {', '.join(loaded)}")
        return loaded[split]
    return loaded


def files_fingerprint(files: list[Path]) -> bytes:
    """Digest of the ends and the middle of files: changed content is noticed without reading all of it."""
    digest = hashlib.sha256()
    for file in files:
        if not os.access(file, os.R_OK):
            digest.update(b"unreadable")
            continue
        with file.open("rb") as stream:
            length = os.fstat(stream.fileno()).st_size
            for start in sorted({0, max(0, length // 2 - SAMPLED_BYTES // 2), max(0, length - SAMPLED_BYTES)}):
                stream.seek(start)
                digest.update(stream.read(SAMPLED_BYTES))
    return digest.digest()


def directory_fingerprint(path: Path) -> str:
    """The fingerprint of all files of a directory."""
    return files_fingerprint(sorted(file for file in path.rglob("*") if file.is_file())).hex()
