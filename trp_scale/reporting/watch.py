"""`trp-scale watch`: serve the page of a running run to local browsers, and update it."""

from __future__ import annotations

import errno
import hashlib
import re
import sys
import threading
import time
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from trp_scale.checkpoint.run_directory import METRICS_FILE, SUMMARY_FILE
from trp_scale.errors import RefusedError
from trp_scale.reporting.document import PLOTLY, Page, page_text, plotly_source
from trp_scale.reporting.record import read_run
from trp_scale.reporting.run import run_page
from trp_scale.training.rundir import CONFIG_FILE, INCIDENTS_FILE, STOP_RECORD

HOST = "127.0.0.1"

OWN_NAMES = ("127.0.0.1", "localhost", "[::1]")
"""Accepted Host headers, for local browsers and tunnels. This blocks DNS rebinding by web pages."""

WATCHED = (METRICS_FILE, SUMMARY_FILE, STOP_RECORD, INCIDENTS_FILE)

REST = 4
"""Pause after rendering, as a multiple of the rendering time: the page of a long run takes seconds, and the machine
may also train."""


class RunningPage:
    """Page of a run directory; rendered again after its files change.

    Args:
        run_dir: exists; metrics.jsonl may follow later.
        clock: returns seconds.
    """

    def __init__(self, run_dir: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self.run_dir, self.clock = run_dir, clock
        self._lock = threading.Lock()
        self._version, self._text, self._until = "", "", 0.0

    def newest(self) -> tuple[str, str]:
        """Return (version, HTML)."""
        with self._lock:
            fingerprint = self._fingerprint()
            if fingerprint != self._version and (self.clock() >= self._until or not self._text):
                start = self.clock()
                self._text = page_text(self._page(), served=fingerprint)
                self._version = fingerprint
                self._until = self.clock() + REST * (self.clock() - start)
            return self._version, self._text

    def _fingerprint(self) -> str:
        parts = []
        for name in WATCHED:
            path = self.run_dir / name
            parts.append(f"{path.stat().st_size}:{path.stat().st_mtime_ns}" if path.exists() else "-")
        return hashlib.sha256(" ".join(parts).encode()).hexdigest()[:16]

    def _page(self) -> Page:
        try:
            return run_page(read_run(self.run_dir))
        except RefusedError as error:
            lead = str(error) if (self.run_dir / METRICS_FILE).exists() else "No step has been logged."
            return Page(kind="Pre-training report", title=self.run_dir.resolve().name, lead=[lead])


def make_server(page: RunningPage, port: int) -> ThreadingHTTPServer:
    """Create a server on 127.0.0.1. Raises RefusedError if the port is not available or plotly is not installed.

    Args:
        port: 0 = any free port.
    """
    plotly = plotly_source().encode()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if re.sub(r":\d+$", "", self.headers.get("Host", "")).lower() not in OWN_NAMES:
                self.send_error(HTTPStatus.FORBIDDEN)
                return
            path = self.path.partition("?")[0]
            if path in ("/", "/report.html"):
                self._answer(page.newest()[1].encode(), "text/html; charset=utf-8", "no-store")
            elif path == "/version":
                self._answer(page.newest()[0].encode(), "text/plain; charset=utf-8", "no-store")
            elif path == f"/{PLOTLY}":
                self._answer(plotly, "text/javascript; charset=utf-8", "max-age=86400")
            else:
                self.send_error(HTTPStatus.NOT_FOUND)

        def _answer(self, content: bytes, kind: str, kept: str) -> None:
            self.send_response(HTTPStatus.OK)
            for name, value in (("Content-Type", kind), ("Cache-Control", kept), ("X-Content-Type-Options", "nosniff")):
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *values: object) -> None:
            """Log nothing: one line per request would hide other output."""

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        allow_reuse_port = False

        def handle_error(self, request: object, client_address: object) -> None:
            """Ignore browsers that close the connection during a response."""
            if not isinstance(sys.exc_info()[1], ConnectionError):
                super().handle_error(request, client_address)  # type: ignore[arg-type]

    try:
        return Server((HOST, port), Handler)
    except OSError as error:
        reason = "it is already in use" if error.errno == errno.EADDRINUSE else str(error.strerror)
        raise RefusedError(
            f"--port {port} of {HOST} cannot be used: {reason}; allowed: another port, or --port 0 for one that is free"
        ) from error
    except OverflowError as error:
        raise RefusedError(f"--port is {port}; allowed: 0 ... 65535") from error


def watch(run_dir: Path, port: int) -> None:
    """Serve the page until the process is interrupted. Raises RefusedError if `run_dir` is not a run."""
    if not run_dir.is_dir():
        raise RefusedError(f"{run_dir}: no such directory; give the --run_dir of a run")
    if any(run_dir.iterdir()) and not any((run_dir / name).exists() for name in (*WATCHED, CONFIG_FILE)):
        raise RefusedError(f"{run_dir}: not a run of trp-scale pretrain; give the --run_dir of a run")
    with make_server(RunningPage(run_dir), port) as server:
        print(f"http://{HOST}:{server.server_address[1]}/  (Ctrl-C stops the server, not the run)", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print()
