"""Section `captured` of benchmarks/gpu.py, with recorded operations in place of CUDA graphs (tests/recorded.py)."""

from __future__ import annotations

import pytest

from benchmarks import gpu_captured
from benchmarks.gpu_setting import Setting
from tests.recorded import recorded_on_cpu
from trp_scale.distributed.environment import Environment

SETTING = Setting(environment=Environment(use_gpu=False), small=True)
TRIED = ("equal, minimax, two micro-batches", f"{gpu_captured.BERT}, 64 rows, over a graph of the whole step")
TRIED += ("minimax over plain, 64 rows", "AdPE ViT-B, relative, 64 rows")


def items() -> dict[str, gpu_captured.Item]:
    with recorded_on_cpu():
        return {item.name: item for item in gpu_captured.captured_steps(SETTING)}


def test_without_a_gpu_nothing_is_measured() -> None:
    assert all("needs a GPU" in item.lacking for item in gpu_captured.captured_steps(SETTING))


@pytest.mark.parametrize("name", TRIED)
def test_items_are_measured(name: str) -> None:
    assert not items()[name].lacking
    with recorded_on_cpu():
        figures = items()[name].measure()
    assert figures.get("as_expected") is not False
    assert all(value > 0 for key, value in figures.items() if key.endswith("_ms") and isinstance(value, float))


@pytest.mark.exhaustive
def test_the_other_items_are_measured() -> None:
    others = {name: item for name, item in items().items() if name not in TRIED and not item.lacking}
    assert len(others) > 20
    with recorded_on_cpu():
        assert [name for name, item in others.items() if item.measure().get("as_expected") is False] == []


@pytest.mark.parametrize("measure", [gpu_captured.off_and_on, gpu_captured.over_whole_graph])
def test_a_step_that_replays_no_graph_is_no_figure(measure: object, monkeypatch: pytest.MonkeyPatch) -> None:
    model = (gpu_captured.bert,) if measure is gpu_captured.off_and_on else ()
    with recorded_on_cpu(enabled=False), pytest.raises(RuntimeError, match="without a graph"):
        measure(SETTING, *model, 64, gpu_captured.BF16)  # type: ignore[operator]


def test_steps_that_differ_are_not_as_expected(monkeypatch: pytest.MonkeyPatch) -> None:
    checked = gpu_captured.CASES["minimax"]
    rates = iter((1e-3, 2e-3))

    def other_rate(setting: Setting) -> gpu_captured.Workload:
        work = checked(setting)
        work.config.optimizer.lr = next(rates)
        return work

    monkeypatch.setitem(gpu_captured.CASES, "minimax", other_rate)
    with recorded_on_cpu():
        figures = gpu_captured.steps_are_equal(SETTING, "minimax")
    assert figures["as_expected"] is False and figures["unequal_tensors"]
