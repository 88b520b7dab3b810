"""A disk that fills up or breaks in the middle of a run: the run goes on, and nothing of it is lost."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.distributed.test_resume import run_and_listen, same_run
from tests.runs import flags, lines, pretrain_here, wait_until
from trp_scale.checkpoint import writer
from trp_scale.checkpoint.document import ChecksumWriter
from trp_scale.checkpoint.run_directory import METRICS_FILE, checkpoints, incompleteness
from trp_scale.cli import main as cli
from trp_scale.errors import ExitStatus
from trp_scale.training.loop import Trainer
from trp_scale.training.metrics import MetricsWriter, read_metrics

CHANGES = {"training__steps": 12, "checkpoint__every": 2, "checkpoint__keep": 2, "model__dropout": 0.1}


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 24 MB of its own; a checkpoint of these runs has 4.6 MB."""
    place = tmp_path / "disk"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(place)]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("no tmpfs can be mounted here: it needs root")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


def fill(disk: Path) -> None:
    """Leave not a byte."""
    with (disk / "ballast").open("ab", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize or 1))


def at_steps(actions: dict[int, Callable[[], object]]) -> Any:
    """Do something before each of these steps, the first of which is 1."""
    train_step = Trainer.train_step

    def watched(trainer: Trainer) -> str | None:
        actions.get(trainer.state.step + 1, lambda: None)()
        return train_step(trainer)

    return mock.patch.object(Trainer, "train_step", watched)


def wait_for_checkpoints() -> None:
    """Wait for the threads that write checkpoints behind the steps."""

    def have_ended() -> bool:
        return not any(thread.name.startswith("trp_scale checkpoint") for thread in threading.enumerate())

    wait_until(have_ended, "threads that write", seconds=120, pause=0.01)


def written_first(run_dir: Path) -> None:
    """Wait for the file of the first checkpoint."""
    wait_for_checkpoints()
    assert list((run_dir / "checkpoints").glob(".step_*/hooks.safetensors"))


@pytest.fixture(scope="module")
def whole(text_dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that nothing happens to."""
    run_dir = tmp_path_factory.mktemp("whole") / "run"
    assert pretrain_here(flags(text_dataset, run_dir, **CHANGES)) == 0
    return run_dir


def steps_of(run_dir: Path) -> list[int]:
    assert [path for _, path in checkpoints(run_dir) if incompleteness(path)] == []
    assert not list((run_dir / "checkpoints").glob(".*"))
    return [step for step, _ in checkpoints(run_dir)]


def test_a_disk_that_is_full_for_a_while_costs_checkpoints_and_nothing_else(
    small_disk: Path, text_dataset: Path, whole: Path
) -> None:
    """Checkpoints and lines of metrics of that time; the lines are written when there is room again."""
    run_dir, seen = small_disk / "run", []

    def look() -> None:
        wait_for_checkpoints()
        seen.append((steps_of(run_dir), (run_dir / METRICS_FILE).read_bytes().count(b"\n")))
        (small_disk / "ballast").unlink()

    # Each step: a checkpoint that failed gives its room back. The last page of the metrics takes some lines still.
    full = dict.fromkeys(range(4, 10), lambda: fill(small_disk))
    with at_steps({3: lambda: written_first(run_dir), **full, 10: look}):
        status, said = run_and_listen(flags(text_dataset, run_dir, checkpoint__max_failures=9, **CHANGES))
    assert status == 0
    (left, written), *_ = seen
    assert left and max(left) < 6, "what was whole before it filled up"
    assert written < 9
    assert "No space left on device" in said and f"{METRICS_FILE}: " in said
    assert steps_of(run_dir) == [10, 12]
    same_run(run_dir, whole)
    assert json.loads((run_dir / "summary.json").read_text())["steps"] == 12
    assert "steps 12 (finished)" in (run_dir / "report.txt").read_text()


def test_a_disk_that_stays_full_ends_the_run_cleanly(
    small_disk: Path, text_dataset: Path, whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "PAUSE_AT_END", 0.01)
    run_dir = small_disk / "run"

    def nearly_fill() -> None:
        fill(small_disk)
        os.truncate(small_disk / "ballast", (small_disk / "ballast").stat().st_size - 500_000)

    with at_steps({5: lambda: written_first(run_dir), 6: nearly_fill}):
        status, said = run_and_listen(flags(text_dataset, run_dir, **CHANGES))
    assert status == 5
    record = json.loads((run_dir / "stop.json").read_text())
    assert (record["status"], record["again"]) == (5, True), "it has come further than at its start"
    assert record["why"].startswith("3 checkpoints ") and " 0." in record["why"] and record["advice"]
    assert record["step"] == 10 and "(3 of 3 " in said
    assert steps_of(run_dir) == [2, 4]
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["exit_reason"] == record["why"]
    (small_disk / "ballast").unlink()
    assert pretrain_here(flags(text_dataset, run_dir, **CHANGES)) == 0
    same_run(run_dir, whole)
    assert steps_of(run_dir) == [10, 12]
    assert not (run_dir / "stop.json").exists() or json.loads((run_dir / "stop.json").read_text())["status"] == 0


@pytest.mark.parametrize("number", [errno.EIO, errno.EROFS])
def test_a_disk_that_breaks_in_the_middle_of_a_file(
    text_dataset: Path, tmp_path: Path, whole: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """One checkpoint, and lines of metrics of which half is written."""
    broken: list[bool] = []
    write, append = ChecksumWriter.write, MetricsWriter._append

    def fails(self: ChecksumWriter, content: Any) -> None:
        if broken and self.size > 100_000:
            raise OSError(number, os.strerror(number))
        write(self, content)

    def half(self: MetricsWriter, line: bytes) -> None:
        if not broken:
            return append(self, line)

        class Half:
            def write(self, part: memoryview) -> int:
                if len(part) < len(line):
                    raise OSError(number, os.strerror(number))
                return os.write(self.file.fileno(), part[: len(part) // 2])

            def __init__(self, file: Any) -> None:
                self.file = file

            def fileno(self) -> int:
                return int(self.file.fileno())

        file = self._file
        self._file = Half(file)  # type: ignore[assignment]
        try:
            append(self, line)
        finally:
            self._file = file

    monkeypatch.setattr(ChecksumWriter, "write", fails)
    monkeypatch.setattr(MetricsWriter, "_append", half)

    def repair() -> None:
        wait_for_checkpoints()
        broken.clear()

    with at_steps({5: lambda: written_first(tmp_path), 6: lambda: broken.append(True), 8: repair}):
        status, said = run_and_listen(flags(text_dataset, tmp_path, **CHANGES))
    assert status == 0
    assert f"[Errno {number}] {os.strerror(number)}" in said and "(1 of 3 " in said
    same_run(tmp_path, whole)
    assert [line["step"] for line in read_metrics(tmp_path)] == list(range(1, 13))
    assert steps_of(tmp_path) == [10, 12]


def test_a_command_without_room_ends_with_one_line(
    small_disk: Path, text_dataset: Path, whole: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fill(small_disk)
    (small_disk / "run").mkdir()
    for argv in (
        ["export", "--run", str(whole), "--output", str(small_disk / "exported")],
        ["pretrain", *flags(text_dataset, small_disk / "run", training__steps=1)],
    ):
        assert cli.main(argv) == ExitStatus.STORAGE
        said = capsys.readouterr().err.strip().splitlines()[-1]
        assert said.startswith("error: ") and "No space left on device" in said


def test_no_room_for_the_summary_and_the_report_at_the_end(
    small_disk: Path, text_dataset: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All is in the checkpoint and in the metrics, from which `trp-scale report` makes the table."""
    run_dir = small_disk / "run"
    with mock.patch("trp_scale.training.observer.Observer._summarise") as summarise:
        summarise.side_effect = lambda *_: (fill(small_disk), {"steps": 2})[1]
        status = pretrain_here(flags(text_dataset, run_dir, training__steps=2))
    assert status == 0
    printed = capsys.readouterr().err
    assert "summary.json: " in printed and "report.txt: " in printed
    assert steps_of(run_dir) == [2]
    assert len(lines(run_dir)) == 2
    assert not list(run_dir.glob(".*.tmp"))
