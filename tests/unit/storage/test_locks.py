"""One run at a time, and never a lock that outlives its process or keeps nobody out."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from trp_scale.errors import DataError
from trp_scale.storage.locks import only_run

ROOT = Path(__file__).resolve().parents[3]


def test_a_second_run_is_refused_until_the_first_has_ended(tmp_path: Path) -> None:
    with only_run(tmp_path), pytest.raises(DataError, match=f"process {os.getpid()} on "), only_run(tmp_path):
        pass
    with pytest.raises(KeyError), only_run(tmp_path):
        raise KeyError
    with only_run(tmp_path):
        pass
    assert list((tmp_path / "progress").iterdir()) == []


def test_the_lock_of_a_killed_run_is_free(tmp_path: Path) -> None:
    program = "import sys, time; from pathlib import Path; from trp_scale.storage.locks import only_run\n"
    program += "with only_run(Path(sys.argv[1])): print(flush=True); time.sleep(600)"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)], env=environment, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == b"\n"
        with pytest.raises(DataError, match=f"process {holder.pid} on "), only_run(tmp_path):
            pass
        holder.kill()
    assert (tmp_path / "progress" / "lock").exists()
    with only_run(tmp_path):
        assert f"process {os.getpid()} on " in (tmp_path / "progress" / "lock").read_text()


def test_a_lock_whose_file_was_taken_away_is_not_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run before ends, and takes the file away, between this run's opening of it and its lock."""
    taken, path = fcntl.flock, tmp_path / "progress" / "lock"

    def ends_first(descriptor: int, operation: int) -> None:
        monkeypatch.setattr("fcntl.flock", taken)
        taken(descriptor, operation)
        path.unlink()

    monkeypatch.setattr("fcntl.flock", ends_first)
    with only_run(tmp_path), pytest.raises(DataError, match="another run"), only_run(tmp_path):
        pass
