"""Mirror: local directory of a data set under a URL, with its small files and the tars that the cache holds.

CACHE/s3/BUCKET/DATASET/
  remote.json                   the URL; size and version of each of its files
  dataset.json, tokenizer/
  shards/index.bin              or shards/*.index.json
  shards/text-000000.tar        fetched on first read; may be removed when space is needed

All code that reads a data set from a directory can read it from a mirror. Only code that opens tars or compares their
sizes uses `Mirror` (tars.py). A local data set costs one lookup of remote.json and does not import fsspec.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from trp_scale.config.files import LARGEST
from trp_scale.config.schema import Fields, FileName, Whole, is_within, record
from trp_scale.data.index import BINARY_INDEX, index_path, read_json, write_json
from trp_scale.data.tars import PART_MARK, PLACES, CachedStore, StoredPart, TarStore, find_external_tars
from trp_scale.errors import DataError, quote
from trp_scale.storage.cache import DIRECTORY, Cache, cache_root, shared_cache
from trp_scale.storage.files import atomic_write, lock_file
from trp_scale.storage.transfer import (
    MAX_REQUESTS,
    DataReplacedError,
    NotThereError,
    Remote,
    RemoteSetupError,
    Stored,
    is_url,
    shared_remote,
    url_directory,
)

MARKER = "remote.json"

FRESH_SECONDS = 30.0
"""Age up to which a mirror needs no update; the ranks of a machine start within this time."""

_TOKENIZER = ("tokenizer.json", "vocab.txt", "tokenizer_config.json", "special_tokens_map.json", "spiece.model")
"""Candidates for a server that does not list files."""


def local_directory(text: str) -> Path:
    """Return the directory of a data set; for a URL, its updated mirror.

    Raises:
        DataError: the URL has no data set.
        RemoteError: the URL cannot be read.
        RefusedError: the URL is not supported.
    """
    return _update_mirror(text, cache_root()) if is_url(text) else Path(text)


@functools.cache
def _update_mirror(url: str, root: Path) -> Path:
    """Update a mirror once per process: a run sees one state of its data."""
    directory = url_directory(url, root)
    directory.mkdir(parents=True, exist_ok=True)
    with lock_file(directory / ".lock", DIRECTORY):
        marker = directory / MARKER
        if not marker.exists() or time.time() - marker.stat().st_mtime > FRESH_SECONDS:
            _Update(url.rstrip("/"), root, directory).run()
    return directory


class _Update:
    """Updates the small files of a mirror and removes tars that have changed."""

    def __init__(self, url: str, root: Path, directory: Path) -> None:
        self._url, self._root, self._directory = url, root, directory
        self._remote = Remote(url)

    def run(self) -> None:
        listed = self._remote.list_files()
        if listed is not None and "dataset.json" not in listed:
            contents = f"{len(listed)} other files" if listed else "nothing"
            raise DataError(f"{self._url}/dataset.json: not found, the URL has {contents}")
        before = self._before()
        content = self._remote.read("dataset.json", LARGEST)
        path = self._directory / "dataset.json"
        if listed is None and (not path.exists() or path.read_bytes() != content):
            before = {}  # all files may have changed; without the marker, a repeat after an interruption sees this too
            (self._directory / MARKER).unlink(missing_ok=True)
        self._write("dataset.json", lambda file: file.write(content))
        document = read_json(path)
        tars = _tars(self._url, document)
        self._remove([name for name in tars if not self._is_current(name, listed, before)])
        self._fetch(_indexes(tars, listed), listed, before)
        self._fetch([places for places in (f"shards/{PLACES}",) if places in (listed or ())], listed, before)
        self._fetch(self._tokenizer(listed), listed, before)
        files = None if listed is None else {name: [entry.size, entry.version] for name, entry in listed.items()}
        write_json(self._directory / MARKER, {"url": self._url, "cache": str(self._root), "files": files})

    def _before(self) -> dict[str, Any]:
        marker = self._directory / MARKER
        if not marker.exists():
            return {}
        return {name: list(entry) for name, entry in (_read_marker(marker).files or {}).items()} or {"": None}

    def _is_current(self, name: str, listed: dict[str, Stored] | None, before: dict[str, Any]) -> bool:
        """Whether a local copy would have the version of the server."""
        if listed is None:
            return bool(before)
        return name in listed and before.get(name) == [listed[name].size, listed[name].version]

    def _is_whole(self, name: str, listed: dict[str, Stored] | None) -> bool:
        """Whether a local copy exists and has the listed size."""
        path = self._directory / name
        return path.exists() and (listed is None or path.stat().st_size == listed[name].size)

    def _tokenizer(self, listed: dict[str, Stored] | None) -> list[str]:
        if listed is None:
            return [f"tokenizer/{name}" for name in _TOKENIZER]
        return [name for name in listed if name.startswith("tokenizer/")]

    def _fetch(self, names: Iterable[str], listed: dict[str, Stored] | None, before: dict[str, Any]) -> None:
        wanted = [n for n in names if not (self._is_current(n, listed, before) and self._is_whole(n, listed))]

        def fetch(name: str) -> None:
            try:
                if listed is None:
                    content = self._remote.read(name)
                    self._write(name, lambda file: file.write(content))
                else:  # streamed: an index of 400 M images has 10 GB
                    size = listed[name].size
                    self._write(name, lambda file: self._remote.read_into(file.fileno(), name, size))
            except KeyError as error:
                raise NotThereError(f"{self._url}/{name}: not found") from error
            except NotThereError:
                if listed is not None or not name.startswith("tokenizer/"):
                    raise

        with ThreadPoolExecutor(MAX_REQUESTS) as pool:
            for _ in pool.map(fetch, wanted):
                pass

    def _write(self, name: str, fill: Callable[[IO[bytes]], object]) -> None:
        path = self._directory / name
        if not is_within(name) or not path.resolve().is_relative_to(self._directory.resolve()):
            raise DataError(f"{self._url}: file name {quote(name)} is outside the data set")
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(path) as file:
            fill(file)

    def _remove(self, tars: list[str]) -> None:
        gone = {self._directory / name for name in tars}
        for path in gone:
            path.unlink(missing_ok=True)
        for folder in {path.parent for path in gone}:
            for path in folder.glob(f"*{PART_MARK}*.tar"):
                if path.with_name(path.name.rpartition(PART_MARK)[0] + path.suffix) in gone:
                    path.unlink(missing_ok=True)


def _indexes(tars: Sequence[str], listed: Mapping[str, Stored] | None) -> list[str]:
    """Return the binary index of each folder, or the indexes of its tars."""
    names = []
    for tar in tars:
        binary = str(Path(tar).with_name(BINARY_INDEX))
        names.append(binary if listed is not None and binary in listed else str(index_path(Path(tar))))
    return list(dict.fromkeys(names))


def _tars(url: str, document: dict[str, Any]) -> list[str]:
    """Return the names of the tars, including those of maps in other directories.

    Raises:
        DataError: a name is outside the data set.
    """
    fields = Fields(document, f"{url}/dataset.json", DataError)
    names = fields.file_names("shards") if "shards" in fields else []
    described = fields.section("modalities")
    folders = [
        "shards",
        *(described.section(name).take("directory", FileName, "shards") for name in described.document),
    ]
    return [f"{folder}/{name}" for folder in dict.fromkeys(folders) for name in names]


class Mirror(CachedStore):
    """Opens the tars of one folder of a mirror.

    Args:
        directory: folder, such as DATASET/shards.
        url: URL of the data set.
        cache: cache that contains the mirror.
        files: size and version of the files under the URL, by name; `None` if the server does not list files.
    """

    def __init__(self, directory: Path, url: str, cache: Cache, files: dict[str, Stored] | None) -> None:
        super().__init__(directory)
        self.url, self.files, self._cache = url, files, cache

    @property
    def cache(self) -> Cache:
        return self._cache

    def cached_path(self, tar: Path) -> Path:
        return tar

    def fetcher(self, stored: StoredPart, *, retry: bool) -> Callable[[int], None]:
        name, size = self._name(stored.tar), stored.size
        known = Stored(size, "") if self.files is None else self.files.get(name, Stored(size, ""))

        def fetch(descriptor: int) -> None:
            remote = shared_remote(self.url) if retry else shared_remote(self.url).once()
            remote.read_into(descriptor, name, len(stored.wanted), start=stored.wanted.start)
            with suppress(RemoteSetupError):  # the server gives no size
                now = remote.stat_file(name)
                if now.size == size and known.version in ("", now.version):
                    return
                listed = remote.list_files() or {}  # a server may use two kinds of versions
                if now.size == size and listed.get(name) == known:
                    return
                raise DataReplacedError(
                    f"{remote.url}/{name}: replaced since this job started ({now.size} bytes now, {size} expected); "
                    "start the job again, or restore the earlier data"
                )

        return fetch

    def _name(self, tar: Path) -> str:
        return tar.relative_to(self.directory.parent).as_posix()

    def is_remote(self, tar: Path) -> bool:
        return True

    def where(self, tar: Path) -> str:
        return f"{self.url}/{self._name(tar)}"

    def size(self, tar: Path) -> int | None:
        if self.files is None:
            return None
        if (name := self._name(tar)) not in self.files:
            raise DataError(f"{self.url}/{name}: not found")
        return self.files[name].size


def find_mirror(directory: Path) -> Mirror | None:
    """Return the mirror of a folder of tars; `None` if the folder does not mirror a URL.

    Raises:
        DataError: remote.json is damaged.
    """
    marker = directory.parent / MARKER
    if not marker.exists():
        return None
    read = _read_marker(marker)
    files = None if read.files is None else {name: Stored(*entry) for name, entry in read.files.items()}
    return Mirror(directory, read.url, shared_cache(Path(read.cache)), files)


@dataclass(frozen=True, kw_only=True)
class _Marker:
    """remote.json: URL, cache directory, size and version of each file (`None` if the server does not list files)."""

    url: str
    cache: str
    files: dict[str, tuple[Whole, str]] | None


def _read_marker(marker: Path) -> _Marker:
    advice = f"remove {marker}: the directory is then updated"
    content = record(_Marker, read_json(marker), str(marker), DataError, advice)
    if not is_url(content.url) or not Path(content.cache).is_absolute() or "\0" in content.cache:
        raise DataError(
            f"{marker}: url {quote(content.url)} and cache {quote(content.cache)} found, a URL and an absolute path "
            f"expected; {advice}"
        )
    return content


def find_store(directory: Path) -> TarStore:
    """Return the store of a folder's tars: external tars, a mirror, or the folder itself.

    Raises:
        DataError: remote.json or places.json is damaged.
    """
    return find_external_tars(directory) or find_mirror(directory) or TarStore(directory)
