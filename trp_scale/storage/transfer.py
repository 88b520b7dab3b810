"""Read files under a URL through fsspec, with retries, time limits and advice in errors.

fsspec's file systems handle failures differently: s3fs repeats some requests, the https one none, and neither ends a
request that hangs. Here every request has a time limit and is repeated until there is no progress for
TRP_SCALE_REMOTE_SECONDS.
"""

from __future__ import annotations

import copy
import functools
import inspect
import logging
import math
import os
import random
import re
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar
from urllib.parse import unquote

from trp_scale.config.files import LARGEST_INDEX
from trp_scale.config.schema import find_credentials
from trp_scale.distributed.stop import first_signal_time
from trp_scale.errors import DataError, ExitStatus, RefusedError

logger = logging.getLogger(__name__)

SECONDS = "TRP_SCALE_REMOTE_SECONDS"
"""Environment variable: seconds without progress before a file is given up."""

DEFAULT_SECONDS = 300.0

REQUEST_SECONDS = 60.0
"""Time limit of a request: PIECE bytes at 140 kB/s."""

PIECE = 8 << 20
"""Bytes of one request."""

MAX_REQUESTS = 8
"""Concurrent requests."""

LOG_AFTER = 6
"""Failed requests in a row before the log reports them, after about ten seconds."""

SECONDS_TO_STOP = 5.0
"""Seconds without progress before a file is given up after a stop request."""

FIRST_PAUSE, LONGEST_PAUSE = 0.25, 15.0

_EXTRA = "for s3:// and https:// run pip install 'trp-scale[remote]', for gs:// install gcsfs"

_SIGN_IN = {
    "s3": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE; FSSPEC_S3_ANON=true reads a public bucket, "
    "AWS_ENDPOINT_URL names a server other than Amazon's",
    "gs": "set GOOGLE_APPLICATION_CREDENTIALS to a key file, or run gcloud auth application-default login; "
    "FSSPEC_GS_TOKEN=anon reads a public bucket",
    "hf": "set HF_TOKEN, or run hf auth login",
    "https": 'set FSSPEC_HTTPS to what the server wants, such as {"headers": {"Authorization": "Bearer TOKEN"}}',
}
_SIGN_IN |= {"s3a": _SIGN_IN["s3"], "gcs": _SIGN_IN["gs"], "http": _SIGN_IN["https"]}

_UNSIGNED = {
    "NoCredentialsError",
    "PartialCredentialsError",
    "CredentialRetrievalError",
    "TokenRetrievalError",
    "ProfileNotFound",
    "DefaultCredentialsError",
    "RefreshError",
    "GatedRepoError",
}

_VERSIONS = ("ETag", "etag", "md5Hash", "blob_id", "LastModified", "mtime", "created")

_MOST: ContextVar[int] = ContextVar("_MOST", default=LARGEST_INDEX)
"""Limit of bytes of an HTTP body in the current request."""

Answer = TypeVar("Answer")


def file_system(url: str) -> tuple[Any, str]:
    """Return fsspec's file system of a URL, and the path in it.

    Raises:
        RefusedError: no installed library supports the URL.
        Exception: errors of that library.
    """
    import fsspec

    userinfo, options = find_credentials(url), dict[str, Any](skip_instance_cache=True)
    address = url
    if userinfo and url.startswith(("http://", "https://")):
        import aiohttp

        user, _, password = userinfo.partition(":")
        options["client_kwargs"] = {"auth": aiohttp.BasicAuth(unquote(user), unquote(password))}
    elif userinfo:
        address = url.replace("://", f"://{userinfo}@", 1)
    try:
        return fsspec.core.url_to_fs(address, **options)  # type: ignore[no-any-return]
    except ImportError as error:
        raise RefusedError(f"{url}: {error}; {_EXTRA}") from error
    except ValueError as error:
        known = "s3://, gs://, https://, hf://, file://"
        raise RefusedError(f"{url}: {error}; allowed: {known} and other protocols of fsspec") from error


class RemoteError(RefusedError):
    """A file cannot be fetched now. Not a `DataError`: a network failure must not skip blocks."""

    status = ExitStatus.FAILED


class RemoteSetupError(RemoteError):
    """A file cannot be fetched until the user changes credentials, the server or the size of the cache."""

    status = ExitStatus.REFUSED


class DataReplacedError(RefusedError):
    """The data set under a URL has been replaced. Not a `DataError`: this must not skip blocks."""


class NotThereError(DataError):
    """The file does not exist under the URL."""


@dataclass(frozen=True)
class Stored:
    """Listed file: bytes, and a version that changes with its content."""

    size: int
    version: str


def is_url(text: str) -> bool:
    """Whether the text is a URL."""
    return "://" in text


def read_positive(variable: str, unit: str) -> float | None:
    """Return the number in an environment variable; `None` if it is not set.

    Raises:
        RefusedError: not a number above 0.
    """
    text = os.environ.get(variable, "")
    try:
        number = float(text) if text else None
    except ValueError:
        number = math.nan
    if number is not None and not 0 < number < math.inf:
        raise RefusedError(f"{variable}: {text!r} found, a number of {unit} above 0 allowed")
    return number


def patience() -> float:
    """Return the seconds without progress before a file is given up."""
    return read_positive(SECONDS, "seconds") or DEFAULT_SECONDS


class Remote:
    """Files under a URL. Several threads may use it; it must not be passed to other processes.

    Raises:
        RefusedError: no installed library supports the URL.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._protocol = url.split("://")[0]
        self._seconds = patience()
        self._once = False
        if "?" in url:
            raise RefusedError(f"{url}: the URL of a directory has a query; give a URL without one")
        try:
            self._files, self._path = file_system(self.url)
        except RefusedError:
            raise
        except Exception as error:  # each library has its own types
            raise self._refusal(url, error) from error
        if self._protocol in ("http", "https"):
            self._files.client_kwargs = {**self._files.client_kwargs, "response_class": _bounded_response()}

    def once(self) -> Remote:
        """Return a view for prefetching: no retries, no threads."""
        other = copy.copy(self)
        other._once = True
        return other

    def read(self, name: str, largest: int = LARGEST_INDEX) -> bytes:
        """Read a whole file of at most `largest` bytes.

        Raises:
            NotThereError: the file does not exist.
            RemoteError: the file cannot be read.
        """
        content: bytes = self._retry(name, lambda seconds: self._content(name, seconds, largest))
        return content

    def read_into(self, descriptor: int, name: str, size: int, start: int = 0) -> None:
        """Write bytes start to start + size of a file to the beginning of an open one, with concurrent requests.

        Raises:
            NotThereError: the file does not exist.
            RemoteError: the file cannot be read, or is shorter.
        """
        pieces = [(at, min(at + PIECE, size)) for at in range(0, size, PIECE)]

        def fetch(piece: tuple[int, int]) -> int:
            content = self.read_range(name, start + piece[0], start + piece[1], start + size)
            at = piece[0] if len(content) == piece[1] - piece[0] else 0
            _write(descriptor, content, at)
            return len(content)

        if not pieces or fetch(pieces[0]) >= size:
            return
        if self._once:
            for piece in pieces[1:]:
                fetch(piece)
            return
        with ThreadPoolExecutor(min(MAX_REQUESTS, len(pieces) - 1)) as pool:
            futures = [pool.submit(fetch, piece) for piece in pieces[1:]]
            try:
                for future in futures:
                    future.result()
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise

    def stat_file(self, name: str) -> Stored:
        """Return size and version of a file.

        Raises:
            NotThereError: the file does not exist.
            RemoteError: the server does not respond, or gives no size.
        """
        self._files.invalidate_cache()  # drop listings, which are older
        entry = self._retry(name, lambda seconds: self._ask("info", seconds, self._place(name)))
        if entry.get("size") is None:
            raise RemoteSetupError(f"{self.url}/{name}: the server gives no size; copy the file to another server")
        return Stored(int(entry["size"]), _version(entry))

    def list_files(self) -> dict[str, Stored] | None:
        """List all files by their names under the URL; `None` if the server does not list files.

        Raises:
            RemoteError: the listing fails.
        """
        if self._protocol in ("http", "https"):
            return None
        files = self._retry("", lambda seconds: self._ask("find", seconds, self._path, detail=True))
        prefix = self._path.rstrip("/") + "/"
        return {
            name.removeprefix(prefix): Stored(int(entry["size"]), _version(entry))
            for name, entry in files.items()
            if name.startswith(prefix)
        }

    def read_range(self, name: str, start: int, end: int, size: int) -> bytes:
        """Read bytes start to end of a file of `size` bytes; returns bytes 0 to `size` if the server ignores ranges.

        Raises:
            NotThereError: the file does not exist.
            RemoteError: the file cannot be read, or is shorter.
        """

        def ask(seconds: float) -> bytes:
            most = end - start if start else max(end, size)
            content = self._content(name, seconds, most, start=start, end=end)
            if len(content) != end - start and not (start == 0 and len(content) == size):
                raise EOFError(f"{len(content)} bytes received, {end - start} requested")
            return content

        return self._retry(name, ask)

    def _content(self, name: str, seconds: float, most: int, **part: int) -> bytes:
        """Read a file or a part of it; over HTTP at most `most` bytes, whatever the server sends."""
        before = _MOST.set(most)
        try:
            content: bytes = self._ask("cat_file", seconds, self._place(name), **part)
        finally:
            _MOST.reset(before)
        return content

    def _place(self, name: str) -> str:
        return f"{self._path.rstrip('/')}/{name}"

    def _ask(self, what: str, seconds: float, *arguments: Any, **named: Any) -> Any:
        """Call a method of the file system with a time limit."""
        asynchronous = getattr(self._files, f"_{what}", None)
        if self._files.async_impl and inspect.iscoroutinefunction(asynchronous):
            from fsspec.asyn import sync

            return sync(self._files.loop, asynchronous, *arguments, timeout=seconds, **named)
        return _within(seconds, lambda: getattr(self._files, what)(*arguments, **named))

    def _retry(self, name: str, ask: Callable[[float], Answer]) -> Answer:
        """Call `ask`, and repeat it after failures with growing pauses."""
        where = f"{self.url}/{name}" if name else self.url
        began = time.monotonic()
        pause, asked = FIRST_PAUSE, 0

        def seconds_left() -> float:
            signal = first_signal_time()
            most = self._seconds if signal is None else min(self._seconds, max(0.0, signal - began) + SECONDS_TO_STOP)
            return began + most - time.monotonic()

        while True:
            asked += 1
            try:
                return ask(max(0.1, min(REQUEST_SECONDS, seconds_left())))
            except FileNotFoundError as error:
                advice = f"; if it is private, {_SIGN_IN['hf']}" if self._protocol == "hf" else ""
                raise NotThereError(f"{where}: not found{advice}") from error
            except Exception as error:  # each file system has its own types
                if _lacks_credentials(error):
                    raise self._refusal(where, error) from error
                reason = f"{type(error).__name__}: {error}".rstrip(": ")
                if asked == LOG_AFTER:
                    logger.warning("%s: %s; the request is repeated for up to %g s", where, reason, self._seconds)
                if self._once or pause > seconds_left():
                    ended = f"not read within {self._seconds:g} s"
                    if first_signal_time() is not None:
                        ended = "not read before this process was asked to stop"
                    raise RemoteError(
                        f"{where}: {ended}, after {asked} requests, the last error: {reason}; check this machine's "
                        f"network, or set {SECONDS} to wait longer"
                    ) from error
            again = time.monotonic() + pause * random.uniform(0.5, 1.0)
            while (
                rest := again - time.monotonic()
            ) > 0 and seconds_left() > 0:  # in pieces: a signal does not end a sleep
                time.sleep(min(rest, 0.5))
            pause = min(2 * pause, LONGEST_PAUSE)

    def _refusal(self, where: str, error: Exception) -> RemoteSetupError:
        advice = _SIGN_IN.get(self._protocol, f"see fsspec's settings for {self._protocol}:// (FSSPEC_...)")
        return RemoteSetupError(f"{where}: no permission ({type(error).__name__}: {error}); {advice}")


@functools.cache
def _bounded_response() -> type:
    """Return aiohttp's response class with a limit of `_MOST` bytes: fsspec reads whole bodies. An endless body, or 14
    MB of gzip, took 4 GB within seconds."""
    import aiohttp

    class BoundedResponse(aiohttp.ClientResponse):
        async def read(self) -> bytes:
            most, parts, size = _MOST.get(), list[bytes](), 0
            async for part in self.content.iter_any():
                parts.append(part)
                size += len(part)
                if size > most:
                    self.close()
                    raise EOFError(f"more than {most} bytes received, which were requested")
            return b"".join(parts)

    return BoundedResponse


@functools.lru_cache(maxsize=64)
def shared_remote(url: str) -> Remote:
    """Return the `Remote` of a directory in this process, to share connections."""
    return Remote(url)


def url_directory(url: str, root: Path) -> Path:
    """Return the directory below `root` for the files under a URL.

    Raises:
        RefusedError: not the URL of a directory.
    """
    protocol, _, rest = url.partition("://")
    parts = [part for part in PurePosixPath(rest).parts if part != "/"]
    if not parts or ".." in parts or not re.fullmatch(r"[A-Za-z0-9+.-]+", protocol):
        raise RefusedError(f"{url}: not the URL of a directory; give a URL like s3://BUCKET/DATASET")
    return root.joinpath(protocol, *parts)


def _version(entry: dict[str, Any]) -> str:
    return next((str(entry[key]) for key in _VERSIONS if entry.get(key) is not None), "")


def _write(descriptor: int, content: bytes, at: int) -> None:
    view = memoryview(content)
    while view:
        written = os.pwrite(descriptor, view, at)
        view, at = view[written:], at + written


def _lacks_credentials(error: BaseException) -> bool:
    """Whether credentials are missing or insufficient, which waiting does not solve."""
    cause: BaseException | None = error
    while cause is not None:
        status = getattr(cause, "status", None) or getattr(getattr(cause, "response", None), "status_code", None)
        if isinstance(cause, PermissionError) or type(cause).__name__ in _UNSIGNED or status in (401, 403):
            return True
        cause = cause.__cause__ or cause.__context__
    return False


def _within(seconds: float, ask: Callable[[], Answer]) -> Answer:
    """Return the result of `ask`, or raise TimeoutError; a daemon thread does not delay the end of the process."""
    future: Future[Answer] = Future()

    def run() -> None:
        try:
            future.set_result(ask())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future.result(seconds)
