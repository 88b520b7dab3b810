"""The cache: its bound, what goes first, and many processes that want the same file."""

from __future__ import annotations

import errno
import fcntl
import multiprocessing
import os
import threading
import time
from pathlib import Path

import pytest

from trp_scale.errors import RefusedError
from trp_scale.storage.cache import Cache, CacheUse, cache_root
from trp_scale.storage.transfer import RemoteError

SIZE = 1000


def fill(descriptor: int) -> None:
    os.pwrite(descriptor, b"x" * SIZE, 0)


def take(cache: Cache, name: str) -> None:
    os.close(cache.open(cache.root / "s3" / name, SIZE, fill))


def held(cache: Cache) -> list[str]:
    return sorted(path.name for path in cache.root.rglob("*.tar*"))


@pytest.fixture
def files(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Cache:
    """A cache of four files."""
    monkeypatch.setenv("TRP_SCALE_CACHE_GB", str(4.5 * SIZE / 1e9))
    return Cache(cache_root())


def test_a_file_is_fetched_once(files: Cache) -> None:
    for _ in range(3):
        descriptor = files.open(files.root / "a.tar", SIZE, fill)
        assert os.pread(descriptor, 2 * SIZE, 0) == b"x" * SIZE
        os.close(descriptor)
    assert files.used == (2, 1, SIZE, 0, 0)
    assert held(files) == ["a.tar"]


@pytest.mark.parametrize("kept", [False, True])
def test_files_opened_longest_ago_go_first(kept: bool, files: Cache) -> None:
    for place, name in enumerate("abcd"):
        take(files, f"{name}.tar")
        os.utime(files.root / "s3" / f"{name}.tar", (place, place))
    if kept:
        assert files.keep(files.root / "s3" / "a.tar") and not files.keep(files.root / "s3" / "x.tar")
    else:
        take(files, "a.tar")  # opened again
    take(files, "e.tar")
    assert "a.tar" in held(files) and "e.tar" in held(files) and "b.tar" not in held(files)
    total = sum(path.stat().st_size for path in files.root.rglob("*.tar"))
    assert total <= 4.5 * SIZE


def test_a_file_fetched_ahead_is_found_when_it_is_opened(files: Cache) -> None:
    for _ in range(2):
        files.fetch_ahead(files.root / "s3" / "a.tar", SIZE, fill)
    assert files.used == (0, 0, 0, 1, SIZE)
    take(files, "a.tar")
    assert files.used[:2] == (1, 0)
    assert files.take_use() == CacheUse(1, 0, 0, 1, SIZE) and files.take_use() == CacheUse()


def test_what_another_process_fetches_is_not_fetched_ahead(files: Cache) -> None:
    begun, end = threading.Event(), threading.Event()

    def slowly(descriptor: int) -> None:
        begun.set()
        end.wait(120)
        fill(descriptor)

    place = files.root / "a.tar"
    thread = threading.Thread(target=lambda: os.close(files.open(place, SIZE, slowly)))
    thread.start()
    begun.wait()
    other = Cache(files.root)
    other.fetch_ahead(place, SIZE, fill)  # returns at once
    assert other.used.ahead == 0 and not end.is_set()
    end.set()
    thread.join()
    assert files.used.fetched == 1


@pytest.mark.parametrize("method", ["fetch_ahead", "open"])
@pytest.mark.parametrize("error", [RemoteError("no network"), OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))])
def test_a_fetch_that_fails_leaves_nothing(files: Cache, method: str, error: Exception) -> None:
    """A disk without room is no unreadable block either."""

    def fail(_: int) -> None:
        raise error

    with pytest.raises(RemoteError, match=str(error.args[-1])):
        getattr(files, method)(files.root / "s3" / "a.tar", SIZE, fail)
    assert held(files) == [] and files.used.ahead == 0
    assert files._used_bytes() == 0, "what was not fetched takes no room"
    take(files, "a.tar")


def test_an_open_file_that_goes_can_still_be_read(files: Cache) -> None:
    descriptor = files.open(files.root / "s3" / "first.tar", SIZE, fill)
    for name in "abcdef":
        time.sleep(0.01)
        take(files, f"{name}.tar")
    assert "first.tar" not in held(files)
    assert os.pread(descriptor, SIZE, 0) == b"x" * SIZE
    os.close(descriptor)


def test_a_file_larger_than_the_cache(files: Cache) -> None:
    with pytest.raises(RemoteError, match=r"a.tar: 0.005 GB, .*TRP_SCALE_CACHE_GB"):
        files.open(files.root / "a.tar", 5000 * SIZE, fill)
    assert held(files) == []


def test_what_killed_processes_leave_is_removed(files: Cache) -> None:
    files.root.mkdir(exist_ok=True)
    (files.root / "killed.tar.part").write_bytes(b"x" * SIZE)
    (files.root / ".used").write_text("1000000")  # and they counted what they did not fetch
    for name in "abcd":
        take(files, f"{name}.tar")
    assert held(files) == ["a.tar", "b.tar", "c.tar", "d.tar"]


def _open_slowly(root: Path, fetched: object) -> None:
    def slowly(descriptor: int) -> None:
        with fetched.get_lock():  # type: ignore[attr-defined]
            fetched.value += 1  # type: ignore[attr-defined]
        time.sleep(0.3)
        fill(descriptor)

    descriptor = Cache(root).open(root / "s3" / "a.tar", SIZE, slowly)
    assert os.pread(descriptor, SIZE, 0) == b"x" * SIZE


def test_of_several_processes_one_fetches(files: Cache) -> None:
    context = multiprocessing.get_context("fork")
    fetched = context.Value("i", 0)
    processes = [context.Process(target=_open_slowly, args=(files.root, fetched)) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0
    assert fetched.value == 1


def test_a_file_that_is_renamed_while_files_are_counted_counts_once(
    files: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the thread that fetches ahead does, or another process, while a tar is opened."""
    part, place = files.root / "a.tar.part", files.root / "a.tar"
    part.write_bytes(b"1234567")
    listing = Path.rglob

    def listed_then_renamed(root: Path, pattern: str) -> list[Path]:
        found = list(listing(root, pattern))
        if part.exists():
            part.replace(place)
        return found

    monkeypatch.setattr(Path, "rglob", listed_then_renamed)
    assert files._used_bytes() == 7
    assert not part.exists()
    assert [path for _, path in files._files()] == [place]


def test_a_process_that_does_not_get_on_is_not_awaited_for_ever(files: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRP_SCALE_REMOTE_SECONDS", "0.2")
    begun, end = threading.Event(), threading.Event()

    def stuck(_: int) -> None:
        begun.set()
        end.wait(120)

    thread = threading.Thread(target=files.open, args=(files.root / "a.tar", SIZE, stuck))
    thread.start()
    begun.wait()
    with pytest.raises(RemoteError, match=r"a.tar"):
        Cache(files.root).open(files.root / "a.tar", SIZE, fill)
    end.set()
    thread.join()


def test_bounds_and_places_that_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for wrong in ("much", "0", "-1", "inf"):
        monkeypatch.setenv("TRP_SCALE_CACHE_GB", wrong)
        with pytest.raises(RefusedError, match=f"TRP_SCALE_CACHE_GB: '{wrong}'"):
            Cache(tmp_path).bound()
    monkeypatch.delenv("TRP_SCALE_CACHE_GB")
    disk = os.statvfs(tmp_path)
    assert 0 <= Cache(tmp_path).bound() < disk.f_frsize * disk.f_blocks
    monkeypatch.delenv("TRP_SCALE_CACHE")
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    place = tmp_path / f"trp_scale_cache-{os.getuid()}"
    assert cache_root() == place
    place.chmod(0o777)
    with pytest.raises(RefusedError, match="TRP_SCALE_CACHE"):
        cache_root()


def test_an_abandoned_file_is_removed_once_and_under_its_lock(files: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process that begins to write it would lose its name."""
    place = files.root / "s3" / "a.tar"
    descriptor, part = files._claim(place), place.with_name("a.tar.part")
    files._clear(0, keep=files.root)
    assert part.exists(), "a process writes it"
    os.close(descriptor)
    unlink, seen = Path.unlink, []

    def unlinked(path: Path, missing_ok: bool = False) -> None:
        with path.open("rb") as other, pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        seen.append(path)
        unlink(path, missing_ok=missing_ok)

    monkeypatch.setattr(Path, "unlink", unlinked)
    files._clear(0, keep=files.root)
    assert seen == [part] and not part.exists()
