"""A lost process loses only the samples that crash it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.grids import always
from tests.runs import ROOT, environment, hear_ctrl_c
from trp_scale.errors import DataError
from trp_scale.sharding.workers import Advance, Portion, ProgressBar, run_portions, start_sample


class Reader:
    """Worker that crashes on names starting with "lethal" and on the first "once", and raises an error on "refused". If
    `tells` is False it does not record its current sample."""

    def __init__(self, directory: Path, tells: bool, advance: Advance) -> None:
        self.directory, self.tells = directory, tells

    def __call__(self, portion: Portion[str]) -> list[str]:
        read = []
        for name in portion.items:
            if self.tells and not start_sample(name):
                read.append(f"without {name}")
                continue
            if name.startswith("lethal") or (name == "once" and not (self.directory / name).exists()):
                (self.directory / name).touch()
                os.kill(os.getpid(), signal.SIGKILL)
            if name == "refused":
                raise DataError("refused")
            read.append(name)
        return read


def read(directory: Path, *portions: tuple[str, ...], tells: bool = True) -> dict[int, list[str]]:
    bar = ProgressBar(counters=("names",), total=1, shown=False)
    numbered = [Portion(number, those, len(those)) for number, those in enumerate(portions)]
    return run_portions(numbered, Reader, (directory, tells), processes=2, bar=bar)


def test_what_ends_a_process_is_left_out_by_its_name(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    found = read(tmp_path, ("a", "b"), ("c", "lethal 1", "d", "lethal 2"), ("e",), ("f", "once", "g"), ("h",))
    assert found == {
        0: ["a", "b"],
        1: ["c", "without lethal 1", "d", "without lethal 2"],
        2: ["e"],
        3: ["f", "once", "g"],
        4: ["h"],
    }
    assert [each for each in ("lethal 1", "lethal 2") if f"{each} is skipped: it crashes" not in caplog.text] == []


def test_a_process_is_lost_while_more_than_a_pipe_holds_is_to_be_done(tmp_path: Path) -> None:
    """The pool of Python 3.11.2 would wait forever for a reader of its queue."""
    long = "a" * 200_000
    found = read(tmp_path, ("lethal",), *[(long,)] * 8)
    assert found == {0: ["without lethal"], **{number: [long] for number in range(1, 9)}}


def test_what_cannot_be_named_ends_the_command(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="a sharding process died"):
        read(tmp_path, ("a",), ("lethal",), tells=False)


def test_a_refusal_is_none(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"^refused$"):
        read(tmp_path, ("a", "refused"), ("b",))


PATCHED = """
import os, signal
import trp_scale.sharding.images.shard as shard

right = shard.encode_sample

def encode(loaded, settings):
    if loaded.image.endswith(b"lethal"):
        os.kill(os.getpid(), signal.SIGSEGV)
    return right(loaded, settings)

shard.encode_sample = encode
"""
"""Imported by every process at startup."""


@pytest.mark.exhaustive
def test_images_are_sharded_without_those_that_end_what_decodes_them(tmp_path: Path) -> None:
    from tests.unit.data.images.source_images import jpeg  # here: worker processes of other tests import this file

    (tmp_path / "images").mkdir()
    for number in range(12):
        (tmp_path / "images" / f"{number}.jpg").write_bytes(jpeg(number) + b"lethal" * (number in (3, 10)))
    (tmp_path / "sitecustomize.py").write_text(PATCHED)
    command = [sys.executable, "-m", "trp_scale", "shard-images", "--inputs", tmp_path / "images"]
    command += ["--output", tmp_path / "made", "--samples_per_shard", "4", "--rows_per_block", "2"]
    environ = {**environment(), "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    made = subprocess.run(
        [*map(str, command), "--processes", "2", "--max_skipped", "0.2"],
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert made.returncode == 0, made.stdout
    for number in (3, 10):
        assert f"images/{number}.jpg is skipped: it crashes the process that reads it" in made.stdout
    document = json.loads((tmp_path / "made" / "dataset.json").read_text())
    assert (document["rows"], document["skipped"]) == (10, {"damaged": 2})


IMAGES = ["shard-images", "--embedded", "--count", "20000", "--size", "64", "--samples_per_shard", "64"]
TEXT = ["shard-text", "--tagger", "textblob", "--rows_per_block", "16", "--shard_bytes", "20000"]


@pytest.mark.parametrize("starts", always([True, False], False), ids=["while processes start", "while they work"])
@pytest.mark.parametrize("words", always([IMAGES, TEXT], TEXT), ids=["images", "text"])
def test_ctrl_c_is_one_line_and_leaves_no_process(
    starts: bool, words: list[str], text_dataset: Path, tmp_path: Path
) -> None:
    """A terminal sends SIGINT to all processes."""
    long = tmp_path / "long.jsonl"
    long.write_text(text_dataset.with_suffix(".jsonl").read_text("utf-8") * 50, "utf-8")
    own = ["--inputs", str(long), "--tokenizer_sample_bytes", "20000"] if words is TEXT else []
    shared = ["--processes", "2", "--output", str(tmp_path / "out")]
    process = subprocess.Popen(
        [sys.executable, "-m", "trp_scale", *words, *own, *shared],
        env=environment(),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=hear_ctrl_c,
    )
    children, until = Path(f"/proc/{process.pid}/task/{process.pid}/children"), time.monotonic() + 240
    while not (children.read_text() if starts else list(tmp_path.rglob("*.tar*"))):
        assert process.poll() is None and time.monotonic() < until
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)
    try:
        _, said = process.communicate(timeout=120)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # one that hangs goes on beside all other tests
        raise
    # Python's tracker of semaphores may warn after that line, when it is interrupted as it starts
    assert process.returncode == 130 and "error: interrupted by Ctrl-C" in said.splitlines(), said
    assert "Traceback" not in said
    with pytest.raises(ProcessLookupError):
        for _ in range(100):  # the standard library's tracker of semaphores ends a moment later
            os.killpg(process.pid, 0)
            time.sleep(0.1)
