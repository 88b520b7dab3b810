"""A directory of fetched files with a bound, which all processes of a machine share.

A file is written beside its name and then renamed, under a lock, so that of several processes that want it one fetches
it and the others wait. Where there is no room, the files that were opened longest ago go. A process that has one of
those open reads on: it is gone when the last one has closed it, and takes its room until then.
"""

from __future__ import annotations

import fcntl
import os
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from trp_scale.storage.files import has_name, lock_file, private_directory, try_lock
from trp_scale.storage.transfer import RemoteError, RemoteSetupError, patience, read_positive

DIRECTORY, GIGABYTES = "TRP_SCALE_CACHE", "TRP_SCALE_CACHE_GB"
"""Environment variables: where, and how much."""

LEFT_FREE = 0.1
"""Share of the disk that stays free where no bound is given."""

_KEPT = 0.9
"""Share of the bound that remains after a clearing, so that not every file clears."""

_PART = ".part"
_USED = ".used"
_POLL = 0.05


def cache_root() -> Path:
    """TRP_SCALE_CACHE; else a directory of this user's in the one for temporary files.

    Raises:
        RefusedError: the latter belongs to someone else.
    """
    if directory := os.environ.get(DIRECTORY):
        root = Path(directory).absolute()
        root.mkdir(parents=True, exist_ok=True)
        return root
    return private_directory("trp_scale_cache", DIRECTORY)


class CacheUse(NamedTuple):
    """Tars opened that were there, and those that were fetched for it, with their bytes; those fetched ahead."""

    found: int = 0
    fetched: int = 0
    fetched_bytes: int = 0
    ahead: int = 0
    ahead_bytes: int = 0

    def plus(self, other: CacheUse | None) -> CacheUse:
        """The sum of both."""
        return self if other is None else CacheUse(*map(sum, zip(self, other, strict=True)))


class Cache:
    """The tars below one root.

    Attributes:
        used: what this process did since `take_use`.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.used = CacheUse()

    def __reduce__(self) -> tuple[object, tuple[Path]]:
        return shared_cache, (self.root,)

    def bound(self) -> int:
        """Bytes that the files may take."""
        gigabytes = read_positive(GIGABYTES, "gigabytes")
        if gigabytes is not None:
            return int(gigabytes * 1e9)
        try:
            disk = os.statvfs(self.root)
        except OSError as error:
            raise RemoteError(f"{self.root}: the cache cannot be looked into ({error.strerror})") from error
        return max(0, self._used_bytes() + disk.f_frsize * (disk.f_bavail - int(LEFT_FREE * disk.f_blocks)))

    def open(self, path: Path, size: int, fetch: Callable[[int], None]) -> int:
        """Return a descriptor of the file at `path`; fetch the file if it is missing.

        Args:
            path: below the root.
            size: its bytes.
            fetch: writes them into a descriptor.

        Raises:
            RemoteError: no room; or another process fetches the file and does not get on.
        """
        with self._on_this_disk(path):
            while True:
                with suppress(FileNotFoundError):
                    descriptor = os.open(path, os.O_RDONLY)
                    os.utime(descriptor)
                    status = os.fstat(descriptor)
                    if status.st_size == size:
                        self.used = self.used.plus(CacheUse(found=1))
                        return descriptor
                    self.drop(path, status.st_ino)
                    os.close(descriptor)
                descriptor = self._claim(path)
                if self._fill(path, descriptor, size, fetch):
                    self.used = self.used.plus(CacheUse(fetched=1, fetched_bytes=size))
                    return descriptor
                os.close(descriptor)

    @contextmanager
    def _on_this_disk(self, path: Path) -> Iterator[None]:
        """Context in which an error is one of this disk: nothing is wrong with what is stored."""
        try:
            yield
        except OSError as error:
            raise RemoteError(
                f"{path}: the cache cannot hold it ({error.strerror}); set {DIRECTORY} to a disk with room"
            ) from error

    def drop(self, path: Path, inode: int) -> None:
        """Remove a file whose content is wrong, unless another process has replaced it.

        Args:
            path: below the root.
            inode: of the wrong file, which the caller holds open or mapped.
        """
        with self._alone(), suppress(FileNotFoundError):
            status = path.stat()
            if status.st_ino == inode:
                path.unlink()
                (self.root / _USED).write_text(str(max(0, self._used_bytes() - status.st_size)))

    def keep(self, path: Path) -> bool:
        """Whether a file is there; it then counts as opened just now, so that others go before it."""
        with suppress(FileNotFoundError):
            os.utime(path)
            return True
        return False

    def fetch_ahead(self, path: Path, size: int, fetch: Callable[[int], None]) -> None:
        """Fetch a file that will be opened, unless it is there or another process fetches it.

        Args:
            path, size, fetch: as of `open`.

        Raises:
            RemoteError: no room.
        """
        with self._on_this_disk(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(_part(path), os.O_RDWR | os.O_CREAT, 0o600)
            try:
                if not try_lock(descriptor) or not has_name(_part(path), descriptor):
                    return
                if self._fill(path, os.dup(descriptor), size, fetch, close=True):
                    self.used = self.used.plus(CacheUse(ahead=1, ahead_bytes=size))
            finally:
                os.close(descriptor)

    def take_use(self) -> CacheUse:
        """Return the statistics of this process since the last call."""
        use, self.used = self.used, CacheUse()
        return use

    def _fill(self, path: Path, descriptor: int, size: int, fetch: Callable[[int], None], close: bool = False) -> bool:
        """Whether an unfinished file that this process has claimed is filled now; it is not where the file is there
        already. Closes the descriptor after an error, or where `close` says so."""
        room_made = False
        try:
            if path.exists():
                _part(path).unlink(missing_ok=True)
                return False
            self._make_room(path, descriptor, size)
            room_made = True
            fetch(descriptor)
            os.fsync(descriptor)  # a power cut after the rename would leave a file of zeros under the name
            _part(path).replace(path)
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # others may wait, and a fork may keep the descriptor
            return True
        except BaseException:
            close = True
            with self._alone():  # whoever counts the files meanwhile counts it, or has it taken off
                _part(path).unlink(missing_ok=True)
                if room_made:
                    (self.root / _USED).write_text(str(max(0, self._used_bytes() - size)))
            raise
        finally:
            if close:
                os.close(descriptor)

    def _claim(self, path: Path) -> int:
        """A descriptor of the unfinished file, locked: this process alone writes it."""
        path.parent.mkdir(parents=True, exist_ok=True)
        part, end = _part(path), time.monotonic() + patience()
        while True:
            descriptor = os.open(part, os.O_RDWR | os.O_CREAT, 0o600)
            try:
                while not try_lock(descriptor):
                    if not has_name(part, descriptor):
                        break
                    if os.fstat(descriptor).st_size and _written_lately(descriptor):
                        end = time.monotonic() + patience()
                    if time.monotonic() > end:
                        raise RemoteError(f"{path}: another process of this machine fetches it and does not get on")
                    time.sleep(_POLL)
                if has_name(part, descriptor):
                    return descriptor
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)  # it was renamed, or given up, by the process that had it before

    def _make_room(self, path: Path, descriptor: int, size: int) -> None:
        """Take `size` bytes for an unfinished file, and remove others where that is too much."""
        with self._alone():
            bound, used = self.bound(), self._used_bytes()
            if size > bound:
                raise RemoteSetupError(
                    f"{path.name}: {size / 1e9:.3f} GB, the cache in {self.root} may take {bound / 1e9:.3f} GB; set "
                    f"{GIGABYTES} to more, or {DIRECTORY} to a larger disk"
                )
            os.ftruncate(descriptor, size)
            if used + size > bound:
                used = self._clear(int(_KEPT * bound) if size <= _KEPT * bound else bound, keep=_part(path))
            else:
                used += size
            (self.root / _USED).write_text(str(used))

    def _clear(self, limit: int, keep: Path) -> int:
        """Remove the files opened longest ago until all take `limit` bytes; returns what they take. Unfinished files of
        processes that were killed go first."""
        files = sorted(self._files(), key=lambda entry: entry[0].st_mtime_ns)
        used = sum(status.st_size for status, _ in files)
        for abandoned in (True, False):
            for status, path in files:
                if path == keep or (path.suffix == _PART) != abandoned or (used <= limit and not abandoned):
                    continue
                if not abandoned:
                    path.unlink(missing_ok=True)
                elif not _removed_abandoned(path):
                    continue
                used -= status.st_size
        return used

    def _files(self) -> Iterator[tuple[os.stat_result, Path]]:
        """All files, each once. Whoever fetches one renames it at any time, perhaps after its name was read here."""
        for path in self.root.rglob("*.tar*"):
            for name in (path, path.with_suffix("")) if path.suffix == _PART else (path,):
                with suppress(FileNotFoundError):
                    status = name.stat()
                    if name.suffix in (".tar", _PART) and stat.S_ISREG(status.st_mode):
                        yield status, name
                    break

    def _used_bytes(self) -> int:
        """Return the bytes of all files at the last change; a killed process may leave more."""
        with suppress(OSError, ValueError):
            return int((self.root / _USED).read_text())
        return sum(status.st_size for status, _ in self._files())

    @contextmanager
    def _alone(self) -> Iterator[None]:
        with lock_file(self.root / ".lock", DIRECTORY):
            yield


_shared: dict[Path, Cache] = {}


def shared_cache(root: Path) -> Cache:
    """One in a process, which counts what it opens."""
    return _shared.setdefault(root, Cache(root))


def use_of_caches() -> CacheUse | None:
    """Return the cache statistics of this process since the last call; `None` without caches."""
    uses = [cache.take_use() for cache in list(_shared.values())]
    return CacheUse(*map(sum, zip(*uses, strict=True))) if uses else None


def _part(path: Path) -> Path:
    return path.with_name(path.name + _PART)


def _written_lately(descriptor: int) -> bool:
    return time.time() - os.fstat(descriptor).st_mtime < 1.0


def _removed_abandoned(path: Path) -> bool:
    """Remove an unfinished file that no process writes, under its lock, so that none begins to; whether it did."""
    try:
        descriptor = os.open(path, os.O_RDWR)
    except FileNotFoundError:
        return False
    try:
        if not try_lock(descriptor) or not has_name(path, descriptor):  # another process writes it, or has renamed it
            return False
        path.unlink()
        return True
    finally:
        os.close(descriptor)
