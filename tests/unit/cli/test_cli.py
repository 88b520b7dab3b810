"""The command: what is listed exists, and a mistake of the user's is one message and status 2."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from trp_scale import cli
from trp_scale.config import RefusedError

ROOT = Path(__file__).parents[3]


def launched(*argv: str, directory: Path = ROOT, **variables: str) -> subprocess.CompletedProcess[str]:
    """launch/pretrain.py as a process of its own, not helped by PYTHONPATH."""
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | variables
    command = [sys.executable, str(ROOT / "launch" / "pretrain.py"), *argv]
    return subprocess.run(command, cwd=directory, env=environ, capture_output=True, text=True, timeout=60, check=False)


def test_no_command_and_help_list_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 2
    assert cli.main(["--help"]) == 0
    listed = capsys.readouterr().out
    assert "pretrain" in listed
    assert "report" in listed
    assert "export" in listed
    assert cli.main(["pretrian"]) == 2
    assert "allowed: pretrain, finetune, evaluate, probe, compare, represent, report" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["pretrain", "compare", "represent", "report", "export"])
def test_each_command_explains_its_flags(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main([command, "--help"])
    assert caught.value.code == 0
    assert f"usage: trp-scale {command}" in capsys.readouterr().out


def test_report_prints_the_table_of_a_run_that_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    task = {"loss": 4.5, "weight": 1.0, "count": 3}
    line = {"step": 1, "loss": 4.5, "applied": True, "peak_memory_bytes": 1, "tasks": {"verb": task}}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(line) + "\n", encoding="utf-8")
    assert cli.main(["report", "--run", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"^ *verb +4\.5000 ", printed, flags=re.MULTILINE)
    assert "still running, or killed" in printed


def test_report_of_a_directory_without_metrics_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["report", "--run", str(tmp_path)]) == 2
    assert f"{tmp_path}/metrics.jsonl does not exist" in capsys.readouterr().err


def test_export_of_a_directory_that_is_no_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["export", "--run", str(tmp_path), "--to", "hf", "--output", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert str(tmp_path) in error


def test_a_refusal_is_one_message_without_a_traceback(tmp_path: Path) -> None:
    done = launched("--recipe", "pos_bert_tiny", "--model.heads", "7", directory=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("error: 1 setting(s) cannot be used:\n  --model.heads is 7")
    assert "Traceback" not in done.stderr


def test_a_checkout_works_without_being_installed(tmp_path: Path) -> None:
    done = launched("--recipe", "pos_bert_tiny", "--help", directory=tmp_path)
    assert done.returncode == 0
    assert "--balancer.kind" in done.stdout


def test_rank_0_speaks_and_the_others_wait_for_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    waited: list[float] = []
    monkeypatch.setattr(time, "sleep", waited.append)

    def refuse() -> int:
        raise RefusedError("no such thing")

    for variables, waits in (({"RANK": "0"}, 0), ({"RANK": "1"}, 1), ({"SLURM_PROCID": "3"}, 1), ({}, 0)):
        for name in ("RANK", "SLURM_PROCID"):
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        waited.clear()
        assert cli.run(refuse) == 2
        assert len(waited) == waits
        assert capsys.readouterr().err == "error: no such thing\n"


def test_an_error_of_ours_is_not_hidden() -> None:
    def fail() -> int:
        raise ValueError("a bug")

    with pytest.raises(ValueError, match="a bug"):
        cli.run(fail)
