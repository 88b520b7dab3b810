"""Bounded directory of fetched files, shared by all processes of a machine.

A file is written under a temporary name and then renamed, under a lock: one process fetches it, others wait. If space
is needed, the least recently opened files are removed. A process that has such a file open can still read it; its space
is freed when the last process closes it.
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
"""Environment variables: directory and bound."""

LEFT_FREE = 0.1
"""Share of the disk that stays free if no bound is set."""

_KEPT = 0.9
"""Share of the bound that remains after a clearing, so that not every new file causes one."""

_PART = ".part"
_USED = ".used"
_POLL = 0.05


def cache_root() -> Path:
    """Return TRP_SCALE_CACHE, by default a private directory among the temporary files.

    Raises:
        RefusedError: the default directory belongs to another user.
    """
    if directory := os.environ.get(DIRECTORY):
        root = Path(directory).absolute()
        root.mkdir(parents=True, exist_ok=True)
        return root
    return private_directory("trp_scale_cache", DIRECTORY)


class CacheUse(NamedTuple):
    """Opened tars that were cached; fetched tars and their bytes; prefetched tars and their bytes."""

    found: int = 0
    fetched: int = 0
    fetched_bytes: int = 0
    ahead: int = 0
    ahead_bytes: int = 0

    def plus(self, other: CacheUse) -> CacheUse:
        """Return the sum of both."""
        return CacheUse(*map(sum, zip(self, other, strict=True)))


class Cache:
    """Tars below one root.

    Attributes:
        used: statistics of this process since `take_use`.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.used = CacheUse()

    def __reduce__(self) -> tuple[object, tuple[Path]]:
        return shared_cache, (self.root,)

    def bound(self) -> int:
        """Return the limit of bytes of all files."""
        gigabytes = read_positive(GIGABYTES, "gigabytes")
        if gigabytes is not None:
            return int(gigabytes * 1e9)
        try:
            disk = os.statvfs(self.root)
        except OSError as error:
            raise RemoteError(f"{self.root}: the disk of the cache cannot be queried ({error.strerror})") from error
        return max(0, self._used_bytes() + disk.f_frsize * (disk.f_bavail - int(LEFT_FREE * disk.f_blocks)))

    def open(self, path: Path, size: int, fetch: Callable[[int], None]) -> int:
        """Return a descriptor of the file at `path`; fetch the file if it is missing.

        Args:
            path: path below the root.
            size: bytes of the file.
            fetch: writes the bytes into a descriptor.

        Raises:
            RemoteError: the cache is too small, or another process fetches the file without progress.
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
        """Context that reports errors of the cache's disk; they say nothing about the data."""
        try:
            yield
        except OSError as error:
            raise RemoteError(
                f"{path}: the cache cannot hold it ({error.strerror}); set {DIRECTORY} to a disk with space"
            ) from error

    def drop(self, path: Path, inode: int) -> None:
        """Remove a damaged file, unless another process has replaced it.

        Args:
            path: path below the root.
            inode: inode of the damaged file, which the caller holds open or mapped.
        """
        with self._alone(), suppress(FileNotFoundError):
            status = path.stat()
            if status.st_ino == inode:
                path.unlink()
                (self.root / _USED).write_text(str(max(0, self._used_bytes() - status.st_size)))

    def keep(self, path: Path) -> bool:
        """Whether a file exists; marks it as recently opened."""
        with suppress(FileNotFoundError):
            os.utime(path)
            return True
        return False

    def fetch_ahead(self, path: Path, size: int, fetch: Callable[[int], None]) -> None:
        """Fetch a file that will be opened, unless it exists or another process fetches it.

        Arguments and errors as for `open`.
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
        """Fill a claimed unfinished file; `False` if the finished file exists. Close the descriptor after an error, or
        if `close` is set."""
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
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # others may wait, and a forked process may keep the descriptor
            return True
        except BaseException:
            close = True
            with self._alone():  # so that a concurrent count either includes the file or subtracts it
                _part(path).unlink(missing_ok=True)
                if room_made:
                    (self.root / _USED).write_text(str(max(0, self._used_bytes() - size)))
            raise
        finally:
            if close:
                os.close(descriptor)

    def _claim(self, path: Path) -> int:
        """Return a locked descriptor of the unfinished file, which only this process may write."""
        path.parent.mkdir(parents=True, exist_ok=True)
        part, end = _part(path), time.monotonic() + patience()
        while True:
            descriptor = os.open(part, os.O_RDWR | os.O_CREAT, 0o600)
            try:
                while not try_lock(descriptor):
                    if not has_name(part, descriptor):
                        break
                    status = os.fstat(descriptor)
                    if status.st_size and time.time() - status.st_mtime < 1.0:
                        end = time.monotonic() + patience()
                    if time.monotonic() > end:
                        raise RemoteError(f"{path}: another process of this machine fetches it without progress")
                    time.sleep(_POLL)
                if has_name(part, descriptor):
                    return descriptor
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)  # the process that held the lock has renamed or removed the file

    def _make_room(self, path: Path, descriptor: int, size: int) -> None:
        """Reserve `size` bytes for an unfinished file; remove other files if necessary."""
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
        """Remove least recently opened files until all have at most `limit` bytes; return their bytes. Unfinished files
        of killed processes are removed first."""
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
        """Yield each file once. A process may rename an unfinished file at any time, also after its name is read."""
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
    """Return the cache of this process, which counts the files that it opens."""
    return _shared.setdefault(root, Cache(root))


def use_of_caches() -> CacheUse | None:
    """Return the cache statistics of this process since the last call; `None` without caches."""
    uses = [cache.take_use() for cache in list(_shared.values())]
    return CacheUse(*map(sum, zip(*uses, strict=True))) if uses else None


def _part(path: Path) -> Path:
    return path.with_name(path.name + _PART)


def _removed_abandoned(path: Path) -> bool:
    """Remove an unfinished file under its lock; `False` if another process writes it."""
    try:
        descriptor = os.open(path, os.O_RDWR)
    except FileNotFoundError:
        return False
    try:
        if not try_lock(descriptor) or not has_name(path, descriptor):  # being written, or just renamed
            return False
        path.unlink()
        return True
    finally:
        os.close(descriptor)
