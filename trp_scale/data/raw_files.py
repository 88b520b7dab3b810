"""Input files of `shard-text`, `shard-images` and `index`, recognized by name; errors for paths without a data set."""

from __future__ import annotations

import errno
import hashlib
import os
import shlex
import stat
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

from trp_scale.config.files import read_object
from trp_scale.config.registry import names
from trp_scale.config.schema import Fields, is_plain_name
from trp_scale.data.index import read_fields
from trp_scale.errors import DataError, error_text, escape_name, quote, shorten


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
    loaded = open_dataset(Path(path), f"input {path}")
    if isinstance(loaded, datasets.DatasetDict):
        if split not in loaded:
            raise DataError(f"input {path}: split {split!r} not found; --split may be {', '.join(loaded)}")
        return loaded[split]
    return loaded


def open_dataset(path: Path, source: str) -> Any:
    """Open a directory written by datasets.save_to_disk, a Dataset or a DatasetDict.

    Args:
        source: name of the directory in messages.

    Raises:
            DataError: the directory cannot be opened.
    """
    import datasets

    try:
        for file in path.glob("**/*.json"):  # the library would follow any path in them
            read_object(file, DataError)
        for state in path.glob("**/state.json"):
            for entry in read_fields(state).take("_data_files", list[dict[str, Any]], []):
                if not is_plain_name(entry.get("filename")):
                    raise DataError(f"{state}: file {quote(entry.get('filename'))} found, a plain file name expected")
        return datasets.load_from_disk(str(path))
    except Exception as error:  # a damaged file raises many types
        raise DataError(
            f"{source}: cannot be read as a dataset directory ({error_text(error)}); save it again"
        ) from error


def check_rows(rows: Any, first: int, last: int, source: str) -> None:
    """Check rows before the library reads them: it would read beyond the file, which ends the process.

    Args:
        rows: Dataset without a selection.
        first, last: rows first ... last - 1.
        source: name of the directory in messages.

    Raises:
        DataError: an offset or a length is wrong.
    """
    try:
        rows.data.table.slice(first, last - first).validate(full=True)
    except Exception as error:  # from pyarrow
        raise DataError(
            f"{source}: rows {first} to {last - 1} are damaged ({error_text(error)}); save it again"
        ) from error


TEXT_SUFFIXES = (".txt", ".text", ".md")
JSON_SUFFIXES = (".jsonl", ".ndjson", ".json")
PARQUET = ".parquet"
GZIP = ".gz"
IMAGE_SUFFIXES = (".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm")
"""Suffixes of images in a folder, in lower or upper case; other files are skipped."""

SAMPLED_BYTES = 65536
"""Bytes of each of the three samples of a file for its fingerprint."""

MAX_INSPECTED = 1000
"""Limit of folder entries that are inspected; a folder may hold millions."""

_KINDS = {"text": "text that is not sharded", "image": "images that are not sharded", "tar": "tars without an index"}

_RUN_FILES = ("metrics.jsonl", "stop.json")
"""Files that identify a run directory."""


def require_dataset(directory: Path, source: str = "") -> None:
    """Refuse a directory without dataset.json.

    Args:
        source: name of the directory in the message; "" for its path.

    Raises:
        DataError: with the content of the directory and the command that creates a data set from it.
    """
    if not (directory / "dataset.json").is_file():
        raise DataError(f"{source or directory}: {_explain_missing_dataset(directory)}")


DATASET_FORMAT = 1
"""Format of dataset.json."""


def read_dataset(directory: Path, kind: str, advice: str, source: str = "", newest: int = DATASET_FORMAT) -> Fields:
    """Read dataset.json of a data set of one kind.

    Args:
        kind: "text" or "image".
        advice: advice for messages about a wrong field.
        source: as for `require_dataset`.
        newest: highest format that can be read.

    Raises:
        DataError: dataset.json is missing or has another format or kind.
    """
    require_dataset(directory, source)
    fields = read_fields(directory / "dataset.json", advice)
    for name, expected in (("format", tuple(range(DATASET_FORMAT, newest + 1))), ("kind", (kind,))):
        if (stored := fields.document.get(name)) not in expected:
            raise fields.refusal(f"{name} {quote(stored)} found, {' or '.join(map(repr, expected))} expected")
    return fields


def walk_files(folder: Path, left_out: Counter[str] | None = None) -> Iterator[tuple[str, int]]:
    """Yield (path relative to the folder, bytes) of all files, also in linked folders; a broken link has -1 bytes.

    Args:
        left_out: counts hidden entries and links to a parent folder, which are skipped.

    Raises:
        DataError: a folder cannot be read.
    """
    around = {(status.st_dev, status.st_ino) for status in map(os.stat, (folder, *folder.resolve().parents))}
    yield from _walk(folder, "", Counter() if left_out is None else left_out, around)


def _walk(folder: Path, prefix: str, left_out: Counter[str], around: set[tuple[int, int]]) -> Iterator[tuple[str, int]]:
    """Implement `walk_files`; `around` holds device and inode of the folder and its parents."""
    try:
        entries = list(os.scandir(folder))
    except OSError as error:
        raise DataError(f"{folder}: cannot be read ({error.strerror}); its files would be left out") from error
    for entry in entries:
        name = prefix + entry.name
        if entry.name.startswith("."):
            left_out["hidden"] += 1
            continue
        try:
            status = entry.stat()
        except OSError:  # a broken or circular link; reading it reports the error
            yield name, -1
            continue
        number = status.st_dev, status.st_ino
        if not stat.S_ISDIR(status.st_mode):
            yield name, status.st_size
        elif number in around:
            left_out["link to a folder around it"] += 1
        else:
            yield from _walk(Path(entry.path), f"{name}/", left_out, {*around, number})


def all_files(folder: Path, left_out: Counter[str] | None = None) -> list[Path]:
    """Return the sorted paths of all files of a folder (`walk_files`)."""
    return sorted(folder / name for name, _ in walk_files(folder, left_out))


def open_regular(path: str | Path) -> BinaryIO:
    """Open a regular file for reading.

    Raises:
        OSError: also for a pipe, which would block, and for a device, which may be endless.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return os.fdopen(descriptor, "rb")


def files_fingerprint(files: list[Path]) -> bytes:
    """Hash the start, middle and end of each file: detects changes without reading everything."""
    digest = hashlib.sha256()
    for file in files:
        try:
            with open_regular(file) as stream:
                length = os.fstat(stream.fileno()).st_size
                for start in sorted({0, max(0, length // 2 - SAMPLED_BYTES // 2), max(0, length - SAMPLED_BYTES)}):
                    stream.seek(start)
                    digest.update(stream.read(SAMPLED_BYTES))
        except OSError:
            digest.update(b"unreadable")
    return digest.digest()


def list_counts(kinds: Counter[str]) -> str:
    """List counts of skipped files by suffix or reason, for a message."""
    named = (f"{n} {escape_name(shorten(kind)) or 'without a suffix'}" for kind, n in kinds.most_common(5))
    return ", ".join(named) or "nothing"


def file_kind(file: Path) -> str:
    """Return "text", "image", "tar", or the suffix of any other file."""
    name = file.name.lower()
    if name.removesuffix(GZIP).endswith((*TEXT_SUFFIXES, *JSON_SUFFIXES, PARQUET)):
        return "text"
    if name.endswith(IMAGE_SUFFIXES):
        return "image"
    return "tar" if file.name.endswith(".tar") else file.suffix


def modality_folders(folder: Path) -> Mapping[str, Path]:
    """Return sub-folders that are modalities of the same images, by name; empty if there are fewer than two."""
    folders = {name: folder / name for name in names("modality") if (folder / name).is_dir()}
    return folders if len(folders) > 1 else {}


def modality_command(folders: Mapping[str, Path]) -> str:
    """Return the command that shards modality folders, images first."""
    images = folders.get("rgb", "IMAGES")
    maps = [f"--modality {name}={_word(path)}" for name, path in folders.items() if name != "rgb"]
    return f"trp-scale shard-images --inputs {_word(images)} {' '.join(maps)} --output DIR"


def _explain_missing_dataset(place: Path) -> str:
    """Describe a path that is no data set, and how to create a data set from it."""
    if not place.exists() and "," in str(place):
        named = [part.rpartition("=") for part in str(place).split(",")]
        weighted = ",".join(f"{name.partition(':')[0] or Path(path).name}:1={path}" for name, _, path in named)
        return f"no such directory; a mixture needs names and weights above 0: {weighted!r}"
    if not place.exists():
        return (
            "no such file or directory; allowed: a directory that trp-scale shard-text, shard-images or index wrote, "
            "or its URL. Data sets of a hub are not downloaded"
        )
    if whole := next((up for up in (place.parent, place.parent.parent) if (up / "dataset.json").is_file()), None):
        return f"a part of the data set {whole}, not a data set itself; give {_word(whole)}"
    if place.is_dir():
        if (place / "progress").is_dir():
            return "sharding was interrupted, dataset.json is missing; repeat the same command to continue"
        if any((place / name).is_file() for name in _RUN_FILES):
            return f"a run directory, not a data set; to see its results: trp-scale report --run {_word(place)}"
        if is_dataset_directory(place):
            command = _sharding_command("text", place)
            return f"a directory of datasets.save_to_disk, not a data set; {command}, or shard-images"
        if within := sorted(path.parent.name for path in islice(place.glob("*/dataset.json"), MAX_INSPECTED)):
            return f"not a data set, but it contains data sets; give one: {', '.join(within[:10])}"
        if folders := modality_folders(place):
            return f"not a data set, but folders of {', '.join(folders)}; shard them: {modality_command(folders)}"
    files = [place / name for name, _ in islice(walk_files(place), MAX_INSPECTED)] if place.is_dir() else [place]
    files = [path for path in files if path.is_file()] or [place]
    if files == [place] and place.is_dir():
        return "an empty directory; allowed: one that trp-scale shard-text, shard-images or index wrote"
    kind = Counter(map(file_kind, files)).most_common(1)[0][0]
    first = min(file for file in files if file_kind(file) == kind)
    example = first.relative_to(place) if place.is_dir() else first.name
    contents = f"not a data set, but {_KINDS.get(kind, 'files')} ({example}{', ...' * (len(files) > 1)})"
    if kind in ("text", "image"):
        return (
            f"{contents}; {_sharding_command(kind, place.parent if kind == 'image' and not place.is_dir() else place)}"
        )
    if kind == "tar":
        tars = first.parent if place.is_dir() else place
        output = "" if tars == place and place.is_dir() else " --output DIR"
        command = f"trp-scale index {_word(tars)}{output}"
        return f"{contents}; index tars of images without copying: {command}; unpack other tars"
    return f"{contents}; text, JSON lines, parquet and images can be sharded (trp-scale shard-text, shard-images)"


def _sharding_command(kind: str, path: Path) -> str:
    command = "shard-text" if kind == "text" else "shard-images"
    return f"shard it: trp-scale {command} --inputs {_word(path)} --output DIR"


def _word(path: Path | str) -> str:
    return shlex.quote(str(path))
