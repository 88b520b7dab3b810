"""A checkpoint that is written behind the steps is the one that is written while they wait, on every engine."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.distributed.test_resume import LAYOUTS, same_run
from tests.grids import always
from tests.ranks import Ranks
from tests.runs import flags, lines, pretrain_here
from trp_scale.checkpoint import writer
from trp_scale.checkpoint.document import DOCUMENT_NAME
from trp_scale.checkpoint.run_directory import checkpoint_path, checkpoints
from trp_scale.checkpoint.writer import CheckpointWriter

STEPS = 6
OFFLOADED = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}


def watched_run(arguments: list[str], slow: bool) -> tuple[int, list[tuple[int, int]]]:
    """A run in which what is written takes as long as steps do; (step, step at which it was finished) of each."""
    write, settle, save = writer.write_part, CheckpointWriter.settle, CheckpointWriter.save
    seen: list[tuple[int, int]] = []
    finished: list[int] = []

    def waits(*arguments: Any) -> Any:
        time.sleep(0.2 * slow)
        return write(*arguments)

    def watched(self: CheckpointWriter) -> None:
        newest = self.newest
        settle(self)
        finished.extend([self.newest] if self.newest != newest else [])

    def noted(self: CheckpointWriter, content: Any, **named: Any) -> None:
        before = list(finished)
        save(self, content, **named)
        seen.append((content.step, len(finished) - len(before)))

    with (
        mock.patch.object(writer, "write_part", waits),
        mock.patch.object(CheckpointWriter, "settle", watched),
        mock.patch.object(CheckpointWriter, "save", noted),
    ):
        return pretrain_here(arguments), seen


def files(checkpoint: Path) -> dict[str, bytes]:
    """Tensors as they are; of the document all but its digest and the settings."""
    found = {file.name: file.read_bytes() for file in checkpoint.iterdir()}
    document = json.loads(found[DOCUMENT_NAME])
    del document["digest"], document["config"]
    return found | {DOCUMENT_NAME: json.dumps(document).encode()}


@pytest.mark.parametrize("layout", always([*LAYOUTS, "in_files", "offloaded"], "zero2"))
def test_it_is_of_its_step_and_resumes_bit_for_bit(
    two_ranks: Ranks, text_dataset: Path, tmp_path: Path, layout: str
) -> None:
    (tmp_path / "zero2.json").write_text(json.dumps(OFFLOADED))
    layouts = LAYOUTS | {
        "in_files": {"engine": "fsdp", "fsdp__offload": True, "fsdp__offload_directory": tmp_path},
        "offloaded": {"ds_config": tmp_path / "zero2.json"},
    }
    changes = {
        "training__steps": STEPS,
        "checkpoint__every": 2,
        "checkpoint__keep": 0,
        "model__dropout": 0.1,
        "hooks": "weight_average",
        **layouts[layout],
    }
    runs = {name: tmp_path / name for name in ("waited", "behind", "resumed")}
    two_ranks(watched_run, flags(text_dataset, runs["waited"], checkpoint__asynchronous=False, **changes), False)
    (status, seen), _ = two_ranks(watched_run, flags(text_dataset, runs["behind"], **changes), True)
    assert status == 0
    waits = layout == "in_files"
    assert seen[0] == (2, int(waits)), "the first is finished when its call returns if there is no copy"
    same_run(runs["behind"], runs["waited"])
    for step in (2, 4, 6):
        mine, theirs = (files(checkpoint_path(runs[name], step)) for name in ("behind", "waited"))
        assert mine == theirs, step
    shutil.copytree(checkpoint_path(runs["behind"], 4), checkpoint_path(runs["resumed"], 4))
    two_ranks(pretrain_here, flags(text_dataset, runs["resumed"], **changes))
    assert files(checkpoint_path(runs["resumed"], 6)) == files(checkpoint_path(runs["waited"], 6))
    assert [line["step"] for line in lines(runs["resumed"])] == [5, 6]


def test_the_end_of_a_run_waits_for_what_is_under_way(two_ranks: Ranks, text_dataset: Path, tmp_path: Path) -> None:
    """All steps done, or stopped: the newest checkpoint is of the last step, and older ones have gone."""
    changes = {"training__steps": 5, "checkpoint__every": 1, "checkpoint__keep": 2, "checkpoint__keep_every": 2}
    far = tmp_path / "far"
    arguments = flags(text_dataset, tmp_path / "run", checkpoint__mirror=f"file://{far}", engine="fsdp", **changes)
    two_ranks(watched_run, arguments, True)
    assert [step for step, _ in checkpoints(tmp_path / "run")] == [2, 4, 5]
    assert not list((tmp_path / "run" / "checkpoints").glob(".*"))
    assert (far / "step_00000005" / DOCUMENT_NAME).exists()
    stopped = tmp_path / "stopped"
    stopped.mkdir()
    (stopped / "STOP").touch()
    two_ranks(watched_run, flags(text_dataset, stopped, engine="fsdp", **changes), True)
    last = lines(stopped)[-1]["step"]
    assert last < 5 and [step for step, _ in checkpoints(stopped)] == [last]
