"""`trp-scale watch`: a page that follows the run, on this machine alone, until Ctrl-C."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.runs import Refused, hear_ctrl_c
from tests.unit.reporting.small_runs import FINISHED, text_lines, write
from trp_scale.cli import main as cli
from trp_scale.errors import RefusedError
from trp_scale.reporting import watch as module
from trp_scale.reporting.watch import HOST, RunningPage, make_server

Get = Callable[..., str]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write(tmp_path / "run", text_lines(3))


@pytest.fixture
def get(run: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Get]:
    """Ask the server of the run for a path."""
    monkeypatch.setattr(module, "REST", 0)
    with make_server(RunningPage(run), 0) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()

        def ask(path: str, host: str = "localhost") -> str:
            address = f"http://{HOST}:{server.server_address[1]}{path}"
            request = urllib.request.Request(address, headers={"Host": host})
            with urllib.request.urlopen(request, timeout=20) as answer:
                return str(answer.read().decode())

        yield ask
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("host", ["localhost", "LocalHost:8000", "127.0.0.1", "[::1]:1"])
def test_its_own_names_are_answered(get: Get, host: str) -> None:
    assert "up to step 3." in get("/", host)


def test_the_page_changes_when_the_run_gets_on(run: Path, get: Get) -> None:
    first, version = get("/"), get("/version")
    assert "up to step 3." in first and f'content="{version}"' in first
    assert get("/version") == version and get("/report.html") == first
    write(run, text_lines(5))
    assert get("/version") != version
    assert "up to step 5." in get("/") and "end not known" in get("/")
    (run / "stop.json").write_text(json.dumps(FINISHED), encoding="utf-8")
    assert "All steps are done." in get("/")
    assert sorted(path.name for path in run.iterdir()) == ["metrics.jsonl", "stop.json"]


def test_plotly_comes_apart_from_the_page(get: Get) -> None:
    assert '<script src="plotly.min.js">' in get("/") and "plotly.js v" not in get("/")
    assert "plotly.js v" in get("/plotly.min.js")[:200]


@pytest.mark.parametrize(
    ("path", "host", "status"),
    [("/metrics.jsonl", "127.0.0.1", 404), ("/../a", "localhost", 404), ("/", "evil.example", 403)],
)
def test_nothing_else_is_served_and_not_to_others(get: Get, path: str, host: str, status: int) -> None:
    with pytest.raises(urllib.error.HTTPError) as caught:
        get(path, host)
    assert caught.value.code == status


def test_a_run_without_a_step_is_waited_for_and_a_damaged_one_told(tmp_path: Path) -> None:
    page = RunningPage(tmp_path)
    assert "No step has been logged." in page.newest()[1]
    (tmp_path / "metrics.jsonl").write_text("no JSON\n", encoding="utf-8")
    page._until = 0.0
    assert "line 1: not JSON" in page.newest()[1]


def test_a_long_run_is_not_read_all_the_time(run: Path) -> None:
    now = [100.0]

    def clock() -> float:
        now[0] += 1.0
        return now[0]

    page = RunningPage(run, clock)
    first = page.newest()[0]  # making it took one second of this clock
    write(run, text_lines(4))
    assert page.newest()[0] == first  # a moment later
    now[0] += 5.0
    assert page.newest()[0] != first


def test_a_busy_port_is_refused(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with closing(socket.create_server((HOST, 0))) as taken:
        port = taken.getsockname()[1]
        assert cli.main(["watch", str(run), "--port", str(port)]) == 2
    assert f"--port {port} of {HOST} cannot be used" in capsys.readouterr().err
    with pytest.raises(RefusedError, match=r"allowed: 0 \.\.\. 65535"):
        make_server(RunningPage(run), 70_000)


def test_a_directory_that_is_not_there_is_refused(tmp_path: Path, refused: Refused) -> None:
    assert "no: no such directory" in refused("watch", tmp_path / "no")
    (tmp_path / "other.txt").write_text("no run")
    assert "not a run of trp-scale pretrain" in refused("watch", tmp_path)


def test_ctrl_c_ends_it_well(run: Path) -> None:
    command = [sys.executable, "-m", "trp_scale", "watch", str(run), "--port", "0"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, **pipes, text=True, preexec_fn=hear_ctrl_c) as process:
        assert process.stdout is not None and process.stderr is not None
        address = process.stdout.readline().split()[0]
        with urllib.request.urlopen(address, timeout=30) as answer:
            assert "up to step 3." in answer.read().decode()
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 0, process.stderr.read()
        assert process.stderr.read() == ""
