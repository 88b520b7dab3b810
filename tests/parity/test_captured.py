"""Captured micro-batches (`training.capture`) give the steps of uncaptured ones, bit for bit: metrics, weights,
moments, states of hooks. Operations on a CPU are recorded in place of CUDA graphs (tests/recorded.py)."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.fixtures import small_text_dataset
from tests.ranks import Ranks
from tests.recorded import recorded_on_cpu
from tests.runs import flags, image_flags, pretrain_here
from tests.synthetic import Layout, batch, data_group, make_engine, small_config
from trp_scale.checkpoint.document import read_document
from trp_scale.checkpoint.format import read_full_state
from trp_scale.checkpoint.run_directory import checkpoints
from trp_scale.cli import main as cli
from trp_scale.engines.captured import Backward, Captured, Mode
from trp_scale.engines.ddp import DdpEngine
from trp_scale.errors import RefusedError

UNEQUAL = (
    *("step_seconds", "processor_seconds", "data_wait_seconds", "data_wait_share", "tokens_per_second"),
    *("images_per_second", "peak_memory_bytes", "model_flops_utilisation", "replays"),
)
"""Metrics that differ between equal runs."""

CASES: dict[str, dict[str, Any]] = {
    "minimax": {},
    "minimax, one micro-batch": {"batch__micro_size": 8},
    "bf16 weights": {"training__weights": "bf16", "training__precision": "bf16"},
    "bf16 autocast": {"training__precision": "bf16"},
    "lagged": {"balancer__estimate": "lagged", "balancer__alpha_schedule": "spread"},
    "micro": {"balancer__estimate": "micro"},
    "gradnorm": {"balancer__kind": "gradnorm", "objective__next_sentence": "outside"},
    "jd": {"balancer__kind": "jd", "objective__next_sentence": "outside"},
    "uncertainty": {"balancer__kind": "uncertainty"},
    "group dro, average": {"balancer__kind": "group_dro", "hooks": "weight_average"},
    "mae_tiny": {},
    "mae_tiny color": {"multilevel__kind": "color"},
    "mm_mae_tiny": {},
    "mm_mae_tiny gradnorm": {"balancer__kind": "gradnorm", "balancer__at": "representation"},
    "adpe_tiny": {},
    "adpe_tiny separate": {"adversary__update": "sequential"},
}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_text_dataset(tmp_path_factory.mktemp("text") / "data")


def arguments(case: str, text: Path, images: Path, run: Path, **more: Any) -> list[str]:
    """Command line of a captured run."""
    given = {"training__steps": 4, "training__capture": "on", **CASES.get(case, {}), **more}
    recipe = case.partition(" ")[0]
    if recipe.endswith("_tiny"):
        return image_flags(recipe, images, run, **given)
    return flags(text, run, **given)


def steps(run: Path) -> list[dict[str, Any]]:
    """The metrics of a run."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name not in UNEQUAL} for line in lines]


def assert_equal_runs(first: Path, second: Path) -> None:
    """Two runs have equal metrics, and equal weights, moments and states of hooks in their last checkpoints."""
    assert steps(first) == steps(second)
    last = [checkpoints(run)[-1][1] for run in (first, second)]
    for state in ("weight", "exp_avg", "exp_avg_sq"):
        ours, theirs = (read_full_state(path, state) for path in last)
        assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []
    ours, theirs = (read_document(path).hooks for path in last)
    assert ours == theirs
    states = [load_file(path / "hooks.safetensors") for path in last if (path / "hooks.safetensors").is_file()]
    torch.testing.assert_close(states[:1], states[1:], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("case", CASES)
def test_a_captured_run_equals_an_uncaptured_one(text: Path, image_dataset: Path, tmp_path: Path, case: str) -> None:
    for enabled in (False, True):
        with recorded_on_cpu(enabled):
            assert pretrain_here(arguments(case, text, image_dataset, tmp_path / str(enabled))) == 0
    assert_equal_runs(tmp_path / "False", tmp_path / "True")
    captured = json.loads((tmp_path / "True" / "summary.json").read_text())["captured"]
    assert captured["replays"] >= 4 and captured["uncaptured"] == 0


@pytest.mark.parametrize("how", ["blocks", "whole"])
def test_compiled(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """Compiled graphs, traced by aot_eager, inside of captured ones."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    for enabled in (False, True):
        torch._dynamo.reset()
        with recorded_on_cpu(enabled):
            command = arguments("minimax", text, text, tmp_path / str(enabled), training__compile=how)
            assert pretrain_here(command) == 0
    torch._dynamo.reset()
    assert_equal_runs(tmp_path / "False", tmp_path / "True")
    assert json.loads((tmp_path / "True" / "summary.json").read_text())["captured"]["replays"] > 0


def pretrain_captured(command: list[str], *, enabled: bool) -> None:
    with recorded_on_cpu(enabled):
        assert pretrain_here(command) == 0


TWO_RANKS: dict[str, dict[str, Any]] = {
    "minimax": {"batch__micro_size": 4, "validation__every": 1},
    "minimax, two micro-batches": {"batch__micro_size": 2},
    "bf16 weights": {"batch__micro_size": 4},
    "bf16 gradients": {"training__precision": "bf16", "training__gradients": "bf16"},
    "gradnorm": {"batch__micro_size": 2},
    "adpe_tiny separate": {"batch__micro_size": 4},
}


ON_FSDP = ("minimax", "bf16 weights", "adpe_tiny separate")
"""Those with one micro-batch in a step."""


@pytest.mark.parametrize(("engine", "case"), [*(("ddp", case) for case in TWO_RANKS), *(("fsdp", c) for c in ON_FSDP)])
def test_on_two_ranks(
    text: Path, image_dataset: Path, tmp_path: Path, two_ranks: Ranks, engine: str, case: str
) -> None:
    """The gradients are reduced inside the backward graph of a window's last micro-batch."""
    for enabled in (False, True):
        command = arguments(case, text, image_dataset, tmp_path / str(enabled), engine=engine, **TWO_RANKS[case])
        two_ranks(pretrain_captured, command, enabled=enabled)
    assert_equal_runs(tmp_path / "False", tmp_path / "True")


def test_a_resumed_run(text: Path, tmp_path: Path) -> None:
    """A captured run continues from a checkpoint with the steps of a run without a stop."""
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    with recorded_on_cpu():
        assert pretrain_here(arguments("gradnorm", text, text, whole, checkpoint__every=2)) == 0
        shutil.copytree(whole, resumed)
        shutil.rmtree(checkpoints(resumed)[-1][1])
        assert pretrain_here(arguments("gradnorm", text, text, resumed, checkpoint__every=2, resume="auto")) == 0
    assert_equal_runs(whole, resumed)


def test_capture_on_a_cpu_is_refused(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["pretrain", *arguments("minimax", text, text, tmp_path)]) == 2
    assert "--training.capture" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("case", "more"),
    [("minimax", {"hooks": "gradient_noise_scale"}), ("mlo_mae_tiny", {}), ("minimax", {"engine": "fsdp"})],
)
def test_what_cannot_be_captured_is_named(
    text: Path, image_dataset: Path, tmp_path: Path, case: str, more: dict[str, Any]
) -> None:
    with recorded_on_cpu(), pytest.raises(RefusedError, match=r"--training\.capture"):
        pretrain_here(arguments(case, text, image_dataset, tmp_path, **more))


def collectives(*, several: bool) -> list[tuple[str, int]]:
    """Names and numbers of the collectives in each graph of a ddp engine, in the order of their recording."""
    layout = Layout(engine="ddp", micro_size=2 if several else 4)
    with recorded_on_cpu():
        config = small_config(layout, training={"capture": "on"})
        engine, objective = make_engine(layout, config, data_group())
        assert isinstance(engine, DdpEngine) and engine.captured_graphs is not None and engine.reduction is not None
        engine.train(True)
        with engine.captured_graphs.capturing():
            losses = engine.captured_graphs.losses(objective, batch(range(layout.micro_size)))
            engine.backward(losses.sums.sum(), last=True)
        recordings = engine.captured_graphs.recorder.recordings
        buckets = len(engine.reduction.buckets)
        engine.close()
    found = [Counter(call[0]._opname for call in each.calls if call[0].namespace == "c10d") for each in recordings]
    return [("buckets", buckets), *((name, number) for each in found for name, number in (each or {"": 0}).items())]


def test_collectives_of_the_graphs(two_ranks: Ranks) -> None:
    """The forward graph has none; a backward graph reduces each bucket once if it is the last of its window."""
    (_, buckets), *graphs = two_ranks(collectives, several=False)[0]
    assert graphs == [("", 0), ("allreduce_", buckets)]
    (_, buckets), *graphs = two_ranks(collectives, several=True)[0]
    assert graphs == [("", 0), *[("", 0), ("allreduce_", buckets)] * 2]


def test_graphs_with_other_results_are_not_used(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The passes before the first step find a graph that computes something else, and the run goes on without."""
    capture_backward = Captured._capture_backward

    def scaled(self: Captured, mode: Mode, total: Tensor, **flags: bool) -> Backward:
        return capture_backward(self, mode, total * 1.01, **flags)

    for name in ("uncaptured", "captured"):
        with recorded_on_cpu(name == "captured"):
            if name == "captured":
                monkeypatch.setattr(Captured, "_capture_backward", scaled)
            assert pretrain_here(arguments("minimax", text, text, tmp_path / name)) == 0
    assert_equal_runs(tmp_path / "uncaptured", tmp_path / "captured")
    captured = json.loads((tmp_path / "captured" / "summary.json").read_text())["captured"]
    assert captured["replays"] == 0 and captured["uncaptured"] > 0
