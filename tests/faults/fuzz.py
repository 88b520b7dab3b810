"""Damaged and hostile files, given to every reader: each is read or refused by a documented error.

    python -m tests.faults.fuzz --inputs 100000

An input is a sound file, damaged by what (seed, reader, number) draw. A child process reads it, under a limit of time
and of memory, and says what came of it; one that dies of it is a crash, and another child goes on with the next.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import os
import random
import resource
import shutil
import signal
import struct
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("ARROW_IO_THREADS", "1")

import torch

from tests.faults import given_files, run_files, stored_data
from tests.faults.mutations import mutated
from tests.faults.readers import Case, Reader, Target

READERS: list[Reader] = [*stored_data.READERS, *run_files.READERS, *given_files.READERS]

MEMORY = 1 << 30
"""Bytes that reading an input may take."""

LONGEST_MESSAGE = 4_000
"""Characters of a refusal: it may list some settings, and quotes little of a file."""

DEEP = ("a", "b", "c")
"""Folders around the files, so that a path with .. in it is seen to be followed."""

SOUND = -1
"""Number of the input that is not damaged."""

READ, REFUSED, UNEXPECTED = "read", "refused", "unexpected"

_CODES = {b"r": READ, b"d": REFUSED, b"u": UNEXPECTED}


@dataclass
class Found:
    """What came of a reader's inputs.

    Attributes:
        counts: by READ, REFUSED, UNEXPECTED.
        unexpected: what happened, with how often.
        examples: the number of the first input of each.
        seconds: of all.
    """

    counts: Counter[str] = field(default_factory=Counter)
    unexpected: Counter[str] = field(default_factory=Counter)
    examples: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0

    def add(self, number: int, outcome: str, what: str = "") -> None:
        """Count one input."""
        self.counts[outcome] += 1
        if outcome == UNEXPECTED:
            self.unexpected[what] += 1
            self.examples.setdefault(what, number)


def shares(inputs: int, readers: Sequence[Reader] = READERS) -> dict[str, int]:
    """How many of the inputs each reader gets."""
    total = sum(reader.share for reader in readers)
    return {reader.name: round(inputs * reader.share / total) for reader in readers}


class _Inputs:
    """The inputs of one reader, by number.

    Args:
        place: an empty folder.
    """

    def __init__(self, reader: Reader, place: Path, seed: int) -> None:
        self.reader, self._seed, self._place = reader, seed, place
        (place / "files").mkdir(parents=True)
        self.case: Case = reader.make(place / "files")
        paths = {target.path for target in self.case.targets}
        self._sound = {path: path.read_bytes() for path in paths}
        self._kept = place / "kept"
        if self.case.renewed is not None:
            shutil.copytree(self.case.renewed, self._kept)

    def lay(self, number: int) -> None:
        """Put input `number` in its place, all other files sound; SOUND: all are."""
        chance = random.Random(f"{self._seed} {self.reader.name} {number}")
        if self.case.renewed is not None:
            shutil.rmtree(self.case.renewed, ignore_errors=True)
            shutil.copytree(self._kept, self.case.renewed)
        else:
            for path, content in self._sound.items():
                path.write_bytes(content)
        if number == SOUND:
            return
        target = chance.choice(self.case.targets)
        target.path.write_bytes(damaged(target, self._sound[target.path], chance))

    def read(self, number: int) -> tuple[bytes, str]:
        """The code of what comes of it, and what was unexpected."""
        self.lay(number)
        try:
            self.case.read()
        except self.reader.documented as error:
            if number == SOUND:
                return b"u", f"refused: {error}"
            if len(str(error)) > LONGEST_MESSAGE:
                return b"u", f"a message of more than {LONGEST_MESSAGE} characters @ {_place_of(error)}"
            return b"d", ""
        except BaseException as error:
            while error.__cause__ is not None:  # a rank's error is told on all ranks
                error = error.__cause__
            said = " ".join(str(error).split())[:90]
            return b"u", f"{type(error).__name__} @ {_place_of(error)} ({said})"
        return b"r", ""


def damaged(target: Target, sound: bytes, chance: random.Random) -> bytes:
    """A damaged copy of a file's content."""
    part = sound if target.within is None else target.within(sound)
    found = mutated(part, target.kind, chance)
    return found if target.joined is None else target.joined(found, sound)


def _place_of(error: BaseException) -> str:
    """The innermost place within the package."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if "/trp_scale/" in frame.filename] or frames
    return f"{ours[-1].filename.rpartition('/trp_scale/')[2]}:{ours[-1].lineno}"


def fuzz(reader: Reader, inputs: int, *, seed: int = 0, first: int = 0) -> Found:
    """Give a reader `inputs` damaged files, from number `first` on."""
    found, began = Found(), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="trp_scale_faults-") as folder:
        made = _Inputs(reader, Path(folder, *DEEP), seed)
        _in_child(made, SOUND, SOUND + 1, sound := Found())
        if not sound.counts[READ]:
            raise AssertionError(f"{reader.name}: the sound files are not read: {list(sound.unexpected)}")
        number = first
        while number < first + inputs:
            number = _in_child(made, number, first + inputs, found)
        for depth in range(len(DEEP)):
            if len(list(Path(folder, *DEEP[:depth]).iterdir())) > 1:
                found.add(number, UNEXPECTED, "a file written outside its folder")
    found.seconds = time.monotonic() - began
    return found


def _in_child(inputs: _Inputs, number: int, end: int, found: Found) -> int:
    """Read inputs in a child until all are read or it dies; returns the next number."""
    receive, send = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if not child:
        os.close(receive)
        try:
            _read_all(inputs, number, end, send)
        finally:
            os._exit(0)
    os.close(send)
    with os.fdopen(receive, "rb") as stream:
        while head := stream.read(3):
            code, length = struct.unpack("<cH", head)
            found.add(number, _CODES[code], stream.read(length).decode("utf-8", "replace"))
            number += 1
    _, status = os.waitpid(child, 0)
    if number < end:
        found.add(number, UNEXPECTED, _ending(status, inputs.reader.wait))
        number += 1
    return number


def _ending(status: int, wait: float) -> str:
    if os.WIFSIGNALED(status):
        ended_by = signal.Signals(os.WTERMSIG(status))
        return f"not done after {wait:g} s" if ended_by == signal.SIGALRM else f"ended by {ended_by.name}"
    return f"ended with status {os.waitstatus_to_exitcode(status)}"


def _read_all(inputs: _Inputs, number: int, end: int, send: int) -> None:
    """In the child: nothing is shown, and each input has its time and memory."""
    with open(os.devnull, "r+b", buffering=0) as nothing:  # noqa: PTH123
        for stream in (0, 1, 2):
            os.dup2(nothing.fileno(), stream)
    faulthandler.disable()
    warnings.simplefilter("ignore")
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    limit = pages * os.sysconf("SC_PAGE_SIZE") + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    for each in range(number, end):
        signal.setitimer(signal.ITIMER_REAL, inputs.reader.wait)
        code, what = inputs.read(each)
        signal.setitimer(signal.ITIMER_REAL, 0)
        if what.startswith("MemoryError"):
            gc.collect()
        content = what.encode("utf-8", "replace")[:400]
        os.write(send, struct.pack("<cH", code, len(content)) + content)


def fuzz_all(
    inputs: int, *, seed: int = 0, readers: Sequence[Reader] = READERS, tell: Callable[[str], None] = lambda _: None
) -> dict[str, Found]:
    """Every reader with its share of the inputs."""
    torch.set_num_threads(1)
    found = {}
    for reader in readers:
        found[reader.name] = fuzz(reader, shares(inputs, readers)[reader.name], seed=seed)
        tell(f"{reader.name}: {dict(found[reader.name].counts)} in {found[reader.name].seconds:.1f} s")
    return found


def table(found: dict[str, Found]) -> Iterator[str]:
    """One line a reader."""
    yield f"{'reader':<22}" + "".join(f"{name:>12}" for name in ("inputs", READ, REFUSED, UNEXPECTED, "s"))
    every = sum((one.counts for one in found.values()), Counter[str]())
    total = Found(counts=every, seconds=sum(one.seconds for one in found.values()))
    for name, one in [*found.items(), ("all", total)]:
        numbers = (one.counts.total(), *(one.counts[outcome] for outcome in (READ, REFUSED, UNEXPECTED)))
        yield f"{name:<22}" + "".join(f"{number:12,}" for number in numbers) + f"{one.seconds:12.1f}"


def unexpected_lines(found: dict[str, Found]) -> list[str]:
    """What should not have happened: how often, to which reader, with which input first."""
    return [
        f"{count}x {name}: {what}; the first is --reader {name} --first {one.examples[what]} --inputs 1"
        for name, one in found.items()
        for what, count in one.unexpected.most_common()
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """The command; status 1 if something unexpected happened."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.fuzz", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--inputs", type=int, default=3000, help="in all, shared among the readers")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--reader", choices=[reader.name for reader in READERS], help="this one alone")
    parser.add_argument("--first", type=int, default=0, help="with --reader: number of the first input")
    parser.add_argument(
        "--here", action="store_true", help="with --reader: one input, in this process, traceback shown"
    )
    arguments = parser.parse_args(argv)
    if arguments.reader:
        reader = next(each for each in READERS if each.name == arguments.reader)
        if arguments.here:
            return _show(reader, arguments.first, arguments.seed)
        found = {reader.name: fuzz(reader, arguments.inputs, seed=arguments.seed, first=arguments.first)}
    else:
        found = fuzz_all(arguments.inputs, seed=arguments.seed, tell=lambda line: print(line, file=sys.stderr))
    print(*table(found), *unexpected_lines(found), sep="\n")
    return int(any(one.counts[UNEXPECTED] for one in found.values()))


def _show(reader: Reader, number: int, seed: int) -> int:
    with tempfile.TemporaryDirectory(prefix="trp_scale_faults-") as folder:
        inputs = _Inputs(reader, Path(folder), seed)
        inputs.lay(number)
        try:
            inputs.case.read()
        except reader.documented as error:
            print(f"refused: {error}")
            return 0
        print("read")
    return 0


if __name__ == "__main__":
    sys.exit(main())
