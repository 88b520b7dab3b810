"""Pictures over time: one of each checkpoint, without a trace in the run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from PIL import Image

from tests.grids import always
from tests.runs import lines, pretrain_here
from tests.unit.evaluation.figures.test_trained_images import FLAGS
from trp_scale.checkpoint.export import find_checkpoint
from trp_scale.checkpoint.format import read_full_state
from trp_scale.errors import RefusedError
from trp_scale.evaluation.figures import pictures

SMALL = {"training.steps": 6, "checkpoint.every": 2, "checkpoint.keep": 1}


def learn(image_dataset: Path, directory: Path, *flags: str) -> int:
    small = [*FLAGS, *(word for name, value in SMALL.items() for word in (f"--{name}", str(value)))]
    return pretrain_here(
        ["--recipe", "mlo_mae_tiny", "--data.path", str(image_dataset), "--run_dir", str(directory), *small, *flags]
    )


@pytest.mark.parametrize("behind", always(["True", "False"], "True"))
def test_each_checkpoint_is_drawn_and_the_run_stays_the_same(image_dataset: Path, tmp_path: Path, behind: str) -> None:
    more = ["--checkpoint.asynchronous", behind]
    assert learn(image_dataset, tmp_path / "without", *more) == 0
    assert learn(image_dataset, tmp_path / "with", *more, "--hooks", "pictures", "--pictures.rows", "2") == 0
    folder = tmp_path / "with" / "pictures"
    drawn = sorted(str(path.relative_to(folder)) for path in folder.rglob("*.png"))
    assert drawn == [f"step_0000000{step}/{what}.png" for step in (2, 4, 6) for what in ("masks", "reconstructions")]
    for path in folder.rglob("*.png"):
        with Image.open(path) as picture:
            assert min(picture.size) > 100
    drawings = [line["pictures"] for line in lines(tmp_path / "with") if "pictures" in line]
    assert [one["step"] for one in drawings][:1] == [2] and all(
        one["files"] == 2 and one["seconds"] > 0 for one in drawings
    )
    ours, theirs = (read_full_state(find_checkpoint(tmp_path / name)) for name in ("with", "without"))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.exhaustive
def test_some_checkpoints_are_left_out(image_dataset: Path, tmp_path: Path) -> None:
    assert learn(image_dataset, tmp_path / "run", "--hooks", "pictures", "--pictures.every", "2") == 0
    assert sorted(path.name for path in (tmp_path / "run" / "pictures").iterdir()) == ["step_00000002", "step_00000006"]


@pytest.mark.parametrize("error", [RefusedError("the data is gone"), RuntimeError("the data is gone")], ids=repr)
def test_what_cannot_be_drawn_ends_nothing(
    error: Exception,
    image_dataset: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def refuse(*_: object, **__: object) -> list[str]:
        raise error

    monkeypatch.setattr(pictures, "draw_pictures", refuse)
    assert learn(image_dataset, tmp_path / "run", "--hooks", "pictures") == 0
    (first, *_) = [line["pictures"] for line in lines(tmp_path / "run") if "pictures" in line]
    assert first["notice"] == "no pictures of step_00000002: the data is gone"
    assert [f"no pictures of step_0000000{step}: the data is gone" in caplog.text for step in (2, 4, 6)] == [True] * 3


def test_text_has_none(text_dataset: Path, tmp_path: Path) -> None:
    arguments = ["--recipe", "pos_bert_tiny", "--data.path", str(text_dataset), "--run_dir", str(tmp_path / "run")]
    with pytest.raises(RefusedError, match="--hooks"):
        pretrain_here([*arguments, "--hooks", "pictures"])
