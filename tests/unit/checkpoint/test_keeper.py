"""Which checkpoints stay: sound ones, the last, every so many steps, and one from before a fault; and the mirror."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.faulty_server import Faults
from tests.unit.checkpoint.fake_engine import save_step
from tests.unit.checkpoint.test_run_directory import flip
from tests.unit.data.test_s3 import s3, signed
from trp_scale.checkpoint import keeper as keeper_module
from trp_scale.checkpoint.document import DOCUMENT_NAME
from trp_scale.checkpoint.keeper import Keeper
from trp_scale.checkpoint.run_directory import Kept, checkpoint_path, checkpoints, select
from trp_scale.distributed.groups import ALONE
from trp_scale.errors import RefusedError

__all__ = ["s3", "signed"]


def kept(run_dir: Path, keeper: Keeper, *steps: int, **rules: int) -> list[int]:
    """Write these, one after the other; returns which are left."""
    for step in steps:
        keeper.note_written(save_step(run_dir, step), Kept(**{"newest": 2, **rules}))
        keeper.finish(lambda: None)
    return [step for step, _ in checkpoints(run_dir)]


@pytest.mark.parametrize(
    ("rules", "left"),
    [
        ({}, [50, 60]),
        ({"newest": 1}, [60]),
        ({"newest": 0}, [10, 20, 30, 40, 50, 60]),
        ({"every": 20}, [20, 40, 50, 60]),
        ({"before": 25}, [20, 50, 60]),
        ({"before": 55}, [50, 60]),
        ({"before": 25, "every": 30, "newest": 1}, [20, 30, 60]),
        ({"newest": 1, "regular": 40}, [40, 60]),
        ({"newest": 1, "regular": 7}, [60]),
    ],
)
def test_these_stay(tmp_path: Path, rules: dict[str, int], left: list[int]) -> None:
    assert kept(tmp_path, Keeper(tmp_path), 10, 20, 30, 40, 50, 60, **rules) == left


def test_a_damaged_one_does_not_count_and_of_an_older_start_either(tmp_path: Path) -> None:
    """It has all its files, in their sizes."""
    assert kept(tmp_path, Keeper(tmp_path), 1, 2, 3, newest=0) == [1, 2, 3]
    flip(checkpoint_path(tmp_path, 3) / "rank-00000.safetensors")
    assert kept(tmp_path, Keeper(tmp_path), 4, newest=2) == [2, 4]


def test_the_one_before_a_fault_must_be_sound_too(tmp_path: Path) -> None:
    assert kept(tmp_path, Keeper(tmp_path), 1, 2, 3, 4, newest=0) == [1, 2, 3, 4]
    flip(checkpoint_path(tmp_path, 2) / "hooks.safetensors")
    assert kept(tmp_path, Keeper(tmp_path), 5, newest=1, before=3) == [1, 5]


def test_one_that_does_not_read_back_removes_none_and_says_so(tmp_path: Path) -> None:
    keeper = Keeper(tmp_path)
    assert kept(tmp_path, keeper, 1, 2) == [1, 2]
    path = save_step(tmp_path, 3)
    flip(path / "rank-00000.safetensors")
    keeper.note_written(path, Kept(newest=1))
    keeper.finish(lambda: None)
    assert [step for step, _ in checkpoints(tmp_path)] == [1, 2, 3]
    (message,) = keeper.messages()
    assert message.startswith(f"{path} was written but is damaged: ") and "none" not in message
    assert kept(tmp_path, keeper, 4, newest=3) == [1, 2, 4]


def test_each_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    original = keeper_module.damage

    def damage(path: Path, entry: Any) -> Any:
        read.append(f"{path.name}/{entry.name}")
        return original(path, entry)

    paths = [save_step(tmp_path, step) for step in (1, 2, 3, 4)]  # which reads them back too
    monkeypatch.setattr(keeper_module, "damage", damage)
    keeper = Keeper(tmp_path)
    for path in paths:
        keeper.note_written(path, Kept(newest=3))
        keeper.finish(lambda: None)
    assert len(read) == len(set(read)) == 8


def test_the_mirror_has_every_finished_one_and_its_document_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[str] = []
    open_url = keeper_module.open_url

    def watched(url: str) -> Any:
        files, root = open_url(url)
        put: Callable[..., None] = files.put_file
        files.put_file = lambda source, target: (sent.append(Path(target).name), put(source, target))
        return files, root

    monkeypatch.setattr(keeper_module, "open_url", watched)
    run_dir, far = tmp_path / "run", tmp_path / "far"
    keeper = Keeper(run_dir, f"file://{far}")
    assert kept(run_dir, keeper, 1, 2, 3, newest=1) == [3]
    assert sent == ["rank-00000.safetensors", "hooks.safetensors", DOCUMENT_NAME] * 3
    assert keeper.messages() == [f"step_0000000{step} was uploaded to file://{far}" for step in (1, 2, 3)]
    assert sorted(path.name for path in far.iterdir()) == [f"step_0000000{step}" for step in (1, 2, 3)]
    assert select(tmp_path / "new", str(far / "step_00000002"), ALONE).path == far / "step_00000002"


def test_a_mirror_that_fails_is_tried_again_and_stops_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeper_module, "FIRST_PAUSE", 0.001)
    original, failures = keeper_module.copy, [True] * 2 + [False] + [True] * 5 + [False]

    def copy(path: Path, url: str) -> None:
        if failures.pop(0):
            raise ConnectionError("the network is down")
        original(path, url)

    monkeypatch.setattr(keeper_module, "copy", copy)
    run_dir, far = tmp_path / "run", tmp_path / "far"
    keeper = Keeper(run_dir, f"file://{far}")
    assert kept(run_dir, keeper, 1, 2, 3) == [2, 3]
    first, second, third = keeper.messages()
    assert first.startswith("step_00000001 was uploaded") and third.startswith("step_00000003 was uploaded")
    assert second.startswith(f"--checkpoint.mirror file://{far}: step_00000002 was not uploaded after 5 attempts")
    assert "ConnectionError: the network is down" in second
    assert sorted(path.name for path in far.iterdir()) == ["step_00000001", "step_00000003"]


def test_a_copy_that_came_short_is_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    open_url = keeper_module.open_url

    def short(url: str) -> Any:
        files, root = open_url(url)
        files.put_file = lambda source, target: Path(target).write_bytes(Path(source).read_bytes()[:-1])
        return files, root

    monkeypatch.setattr(keeper_module, "open_url", short)
    path = save_step(tmp_path, 1)
    with pytest.raises(RefusedError, match=r"rank-00000\.safetensors: [0-9]+ bytes uploaded, [0-9]+ expected"):
        keeper_module.copy(path, f"file://{tmp_path / 'far'}")
    assert not (tmp_path / "far" / path.name / DOCUMENT_NAME).exists()


def test_a_stop_waits_for_the_mirror_no_longer_than_a_scheduler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The signal comes while the copy hangs; without one the end waits its ten minutes."""
    hangs, asked = threading.Event(), list[int]()
    monkeypatch.setattr(keeper_module, "copy", lambda path, url: hangs.wait(30))
    came: list[float | None] = [None]
    monkeypatch.setattr(keeper_module, "first_signal_time", lambda: came[0])
    keeper = Keeper(tmp_path, f"file://{tmp_path / 'far'}")
    keeper.note_written(save_step(tmp_path, 1), Kept(newest=1))

    def beat() -> None:
        asked.append(len(asked))
        if len(asked) == 2:
            came[0] = time.monotonic() - keeper_module.AFTER_A_SIGNAL

    keeper.finish(beat)
    hangs.set()
    assert len(asked) == 2
    assert "the last checkpoint was not uploaded within 1 s" in keeper.messages()[-1]


@pytest.mark.parametrize("url", ["words", "nothing://there"])
def test_what_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(RefusedError, match=f"--checkpoint.mirror {url}: "):
        keeper_module.open_url(url)


def test_a_checkpoint_in_a_bucket_is_the_local_one(
    signed: Faults, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import boto3

    monkeypatch.setattr(keeper_module, "FIRST_PAUSE", 0.01)
    client = boto3.client("s3")
    client.create_bucket(Bucket="mirror")
    signed.of = {"hooks.safetensors": ["500"], "checkpoint.json": ["503"]}
    keeper, path = Keeper(tmp_path, "s3://mirror/runs/one"), save_step(tmp_path, 3)
    keeper.note_written(path, Kept(newest=2))
    keeper.finish(lambda: None)
    assert keeper.messages() == ["step_00000003 was uploaded to s3://mirror/runs/one"]
    assert not any(signed.of.values()), "every failure was met"
    for file in path.iterdir():
        stored = client.get_object(Bucket="mirror", Key=f"runs/one/step_00000003/{file.name}")
        assert stored["Body"].read() == file.read_bytes()
