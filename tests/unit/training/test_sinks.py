"""W&B offline, TensorBoard, and what happens when they are not installed."""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.unit.training.small_run import record
from trp_scale.config import Config, RefusedError
from trp_scale.training.metrics import RunInfo
from trp_scale.training.observer import Observer
from trp_scale.training.sinks import NewPictures, flatten


def test_nested_lines_become_paths() -> None:
    line = {"step": 3, "applied": True, "tasks": {"verb": {"loss": None, "weight": 0.5}}, "outside_tasks": ["other"]}
    assert flatten(line) == {"step": 3.0, "applied": 1.0, "tasks/verb/weight": 0.5}


def events_of(run_dir: Path) -> Any:
    """What TensorBoard reads of a run."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run_dir / "tensorboard"))
    events.Reload()
    return events


def test_tensorboard_has_every_step_once_after_a_resume(
    start: Callable[..., Observer], config: Config, info: RunInfo, tmp_path: Path
) -> None:
    pytest.importorskip("tensorboard")
    config.logging.tensorboard = True
    observer = start()
    for step in (1, 2, 3):
        observer.step(record(step))
    observer.close("killed")
    info.start_step = 2
    observer = start()
    for step in (3, 4):
        observer.step(record(step))
    observer.close("finished")
    events = events_of(tmp_path / "run")
    assert [event.step for event in events.Scalars("tasks/noun/loss")] == [1, 2, 3, 4]
    assert events.Scalars("loss")[-1].value == pytest.approx(4.6)


@pytest.fixture
def offline(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs are logged to W&B without a network."""
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    config.logging.wandb = True


def test_tensorboard_has_new_pictures_and_the_report(
    start: Callable[..., Observer], config: Config, tmp_path: Path
) -> None:
    pytest.importorskip("tensorboard")
    config.logging.tensorboard = True
    draw(tmp_path / "run", 1, 10)  # of an earlier start, which has sent it
    observer = start()
    draw(tmp_path / "run", 2, 20)
    observer.step(record(3))
    draw(tmp_path / "run", 4, 40)  # of the last checkpoint, after the last line
    observer.close("finished")
    events = events_of(tmp_path / "run")
    images = events.Images("pictures/masks")
    assert [(event.step, event.width, event.height) for event in images] == [(2, 12, 8), (4, 12, 8)]
    with Image.open(io.BytesIO(images[1].encoded_image_string)) as picture:
        assert picture.convert("RGB").getpixel((3, 3)) == (40, 0, 0)
    (text,) = events.Tensors("report/text_summary")
    assert b"worst task, noun" in text.tensor_proto.string_val[0]


def test_wandb_offline_keeps_its_id_and_has_new_pictures_and_the_report(
    start: Callable[..., Observer], offline: None, tmp_path: Path
) -> None:
    ids = []
    for step in (2, 3):
        observer = start()
        draw(tmp_path / "run", step, 10 * step)
        observer.step(record(step))
        observer.close("finished")
        ids.append((tmp_path / "run" / "wandb_id.txt").read_text(encoding="utf-8").strip())
    assert ids[0] == ids[1]
    folder = tmp_path / "run" / "wandb"
    stored = b"".join(path.read_bytes() for path in folder.glob(f"offline-run-*-{ids[0]}/run-{ids[0]}.wandb"))
    assert b"noun" in stored and b"weight" in stored
    drawn = [path.read_bytes() for path in sorted((tmp_path / "run" / "pictures").rglob("*.png"))]
    assert sorted(path.read_bytes() for path in folder.glob("offline-run-*/files/media/images/**/*.png")) == drawn
    pages = [path.read_text(encoding="utf-8") for path in folder.glob("offline-run-*/files/media/html/**/*.html")]
    assert len(pages) == 2 and all("worst task, noun" in page for page in pages)


def test_wandb_has_owner_name_group_and_tags_also_after_a_resume(
    start: Callable[..., Observer], offline: None, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    import wandb

    runs: list[Any] = []
    init = wandb.init
    monkeypatch.setattr(wandb, "init", lambda **settings: runs.append(init(**settings)) or runs[-1])
    start().close("killed")
    config.logging.wandb_entity, config.logging.wandb_name, config.logging.wandb_group = "team", "first", "sweep"
    config.logging.wandb_tags = ["a", "b"]
    for _ in range(2):
        start().close("finished")
    assert len({run.id for run in runs}) == 1
    assert [(run.name, run.group, run.tags) for run in runs[:1]] == [("run", "", ())]
    assert {(run.entity, run.name, run.group, run.tags) for run in runs[1:]} == {("team", "first", "sweep", ("a", "b"))}


def test_wandb_without_a_login_is_one_line(
    start: Callable[..., Observer], config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb = pytest.importorskip("wandb")

    def refuse(**_: object) -> None:
        raise wandb.errors.UsageError("No API key configured. Use `wandb login` to log in.")

    monkeypatch.setattr(wandb, "init", refuse)
    config.logging.wandb = True
    with pytest.raises(RefusedError, match=r"^--logging\.wandb.*key.*WANDB_MODE=offline") as caught:
        start()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("extra", ["wandb", "tensorboard"])
def test_a_missing_extra_is_named_with_its_command(
    start: Callable[..., Observer], config: Config, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trp_scale.training.sinks.find_spec", lambda name: None)
    setattr(config.logging, extra, True)
    with pytest.raises(RefusedError, match=rf"--logging\.{extra} .*pip install 'trp-scale\[{extra}\]'"):
        start()


def draw(run_dir: Path, step: int, value: int) -> None:
    folder = run_dir / "pictures" / f"step_{step:08d}"
    folder.mkdir(parents=True)
    Image.new("RGB", (12, 8), (value, 0, 0)).save(folder / "masks.png")


def test_a_picture_comes_again_when_it_was_not_taken_or_is_drawn_again(tmp_path: Path) -> None:
    new = NewPictures(tmp_path)
    draw(tmp_path, 1, 10)
    with pytest.raises(OSError):
        for _ in new.take():
            raise OSError
    assert [step for _, step, _ in new.take()] == [1] and list(new.take()) == []
    path = tmp_path / "pictures" / "step_00000001" / "masks.png"
    os.utime(path, (1, 1))
    assert [(name, step) for name, step, _ in new.take()] == [("pictures/masks", 1)]
    path.write_bytes(path.read_bytes() + bytes(5 << 20))
    assert list(new.take()) == []
