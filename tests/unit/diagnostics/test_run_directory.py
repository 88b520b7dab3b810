"""What `trp-scale doctor RUN_DIR` finds: a small run, damaged in one way each. `trp-scale runs`: every state of a run,
what is skipped, and the width of the table."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.runs import flags, pretrain_here
from tests.unit.reporting.small_runs import FAILED, FINISHED, image_lines, line, task, text_lines, write
from trp_scale.checkpoint.run_directory import checkpoint_path
from trp_scale.cli import main as cli
from trp_scale.console import Table
from trp_scale.diagnostics import run_directory as doctor
from trp_scale.diagnostics.machine import Finding
from trp_scale.diagnostics.run_directory import examine_run, find_runs, list_runs, read_row
from trp_scale.distributed.liveness import Lease
from trp_scale.errors import ExitStatus, RefusedError
from trp_scale.training.metrics import read_history
from trp_scale.training.rundir import Ending, Incidents


@pytest.fixture(scope="module")
def finished(text_dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight steps, with checkpoints of steps 3, 6 and 8."""
    run_dir = tmp_path_factory.mktemp("finished") / "run"
    assert pretrain_here(flags(text_dataset, run_dir, checkpoint__every=3, checkpoint__keep=3)) == 0
    return run_dir


@pytest.fixture
def run_dir(finished: Path, tmp_path: Path) -> Path:
    shutil.copytree(finished, tmp_path / "run")
    return tmp_path / "run"


def states(findings: list[Finding]) -> dict[str, str]:
    """Of each check; all that is not ok says what to change."""
    assert all(bool(each.change) == (each.state != "ok") for each in findings)
    return {each.check: each.state for each in findings}


def of(run_dir: Path, check: str, **settings: Any) -> Finding:
    found = [each for each in examine_run(run_dir, **settings) if each.check.startswith(check)]
    assert len(found) == 1, found
    return found[0]


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 16
    path.write_bytes(content)


def lease_of(run_dir: Path, **fields: Any) -> Path:
    """A lease as a process of another host has it, but for `fields`."""
    holder = {"token": "1", "host": "elsewhere", "boot": "2", "process": 3, "began": "4", "started": "today", **fields}
    path = run_dir / "lease.json"
    path.write_text(json.dumps(holder))
    return path


def aged(path: Path, seconds: float) -> None:
    os.utime(path, (time.time() - seconds,) * 2)


def test_a_finished_run_is_ok(run_dir: Path) -> None:
    findings = examine_run(run_dir)
    assert set(states(findings).values()) == {"ok"}
    found = {each.check: each.result for each in findings}
    assert "plain on 1 rank(s)" in found["run"] and found["run"].endswith("starts so far: 1")
    assert found["stop"].startswith("finished; step 8, status 0")
    assert [check for check in found if check.startswith("step")] == ["step 3", "step 6", "step 8"]
    assert "all checksums match" in found["step 8"]
    assert found["resume"] == "--resume auto takes checkpoints/step_00000008; no step is lost"
    assert found["metrics"].startswith("the last line is of step 8, loss ")
    assert re.search(r"free, a checkpoint takes \d+\.\d MB$", found["room"])


def test_files_that_are_too_large_to_be_a_runs_are_not_read(run_dir: Path) -> None:
    (run_dir / "hangs" / "20260101-000000").mkdir(parents=True)
    for name in ("stop.json", "environment.json", "hangs/20260101-000000/summary.txt"):
        with (run_dir / name).open("ab") as file:
            file.truncate(1 << 40)  # more than there is memory, of a file with nothing in it
    found = {each.check: each.result for each in examine_run(run_dir)}
    assert found["run"].endswith("environment.json cannot be read")
    assert found["hang 20260101-000000"] == "no summary; ranks with stacks: none"
    assert not found["stop"].startswith("finished")


class Damage(NamedTuple):
    """What is done to the newest checkpoint, what is said of it, and whether sizes alone tell."""

    act: Callable[[Path], object]
    said: str
    sizes_tell: bool


def shorten(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-20])


DAMAGES = {
    "flipped": Damage(lambda path: flip(path / "rank-00000.safetensors"), "do not match their checksum", False),
    "short": Damage(lambda path: shorten(path / "rank-00000.safetensors"), "bytes found", True),
    "gone": Damage(lambda path: (path / "hooks.safetensors").unlink(), "hooks.safetensors: missing", True),
    "without its list": Damage(lambda path: (path / "checkpoint.json").unlink(), "checkpoint.json: missing", True),
    "list cut": Damage(lambda path: shorten(path / "checkpoint.json"), "checkpoint.json: ", True),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_taken(run_dir: Path, name: str) -> None:
    damage = DAMAGES[name]
    damage.act(checkpoint_path(run_dir, 8))
    bad = of(run_dir, "step 8")
    assert bad.state == "wrong" and damage.said in bad.result and "step_00000008" in bad.result
    assert of(run_dir, "resume").result == "--resume auto takes checkpoints/step_00000006; 2 step(s) are repeated"
    assert (of(run_dir, "step 8", quick=True).state == "wrong") == damage.sizes_tell
    assert states(examine_run(run_dir))["step 6"] == "ok"


def test_one_that_was_about_to_be_replaced_counts(run_dir: Path) -> None:
    newest = checkpoint_path(run_dir, 8)
    newest.rename(newest.with_name(f".{newest.name}.replaced"))
    assert "takes checkpoints/.step_00000008.replaced" in of(run_dir, "resume").result


def test_no_whole_checkpoint_is_wrong_and_none_at_all_is_not(run_dir: Path) -> None:
    for step in (3, 6, 8):
        flip(checkpoint_path(run_dir, step) / "rank-00000.safetensors")
    found = of(run_dir, "resume")
    assert found.state == "wrong" and "none of 3 checkpoint(s) is intact" in found.result
    shutil.rmtree(run_dir / "checkpoints")
    found = of(run_dir, "resume")
    assert found.state == "warning" and found.result.endswith("starts from step 0; 8 step(s) are repeated")
    assert "--checkpoint.every" in found.change


@pytest.mark.parametrize(
    ("why", "status", "state"),
    [("SIGTERM (rank 0)", 0, "ok"), ("the file STOP", 0, "ok"), ("11 steps skipped", 3, "wrong")],
)
def test_an_agreed_end(run_dir: Path, why: str, status: int, state: str) -> None:
    ending = Ending(run_dir=run_dir, rank=0)
    ending.begin()
    ending.note_stop(why, 8, ExitStatus(status))
    found = of(run_dir, "stop")
    assert found.state == state and found.result.startswith(f"{why}; step 8, status {status}, again: ")
    assert ("again: yes" in found.result) == why.startswith("SIGTERM")
    assert "the same command" in found.result if status == 0 else "--optimizer.lr" in found.change


@pytest.mark.parametrize("step", [None, 7])
def test_an_end_by_an_error(run_dir: Path, step: int | None) -> None:
    ending = Ending(run_dir=run_dir, rank=1)
    ending.begin()
    ending.run_dir.joinpath("stop.json").unlink(missing_ok=True)
    ending.broke(ValueError("no such thing"), step)
    found = of(run_dir, "stop")
    assert found.state == "wrong" and found.result.startswith("ValueError: no such thing; ")
    assert ("step 7" in found.result) == (step is not None) and "(rank 1 on" in found.result
    assert "read the error" in found.change


def test_a_start_that_was_killed(run_dir: Path) -> None:
    (run_dir / "stop.json").unlink()
    assert of(run_dir, "stop").state == "warning", "no lease either"
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    lease_of(run_dir, host=socket.gethostname(), boot=boot(), process=ended.pid, began="1")
    found = states(examine_run(run_dir))
    assert (found["stop"], found["lease"]) == ("wrong", "warning")
    assert "kill -9" in of(run_dir, "stop").result and "is gone" in of(run_dir, "lease").result


def boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def test_a_run_that_is_alive(run_dir: Path) -> None:
    (run_dir / "stop.json").unlink()
    (run_dir / "checkpoints" / ".step_00000009.tmp").mkdir()
    with Lease(run_dir):
        assert set(states(examine_run(run_dir)).values()) == {"ok"}
        assert of(run_dir, "stop").result == "still running"
        assert f"process {os.getpid()} on " in of(run_dir, "lease").result
        aged(run_dir / "metrics.jsonl", doctor.STALLED_AFTER_S + 100)
        assert of(run_dir, "metrics").state == "warning" and "is alive" in of(run_dir, "metrics").result
        aged(run_dir / "lease.json", 60)
        assert "has not renewed the lease for 0:01:0" in of(run_dir, "lease").result


def test_a_holder_on_another_host(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "RENEWAL_INTERVAL_S", 0.1)
    lease = lease_of(run_dir)
    assert of(run_dir, "lease").state == "ok", "it was renewed just now"
    aged(lease, 3600)
    assert of(run_dir, "lease").result == "process 3 on elsewhere, started today, is gone"
    lease.write_text("{")
    assert of(run_dir, "lease").result == "lease.json cannot be read"


def test_hangs_and_incidents(run_dir: Path) -> None:
    for number in range(7):
        (run_dir / "hangs" / f"20260101-12000{number}").mkdir(parents=True)
    (run_dir / "hangs" / "20260101-120006" / "summary.txt").write_text("the run hangs: rank 3 did not answer\n  rank 0")
    (run_dir / "hangs" / "20260101-120005" / "rank-00002.txt").write_text("")
    incidents = Incidents(run_dir)
    for step in range(9):
        incidents.add("unreadable", step, key=f"block {step}", reason="checksum")
    incidents.add("other", 9)
    findings = {each.check: each for each in examine_run(run_dir)}
    assert findings["hangs"].result == "7 starts have hung; the last 5 are shown"
    assert "hang 20260101-120001" not in findings
    assert findings["hang 20260101-120006"].result == "the run hangs: rank 3 did not answer;   rank 0"
    assert findings["hang 20260101-120005"].result == "no summary; ranks with stacks: 2"
    found = findings["incidents"]
    assert found.state == "warning" and found.result.startswith("9 unreadable, 1 other; the last: step 5 unreadable ")
    assert found.result.endswith("step 8 unreadable block 8, checksum; step 9 other")
    assert "trp-scale verify" in found.change


def test_a_torn_line_of_metrics_is_passed_over(run_dir: Path) -> None:
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write('{"step": 9, "lo')
    assert of(run_dir, "metrics").result.startswith("the last line is of step 8, ")


@pytest.mark.parametrize(("free", "state"), [(10_000, "wrong"), (1_500_000, "warning"), (10**12, "ok")])
def test_room_for_the_next_checkpoint(run_dir: Path, monkeypatch: pytest.MonkeyPatch, free: int, state: str) -> None:
    usage = shutil.disk_usage(run_dir)
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: usage._replace(free=free))
    assert of(run_dir, "room").state == state


@pytest.mark.parametrize(
    "content", ["", "[]", "{", "[" * 100_000, '{"step": "8", "status": [], "hosts": 3, "earlier": 1}']
)
def test_files_that_say_nothing_stop_nothing(run_dir: Path, monkeypatch: pytest.MonkeyPatch, content: str) -> None:
    monkeypatch.setattr(doctor, "RENEWAL_INTERVAL_S", 0.1)
    for name in ("stop.json", "environment.json", "lease.json", "metrics.jsonl", "incidents.jsonl"):
        (run_dir / name).write_text(content + "\n")
    aged(run_dir / "lease.json", 3600)
    assert states(examine_run(run_dir))["stop"] == "wrong"


def test_no_run_is_refused(run_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match="none"):
        examine_run(tmp_path / "none")
    with pytest.raises(RefusedError, match=f"{tmp_path} .*{run_dir}"):
        examine_run(tmp_path)


def test_the_command(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content = {path: path.stat().st_mtime_ns for path in run_dir.rglob("*")}
    assert cli.main(["doctor", str(run_dir)]) == 0
    assert capsys.readouterr().out.rstrip().endswith("0 warning, 0 wrong")
    assert {path: path.stat().st_mtime_ns for path in run_dir.rglob("*")} == content, "nothing was changed"
    flip(checkpoint_path(run_dir, 8) / "rank-00000.safetensors")
    assert cli.main(["doctor", str(run_dir), "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["run_dir"] == str(run_dir)
    assert [each["check"] for each in told["findings"] if each["state"] == "wrong"] == ["step 8"]
    assert cli.main(["doctor", str(run_dir), "--quick"]) == 0
    capsys.readouterr()
    for wrong in (["--quick"], [str(run_dir), "--storage", str(run_dir)], [str(run_dir / "none")]):
        assert cli.main(["doctor", *wrong]) == 2
        assert capsys.readouterr().err.startswith("error: ")


SLOW = {"why": "SIGTERM (rank 0)", "status": 0, "step": 20, "advice": "resume it"}
DIVERGED = {"why": "too many skipped steps", "status": int(ExitStatus.DIVERGED), "step": 20}


def rows(table: Table) -> list[list[str]]:
    return [[cell.text for cell in row] for row in list(table.cells())[1:]]


def worst_of(run: Path) -> tuple[object, object]:
    row = read_row(run, "run")
    return row[4], getattr(row[5], "order", None)


def end(run: Path) -> Path:
    """summary.json as the run's observer writes it."""
    history = read_history(run)
    tasks = {name: {"end": entry.end, "count": entry.count} for name, entry in history.tasks.items()}
    summary = {"exit_reason": "finished", "steps": history.last_step, "worst_task": history.worst_task, "tasks": tasks}
    (run / "summary.json").write_text(json.dumps(summary), encoding="utf-8")
    return run


@pytest.fixture
def parent(tmp_path: Path) -> Path:
    """A run of each state, the oldest first."""
    parent = tmp_path / "runs"
    for name, stop in (("done", FINISHED), ("broken", FAILED), ("halted", SLOW), ("wild", DIVERGED), ("killed", None)):
        write(parent / name, text_lines(), recipe="pos_bert_tiny", stop=stop)
    write(parent / "sweep" / "seed_0", image_lines(), recipe="mae_tiny", stop=FINISHED)
    end(parent / "done")
    for age, name in enumerate(("sweep/seed_0", "killed", "wild", "halted", "broken", "done")):
        for path in (parent / name).iterdir():
            os.utime(path, (time.time() - 7200 * age - 100,) * 2)
    return parent


def test_runs_of_every_state_are_listed_newest_first(parent: Path) -> None:
    listed = rows(list_runs(parent))
    assert [(row[0], row[2], row[-1]) for row in listed] == [
        ("sweep/seed_0", "finished", "2 min"),
        ("killed", "end not known", "2 h"),
        ("wild", "diverged", "4 h"),
        ("halted", "stopped", "6 h"),
        ("broken", "failed", "8 h"),
        ("done", "finished", "10 h"),
    ]
    assert {row[1] for row in listed} == {"pos_bert_tiny", "mae_tiny"} and {row[3] for row in listed} == {"20/20"}


def test_the_worst_task_is_that_of_the_report_or_of_the_last_line(parent: Path) -> None:
    history = read_history(parent / "done")
    assert history.worst_task is not None
    assert worst_of(parent / "done") == (history.worst_task, history.tasks[history.worst_task].end)
    last = list(text_lines())[-1]["tasks"]
    assert worst_of(parent / "killed") == ("noun", last["noun"]["loss"])


def test_a_run_that_goes_on_after_its_summary_shows_the_last_line(parent: Path) -> None:
    run = end(write(parent / "more", text_lines(5), recipe="pos_bert_tiny"))
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(line(6, {"noun": task(3.25)})) + '\n{"step": 7, "tor')
    with Lease(run):
        assert read_row(run, "more")[2:4] == ["running", "6/5"]
        assert worst_of(run) == ("noun", 3.25)


def test_damaged_and_foreign_directories_are_counted(parent: Path) -> None:
    (parent / "other" / "deep").mkdir(parents=True)
    write(parent / "torn", text_lines(), recipe="pos_bert_tiny")
    (parent / "torn" / "config.yaml").write_text("a: [", encoding="utf-8")
    write(parent / "odd", text_lines(), recipe="pos_bert_tiny")
    (parent / "odd" / "metrics.jsonl").write_text('{"step": 1, "tasks": [3]}\n', encoding="utf-8")
    (parent / "hydra").mkdir()
    (parent / "hydra" / "config.yaml").write_text("lr: 1\n", encoding="utf-8")
    table = list_runs(parent)
    assert len(table.rows) == 6 and list(table.notes) == ["directories skipped: 3 damaged, 1 without a run"]


def test_what_is_inside_a_run_is_not_searched(parent: Path) -> None:
    write(parent / "done" / "checkpoints" / "copy", text_lines(), recipe="pos_bert_tiny")
    assert len(list(find_runs(parent))) == 6
    assert rows(list_runs(parent / "done"))[0][0] == "."


def test_the_table_fits_80_columns(
    parent: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (parent / "done").rename(parent / "pos_bert_tiny-20260101-120000")
    monkeypatch.chdir(parent.parent)
    assert cli.main(["runs"]) == 0
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= 80
    assert all(word in printed for word in ("noun", "finished", "diverged"))


def test_no_such_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match="nowhere"):
        list_runs(tmp_path / "nowhere")
