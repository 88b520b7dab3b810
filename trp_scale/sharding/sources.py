"""`--source_field`: one data set for each source of the input, and the `data.path` that mixes them by their rows.

OUTPUT/
  SOURCE/       data set of a source
  mixture.txt   value of --data.path, written when all sources are finished
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from trp_scale.data.index import read_fields
from trp_scale.data.mixture import format_paths
from trp_scale.errors import DataError, quote
from trp_scale.storage.files import write_text

FOLDER = "folder"
"""Value of --source_field for which each folder directly in the input is a source."""
MIXTURE = "mixture.txt"
MOST_SOURCES = 256
SHARES = 1000
"""Sum of the weights in a mixture."""

log = logging.getLogger(__name__)


def source_folders(inputs: list[str]) -> dict[str, Path]:
    """Return the folders directly in the input, by name.

    Raises:
        DataError: the input is not a single folder with two or more folders.
    """
    root = Path(inputs[0])
    folders = sorted(path for path in root.iterdir() if path.is_dir()) if len(inputs) == 1 and root.is_dir() else []
    if len(folders) < 2:
        raise DataError(
            f"--source_field {FOLDER} with --inputs {' '.join(inputs)}: {len(folders)} folders found, one folder with "
            "two or more folders expected; each becomes a source"
        )
    return {path.name: path for path in folders}


def shard_sources(output: Path, sources: Mapping[str, object], shard: Callable[[str, Path], object]) -> Path:
    """Make a data set for each source, and write the mixture when all are finished. Return `output`.

    Args:
        output: directory of all data sets.
        sources: sources by the value of the field.
        shard: makes the data set of a value in a directory, or a part of it.

    Raises:
        DataError: too many sources, or two with the same name.
    """
    if len(sources) > MOST_SOURCES:
        raise DataError(f"--source_field: {len(sources)} sources found, at most {MOST_SOURCES} allowed")
    directories: dict[str, Path] = {}
    for value in sources:
        name = re.sub(r"[^A-Za-z0-9_.-]+", "_", value)
        if name in directories:
            raise DataError(f"--source_field: two values are named {quote(name)} in a mixture; rename one of them")
        directories[name] = output / name
        shard(value, directories[name])
    if all((directory / "dataset.json").exists() for directory in directories.values()):
        path = mixture_path(directories)
        write_text(output / MIXTURE, path + "\n")
        with suppress(OSError):  # not empty while other parts hold their locks
            (output / "progress").rmdir()
        log.info("%s: %d sources; give --data.path %s", output / MIXTURE, len(directories), path)
    return output


def mixture_path(directories: Mapping[str, Path]) -> str:
    """Return the `data.path` of data sets by name; a weight is the share of the rows in thousandths, at least one."""
    rows = {name: read_fields(path / "dataset.json").take("rows", int) for name, path in directories.items()}
    return format_paths(rows, directories, total=SHARES)
