"""`trp-scale plan` and `trp-scale pretrain --dry_run`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.runs import flags
from trp_scale.cli.main import main
from trp_scale.config.run_flags import parse
from trp_scale.planning.clusters import parse_plan
from trp_scale.planning.command import dry_run

TINY = ["--recipe", "pos_bert_tiny", "--batch.global_size", "1024", "--batch.micro_size", "auto"]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no recipe's data is: a checkout may have it."""
    monkeypatch.chdir(tmp_path)


def test_a_plan_is_printed_with_its_curve_and_assumptions(capsys: pytest.CaptureFixture[str]) -> None:
    flags = "--gpus 8 --gpu h100 --predict 8,100 --vocabulary 2000 --length 64 --engine ddp --data.path none"
    words = ["plan", *TINY, *flags.split()]
    assert main(words) == 0
    printed = capsys.readouterr().out
    assert "8 x h100 in 1 node\n" in printed
    assert "1. torchrun --nproc_per_node 8 launch/pretrain.py --engine ddp --recipe pos_bert_tiny" in printed
    assert "100 GPUs: global batch 1024 does not divide over 100 ranks" in printed
    assert "assumed:\n- no data set to read: shapes from --length and --vocabulary\n" in printed
    assert "- predicted, not measured; h100: 989 TFLOP/s" in printed


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--gpus", "0"], "--gpus is 0"),
        (["--predict", "8,many"], "--predict 8,many: allowed: numbers of GPUs"),
        (["--engine", "plain"], "--engine plain is for one process, this run has 8"),
        (["--length", "100000"], "--length is 100000, allowed: up to --model.max_positions"),
    ],
)
def test_wrong_flags_are_refused(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *TINY, *flags]) == 2
    assert message in capsys.readouterr().err


def test_a_plan_needs_no_data() -> None:
    assert parse_plan(["--recipe", "mae_vit_b", "--gpus", "64"]).config.data.path == "(none)"


def test_a_dry_run_plans_the_very_command_and_writes_nothing(
    tmp_path: Path, text_dataset: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    words = ["pretrain", "--recipe", "pos_bert_tiny", "--data.path", str(text_dataset), "--run_dir", str(run)]
    assert main([*words, "--dry_run"]) == 0
    printed = capsys.readouterr().out
    assert not run.exists()
    assert "1 x a100-80 in 1 node" in printed
    assert "\n plain " in printed and "\n ddp " not in printed
    assert "assumed: a100-80" in printed


def test_a_dry_run_plans_cut_matrices(tmp_path: Path, text_dataset: Path) -> None:
    words = flags(text_dataset, tmp_path / "run", engine="megatron", megatron__tensor_parallel=2)
    printed = str(dry_run(parse(words), 4))
    assert "\n megatron TP 2 " in printed and "megatron TP 1" not in printed
    assert "4 x a100-80 in 1 node" in printed
