"""What a run says before it can show a step: what takes its time, in order, and on one rank alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.runs import flags
from trp_scale.cli import main as cli

SLOW = ["importing torch", "opening", "making the first step", "step 1/2"]


def said_before_steps(capsys: pytest.CaptureFixture[str]) -> list[str]:
    lines = capsys.readouterr().out.splitlines()
    return [what for line in lines for what in SLOW if what in line.partition("/tmp")[0]]


def test_each_slow_phase_has_a_line_before_the_first_step(
    text_dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TRP_SCALE_PROGRESS", "plain")
    assert cli.main(["pretrain", *flags(text_dataset, tmp_path / "run", training__steps=2)]) == 0
    assert said_before_steps(capsys) == SLOW


def test_other_ranks_are_silent(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from trp_scale.config.flags import phase

    for rank, said in (("0", "importing torch\n"), ("1", "")):
        monkeypatch.setenv("RANK", rank)
        phase("importing torch")
        assert capsys.readouterr().out == said
