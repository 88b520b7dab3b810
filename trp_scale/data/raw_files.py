"""Files of which `shard-text`, `shard-images` and `index` make data sets, by their names; and what is said where such
files, or nothing, lie in place of a data set."""

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

from trp_scale.config.json_files import read_object
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
        DataError: it cannot be opened.
    """
    import datasets

    try:
        for file in path.glob("**/*.json"):  # the library follows them wherever they lead
            read_object(file, DataError)
        for state in path.glob("**/state.json"):
            for entry in read_fields(state).take("_data_files", list[dict[str, Any]], []):
                if not is_plain_name(entry.get("filename")):
                    raise DataError(f"{state}: file {quote(entry.get('filename'))} found, a plain file name expected")
        return datasets.load_from_disk(str(path))
    except Exception as error:  # pyarrow's, ours, and whatever other fields than the library's lead to
        raise DataError(
            f"{source}: cannot be read as a dataset directory ({error_text(error)}); save it again"
        ) from error


def check_rows(rows: Any, first: int, last: int, source: str) -> None:
    """Refuse rows that the library would read past the ends of their file, which ends the process.

    Args:
        rows: a Dataset without a selection.
        first, last: rows first ... last - 1.
        source: name of the directory in messages.

    Raises:
        DataError: offsets or lengths of one of them lead elsewhere.
    """
    try:
        rows.data.table.slice(first, last - first).validate(full=True)
    except Exception as error:  # pyarrow's
        raise DataError(
            f"{source}: rows {first} to {last - 1} are damaged ({error_text(error)}); save it again"
        ) from error


TEXT_SUFFIXES = (".txt", ".text", ".md")
JSON_SUFFIXES = (".jsonl", ".ndjson", ".json")
PARQUET = ".parquet"
GZIP = ".gz"
IMAGE_SUFFIXES = (".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm")
"""Files of a folder that are taken for images, in capitals too; others are not looked at."""

SAMPLED_BYTES = 65536
"""Bytes at each of three places of a file that its fingerprint is of."""

LOOKED_THROUGH = 1000
"""Entries of a folder that tell what it holds; it may hold millions."""

_KINDS = {"text": "text that is not sharded", "image": "images that are not sharded", "tar": "tars without an index"}

_OF_A_RUN = ("metrics.jsonl", "stop.json")
"""Either is in the directory of each run that made a step or was refused one."""


def require_dataset(directory: Path, source: str = "") -> None:
    """Refuse a directory that is no data set.

    Args:
        source: name of the directory in the message; "" for its path.

    Raises:
        DataError: says what is there, and the command that makes a data set of it.
    """
    if not (directory / "dataset.json").is_file():
        raise DataError(f"{source or directory}: {_explain_missing_dataset(directory)}")


DATASET_FORMAT = 1
"""Of dataset.json."""


def read_dataset(directory: Path, kind: str, advice: str, source: str = "") -> Fields:
    """Read dataset.json of a data set of one kind.

    Args:
        kind: "text" or "image".
        advice: what to do about a wrong field, for messages.
        source: as of `require_dataset`.

    Raises:
        DataError: there is none, or it is of another format or kind.
    """
    require_dataset(directory, source)
    fields = read_fields(directory / "dataset.json", advice)
    for name, expected in (("format", DATASET_FORMAT), ("kind", kind)):
        if (stored := fields.document.get(name)) != expected:
            raise fields.refusal(f"{name} {quote(stored)} found, {expected!r} expected")
    return fields


def walk_files(folder: Path, left_out: Counter[str] | None = None) -> Iterator[tuple[str, int]]:
    """Yield (path relative to the folder, bytes) of all files, also below linked folders. A link that leads to nothing
    has -1 bytes.

    Args:
        left_out: counts hidden files and folders, and links to a folder that the link lies in.

    Raises:
        DataError: a folder cannot be read.
    """
    around = {(status.st_dev, status.st_ino) for status in map(os.stat, (folder, *folder.resolve().parents))}
    yield from _walk(folder, "", Counter() if left_out is None else left_out, around)


def _walk(folder: Path, prefix: str, left_out: Counter[str], around: set[tuple[int, int]]) -> Iterator[tuple[str, int]]:
    """Yield what `walk_files` does; `around`: the numbers of the folder and of those that it lies in."""
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
        except OSError:  # a link to nothing, or to itself: named as unreadable when its turn comes
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
    """The paths of all files of a folder (`walk_files`), sorted."""
    return sorted(folder / name for name, _ in walk_files(folder, left_out))


def open_regular(path: str | Path) -> BinaryIO:
    """Open a file for reading.

    Raises:
        OSError: also for a pipe, which would be waited for, and for a device, which may have no end.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return os.fdopen(descriptor, "rb")


def files_fingerprint(files: list[Path]) -> bytes:
    """Digest of the ends and the middle of files: changed content is noticed without reading all of it."""
    digest = hashlib.sha256()
    for file in files:
        digest.update(b"".join(_read_samples(file)))
    return digest.digest()


def _read_samples(file: Path) -> Iterator[bytes]:
    try:
        with open_regular(file) as stream:
            length = os.fstat(stream.fileno()).st_size
            for start in sorted({0, max(0, length // 2 - SAMPLED_BYTES // 2), max(0, length - SAMPLED_BYTES)}):
                stream.seek(start)
                yield stream.read(SAMPLED_BYTES)
    except OSError:
        yield b"unreadable"


def list_counts(kinds: Counter[str]) -> str:
    """List files that are left out by suffix, or by the reason why, for a message."""
    named = (f"{n} {escape_name(shorten(kind)) or 'without a suffix'}" for kind, n in kinds.most_common(5))
    return ", ".join(named) or "nothing"


def file_kind(file: Path) -> str:
    """text, image or tar; of others the suffix, empty where there is none."""
    name = file.name.lower()
    if name.removesuffix(GZIP).endswith((*TEXT_SUFFIXES, *JSON_SUFFIXES, PARQUET)):
        return "text"
    if name.endswith(IMAGE_SUFFIXES):
        return "image"
    return "tar" if file.name.endswith(".tar") else file.suffix


def modality_folders(folder: Path) -> Mapping[str, Path]:
    """Return the sub-folders that are modalities of the same images, by name; empty unless there are two or more."""
    folders = {name: folder / name for name in names("modality") if (folder / name).is_dir()}
    return folders if len(folders) > 1 else {}


def modality_command(folders: Mapping[str, Path]) -> str:
    """Return the command that shards modality folders, images first."""
    images = folders.get("rgb", "IMAGES")
    maps = [f"--modality {name}={_word(path)}" for name, path in folders.items() if name != "rgb"]
    return f"trp-scale shard-images --inputs {_word(images)} {' '.join(maps)} --output DIR"


def _explain_missing_dataset(place: Path) -> str:
    """Describe a path that is no data set, and how to make one of it."""
    if not place.exists() and "," in str(place):
        named = [part.rpartition("=") for part in str(place).split(",")]
        weighted = ",".join(f"{name.partition(':')[0] or Path(path).name}:1={path}" for name, _, path in named)
        return f"no such directory; several data sets have names and weights above 0: {weighted!r}"
    if not place.exists():
        return (
            "no such file or directory; allowed: a directory that trp-scale shard-text, shard-images or index wrote, "
            "or the URL of one. Names on a hub are not downloaded"
        )
    if whole := next((up for up in (place.parent, place.parent.parent) if (up / "dataset.json").is_file()), None):
        return f"a part of the data set {whole}, without an index of its own; give that: {_word(whole)}"
    if place.is_dir():
        if (place / "progress").is_dir():
            return "its sharding has not come to its end, and there is no dataset.json; the same command again goes on"
        if any((place / name).is_file() for name in _OF_A_RUN):
            return f"no data set, but a run's directory; trp-scale report --run {_word(place)} tells of it"
        if is_dataset_directory(place):
            command = _sharding_command("text", place)
            return f"no data set, but a directory of datasets.save_to_disk; {command}, or shard-images"
        if within := sorted(path.parent.name for path in islice(place.glob("*/dataset.json"), LOOKED_THROUGH)):
            return f"no data set, but there are such in it; give one: {', '.join(within[:10])}"
        if folders := modality_folders(place):
            return f"no data set, but folders of {', '.join(folders)}; shard them: {modality_command(folders)}"
    files = [place / name for name, _ in islice(walk_files(place), LOOKED_THROUGH)] if place.is_dir() else [place]
    files = [path for path in files if path.is_file()] or [place]
    if files == [place] and place.is_dir():
        return "an empty directory; allowed: one that trp-scale shard-text, shard-images or index wrote"
    kind = Counter(map(file_kind, files)).most_common(1)[0][0]
    first = min(file for file in files if file_kind(file) == kind)
    example = first.relative_to(place) if place.is_dir() else first.name
    contents = f"no data set, but {_KINDS.get(kind, 'files')} ({example}{', ...' * (len(files) > 1)})"
    if kind in ("text", "image"):
        return (
            f"{contents}; {_sharding_command(kind, place.parent if kind == 'image' and not place.is_dir() else place)}"
        )
    if kind == "tar":
        tars = first.parent if place.is_dir() else place
        output = "" if tars == place and place.is_dir() else " --output DIR"
        command = f"trp-scale index {_word(tars)}{output}"
        return f"{contents}; tars of images are read where they lie, after: {command}; unpack others"
    return f"{contents}; text, JSON lines, parquet and images can be sharded (trp-scale shard-text, shard-images)"


def _sharding_command(kind: str, path: Path) -> str:
    command = "shard-text" if kind == "text" else "shard-images"
    return f"make one of it: trp-scale {command} --inputs {_word(path)} --output DIR"


def _word(path: Path | str) -> str:
    return shlex.quote(str(path))
