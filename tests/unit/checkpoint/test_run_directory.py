"""A run directory always holds whole checkpoints, whenever the process dies."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.unit.checkpoint.fake_engine import on_ranks, renew_digest, save_step, whole_state
from trp_scale.checkpoint import keeper, manager, run_directory, tensor_file, writer
from trp_scale.checkpoint.agreement import RankError, check_shared_directory, on_rank_zero, run_on_all_ranks
from trp_scale.checkpoint.document import CheckpointDocument
from trp_scale.checkpoint.format import read_full_state
from trp_scale.checkpoint.run_directory import (
    checkpoints,
    copy_tokenizer,
    newest_complete,
    remove_leftovers,
    set_aside_later,
)
from trp_scale.config import RefusedError
from trp_scale.distributed.groups import ALONE, Group
from trp_scale.errors import CheckpointError

ROOT = Path(__file__).parents[3]


class Killed(BaseException):
    """Stands for the end of the process: nothing is cleaned up."""


def visible(run_dir: Path) -> list[int]:
    return [step for step, _ in checkpoints(run_dir)]


def weights_are_of(path: Path | None, seed: int) -> bool:
    assert path is not None
    return all(tensor.equal(whole_state(seed)["weight"][name]) for name, tensor in read_full_state(path).items())


def test_kill_9_while_tensors_are_written(tmp_path: Path) -> None:
    run_dir, signal = tmp_path / "run", tmp_path / "signal"
    save_step(run_dir, 1, seed=1)
    command = [sys.executable, "-m", "tests.unit.checkpoint.stalled_writer", str(run_dir), str(signal)]
    process = subprocess.Popen(command, cwd=ROOT)
    try:
        for _ in range(600):
            if signal.exists() or process.poll() is not None:
                break
            time.sleep(0.1)
    finally:
        process.kill()
        process.wait()
    assert signal.exists(), "the process ended before it came to the middle"
    assert (run_dir / "checkpoints" / ".step_00000002.tmp" / "rank-00000.safetensors").exists()
    assert visible(run_dir) == [1]
    assert weights_are_of(newest_complete(run_dir).path, 1)
    save_step(run_dir, 2, seed=2)
    assert weights_are_of(newest_complete(run_dir).path, 2)
    assert sorted(path.name for path in (run_dir / "checkpoints").iterdir()) == ["step_00000001", "step_00000002"]


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (writer, "make_room"),
        (manager, "write_pieces"),
        (tensor_file.os, "fsync"),
        (manager, "write_tensor_file"),
        (CheckpointDocument, "write"),
        (writer, "publish"),
        (run_directory, "sync_directory"),
        (keeper, "retain"),
        (run_directory.shutil, "rmtree"),
    ],
)
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("step", [2, 3])
def test_death_at_any_point_leaves_the_old_or_the_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, when: str, step: int
) -> None:
    """step 2 replaces a checkpoint of the same step, step 3 adds one; two are kept."""
    save_step(tmp_path, 1, seed=1)
    save_step(tmp_path, 2, seed=2)
    original = getattr(owner, name)

    def dies(*arguments: Any, **named: Any) -> None:
        if when == "after":
            original(*arguments, **named)
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, dies)
        try:
            save_step(tmp_path, step, seed=3, keep=2)
        except Killed:
            pass
        else:  # nothing to remove when a checkpoint is added to one that stays
            assert name == "rmtree"
    remove_leftovers(tmp_path)
    found = newest_complete(tmp_path)
    assert found.warnings == ()
    assert found.path is not None
    seed = 2 if found.path.name == "step_00000002" else 3
    assert weights_are_of(found.path, seed) or (step == 2 and weights_are_of(found.path, 3))
    assert all(path.name.startswith("step_") for path in (tmp_path / "checkpoints").iterdir())
    save_step(tmp_path, step, seed=4, keep=2)
    assert weights_are_of(newest_complete(tmp_path).path, 4)
    assert visible(tmp_path) == [step - 1, step]


def test_death_between_the_two_renames_of_a_replacement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_step(tmp_path, 2, seed=2)
    original = Path.rename

    def dies(self: Path, target: Path) -> Path:
        if self.name.endswith(".tmp"):
            raise Killed
        return original(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", dies)
        with pytest.raises(Killed):
            save_step(tmp_path, 2, seed=3)
    assert visible(tmp_path) == []
    remove_leftovers(tmp_path)
    assert weights_are_of(newest_complete(tmp_path).path, 2)


@pytest.mark.parametrize(("keep", "left"), [(1, [4]), (2, [3, 4]), (3, [2, 3, 4]), (0, [1, 2, 3, 4])])
def test_the_newest_are_kept(tmp_path: Path, keep: int, left: list[int]) -> None:
    for step in (1, 2, 3, 4):
        save_step(tmp_path, step, keep=keep)
    assert visible(tmp_path) == left


def test_an_incomplete_one_does_not_count_as_kept(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save_step(tmp_path, step)
    (tmp_path / "checkpoints" / "step_00000003" / "checkpoint.json").unlink()
    save_step(tmp_path, 4, keep=2)
    assert visible(tmp_path) == [2, 4]


def reshape(path: Path, **fields: Any) -> None:
    """Change fields of the first tensor, with the digest of the new content."""
    content = json.loads(path.read_text())
    next(iter(content["tensors"].values())).update(fields)
    path.write_text(json.dumps(content))
    renew_digest(path)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda path: (path / "checkpoint.json").unlink(), "checkpoint.json: missing"),
        (lambda path: (path / "checkpoint.json").write_text('{"format": 1'), "checkpoint.json: not JSON"),
        (lambda path: (path / "checkpoint.json").write_text("[" * 100_000), "checkpoint.json: not JSON"),
        (lambda path: (path / "checkpoint.json").write_text("{}"), "a checkpoint of format None"),
        (lambda path: reshape(path / "checkpoint.json", states=[1]), r"tensors.matrix.states is \[1\]"),
        (lambda path: reshape(path / "checkpoint.json", states=["word"]), r"states is \['word'\]"),
        (lambda path: (path / "hooks.safetensors").unlink(), "hooks.safetensors: missing"),
        (
            lambda path: (path / "rank-00000.safetensors").open("ab").write(b"x"),
            "rank-00000.safetensors: [0-9]+ bytes found",
        ),
    ],
)
def test_an_incomplete_newer_one_is_passed_over_by_name(tmp_path: Path, spoil: Any, said: str) -> None:
    older, newer = save_step(tmp_path, 1), save_step(tmp_path, 2)
    spoil(newer)
    found = newest_complete(tmp_path)
    assert found.path == older
    assert len(found.warnings) == 1
    assert str(newer) in found.warnings[0]
    assert re.search(said, found.warnings[0])


def test_going_back_sets_later_ones_aside(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save_step(tmp_path, step, seed=step)
    assert [path.name for path in set_aside_later(tmp_path / "checkpoints", 1)] == [
        "set_aside_step_00000002",
        "set_aside_step_00000003",
    ]
    assert visible(tmp_path) == [1]
    save_step(tmp_path, 2, seed=5, keep=2)
    assert [path.name for path in set_aside_later(tmp_path / "checkpoints", 1)] == ["set_aside_step_00000002_2"]
    assert weights_are_of(tmp_path / "checkpoints" / "set_aside_step_00000002", 2)


def test_steps_beyond_eight_digits_stay_in_order(tmp_path: Path) -> None:
    for step in (99_999_999, 100_000_000):
        save_step(tmp_path, step, keep=1)
    assert visible(tmp_path) == [100_000_000]


def test_ranks_that_do_not_share_the_run_directory_are_named(tmp_path: Path) -> None:
    def check(group: Group) -> None:
        own = tmp_path / ("elsewhere" if group.rank == 2 else "shared")
        own.mkdir(exist_ok=True)
        check_shared_directory(own, group)

    for error in on_ranks(3, check):
        assert isinstance(error, CheckpointError)
        assert r"ranks [2] do not see the file" in str(error)
    assert on_ranks(3, lambda group: check_shared_directory(tmp_path / "shared", group)) == [None] * 3
    assert list((tmp_path / "shared").iterdir()) == []


def test_a_directory_that_cannot_be_made_fails_on_all_ranks(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a directory")
    for error in on_ranks(2, lambda group: check_shared_directory(tmp_path / "file" / "run", group)):
        assert isinstance(error, CheckpointError)
        assert "rank 0: NotADirectoryError" in str(error)


def test_retention_leaves_no_half_removed_checkpoint_visible(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_step(tmp_path, 1)

    def dies(path: Path) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", dies)
        with pytest.raises(Killed):
            save_step(tmp_path, 2, keep=1)
    assert visible(tmp_path) == [2]


def test_what_is_refused_keeps_its_words_and_what_is_not_keeps_its_kind() -> None:
    def refuse() -> None:
        raise RefusedError("--resume never, but ...")

    def break_down() -> None:
        raise KeyError("x")

    def either(group: Group) -> None:
        run_on_all_ranks(group, "a try", refuse if group.rank else break_down)

    for error in on_ranks(2, lambda group: on_rank_zero(group, "a try", refuse)):
        assert (type(error), str(error)) == (CheckpointError, "--resume never, but ...")
    for error in on_ranks(2, lambda group: on_rank_zero(group, "a try", break_down)):
        assert (type(error), str(error)) == (RankError, "a try failed on 1 of 2 ranks: rank 0: KeyError: 'x'")
    for error in on_ranks(2, either):
        assert type(error) is RankError
        assert str(error).endswith("rank 0: KeyError: 'x'; rank 1: --resume never, but ...")


def test_the_tokenizer_is_copied_once_and_whole(tmp_path: Path) -> None:
    source, run_dir = tmp_path / "tokenizer", tmp_path / "run"
    source.mkdir()
    run_dir.mkdir()
    (source / "tokenizer.json").write_text("{}", encoding="utf-8")
    (run_dir / ".tokenizer.tmp").mkdir()  # left by a killed run
    (run_dir / ".tokenizer.tmp" / "half").touch()
    for _ in range(2):
        copy_tokenizer(run_dir, source, ALONE)
    assert [path.name for path in (run_dir / "tokenizer").iterdir()] == ["tokenizer.json"]
    assert not (run_dir / ".tokenizer.tmp").exists()
