"""An HTTP server that fails on purpose, over a directory or in front of another server."""

from __future__ import annotations

import http.client
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote

HOP = {"connection", "transfer-encoding", "keep-alive", "date", "server"}
"""Headers that belong to one connection."""

STALL_SECONDS = 20.0


@dataclass(frozen=True)
class Answer:
    """What a server says."""

    status: int
    headers: dict[str, str]
    content: bytes


Serve = Callable[[str, str, Mapping[str, str], bytes], Answer]
"""(method, path, headers, content) -> answer."""


@dataclass
class Faults:
    """What goes wrong, and what was asked.

    Attributes:
        of: the next answers to requests, GET or PUT, of a path that ends so: "500", "503", "stall", "cut" (fewer
            bytes than said), "short" (fewer bytes, and says so), "close" (none), "401"; then all goes well.
        asked: (method, path, Range) of each request.
    """

    of: dict[str, list[str]] = field(default_factory=dict)
    asked: list[tuple[str, str, str]] = field(default_factory=list)

    def next(self, path: str) -> str:
        for ending, faults in self.of.items():
            if path.split("?")[0].endswith(ending) and faults:
                return faults.pop(0)
        return ""

    def gets(self, ending: str) -> int:
        """GET requests so far of paths that end so."""
        return sum(method == "GET" and path.split("?")[0].endswith(ending) for method, path, _ in self.asked)


def directory(root: Path, ranges: bool = True) -> Serve:
    """The files of a directory, with or without answers to range requests; it lists nothing."""

    def serve(method: str, path: str, headers: Mapping[str, str], _: bytes) -> Answer:
        place = root / unquote(path).lstrip("/")
        if not place.is_file():
            return Answer(404, {}, b"")
        content = place.read_bytes()
        asked = headers.get("Range", "")
        if ranges and asked.startswith("bytes="):
            first, last = asked.removeprefix("bytes=").split("-")
            part = content[int(first) : int(last) + 1 if last else None]
            return Answer(206, {"Content-Range": f"bytes {first}-{last}/{len(content)}"}, part)
        return Answer(200, {}, content)

    return serve


def server(host: str, port: int) -> Serve:
    """Another server behind this one."""

    def serve(method: str, path: str, headers: Mapping[str, str], content: bytes) -> Answer:
        connection = http.client.HTTPConnection(host, port, timeout=30)
        try:
            connection.request(method, path, body=content, headers=dict(headers))
            answer = connection.getresponse()
            kept = {name: value for name, value in answer.getheaders() if name.lower() not in HOP}
            return Answer(answer.status, kept, answer.read())
        finally:
            connection.close()

    return serve


@contextmanager
def faulty_server(serve: Serve) -> Iterator[tuple[str, Faults]]:
    """The server's URL, and what goes wrong there."""
    faults, over = Faults(), threading.Event()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: Any) -> None:
            pass

        def answer(self) -> None:
            content = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            faults.asked.append((self.command, self.path, self.headers.get("Range", "")))
            fault = faults.next(self.path) if self.command in ("GET", "PUT") else ""
            if fault == "stall":
                over.wait(STALL_SECONDS)
            if fault in ("stall", "close"):
                self.close_connection = True
                return
            given = serve(self.command, self.path, dict(self.headers.items()), content)
            if fault.isdigit():
                code = "AccessDenied" if fault in ("401", "403") else "InternalError"
                given = Answer(int(fault), {}, f"<Error><Code>{code}</Code></Error>".encode())  # as S3 says it
            if fault == "short":
                given = Answer(given.status, given.headers, given.content[: len(given.content) // 2])
            self.send_response(given.status)
            for name, value in given.headers.items():
                if name.lower() != "content-length":
                    self.send_header(name, value)
            length = given.headers.get("Content-Length") if self.command == "HEAD" else None
            self.send_header("Content-Length", length or str(len(given.content)))
            self.end_headers()
            if self.command == "HEAD":
                return
            self.wfile.write(given.content[: len(given.content) // 2] if fault == "cut" else given.content)
            self.close_connection |= fault == "cut"

        do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = answer  # noqa: N815 - names that http.server looks for

    class Server(ThreadingHTTPServer):
        def handle_error(self, request: Any, client_address: Any) -> None:
            if not isinstance(sys.exc_info()[1], ConnectionError):  # a client that has gone
                super().handle_error(request, client_address)

    running = Server(("127.0.0.1", 0), Handler)
    running.daemon_threads = True
    thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{running.server_address[1]}", faults
    finally:
        over.set()
        running.shutdown()
        running.server_close()
        thread.join()
