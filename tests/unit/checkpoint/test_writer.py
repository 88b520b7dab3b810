"""Checkpoints that are written behind the steps: of the step they are named by, by all ranks or none, and what happens
when storage fails."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.checkpoint.fake_engine import (
    FakeEngine,
    assert_equal_state,
    on_ranks,
    random_split,
    save_step,
    whole_state,
)
from trp_scale.checkpoint import writer as writer_module
from trp_scale.checkpoint.document import ChecksumWriter
from trp_scale.checkpoint.format import read_full_state
from trp_scale.checkpoint.manager import Content
from trp_scale.checkpoint.run_directory import checkpoints, incompleteness
from trp_scale.checkpoint.writer import CheckpointWriter
from trp_scale.config import CheckpointConfig
from trp_scale.distributed.groups import ALONE, Group, RankError


def content(step: int, engine: FakeEngine, **changes: Any) -> Content:
    """As save_step writes it."""
    values: dict[str, Any] = {
        "hooks_state": {"balancer": {"losses": torch.arange(3.0), "seen": 2}},
        "cursors": {"train": step * 8},
        "config": {"training": {"seed": 1}},
        "extra": {"vocab_size": 30},
    }
    return Content(step=step, engine=engine, **(values | changes))


def of_rank(group: Group, seed: int = 0) -> FakeEngine:
    return FakeEngine(group.rank, random_split(seed, group.size), whole_state(seed))


def made(run_dir: Path, group: Group = ALONE, **settings: Any) -> tuple[CheckpointWriter, list[str]]:
    """A writer, and what it says."""
    said: list[str] = []
    settings = {"every": 1, "keep": 0} | settings
    return CheckpointWriter(run_dir=run_dir, group=group, settings=CheckpointConfig(**settings), tell=said.append), said


def until(condition: Callable[[], bool], seconds: float = 120.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it takes too long"
        time.sleep(0.005)


def files(directory: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in directory.iterdir()}


def steps(run_dir: Path) -> list[int]:
    assert [path for _, path in checkpoints(run_dir) if incompleteness(path)] == []
    return [step for step, _ in checkpoints(run_dir)]


def before_parts(monkeypatch: pytest.MonkeyPatch, act: Callable[[int], object]) -> None:
    """Call a function with the rank before each part is written."""
    original = writer_module.write_part

    def write(temporary: Path, rank: int, *rest: Any) -> Any:
        act(rank)
        return original(temporary, rank, *rest)

    monkeypatch.setattr(writer_module, "write_part", write)


def wait_for(event: threading.Event) -> None:
    assert event.wait(120)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Parts are written once it is open."""
    opened = threading.Event()
    before_parts(monkeypatch, lambda rank: wait_for(opened))
    yield opened
    opened.set()


def test_what_is_written_later_is_of_the_step_that_it_is_named_by(tmp_path: Path, gate: threading.Event) -> None:
    """Byte for byte what a save that waits writes."""
    engine, losses, cursors = of_rank(ALONE), torch.arange(3.0), {"train": 24}
    state: dict[str, Any] = {"losses": losses, "seen": 2, "list": [1]}
    gate.set()
    expected = save_step(tmp_path / "waited", 3, hooks_state={"balancer": state})
    gate.clear()
    writer, _ = made(tmp_path / "behind")
    extra = {"vocab_size": 30}
    config = {"training": {"seed": 1}}
    writer.save(content(3, engine, hooks_state={"balancer": state}, cursors=cursors, extra=extra, config=config))
    for piece in engine.held:
        for tensor in piece.tensors.values():
            tensor.fill_(torch.nan)
    losses.fill_(-1)
    state["list"].append(2)
    cursors["train"] = extra["vocab_size"] = config["training"]["seed"] = engine.steps = 99
    engine.extra["loss_scale"] = 1.0
    assert not writer.has_written() and steps(tmp_path / "behind") == []
    gate.set()
    until(writer.has_written)
    writer.settle()
    assert not writer.has_written(), "nothing is under way"
    assert files(tmp_path / "behind" / "checkpoints" / "step_00000003") == files(expected)
    writer.finish(lambda: None)


def test_it_has_its_name_once_all_ranks_have_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = threading.Event()
    before_parts(monkeypatch, lambda rank: rank == 0 or wait_for(slow))

    def on_rank(group: Group) -> list[bool]:
        writer, _ = made(tmp_path, group)
        writer.save(content(3, of_rank(group)))
        if group.rank == 0:
            until(writer.has_written)
        seen = group.gather_objects(writer.has_written())
        assert steps(tmp_path) == []
        slow.set()
        until(writer.has_written)
        group.gather_objects(None)
        writer.settle()
        group.gather_objects(None)
        assert steps(tmp_path) == [3]
        writer.finish(lambda: None)
        return seen

    assert on_ranks(2, on_rank) == [[True, False]] * 2
    found = {"weight": read_full_state(tmp_path / "checkpoints" / "step_00000003")}
    assert_equal_state(found, {"weight": whole_state(0)["weight"]})


def test_a_second_one_waits_for_the_first_and_takes_its_memory(tmp_path: Path, gate: threading.Event) -> None:
    writer, _ = made(tmp_path)
    writer.save(content(3, of_rank(ALONE, 3)))
    memory = writer._copy._memory
    assert memory is not None
    threading.Timer(0.2, gate.set).start()
    writer.save(content(5, of_rank(ALONE, 3)))
    assert steps(tmp_path) == [3]
    writer.finish(lambda: None)
    assert steps(tmp_path) == [3, 5]
    for path in (path for _, path in checkpoints(tmp_path)):
        assert_equal_state({"weight": read_full_state(path)}, {"weight": whole_state(3)["weight"]})
    assert writer._copy._memory is None, "given back"


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EROFS])
def test_storage_that_fails_once_on_one_rank_costs_one_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asynchronous: bool, number: int
) -> None:
    """In the middle of a file; the run goes on, and what was there stays whole."""
    original = ChecksumWriter.write
    failing = threading.Event()

    def write(self: ChecksumWriter, part: Any) -> None:
        if failing.is_set() and "rank-00001" in str(self._file.name) and self.size > 100:
            raise OSError(number, "injected")
        original(self, part)

    monkeypatch.setattr(ChecksumWriter, "write", write)

    def on_rank(group: Group) -> list[str]:
        writer, said = made(tmp_path, group, asynchronous=asynchronous)
        for step in (1, 2, 3):
            group.gather_objects(None)
            failing.set() if step == 2 else failing.clear()
            writer.save(content(step, of_rank(group)))
            writer.settle()
            group.gather_objects(None)
            assert writer.failures == (step == 2) and writer.given_up() is None
        writer.finish(lambda: None)
        return said

    first, second = on_ranks(2, on_rank)
    assert first == second
    assert len(first) == 1
    assert first[0].startswith("step 2: no checkpoint, the newest is of step 1 (1 of 3 failures in a row, ")
    assert f"failed on 1 of 2 ranks: rank 1: OSError: [Errno {number}] injected" in first[0]
    assert steps(tmp_path) == [1, 3]
    assert [path for path in (tmp_path / "checkpoints").iterdir() if path.name.startswith(".")] == []


def refuse(*_: Any) -> None:
    raise OSError(errno.ENOSPC, "full")


def test_after_so_many_failures_in_a_row_the_run_stops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_module, "write_part", refuse)
    monkeypatch.setattr(writer_module, "PAUSE_AT_END", 0.01)
    writer, said = made(tmp_path, max_failures=2)
    for step in (1, 2):
        assert writer.given_up() is None
        writer.save(content(step, of_rank(ALONE)))
        writer.settle()
    reason = writer.given_up()
    assert reason is not None and reason.startswith("2 checkpoints in a row could not be written: writing the ")
    assert "none exists yet (2 of 2" in said[1]
    writer.finish(lambda: pytest.fail("it has been given up"))


def test_the_last_one_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_module, "PAUSE_AT_END", 0.01)
    writer, _ = made(tmp_path)

    def save() -> None:
        writer.save(content(9, of_rank(ALONE)), wait=True)

    with monkeypatch.context() as patch:
        patch.setattr(writer_module, "write_part", refuse)
        save()
    assert writer.failures == 1
    writer.finish(save)
    assert (writer.failures, writer.given_up(), steps(tmp_path)) == (0, None, [9])


def test_an_error_of_another_kind_ends_the_run_on_all_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(rank: int) -> None:
        if rank == 1:
            raise KeyError("a mistake")

    before_parts(monkeypatch, fail)

    def on_rank(group: Group) -> None:
        writer, _ = made(tmp_path, group)
        writer.save(content(3, of_rank(group)))
        writer.settle()

    for error in on_ranks(2, on_rank):
        assert isinstance(error, RankError) and "rank 1: KeyError: 'a mistake'" in str(error)
    assert list((tmp_path / "checkpoints").iterdir()) == []


def test_room_is_looked_for_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_module, "BESIDE_TENSORS", 10**18)
    writer, said = made(tmp_path)
    writer.save(content(3, of_rank(ALONE)))
    assert writer.failures == 1 and not writer.has_written()
    assert "free, a checkpoint needs 1000000000.00 GB: make room there, or keep fewer (--checkpoint.keep" in said[0]
    assert list((tmp_path / "checkpoints").iterdir()) == []


@pytest.mark.parametrize("how", ["no memory", "none to be had", "asked for", "in files"])
def test_without_memory_for_a_copy_the_steps_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    if how == "no memory":
        monkeypatch.setattr(writer_module, "available_memory", lambda: 100)
    if how == "none to be had":
        monkeypatch.setattr(writer_module.HostCopy, "take", lambda *_: (_ for _ in ()).throw(RuntimeError("no memory")))
    writer, said = made(tmp_path, asynchronous=how != "asked for")
    writer.no_copy = "in files" if how == "in files" else ""
    writer.save(content(3, of_rank(ALONE)))
    assert writer._copy._memory is None
    writer.settle()
    assert steps(tmp_path) == [3]
    assert len(said) == (how.startswith("no"))
    assert all("written synchronously" in line for line in said)


def test_a_run_that_breaks_leaves_nothing_that_writes_on(tmp_path: Path, gate: threading.Event) -> None:
    """Alone it finishes what is under way; of several ranks others may be gone."""

    def on_rank(group: Group) -> None:
        writer, _ = made(tmp_path / str(group.size), group)
        writer.save(content(3, of_rank(group)))
        group.gather_objects(None)
        threading.Timer(0.1, gate.set).start()
        pending = writer._pending
        writer.abandon()
        assert pending is not None and pending.over

    assert on_ranks(1, on_rank) == [None]
    assert steps(tmp_path / "1") == [3]
    gate.clear()
    assert on_ranks(2, on_rank) == [None, None]
    assert steps(tmp_path / "2") == []


def test_the_memory_for_a_copy_is_what_machine_and_control_groups_leave(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = writer_module.available_memory()
    inner, outer = tmp_path / "inner", tmp_path / "outer"
    for folder, limit, used in ((inner, "max", 10), (outer, "1000", 300)):
        folder.mkdir()
        (folder / "memory.max").write_text(f"{limit}\n")
        (folder / "memory.current").write_text(f"{used}\n")
        (folder / "memory.stat").write_text("anon 5\ninactive_file 50\n")
    monkeypatch.setattr(writer_module, "control_groups", lambda: iter([inner, outer]))
    assert writer_module.available_memory() == 1000 - 300 + 50 < machine
    monkeypatch.setattr(writer_module, "control_groups", lambda: iter([inner, tmp_path / "none"]))
    assert writer_module.available_memory() > 1000, "that of the machine, which others use meanwhile"


def test_who_is_told_of_whole_checkpoints_is_not_told_of_one_that_a_breaking_run_ends(tmp_path: Path) -> None:
    writer, _ = made(tmp_path)
    told: list[str] = []
    writer.whole = lambda path: told.append(path.name)
    writer.save(content(1, of_rank(ALONE)))
    writer.settle()
    writer.save(content(2, of_rank(ALONE)), wait=True)
    writer.save(content(3, of_rank(ALONE)))
    writer.abandon()
    assert told == ["step_00000001", "step_00000002"]
    assert steps(tmp_path) == [1, 2, 3]
