"""A run whose output nobody reads any more, as of `trp-scale pretrain ... 2>&1 | head -1`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.grids import always
from tests.runs import flags, lines, start
from trp_scale.checkpoint.run_directory import checkpoints


@pytest.mark.parametrize("read", always([0, 1], 1), ids=["before the first line", "after a line"])
def test_it_goes_on_to_its_end_and_its_checkpoint(text_dataset: Path, tmp_path: Path, read: int) -> None:
    process = start(flags(text_dataset, tmp_path / "run", data__workers=1))
    assert process.stdout is not None
    for _ in range(read):
        assert process.stdout.readline()
    process.stdout.close()
    try:
        assert process.wait(timeout=240) == 0
    finally:
        process.kill()
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["exit_reason"] == "finished"
    assert [line["step"] for line in lines(tmp_path / "run")] == list(range(1, 9))
    assert [step for step, _ in checkpoints(tmp_path / "run")] == [8]
