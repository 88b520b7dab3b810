"""Device peaks and memory."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
import torch

from tests.grids import always
from tests.runs import essence, flags, lines, pretrain_here
from trp_scale.config import LoggingConfig, RefusedError
from trp_scale.config.checks import check_engine
from trp_scale.config.run_flags import parse
from trp_scale.training.speed import peak_flops, peak_memory_bytes


@pytest.mark.parametrize(
    ("name", "teraflops"),
    [
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H200", 989),
        ("NVIDIA A10", 125),
        ("NVIDIA L4", 121),
        ("NVIDIA L40S", 362),
    ],
)
def test_peaks(name: str, teraflops: float) -> None:
    assert peak_flops(name, "bf16") == teraflops * 1e12


@pytest.mark.parametrize(("name", "precision"), [("cpu", "bf16"), ("NVIDIA A10G", "bf16"), ("NVIDIA H200", "fp32")])
def test_unknown_peaks(name: str, precision: str) -> None:
    assert peak_flops(name, precision) is None


def test_peak_memory_grows_with_what_is_used() -> None:
    before = peak_memory_bytes(on_gpu=False)
    block = torch.ones(before // 8 + 2**25)  # fp32: half of what was used so far, and 128 MiB
    assert peak_memory_bytes(on_gpu=False) > before + 2**26
    assert block.sum() == len(block)


@pytest.fixture(scope="module")
def untraced(text_dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("untraced") / "run"
    assert pretrain_here(flags(text_dataset, run_dir, training__steps=4)) == 0
    return run_dir


@pytest.mark.parametrize(
    ("steps", "name", "count"), always([("2:3", "steps-2-3", 2), ("4:9", "steps-4-4", 1)], ("2:3", "steps-2-3", 2))
)
def test_the_named_steps_are_traced_and_none_is_changed(
    text_dataset: Path,
    untraced: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    steps: str,
    name: str,
    count: int,
) -> None:
    assert pretrain_here(flags(text_dataset, tmp_path, training__steps=4, logging__profile=steps)) == 0
    assert [essence(line) for line in lines(tmp_path)] == [essence(line) for line in lines(untraced)]
    assert sorted(path.name for path in (tmp_path / "profile").iterdir()) == [f"{name}.json.gz", f"{name}.txt"]
    with gzip.open(tmp_path / "profile" / f"{name}.json.gz") as stream:
        events = json.load(stream)["traceEvents"]
    updates = [event for event in events if event.get("name") == "aten::_fused_adamw_"]
    assert len(updates) == 2 * count, "of matrices and of vectors, in each step"
    table = (tmp_path / "profile" / f"{name}.txt").read_text(encoding="utf-8")
    assert table.count("aten::") + table.count("autograd::") <= 10 and "aten::" in table
    assert str(tmp_path / "profile" / f"{name}.json.gz") in capsys.readouterr().out.replace("\n", "")


def test_without_it_nothing_is_written(untraced: Path) -> None:
    assert not (untraced / "profile").exists()


@pytest.mark.parametrize("steps", ["5", "3:2", "0:1", "a:b", "1:2:3", ":"])
def test_what_names_no_steps_is_refused(steps: str) -> None:
    with pytest.raises(RefusedError, match=r"--logging\.profile .*START:STOP"):
        parse(["--recipe", "pos_bert_tiny", "--logging.profile", steps])


def test_steps_that_never_come_and_a_snapshot_of_nothing_are_refused() -> None:
    with pytest.raises(RefusedError, match=r"--logging.profile .*9:9.* 8"):
        parse(["--recipe", "pos_bert_tiny", "--training.steps", "8", "--logging.profile", "9:9"])
    with pytest.raises(RefusedError, match=r"--logging.profile"):
        parse(["--recipe", "pos_bert_tiny", "--logging.memory_snapshot", "True"])
    both = ["--logging.memory_snapshot", "True", "--logging.profile", "2:2"]
    config = parse(["--recipe", "pos_bert_tiny", *both]).config
    with pytest.raises(RefusedError, match="GPU"):
        check_engine(config, "plain", gpu=False)
    check_engine(config, "plain", gpu=True)


def test_steps_are_counted_as_in_the_metrics() -> None:
    assert LoggingConfig(profile="20:22").profiled_steps() == range(20, 23)
    assert not LoggingConfig().profiled_steps()
