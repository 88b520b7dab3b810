"""Running a study: resume after kill -9, a run that fails, what has finished."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from itertools import chain
from pathlib import Path

import pytest

from tests.unit.studies.study_files import document, graph_of, run_here, write_program
from trp_scale.errors import RefusedError
from trp_scale.studies.execute import Executor, NodeState, file_name, find_blocked, read_state, read_states, submit
from trp_scale.studies.plan import hours_left

RUNS = """
import sys
from pathlib import Path
from tests.unit.studies.study_files import graph_of
from trp_scale.studies.execute import Executor
directory = Path(sys.argv[1])
Executor(graph_of(directory), jobs=2, program=[sys.executable, "-IS", str(directory / "program.py")]).run()
"""


def calls(directory: Path) -> list[str]:
    return (directory / "calls.txt").read_text().split() if (directory / "calls.txt").exists() else []


def test_a_study_that_was_killed_goes_on_and_does_nothing_twice(tmp_path: Path) -> None:
    program = write_program(tmp_path)
    (tmp_path / "settings.json").write_text(json.dumps({"slow": 0.3}))
    graph = graph_of(tmp_path)
    started = subprocess.Popen([sys.executable, "-c", RUNS, str(tmp_path)], stdout=subprocess.DEVNULL)
    until = time.monotonic() + 60
    while sum(read_state(graph.directory, name) is not None for name in graph.nodes) < 4 and time.monotonic() < until:
        time.sleep(0.02)
    os.kill(started.pid, signal.SIGKILL)
    started.wait()
    done = {name for name, state in read_states(graph).items() if state is not None}
    assert 4 <= len(done) < len(graph.nodes)
    time.sleep(0.5)  # a command that the killed study left behind would write now
    before = calls(tmp_path)
    ended = Executor(graph, jobs=2, program=program, tell=lambda line: None).run()
    assert {state.status for state in ended.values() if state} == {"finished"}
    assert len(ended) == len(graph.nodes)
    again = calls(tmp_path)[len(before) :]
    assert sorted(again) == sorted(str(graph.path(name)) for name in graph.nodes if name not in done)


def test_a_variant_that_fails_stops_only_what_needs_it(tmp_path: Path) -> None:
    program = write_program(tmp_path)
    (tmp_path / "settings.json").write_text(json.dumps({"fails": ["runs/slow/seed_0"]}))
    graph, log_lines = graph_of(tmp_path), list[str]()
    Executor(graph, jobs=2, program=program, tell=log_lines.append).run()
    states = read_states(graph)
    failed = [name for name, state in states.items() if state is not None and state.status == "failed"]
    assert failed == ["runs/slow/seed_0"]
    assert "this was to fail" in next(line for line in log_lines if line.startswith("failed"))
    assert find_blocked(graph, states) == {"judged/glue/runs/slow/seed_0": "runs/slow/seed_0"}
    assert sum(state is not None and state.status == "finished" for state in states.values()) == len(graph.nodes) - 2
    (tmp_path / "settings.json").unlink()
    ended = Executor(graph, jobs=2, program=program, tell=log_lines.append).run()
    assert {state.status for state in ended.values() if state} == {"finished"}


def test_a_study_that_is_asked_to_stop_starts_no_more(tmp_path: Path) -> None:
    program, graph = write_program(tmp_path), graph_of(tmp_path)
    executor = Executor(graph, jobs=1, program=program, tell=lambda line: None)
    executor.tell = lambda line: executor.stop()
    ended = executor.run()
    assert sum(state is not None for state in ended.values()) == 1


def test_what_has_finished_with_another_command_is_refused(tmp_path: Path) -> None:
    run_here(graph_of(tmp_path))
    given = document(settings={"data.path": "{words}", "training.steps": 200, "optimizer.lr": 0.001})
    with pytest.raises(RefusedError, match=r"(?s)100.*steps.*200"):
        run_here(graph_of(tmp_path, given))


def test_slurm_gets_an_array_for_each_level_of_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = graph_of(tmp_path)
    sbatch = tmp_path / "bin" / "sbatch"
    sbatch.parent.mkdir()
    sbatch.write_text(f'#!/bin/sh\nprintf "%s\\n" "$*" >> {tmp_path}/submitted\nwc -l < {tmp_path}/submitted\n')
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", f"{sbatch.parent}:{os.environ['PATH']}")
    jobs = submit(graph, ["trp-scale", "study", "run", "x"], "--partition=gpu")
    lines = (tmp_path / "submitted").read_text().splitlines()
    assert jobs == ["1", "2", "3"]
    assert [f"--dependency=afterany:{number}" in line for number, line in zip((1, 1, 2), lines, strict=True)] == [
        False,
        True,
        True,
    ]
    numbers = [list(map(int, line.split("--array=")[1].split()[0].split(","))) for line in lines]
    assert sorted(chain.from_iterable(numbers)) == list(range(len(graph.nodes)))
    assert all('--only "$SLURM_ARRAY_TASK_ID"' in line and "--partition=gpu" in line for line in lines)


def test_slurm_is_given_only_what_has_not_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = graph_of(tmp_path)
    run_here(graph)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert submit(graph, ["trp-scale"], "") == []


def test_the_launcher_starts_runs_and_judges_but_does_not_make_data(tmp_path: Path) -> None:
    program = tmp_path / "launch.sh"
    program.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/launched.txt\nexec "{sys.executable}" "$@"\n')
    program.chmod(0o755)
    graph = graph_of(tmp_path, document(launcher=str(program)))
    ended = Executor(graph, jobs=2, program=write_program(tmp_path), tell=lambda line: None).run()
    assert {state.status for state in ended.values() if state} == {"finished"}
    launched = (tmp_path / "launched.txt").read_text().splitlines()
    assert len(launched) == len(graph.nodes) - 1
    assert {line.split()[2] for line in launched} == {"pretrain", "finetune"}


def test_what_is_left_is_counted_by_the_seconds_of_what_has_finished(tmp_path: Path) -> None:
    graph = graph_of(tmp_path)
    (graph.directory / "state").mkdir(parents=True)
    judged = [name for name in graph.nodes if name.startswith("judged/glue/")]
    for name, seconds in zip(judged[:2], (100.0, 260.0), strict=True):
        ended = NodeState(node=name, command=[], status="finished", seconds=seconds)
        (graph.directory / "state" / f"{file_name(name)}.json").write_text(json.dumps(asdict(ended)))
    first, *lines, last = hours_left(graph)
    assert first.endswith(f": 2 of {len(graph.nodes)} commands have finished")
    left = len(judged) - 2
    assert f"  judged/glue: {left} left, 180 s each by 2: {left * 0.05:.2f} hours" in lines
    assert any(line.startswith("  runs/slow: ") and "none finished yet" in line for line in lines)
    assert last.startswith(f"left: {left * 0.05:.2f} hours")


@pytest.mark.parametrize(
    ("reason", "whole"),
    [
        ("finished", True),
        ("no better validation.loss in 3 measurements: ...", True),
        ("SIGTERM (rank 0)", False),
        ("", False),
    ],
)
def test_a_run_is_whole_that_has_nothing_left_to_do(tmp_path: Path, reason: str, whole: bool) -> None:
    executor = Executor(graph_of(tmp_path), jobs=1)
    path = executor.graph.path("runs/plain/seed_0")
    path.mkdir(parents=True)
    (path / "summary.json").write_text(json.dumps({"exit_reason": reason} if reason else {}))
    assert executor._is_complete("runs/plain/seed_0") is whole


@pytest.mark.parametrize("last", ["dataset.json", "mixture.txt", "annotations.json"])
def test_a_data_set_is_whole_with_its_last_file(tmp_path: Path, last: str) -> None:
    executor = Executor(graph_of(tmp_path), jobs=1)
    path = executor.graph.path("data/words")
    path.mkdir(parents=True)
    assert not executor._is_complete("data/words")
    (path / last).touch()
    assert executor._is_complete("data/words")


def test_asking_to_stop_leaves_the_exit_status_to_the_thread_that_waits(tmp_path: Path) -> None:
    executor = Executor(graph_of(tmp_path), jobs=1)
    ended, finished = (subprocess.Popen(["true"]) for _ in range(2))
    finished.wait()
    os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)  # it has ended, and nobody has asked how
    executor._running = {"runs/plain/seed_0": ended, "runs/slow/seed_0": finished}
    executor.stop()
    _, status, _ = os.wait4(ended.pid, 0)
    ended.returncode = os.waitstatus_to_exitcode(status)
    assert ended.returncode == 0
