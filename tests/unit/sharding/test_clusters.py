"""Arguments of sbatch for `--executor slurm-array`, and refusals. tests/cluster submits to a real SLURM."""

from __future__ import annotations

import json
import re
import shlex
import sys
from pathlib import Path

import pytest

from trp_scale.cli.main import main

TEXT = ("shard-text", "--embedded", "--output", "a folder/books", "--executor", "slurm-array")


@pytest.fixture
def sbatch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put a fake sbatch first in PATH; return the file with its arguments."""
    called = tmp_path / "called"
    program = tmp_path / "sbatch"
    program.write_text(
        f"#!{sys.executable}\nimport sys, json\n"
        f"with open({str(called)!r}, 'a') as out: out.write(json.dumps(sys.argv[1:]) + chr(10))\n"
        "if '--partition=none' in sys.argv: sys.exit('sbatch: error: invalid partition')\n"
        "print('41;cluster')\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    return called


def test_a_job_for_each_part_and_one_that_merges(sbatch: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*TEXT, "--num_shards", "8", "--sbatch=--partition=cpu --time=4:00:00"]) == 0
    array, merge = (json.loads(line) for line in sbatch.read_text().splitlines())
    assert {"--array=0-7", "--requeue", "--partition=cpu", "--time=4:00:00"} <= set(array)
    assert {"--dependency=afterany:41", "--partition=cpu"} <= set(merge)
    words = shlex.split(array[-1])
    assert words[:4] == ["exec", sys.executable, "-m", "trp_scale"]
    assert words[4 : 4 + len(TEXT)] == list(TEXT), "the flags as they were given"
    assert words[-7:] == [
        *("--executor", "local", "--sbatch", "", "--no-progress", "--shard_index", "$SLURM_ARRAY_TASK_ID"),
    ]
    assert shlex.split(merge[-1])[-2:] == ["merge", "a folder/books"]
    assert "8 parts are array job 41, job 41 merges them" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ((), "--num_shards 1 and --shard_index 0 found; allowed: 2 parts or more"),
        (("--num_shards", "4", "--shard_index", "1"), "--shard_index 1 found; .* no --shard_index"),
        (("--num_shards", "4", "--sbatch=--partition=none"), "sbatch: error: invalid partition"),
        (("--num_shards", "4", "--length", "4"), "--length is 4"),
        (("--executor", "local", "--sbatch=--partition=cpu"), "--sbatch '--partition=cpu' needs --executor slurm"),
    ],
)
def test_refusals(sbatch: Path, flags: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*TEXT, *flags]) == 2
    assert re.search(said, capsys.readouterr().err)
