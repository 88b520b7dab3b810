"""W&B offline, TensorBoard, and what happens when they are not installed."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.unit.training.small_run import record
from tests.unit.training.test_picture_files import draw
from trp_scale.config import Config, RefusedError
from trp_scale.training.metrics import RunInfo
from trp_scale.training.observer import Observer
from trp_scale.training.sinks import flatten


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


def test_wandb_offline_keeps_its_id(start: Callable[..., Observer], offline: None, tmp_path: Path) -> None:
    ids = []
    for _ in range(2):
        observer = start()
        observer.step(record(1))
        observer.close("finished")
        ids.append((tmp_path / "run" / "wandb_id.txt").read_text(encoding="utf-8").strip())
    assert ids[0] == ids[1]
    stored = sorted((tmp_path / "run" / "wandb").glob(f"offline-run-*-{ids[0]}/run-{ids[0]}.wandb"))
    assert stored
    content = b"".join(path.read_bytes() for path in stored)
    assert b"noun" in content
    assert b"weight" in content


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


def test_wandb_has_new_pictures_and_the_report(start: Callable[..., Observer], offline: None, tmp_path: Path) -> None:
    observer = start()
    draw(tmp_path / "run", 2, 20)
    observer.step(record(3))
    observer.close("finished")
    (media,) = (tmp_path / "run" / "wandb").glob("offline-run-*/files/media")
    (picture,) = (media / "images").rglob("*.png")
    assert picture.read_bytes() == (tmp_path / "run" / "pictures" / "step_00000002" / "masks.png").read_bytes()
    (page,) = (media / "html").rglob("*.html")
    assert "worst task, noun" in page.read_text(encoding="utf-8")


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
