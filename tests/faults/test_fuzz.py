"""Every reader meets damaged and hostile files: it reads them or refuses them, and never crashes, hangs or runs out."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from tests.faults import fuzz
from tests.faults.fuzz import MEMORY, READ, REFUSED, UNEXPECTED, Found, unexpected_lines
from tests.faults.mutations import mutated
from tests.faults.readers import Case, Reader, Target

INPUTS = 700
"""Over all readers in every run of the tests."""

MANY = int(os.environ.get("TRP_SCALE_FUZZ", "100000"))
"""Over all readers by `make test-faults`."""


def refused(counts: Found, reader: str) -> str:
    lines = "\n".join(unexpected_lines({reader: counts}))
    return f"{counts.counts[UNEXPECTED]} of {counts.counts.total()} inputs of {reader}:\n{lines}"


@pytest.mark.parametrize("reader", fuzz.READERS, ids=lambda reader: reader.name)
def test_each_input_is_read_or_refused(reader: Reader) -> None:
    found = fuzz.fuzz(reader, fuzz.shares(INPUTS)[reader.name])
    assert not found.counts[UNEXPECTED], refused(found, reader.name)
    assert found.counts[REFUSED] or reader.name in ("jsonl", "gzip_text", "cut_metrics", "features", "hostfile")


@pytest.mark.faults
@pytest.mark.parametrize("reader", fuzz.READERS, ids=lambda reader: reader.name)
def test_many_inputs(reader: Reader, capsys: pytest.CaptureFixture[str]) -> None:
    found = fuzz.fuzz(reader, fuzz.shares(MANY)[reader.name], seed=1)
    with capsys.disabled():
        counts = ", ".join(f"{found.counts[outcome]} {outcome}" for outcome in (READ, REFUSED, UNEXPECTED))
        print(f"{reader.name}: {counts}, {found.seconds:.1f} s")
    assert not found.counts[UNEXPECTED], refused(found, reader.name)


def case_of(path: Path, read: object) -> Case:
    path.write_bytes(b'{"a": 1}')
    return Case(targets=[Target(path=path, kind="json")], read=read)  # type: ignore[arg-type]


def of_faults(name: str, fault: object, wait: float = 30.0) -> Reader:
    """A reader that reads the sound file, and meets its fault on any other."""

    def make(directory: Path) -> Case:
        path = directory / "file"

        def read() -> None:
            if path.read_bytes() != b'{"a": 1}':
                fault()  # type: ignore[operator]

        return case_of(path, read)

    return Reader(name=name, make=make, documented=(ValueError,), wait=wait)


def hang() -> None:
    while True:
        pass


def long_message() -> None:
    raise ValueError("x" * 100_000)


def key_error() -> None:
    raise KeyError("x")


FAULTS = {
    "KeyError": key_error,
    "MemoryError": lambda: bytearray(2 * MEMORY),
    "ended by SIGABRT": os.abort,
    "ended with status 3": lambda: os._exit(3),
    "a message of more than": long_message,
    "not done after": hang,
}


@pytest.mark.parametrize("what", FAULTS)
def test_the_fuzzer_sees_what_goes_wrong(what: str) -> None:
    """Each is counted with its place, and the inputs after it are read on."""
    # Only what hangs may be cut short: on a busy machine another fault takes long, too.
    wait = 0.3 if FAULTS[what] is hang else 30.0
    found = fuzz.fuzz(of_faults("faulty", FAULTS[what], wait=wait), 2)
    assert found.counts == {UNEXPECTED: 2}
    assert all(each.startswith(what) for each in found.unexpected)


def test_a_file_written_outside_is_seen() -> None:
    def make(directory: Path) -> Case:
        return case_of(directory / "file", lambda: (directory.parent.parent / "x").touch())

    found = fuzz.fuzz(Reader(name="leading out", make=make, documented=()), 1)
    assert list(found.unexpected) == ["a file written outside its folder"]


def test_a_fixture_that_is_not_read_fails() -> None:
    with pytest.raises(AssertionError, match="none: "):
        fuzz.fuzz(Reader(name="none", make=lambda folder: case_of(folder / "x", key_error), documented=()), 1)


@pytest.mark.parametrize("kind", ["bytes", "json", "jsonl", "yaml", "xml", "text"])
def test_inputs_are_the_same_each_time_and_differ(kind: str) -> None:
    sound = {"yaml": b"a: 1\nb: [1, 2]\n", "xml": b"<a><b>1</b></a>", "text": b"a b\nc d\n"}.get(kind, b'{"a": [1]}\n')
    made = [[mutated(sound, kind, random.Random(f"{number}")) for number in range(40)] for _ in range(2)]
    assert made[0] == made[1]
    assert len(set(made[0])) > 20
