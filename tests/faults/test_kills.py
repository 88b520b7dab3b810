"""A run whose ranks are killed, or asked to stop, at random places and started again ends as the run that was not: its
weights, moments and metrics, bit for bit."""

from __future__ import annotations

import functools
import json
import os
import random
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import stored_state, unequal
from tests.distributed.launched import descendants, environment_of, launch, wait_for_steps
from tests.faults.forked_ranks import RAISES, Signal, run_ranks
from tests.runs import essence, flags, lines
from trp_scale.checkpoint.run_directory import checkpoint_path, checkpoints, incompleteness
from trp_scale.diagnostics.run_directory import examine_run
from trp_scale.distributed.stop import NOTICES

SETTINGS: dict[str, Any] = {
    "engine": "fsdp",
    "checkpoint__every": 2,
    "checkpoint__keep": 2,
    "validation__every": 5,
    "model__dropout": 0.1,
    "data__workers": 0,
}

CALLS = {
    "start-up": 1,
    "rows": 2,
    "forward": 4,
    "backward": 4,
    "step": 2,
    "checkpoint": 100,
    "rename": 1,
}
"""A place is met at least so often before the first checkpoint of a start has its name."""

FEW, MANY = 8, 60
"""Steps."""


@pytest.fixture(scope="module")
def whole_runs(text_dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """Makes the run of so many steps that nothing happens to, once."""

    @functools.cache
    def made(steps: int) -> Path:
        run_dir = tmp_path_factory.mktemp("whole") / "run"
        log = run_dir.with_name("log")
        arguments = flags(text_dataset, run_dir, training__steps=steps, **SETTINGS)
        assert run_ranks(arguments, log) == [0, 0], log.read_text()
        return run_dir

    return made


def chosen(random_number: random.Random, numbers: list[signal.Signals], places: list[str]) -> Iterator[Signal]:
    """Signals at these places, each of a random rank at a random call, at once or within a few milliseconds."""
    for place in places:
        yield Signal(
            place=place,
            rank=0 if place == "rename" else random_number.randrange(2),  # only rank 0 names a checkpoint
            # Nobody listens for Ctrl-C before there is a run: it ends the command.
            number=random_number.choice(numbers[:2] if place == "before the group" else numbers),
            times=random_number.randint(1, CALLS.get(place, 1)),
            after=random_number.choice([0.0, random_number.uniform(0.0, 0.02)]),
        )


def some(random_number: random.Random, places: list[str], count: int) -> list[str]:
    """So many of the places in a random order, none a second time before all have come."""
    found: list[str] = []
    while len(found) < count:
        found += random_number.sample(places, len(places))
    return found[:count]


def taken(run_dir: Path) -> str:
    """What the next start says, if `trp-scale doctor` is right."""
    if not (run_dir / "checkpoints").exists():
        return "starting from step 0"
    (resume,) = (each.result for each in examine_run(run_dir) if each.check == "resume")
    name = resume.removeprefix("--resume auto takes ").partition(";")[0]
    if name.startswith("there is no checkpoint"):
        return "starting from step 0"
    return f"resuming from {run_dir / name}".replace("/.step", "/step").removesuffix(".replaced")


def same_end(run_dir: Path, whole: Path, steps: int) -> None:
    """All metrics, each step once, and all that the last checkpoint has; nothing half-written is left."""
    training = [[essence(line) for line in lines(each) if "loss" in line] for each in (run_dir, whole)]
    assert [[line["step"] for line in each] for each in training] == [[*range(1, steps + 1)]] * 2
    assert [mine["step"] for mine, other in zip(*training, strict=True) if mine != other] == []
    # A validation that was left for a request to stop is made first when the run goes on, and has a line of its own.
    validated = [
        [(line["step"], line["validation"]) for line in lines(each) if "validation" in line]
        for each in (run_dir, whole)
    ]
    assert validated[0] == validated[1]
    assert unequal(*(stored_state(checkpoint_path(each, steps)) for each in (run_dir, whole))) == []
    assert {each.check: each.result for each in examine_run(run_dir) if each.state != "ok"} == {}
    assert list((run_dir / "checkpoints").glob(".*")) == []


@pytest.mark.parametrize(
    ("kills", "steps"), [(1, FEW), pytest.param(20, MANY, marks=pytest.mark.faults)], ids=["few", "many"]
)
def test_kill_9_of_a_rank_again_and_again(
    whole_runs: Callable[[int], Path], text_dataset: Path, tmp_path: Path, kills: int, steps: int
) -> None:
    seed = random.SystemRandom().randrange(10**9)
    random_number = random.Random(seed)
    whole, killed = whole_runs(steps), tmp_path / "killed"
    arguments = flags(text_dataset, killed, training__steps=steps, **SETTINGS)
    places = some(random_number, [*CALLS], kills)
    for given in chosen(random_number, [signal.SIGKILL], places):
        expected = taken(killed)
        log = tmp_path / "log-of-a-kill"
        log.unlink(missing_ok=True)
        workers = ["--data.workers", "1"] if given.place == "rows" and kills > 3 else []  # which take seconds to start
        statuses = run_ranks([*arguments, *workers], log, given)
        said = f"seed {seed}, {given}, statuses {statuses}: {log.read_text(errors='replace')[-4000:]}"
        assert statuses[given.rank] == -signal.SIGKILL and statuses[1 - given.rank] != 0, said
        if given.place != "start-up":
            assert expected in log.read_text(errors="replace"), f"{expected} was expected, {said}"
    expected = taken(killed)
    log = tmp_path / "log-of-the-end"
    assert run_ranks(arguments, log) == [0, 0], f"seed {seed}: {log.read_text()[-4000:]}"
    assert expected in log.read_text()
    same_end(killed, whole, steps)


@pytest.mark.exhaustive  # in tests/distributed/test_environment.py a rank fails under srun
@pytest.mark.parametrize("rank", [0, 1])
def test_a_hook_that_raises_on_one_rank(
    whole_runs: Callable[[int], Path], text_dataset: Path, tmp_path: Path, rank: int
) -> None:
    run_dir, log = tmp_path / "run", tmp_path / "log"
    arguments = flags(text_dataset, run_dir, training__steps=FEW, checkpoint__asynchronous=False, **SETTINGS)
    statuses = run_ranks(arguments, log, Signal(place="hook", rank=rank, number=RAISES, times=4))
    assert statuses == [1, 1], log.read_text()
    assert f"[rank {rank} on " in log.read_text() and "RuntimeError: on purpose" in log.read_text()
    record = json.loads((run_dir / "stop.json").read_text())
    assert (record["status"], record["step"], record["again"]) == (1, 3, True)
    assert [step for step, _ in checkpoints(run_dir)] == [2]
    assert run_ranks(arguments, log) == [0, 0], log.read_text()
    same_end(run_dir, whole_runs(FEW), FEW)


@pytest.mark.faults
def test_kill_9_of_a_rank_under_torchrun(whole_runs: Callable[[int], Path], text_dataset: Path, tmp_path: Path) -> None:
    """At random steps, and at the start-up where lines of later steps than the checkpoint's are still there."""
    arguments = flags(text_dataset, tmp_path, training__steps=FEW, **SETTINGS)
    for _ in range(3):
        reached = max((step for step, _ in checkpoints(tmp_path)), default=0)
        process = launch("torchrun", arguments)
        wait_for_steps(process, tmp_path, reached + random.SystemRandom().randint(1, 2))
        while not (ranks := [pid for pid in descendants(process.pid) if "RANK" in environment_of(pid)]):
            assert process.poll() is None
        os.kill(random.SystemRandom().choice(ranks), signal.SIGKILL)
        output = process.communicate(timeout=600)[0]
        assert process.returncode == 1, output
    process = launch("torchrun", arguments)
    output = process.communicate(timeout=600)[0]
    assert process.returncode == 0, output
    same_end(tmp_path, whole_runs(FEW), FEW)


# In tests/distributed/test_learned_masks_resume.py a run on two ranks is asked to stop, in every run of the tests.
@pytest.mark.parametrize(
    ("stops", "steps"),
    [pytest.param(1, FEW, marks=pytest.mark.exhaustive), pytest.param(10, MANY, marks=pytest.mark.faults)],
    ids=["few", "many"],
)
def test_a_request_to_stop_at_a_random_place(
    whole_runs: Callable[[int], Path], text_dataset: Path, tmp_path: Path, stops: int, steps: int
) -> None:
    seed = random.SystemRandom().randrange(10**9)
    random_number = random.Random(seed)
    whole, stopped, log = whole_runs(steps), tmp_path / "stopped", tmp_path / "log"
    arguments = flags(text_dataset, stopped, training__steps=steps, **SETTINGS)
    places = ["validation", *some(random_number, ["before the group", *CALLS], stops - 1)]
    for given in chosen(random_number, [*NOTICES, signal.SIGINT], places):
        log.unlink(missing_ok=True)
        statuses = run_ranks(arguments, log, given)
        said = f"seed {seed}, {given}: {log.read_text(errors='replace')[-4000:]}"
        assert statuses == [0, 0], said
        if "stopped before training" in said:
            continue  # nothing is written
        record = json.loads((stopped / "stop.json").read_text())
        by_a_person = given.number == signal.SIGINT
        assert (record["status"], record["again"]) == (0, not by_a_person), said
        name = "Ctrl-C" if by_a_person else signal.Signals(given.number).name
        assert record["why"].startswith(name) and record["why"].endswith(f"(rank {given.rank})"), said
        step, path = checkpoints(stopped)[-1]
        assert (step, incompleteness(path)) == (record["step"], None), said
        assert lines(stopped)[-1]["step"] == step, said
        assert {each.check: each.result for each in examine_run(stopped) if each.state != "ok"} == {}, said
    assert run_ranks(arguments, log) == [0, 0], f"seed {seed}: {log.read_text()[-4000:]}"
    same_end(stopped, whole, steps)
