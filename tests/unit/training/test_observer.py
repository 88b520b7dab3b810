"""The run directory that an observer leaves behind; device peaks and memory; traces of steps."""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.grids import always
from tests.runs import essence, flags, lines, pretrain_here
from tests.unit.training.small_run import TASKS, record
from trp_scale.config import Config, RefusedError
from trp_scale.config.loader import check_engine
from trp_scale.config.run_flags import parse
from trp_scale.training.metrics import RunInfo, TaskRecord
from trp_scale.training.observer import Observer, peak_flops, peak_memory_bytes
from trp_scale.training.report import report


def lines_of(run_dir: Path) -> list[dict[str, Any]]:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    text = (run_dir / "metrics.jsonl").read_text(encoding="utf-8")
    return [json.loads(line, parse_constant=refuse) for line in text.splitlines()]


def test_a_line_has_every_field_and_is_there_at_once(start: Callable[..., Observer], tmp_path: Path) -> None:
    observer = start()
    observer.step(record(1, hooks={"minimax": {"effective_elements": 7.5}}))
    (line,) = lines_of(tmp_path / "run")
    assert line["step"] == 1
    assert line["loss"] == pytest.approx(4.9)
    assert (line["lr"], line["grad_norm"], line["applied"]) == (1e-3, 1.0, True)
    assert line["tasks"]["verb"] == {"loss": pytest.approx(3.9), "weight": 0.25, "count": 10}
    assert (line["step_seconds"], line["data_wait_seconds"], line["data_wait_share"]) == (0.5, 0.1, 0.2)
    assert line["processor_seconds"] == 0.75
    assert line["tokens_per_second"] == pytest.approx(2000)
    assert line["model_flops"] == 2e9
    assert line["model_flops_utilisation"] is None
    assert line["peak_memory_bytes"] > 10**6
    assert line["minimax"] == {"effective_elements": 7.5}


def test_skipped_steps_are_strict_json_and_always_logged(
    start: Callable[..., Observer], config: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config.logging.every = 10
    observer = start()
    observer.step(record(1))
    broken = {name: TaskRecord(loss=math.nan, weight=math.inf, count=1) for name in ("noun", "verb", "other")}
    observer.step(record(2, loss=math.nan, grad_norm=math.inf, applied=False, tasks=broken))
    observer.step(record(3))
    first, second = lines_of(tmp_path / "run")
    assert (first["step"], second["step"]) == (1, 2)
    assert second["loss"] is None
    assert second["grad_norm"] is None
    assert second["tasks"]["noun"] == {"loss": None, "weight": None, "count": 1}
    assert second["applied"] is False
    assert observer.close("finished")["skipped_steps"] == 1
    assert "step 2 " in (printed := capsys.readouterr().out) and "loss nan" in printed and "norm inf" in printed


def test_absent_tasks_are_listed_and_forgotten_ones_refused(start: Callable[..., Observer], tmp_path: Path) -> None:
    observer = start()
    tasks = dict(record(1).tasks)
    observer.step(record(1, tasks=tasks | {"verb": TaskRecord(loss=None, weight=0.0, count=0)}))
    assert lines_of(tmp_path / "run")[0]["tasks"]["verb"] == {"loss": None, "weight": 0.0, "count": 0}
    with pytest.raises(ValueError, match=r"step 2.*'verb'"):
        observer.step(record(2, tasks={"noun": tasks["noun"], "other": tasks["other"]}))


def test_times_are_means_over_the_steps_of_a_line(
    start: Callable[..., Observer], config: Config, tmp_path: Path
) -> None:
    config.logging.every = 4
    observer = start()
    for step in range(1, 9):
        assert observer.wants(step) is (step in (1, 4, 8))
        observer.step(record(step, step_seconds=float(step), processor_seconds=2.0 * step))
    assert [line["step"] for line in lines_of(tmp_path / "run")] == [1, 4, 8]
    assert [line["step_seconds"] for line in lines_of(tmp_path / "run")] == [1.0, 3.0, 6.5]
    assert [line["processor_seconds"] for line in lines_of(tmp_path / "run")] == [2.0, 6.0, 13.0]


def test_the_share_of_waiting_is_of_all_steps_logged_or_not(
    start: Callable[..., Observer], config: Config, tmp_path: Path
) -> None:
    config.logging.every = 4
    observer = start()
    for step in range(1, 9):
        observer.step(record(step, step_seconds=2.0 if step == 1 else 1.0, data_wait_seconds=0.1 * (step in (2, 8))))
    assert [line["data_wait_share"] for line in lines_of(tmp_path / "run")] == pytest.approx([0.0, 0.1 / 3, 0.1 / 4])
    assert observer.close("finished")["data_wait_share"] == pytest.approx(0.2 / 9)
    assert "waited for data: 2.2% " in report(tmp_path / "run")


def test_a_resumed_run_logs_the_steps_that_an_uninterrupted_one_does(
    start: Callable[..., Observer], config: Config, info: RunInfo, tmp_path: Path
) -> None:
    config.logging.every = 4
    info.start_step = 6
    observer = start()
    for step in (7, 8, 9):
        observer.step(record(step))
    assert [line["step"] for line in lines_of(tmp_path / "run")] == [8]


def test_validation_is_part_of_its_step(start: Callable[..., Observer], config: Config, tmp_path: Path) -> None:
    config.validation.every = 2
    config.logging.every = 100
    observer = start()
    losses = {"loss": 3.0, "tasks": {"noun": {"loss": 3.5, "count": 100}}}
    for step in (1, 2, 3):
        observer.step(record(step))
        if step == 2:
            observer.validation(step, losses)
    lines = lines_of(tmp_path / "run")
    assert [line["step"] for line in lines] == [1, 2]
    assert lines[1]["validation"] == losses
    assert lines[1]["loss"] == pytest.approx(4.8)
    assert observer.close("finished")["validation"] == losses
    assert "held-out loss (mean of the balanced tasks) is 3.000 after step 2" in report(tmp_path / "run")


def test_a_validation_that_never_came_loses_no_line(
    start: Callable[..., Observer], config: Config, tmp_path: Path
) -> None:
    config.validation.every = 1
    observer = start()
    observer.step(record(1))
    observer.step(record(2))
    observer.close("SIGTERM")
    assert [line["step"] for line in lines_of(tmp_path / "run")] == [1, 2]


def test_a_resumed_run_appends_after_a_torn_line(start: Callable[..., Observer], tmp_path: Path) -> None:
    start().step(record(1))
    with (tmp_path / "run" / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"step": 2, "los')
    start().step(record(2))
    assert [line["step"] for line in lines_of(tmp_path / "run")] == [1, 2]


def test_the_end_has_what_a_hook_last_said_and_a_single_task_in_words(
    config: Config, info: RunInfo, tmp_path: Path
) -> None:
    observer = Observer(tmp_path, config, ("noun",), replace(info, shown={"adversary": ("norm", "effect")}))
    for step, norm in ((1, 0.1), (2, 0.25)):
        tasks = {"noun": TaskRecord(loss=4.0 / step, weight=1.0, count=40)}
        hooks = {"adversary": {"norm": norm, "effect": None, "kind": "pixels"}}
        observer.step(record(step, loss=4.0 / step, tasks=tasks, hooks=hooks))
    assert observer.close("finished")["hooks"] == ["adversary: norm 0.25"]
    lines = report(tmp_path).splitlines()
    assert "adversary: norm 0.25" in lines and "The loss fell from 4.000 to 2.000 (-50%) in 2 steps." in lines


@pytest.mark.parametrize(("factor", "diverged"), [(2.0, False), (9.9, False), (10.1, True)])
def test_losses_far_above_their_start_are_no_result(
    start: Callable[..., Observer], tmp_path: Path, factor: float, diverged: bool
) -> None:
    observer = start()
    for step in (1, 2, 3):
        tasks = {
            name: replace(task, loss=task.loss * (factor if step == 3 else 1.0))
            for name, task in record(1).tasks.items()
            if task.loss is not None
        }
        observer.step(record(step, tasks=tasks))
    why = observer.divergence()
    assert bool(why) == diverged
    assert not why or ("6.267" in why and "63.29" in why and "step 3" in why)
    observer.close("finished")


def test_one_skipped_step_at_the_end_is_no_divergence(start: Callable[..., Observer]) -> None:
    observer = start()
    for step in (1, 2, 3):
        observer.step(record(step, **({"loss": math.nan, "applied": False} if step == 3 else {})))
    assert not observer.divergence()
    observer.step(record(4, loss=math.nan, applied=False))
    observer.step(record(5, loss=math.inf, applied=False))
    assert "3 of 5 steps" in (why := observer.divergence()) and "step 5" in why
    observer.close("finished")


def test_other_ranks_do_nothing(start: Callable[..., Observer], tmp_path: Path, config: Config) -> None:
    config.logging.tensorboard = True
    observer = start(enabled=False)
    observer.step(record(1))
    observer.validation(1, {"loss": 1.0})
    observer.message("hello")
    assert observer.close("finished") == {}
    assert not (tmp_path / "run").exists()


def test_a_hook_cannot_take_a_field_s_name(start: Callable[..., Observer]) -> None:
    with pytest.raises(ValueError, match="'loss'"):
        start().step(record(1, hooks={"loss": {"value": 1.0}}))


def test_use_of_the_cache_is_in_lines_and_report(config: Config, tmp_path: Path) -> None:
    """Lines say what was done since the last one; the report has the sum, and nothing where data is local."""
    uses = iter([{"found": 3, "fetched": 1, "fetched_bytes": 10**9, "ahead": 2, "ahead_bytes": 10**9}, {}] * 2)
    observer = Observer(tmp_path / "run", config, TASKS, RunInfo(positions_per_step=10), cache_use=lambda: next(uses))
    for step in (1, 2, 3):
        observer.step(record(step))
    first, second, third = lines_of(tmp_path / "run")
    assert first["cache"]["found"] == third["cache"]["found"] == 3 and "cache" not in second
    assert observer.close("finished")["cache"]["ahead_bytes"] == 2 * 10**9
    text = " ".join(report(tmp_path / "run").split())
    assert "cache: 75.0% of 8 " in text and "; 6 fetched, 4 of them prefetched, 4.000 GB (rank 0)" in text
    local = Observer(tmp_path / "local", config, TASKS, RunInfo(positions_per_step=10))
    local.step(record(1))
    assert local.close("finished")["cache"] is None and "cache: " not in report(tmp_path / "local")


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
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("NVIDIA A10G", None),
        ("cpu", None),
    ],
)
def test_peaks(name: str, teraflops: float | None) -> None:
    assert peak_flops(name, "bf16") == (teraflops and teraflops * 1e12)
    assert peak_flops(name, "fp32") is None


def test_peak_memory_grows_with_what_is_used() -> None:
    before = peak_memory_bytes(on_gpu=False)
    block = torch.ones(before // 8 + 2**25)  # fp32: half of what was used so far, and 128 MiB
    assert peak_memory_bytes(on_gpu=False) > before + 2**26
    assert block.sum() == len(block)


@pytest.fixture(scope="module")
def untraced(text_dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("untraced") / "run"
    assert pretrain_here(flags(text_dataset, run_dir, training__steps=4)) == 0
    assert not (run_dir / "profile").exists()
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
