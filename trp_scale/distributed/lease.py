"""One run a directory: a lease that its holder renews, on any file system that ranks share.

RUN_DIR/lease.json names the holder. Its time of change is the sign of life: it is compared with that of a file written
now to the same storage, so that no two hosts' clocks are. A lease that is not renewed any more, or whose process on
this host is gone, is taken over.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from trp_scale.config.json_files import read_object
from trp_scale.errors import RefusedError

LEASE = "lease.json"

RENEWED_EACH = 5.0
"""Seconds."""

GONE_AFTER = 30.0
"""Seconds without a renewal after which the holder is taken to be gone."""


class Lease:
    """Context in which this process alone trains into a directory. A thread renews the lease.

    Args:
        run_dir: exists.
        gone_after, renewed_each: seconds.
        lost: called if another process has taken the lease, as it may where this one was stopped for long.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        gone_after: float = GONE_AFTER,
        renewed_each: float = RENEWED_EACH,
        lost: Callable[[str], object] | None = None,
    ) -> None:
        self._path, self._gone_after, self._renewed_each = run_dir / LEASE, gone_after, renewed_each
        self._lost = _end_process if lost is None else lost
        self._token = secrets.token_hex(8)
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="trp_scale lease", daemon=True)

    def __enter__(self) -> Lease:
        """
        Raises:
            RefusedError: another run holds it.
        """
        while not self._is_held():
            self._await_sign_of_life()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._done.set()
        self._thread.join()
        if _read(self._path).get("token") == self._token:
            self._path.unlink(missing_ok=True)

    def _is_held(self) -> bool:
        """Whether the lease is this process's now."""
        try:
            write_exclusively(self._path, json.dumps({"token": self._token, **_this_process()}))
        except FileExistsError:
            return False
        return True

    def _await_sign_of_life(self) -> None:
        """Take away the lease of a holder that is gone.

        Raises:
            RefusedError: it is not.
        """
        holder = _read(self._path)
        changed, until = _modified_ns(self._path), time.monotonic() + self._gone_after
        while not _is_gone_from_here(holder):
            now = _modified_ns(self._path)
            if now is None:
                return
            if now != changed:
                holder = _read(self._path)  # it may have been created a moment ago
                raise RefusedError(
                    f"{self._path.parent}: another run trains into this directory: process {holder.get('process')} on "
                    f"{holder.get('host')}, started {holder.get('started')}; allowed: stop it (touch "
                    f"{self._path.parent / 'STOP'}), or another --run_dir"
                )
            if time.monotonic() > until:
                break
            time.sleep(min(0.2, self._renewed_each / 5))
        if _read(self._path).get("token") != holder.get("token"):  # another start has taken it over
            return
        aside = self._path.with_name(f".{LEASE}.{self._token}.old")
        with contextlib.suppress(FileNotFoundError):  # another start was faster
            self._path.rename(aside)
            if _read(aside).get("token") != holder.get("token"):  # it was taken by another start meanwhile
                with contextlib.suppress(FileExistsError):
                    write_exclusively(self._path, aside.read_text(encoding="utf-8"))
            aside.unlink(missing_ok=True)

    def _renew(self) -> None:
        while not self._done.wait(self._renewed_each):
            with contextlib.suppress(OSError):  # storage that does not answer now may later
                if not self._path.parent.is_dir():
                    self._lost(f"{self._path.parent}: the run directory was removed while the run trained into it")
                    return
                holder = _read(self._path)
                if holder and holder.get("token") != self._token:
                    self._lost(
                        f"{self._path.parent}: process {holder.get('process')} on {holder.get('host')} has taken over "
                        "this directory"
                    )
                    return
                os.utime(self._path)


def write_exclusively(path: Path, text: str) -> None:
    """Create a file in one write. Hard links would give it its name with its content, and not every file system that
    ranks share has them (gcsfuse, CIFS, exFAT).

    Raises:
        FileExistsError: the file exists; it is not touched.
    """
    with path.open("x", encoding="utf-8") as file:
        try:
            file.write(text)
            file.flush()
        except OSError:
            path.unlink(missing_ok=True)
            raise


def lease_holder(run_dir: Path) -> dict[str, Any]:
    """Return the holder of the lease, with `gone` if it is an ended process of this host; empty if nobody holds it."""
    holder = _read(run_dir / LEASE)
    return {**holder, "gone": _is_gone_from_here(holder)} if holder else {}


def _end_process(message: str) -> None:
    print(f"error: {message}; this one ends without a checkpoint", file=sys.stderr, flush=True)
    os._exit(1)


def _this_process() -> dict[str, Any]:
    return {
        "host": socket.gethostname(),
        "boot": boot_id(),
        "pid_namespace": _pid_namespace(),
        "process": os.getpid(),
        "began": _began(os.getpid()),
        "started": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
    }


def _is_gone_from_here(holder: dict[str, Any]) -> bool:
    """Whether the holder was a process of this host that has ended."""
    if holder.get("host") != socket.gethostname():
        return False
    if holder.get("boot") != boot_id():
        return True
    namespace = _pid_namespace()
    if holder.get("pid_namespace", namespace) != namespace:  # of another container, whose processes are not seen here
        return False
    number = holder.get("process")
    return not isinstance(number, int) or _began(number) != holder.get("began")


def boot_id() -> str:
    """Number that changes at each start of the host; empty if it cannot be read."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


def _pid_namespace() -> str:
    """Two containers of a host have two, also where they share its name."""
    with contextlib.suppress(OSError):
        return str(Path("/proc/self/ns/pid").readlink())
    return ""


def _began(process: int) -> str:
    """Return the start time of a process in ticks since boot, which tells processes with the same id apart; "" if it
    has ended. Empty: there is none, or only what is left of one."""
    with contextlib.suppress(OSError, IndexError):
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        return "" if fields[0] in ("Z", "X") else fields[19]
    return ""


def _read(path: Path) -> dict[str, Any]:
    """A lease; empty where there is none, or none that can be read."""
    with contextlib.suppress(RefusedError):
        return read_object(path)
    return {}


def _modified_ns(path: Path) -> int | None:
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return None
