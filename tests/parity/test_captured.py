"""Captured micro-batches (`training.capture`) give the steps of uncaptured ones, bit for bit: metrics, weights,
moments, states of hooks. Operations on a CPU are recorded in place of CUDA graphs (tests/recorded.py)."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from tests.checkpoints import stored_state, unequal
from tests.grids import always
from tests.ranks import Ranks
from tests.recorded import RecordedOperations, Recording, Result, recorded_on_cpu
from tests.runs import flags, image_flags, lines, pretrain_here
from tests.synthetic import Layout, batch, data_group, make_engine, small_config
from trp_scale.checkpoint.document import read_document
from trp_scale.checkpoint.run_directory import checkpoints
from trp_scale.cli import main as cli
from trp_scale.engines import captured
from trp_scale.engines.captured import Backward, Captured, Mode, Replay
from trp_scale.engines.ddp import DdpEngine
from trp_scale.errors import RefusedError
from trp_scale.pretraining.pos_bert import batch as pos_bert
from trp_scale.pretraining.pos_bert.batch import Flags, Integers, kept_lengths, kept_positions

UNEQUAL = (
    *("step_seconds", "processor_seconds", "data_wait_seconds", "data_wait_share", "tokens_per_second"),
    *("images_per_second", "peak_memory_bytes", "model_flops_utilisation", "replays"),
)
"""Metrics that differ between equal runs."""

CASES: dict[str, dict[str, Any]] = {
    "minimax": {},
    "minimax, one micro-batch": {"batch__micro_size": 8},
    "bf16 weights, lagged": {
        "training__weights": "bf16",
        "training__precision": "bf16",
        "balancer__estimate": "lagged",
        "balancer__alpha_schedule": "spread",
    },
    "bf16 autocast": {"training__precision": "bf16"},
    "micro": {"balancer__estimate": "micro"},
    "gradnorm": {"balancer__kind": "gradnorm", "objective__next_sentence": "outside"},
    "jd": {"balancer__kind": "jd", "objective__next_sentence": "outside"},
    "uncertainty": {"balancer__kind": "uncertainty"},
    "packed, group dro, average, muon": {
        "model__kind": "modern",
        "model__dropout": 0.0,
        "objective__next_sentence": "off",
        "optimizer__kind": "muon",
        "balancer__kind": "group_dro",
        "hooks": "weight_average",
    },
    "mae_tiny": {},
    "mae_tiny color": {"multilevel__kind": "color"},
    "mm_mae_tiny": {},
    "mm_mae_tiny gradnorm": {"balancer__kind": "gradnorm", "balancer__at": "representation"},
    "adpe_tiny": {},
    "adpe_tiny separate": {"adversary__update": "sequential"},
}


def arguments(case: str, text: Path, images: Path, run: Path, **more: Any) -> list[str]:
    """Command line of a captured run."""
    given = {"training__steps": 3, "batch__micro_size": 4, "training__capture": "on", **CASES.get(case, {}), **more}
    recipe = case.partition(" ")[0]
    if recipe.endswith("_tiny"):
        return image_flags(recipe, images, run, **given)
    return flags(text, run, **given)


def steps(run: Path) -> list[dict[str, Any]]:
    """The metrics of a run."""
    return [{name: value for name, value in line.items() if name not in UNEQUAL} for line in lines(run)]


def assert_equal_runs(first: Path, second: Path) -> None:
    """Two runs have equal metrics, and equal weights, moments and states of hooks in their last checkpoints."""
    assert steps(first) == steps(second)
    last = [checkpoints(run)[-1][1] for run in (first, second)]
    assert unequal(*map(stored_state, last)) == []
    ours, theirs = (read_document(path).hooks for path in last)
    assert ours == theirs
    states = [load_file(path / "hooks.safetensors") for path in last if (path / "hooks.safetensors").is_file()]
    torch.testing.assert_close(states[:1], states[1:], rtol=0, atol=0, equal_nan=True)


def pretrain(command: list[str], recorder: type[RecordedOperations] = RecordedOperations) -> None:
    """Run a command with recorded operations. PoS-BERT computes as many padding positions as with capture, because
    other shapes change rounding and dropout."""

    def pad(attended: Flags, lengths: Sequence[int] | None = None) -> Integers:
        return kept_positions(attended, lengths or kept_lengths(attended.size))

    with recorded_on_cpu(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(pos_bert, "kept_positions", pad)
        patch.setitem(captured.RECORDERS, "cpu", recorder)
        assert pretrain_here(command) == 0


def run_both(case: str, text: Path, images: Path, directory: Path, **more: Any) -> dict[str, Any]:
    """Runs without and with capture, which must be equal; what the second says of its graphs."""
    for capture in ("off", "on"):
        pretrain(arguments(case, text, images, directory / capture, **{"training__capture": capture, **more}))
    return equal_runs(directory)


def equal_runs(directory: Path) -> dict[str, Any]:
    assert_equal_runs(directory / "off", directory / "on")
    numbers: dict[str, Any] = json.loads((directory / "on" / "summary.json").read_text())["captured"]
    return numbers


KEPT = (
    *("bf16 weights, lagged", "jd", "packed, group dro, average, muon"),
    *("mae_tiny color", "mm_mae_tiny gradnorm", "adpe_tiny separate"),
)


@pytest.mark.parametrize("case", always(CASES, *KEPT))
def test_a_captured_run_equals_an_uncaptured_one(
    text_dataset: Path, packed_dataset: Path, image_dataset: Path, tmp_path: Path, case: str
) -> None:
    rows = packed_dataset if case.startswith("packed") else text_dataset
    numbers = run_both(case, rows, image_dataset, tmp_path)
    assert numbers["replays"] >= 3 and numbers["uncaptured"] == 0


def test_padding_of_a_captured_run_changes_only_rounding(text_dataset: Path, tmp_path: Path) -> None:
    """Without dropout, whose numbers depend on the shapes, losses and gradient norms are those of a run with
    `training.capture off`, up to fp32 rounding."""
    for capture in ("off", "on"):
        more = {"training__capture": capture, "model__dropout": 0, "training__steps": 2}
        with recorded_on_cpu():
            assert pretrain_here(arguments("minimax", text_dataset, text_dataset, tmp_path / capture, **more)) == 0
    off, on = (steps(tmp_path / capture) for capture in ("off", "on"))
    assert off != on
    for name in ("loss", "grad_norm"):
        assert [line[name] for line in on] == pytest.approx([line[name] for line in off], rel=1e-5)


@pytest.mark.parametrize("how", always(["blocks", "whole"], "blocks"))
def test_compiled(text_dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """Compiled graphs, traced by aot_eager, inside of captured ones."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    more = {"training__compile": how, "training__steps": 2, "balancer__kind": "uniform", "validation__every": 0}
    torch._dynamo.reset()
    assert run_both("minimax", text_dataset, text_dataset, tmp_path, **more)["replays"] > 0
    torch._dynamo.reset()


TWO_RANKS: dict[str, dict[str, Any]] = {
    "minimax": {"batch__micro_size": 4, "validation__every": 1},
    "minimax, two micro-batches": {"batch__micro_size": 2},
    "bf16 weights, lagged": {"batch__micro_size": 4},
    "bf16 gradients": {"training__precision": "bf16", "training__gradients": "bf16"},
    "gradnorm": {"batch__micro_size": 2},
    "adpe_tiny separate": {"batch__micro_size": 4},
}


ON_FSDP = ("minimax", "bf16 weights, lagged", "adpe_tiny separate")
"""Those with one micro-batch in a step."""


@pytest.mark.parametrize(
    ("engine", "case"),
    always(
        [*(("ddp", case) for case in TWO_RANKS), *(("fsdp", case) for case in ON_FSDP)],
        ("ddp", "minimax, two micro-batches"),
        ("ddp", "adpe_tiny separate"),
        ("fsdp", "bf16 weights, lagged"),
    ),
)
def test_on_two_ranks(
    text_dataset: Path, image_dataset: Path, tmp_path: Path, two_ranks: Ranks, engine: str, case: str
) -> None:
    """The gradients are reduced inside the backward graph of a window's last micro-batch."""
    for capture in ("off", "on"):
        more = {"engine": engine, "training__capture": capture, **TWO_RANKS[case]}
        two_ranks(pretrain, arguments(case, text_dataset, image_dataset, tmp_path / capture, **more))
    assert equal_runs(tmp_path)["uncaptured"] == 0


def pretrain_with_a_failure(command: list[str]) -> list[int]:
    """Run a command whose second recording on rank 1 fails; return how many operations were recorded."""
    recorders = []

    class Failing(RecordedOperations):
        def __init__(self, device: torch.device) -> None:
            super().__init__(device)
            recorders.append(self)

        def record(self, work: Callable[[], Result]) -> tuple[Result, Replay]:
            recording = super().record(work)
            if len(self.recordings) == 2 and data_group().rank == 1:
                raise torch.OutOfMemoryError("no memory is free")
            return recording

    pretrain(command, Failing)
    return [len(recorder.recordings) for recorder in recorders]


@pytest.mark.parametrize("engine", always(["ddp", "fsdp"], "fsdp"))
def test_a_rank_that_fails_to_capture(text_dataset: Path, tmp_path: Path, two_ranks: Ranks, engine: str) -> None:
    """All ranks stop capturing after the recording that failed, and the run continues without graphs."""
    for capture in ("off", "on"):
        more = {"engine": engine, "training__capture": capture, "batch__micro_size": 4, "training__steps": 2}
        command = arguments("minimax", text_dataset, text_dataset, tmp_path / capture, **more)
        recorded = two_ranks(pretrain_with_a_failure if capture == "on" else pretrain, command)
    assert recorded == [[2], [2]]
    numbers = equal_runs(tmp_path)
    assert numbers["replays"] == 0 and numbers["uncaptured"] > 0


def test_a_resumed_run(image_dataset: Path, tmp_path: Path) -> None:
    """A captured run continues from a checkpoint with the steps of a run without a stop."""
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    command = partial(arguments, "mm_mae_tiny gradnorm", image_dataset, image_dataset)
    with recorded_on_cpu():
        assert pretrain_here(command(whole, checkpoint__every=2)) == 0
        shutil.copytree(whole, resumed)
        shutil.rmtree(checkpoints(resumed)[-1][1])
        assert pretrain_here(command(resumed, resume="auto")) == 0
    assert_equal_runs(whole, resumed)


def test_capture_on_a_cpu_is_refused(text_dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["pretrain", *arguments("minimax", text_dataset, text_dataset, tmp_path)]) == 2
    assert "--training.capture" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("case", "more"),
    [("minimax", {"hooks": "gradient_noise_scale"}), ("mlo_mae_tiny", {}), ("minimax", {"engine": "fsdp"})],
)
def test_what_cannot_be_captured_is_named(
    text_dataset: Path, image_dataset: Path, tmp_path: Path, case: str, more: dict[str, Any]
) -> None:
    with recorded_on_cpu(), pytest.raises(RefusedError, match=r"--training\.capture"):
        pretrain_here(arguments(case, text_dataset, image_dataset, tmp_path, **more))


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
    found = [count_collectives(each) or {"": 0} for each in recordings]
    return [("buckets", buckets), *((name, number) for each in found for name, number in each.items())]


def test_collectives_of_the_graphs(two_ranks: Ranks) -> None:
    """The forward graph has none; a backward graph reduces each bucket once if it is the last of its window."""
    (_, buckets), *graphs = two_ranks(collectives, several=False)[0]
    assert graphs == [("", 0), ("allreduce_", buckets)]
    (_, buckets), *graphs = two_ranks(collectives, several=True)[0]
    assert graphs == [("", 0), *[("", 0), ("allreduce_", buckets)] * 2]


def count_collectives(recording: Recording) -> Counter[str]:
    return Counter(call[0]._opname for call in recording.calls if call[0].namespace == "c10d")


def collectives_of_fsdp() -> tuple[int, Counter[str], list[Counter[str]]]:
    """Number of FSDP2's parameter groups, the collectives of a step without graphs, and those of each graph."""
    layout = Layout(engine="fsdp", micro_size=4)
    with recorded_on_cpu():
        engine, objective = make_engine(layout, small_config(layout, training={"capture": "on"}), data_group())
        graphs, uncaptured = engine.captured_graphs, Recording()
        assert graphs is not None
        engine.train(True)
        rows = batch(range(4))
        for context in (uncaptured, graphs.capturing()):
            with context:
                engine.backward(graphs.losses(objective, rows).sums.sum(), last=True)
            engine.discard_gradients()
        groups = sum(isinstance(module, FSDPModule) for module in engine.module.modules())
        recordings = graphs.recorder.recordings
        engine.close()
    return groups, count_collectives(uncaptured), [count_collectives(each) for each in recordings]


def test_collectives_of_fsdp_are_those_of_a_step_without_graphs(two_ranks: Ranks) -> None:
    groups, uncaptured, (forward, backward) = two_ranks(collectives_of_fsdp)[0]
    assert forward == {"_allgather_base_": groups} and backward["_reduce_scatter_base_"] == groups
    assert forward + backward == uncaptured


def test_graphs_with_other_results_are_not_used(
    text_dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The passes before the first step find a graph that computes something else, and the run goes on without."""
    capture_backward = Captured._capture_backward

    def scaled(self: Captured, mode: Mode, total: Tensor, **flags: bool) -> Backward:
        return capture_backward(self, mode, total * 1.01, **flags)

    monkeypatch.setattr(Captured, "_capture_backward", scaled)
    numbers = run_both("minimax", text_dataset, text_dataset, tmp_path, training__steps=2)
    assert numbers["replays"] == 0 and numbers["uncaptured"] > 0
