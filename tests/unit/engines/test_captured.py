"""Captured micro-batches of an engine: which are captured, whose gradients they set, and what they refuse. tests/parity
compares whole runs."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import TypeVar, cast

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from tests.ranks import Ranks
from tests.recorded import HostReadError, RecordedOperations, Result, recorded_on_cpu
from tests.settings import changed
from tests.synthetic import Layout, data_group, make_engine, small_config
from tests.synthetic import batch as synthetic_batch
from trp_scale.core.batch import Batch, Extra, TaskLosses
from trp_scale.core.engine import EngineError
from trp_scale.core.run import task_losses
from trp_scale.distributed.groups import ALONE
from trp_scale.engines.captured import RECORDERS, Captured, CudaGraphs, Replay, choose_capture
from trp_scale.engines.fsdp import FsdpEngine
from trp_scale.engines.plain import PlainEngine
from trp_scale.pretraining.pos_bert.settings import PosBertConfig
from trp_scale.pretraining.pos_bert.upstream import PosMaskedLanguageModelling

T = TypeVar("T")

CPU = torch.device("cpu")
SHIFT = Extra("shift")


class TwoLayers(nn.Module):
    """Two matrices; the second takes part only in batches that have `deep`."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, inputs: Tensor, deep: bool) -> Tensor:
        hidden: Tensor = self.first(inputs).tanh()
        return self.second(hidden) if deep else hidden


class Squares:
    """Two tasks: sums of squares of the two halves of the outputs. `reads`: reads a number on the host."""

    tasks, balanced, regression, in_a_graph = ("left", "right"), (0, 1), (), True

    def __init__(self, *, reads: bool = False) -> None:
        self.reads = reads

    def count(self, batch: Batch) -> Tensor:
        return torch.full((2,), float(batch.rows), dtype=torch.float64)

    def outside_weights(self, counts: Tensor) -> Tensor:
        return torch.zeros_like(counts)

    def __call__(self, forward: PlainEngine, batch: Batch) -> TaskLosses:
        inputs = batch["inputs"] + batch.extras.get(SHIFT, torch.zeros(()))
        if self.reads and float(inputs.sum()) > 1e9:
            inputs = inputs * 2
        squares = forward(inputs, "deep" in batch.fields).double().square()
        return TaskLosses(sums=squares.view(-1, 2, 2).sum(dim=(0, 2)), counts=self.count(batch))


def batch(seed: int, *, rows: int = 3, deep: bool = True, **extras: Tensor) -> Batch:
    """Random rows; `extras` by key."""
    inputs = torch.randn(rows, 4, generator=torch.Generator().manual_seed(seed))
    fields = {"inputs": inputs} | ({"deep": torch.ones(rows)} if deep else {})
    return Batch(fields=fields, keys=torch.arange(rows), start=0, extras={Extra(k): v for k, v in extras.items()})


@pytest.fixture(autouse=True)
def recorded() -> Iterator[None]:
    with recorded_on_cpu():
        yield


def engine_of(capture: str) -> PlainEngine:
    config = changed(PosBertConfig(), training={"capture": capture}, batch={"global_size": 8, "micro_size": 2})
    torch.manual_seed(0)
    engine = PlainEngine(TwoLayers(), config, device=CPU)
    engine.train(True)
    return engine


def backward(engine: PlainEngine, objective: Squares, micro: Batch) -> None:
    """Add the gradient of sum of (1 + t) times the loss of task t."""
    losses = task_losses(objective, engine, micro)
    engine.backward((losses.sums * torch.tensor([1.0, 2.0], dtype=torch.float64)).sum(), last=True)


def captured_engine(objective: Squares, *shapes: Batch) -> PlainEngine:
    """Engine with graphs of these shapes."""
    engine = engine_of("on")
    assert engine.captured_graphs is not None
    with engine.captured_graphs.capturing():
        for micro in shapes:
            backward(engine, objective, micro)
            engine.discard_gradients()
    engine.captured_graphs.replays = engine.captured_graphs.uncaptured = 0
    return engine


def gradients(engine: PlainEngine) -> list[Tensor | None]:
    return [parameter.grad for parameter in engine.module.parameters()]


def assert_equal_gradients(ours: PlainEngine, theirs: PlainEngine) -> None:
    for mine, other in zip(gradients(ours), gradients(theirs), strict=True):
        assert (mine is None) == (other is None)
        assert mine is None or other is None or torch.equal(mine, other)


def assert_same_backward(ours: PlainEngine, theirs: PlainEngine, objective: Squares, micro: Batch) -> None:
    """After one more micro-batch both engines have the same gradients."""
    for engine in (ours, theirs):
        backward(engine, objective, micro)
    assert_equal_gradients(ours, theirs)


@pytest.mark.parametrize("deep", [(True, True), (False, False), (False, True), (True, False)])
def test_gradients_of_a_window(deep: tuple[bool, ...]) -> None:
    """Sums over micro-batches, also of modes with other parameters; None for parameters that take no part."""
    objective = Squares()
    eager, engine = engine_of("off"), captured_engine(objective, batch(0), batch(0, deep=False))
    for step in range(2):
        for number, uses in enumerate(deep):
            assert_same_backward(engine, eager, objective, batch(10 * step + number, deep=uses))
        for each in (eager, engine):
            each.discard_gradients()
    graphs = engine.captured_graphs
    assert graphs is not None and (graphs.replays, graphs.uncaptured) == (4, 0)


def test_a_window_with_an_uncaptured_micro_batch() -> None:
    """A shape without graphs is counted for each micro-batch, and named once."""
    objective = Squares()
    eager, engine = engine_of("off"), captured_engine(objective, batch(0))
    for rows in (3, 2, 3, 2):
        assert_same_backward(engine, eager, objective, batch(rows, rows=rows))
    graphs = engine.captured_graphs
    assert graphs is not None and (graphs.replays, graphs.uncaptured) == (2, 2)
    assert len(graphs.notices) == 1 and "inputs [2, 4]" in graphs.notices[0]


def test_the_gradient_of_an_extra() -> None:
    """Added up over micro-batches; a hook may set it to None, after a step or between micro-batches."""
    objective = Squares()
    engine = captured_engine(objective, batch(0, shift=torch.zeros(4, requires_grad=True)))
    eager, shifts = engine_of("off"), []
    for each in (eager, engine):
        shift = torch.ones(4, requires_grad=True)
        seen = []
        for seeds in ((1, 2), (11, 12), (21,), (22,)):
            for seed in seeds:
                backward(each, objective, batch(seed, shift=shift))
            seen.append(shift.grad)
            shift.grad = None
        shifts.append(seen)
    for ours, theirs in zip(*shifts, strict=True):
        assert torch.equal(ours, theirs) and ours.abs().sum() > 0


def test_losses_of_a_pass_remain_after_the_next() -> None:
    objective = Squares()
    engine = engine_of("on")
    assert engine.captured_graphs is not None
    with torch.no_grad():
        with engine.captured_graphs.capturing():
            task_losses(objective, engine, batch(0))
        first, second = (task_losses(objective, engine, batch(seed)).sums for seed in (1, 2))
        assert engine.captured_graphs.replays == 3
        assert torch.equal(first, task_losses(objective, engine_of("off"), batch(1)).sums) and not first.equal(second)


def test_an_objective_that_reads_a_number_runs_without_graphs() -> None:
    objective = Squares(reads=True)
    eager, engine = engine_of("off"), captured_engine(objective, batch(0))
    assert_same_backward(engine, eager, objective, batch(1))
    assert engine.captured_graphs is not None and engine.captured_graphs.replays == 0
    assert [HostReadError.__name__ in notice for notice in engine.captured_graphs.notices] == [True]


def test_after_close_micro_batches_run_without_graphs() -> None:
    """Their static memory is dropped."""
    objective = Squares()
    eager, engine = engine_of("off"), captured_engine(objective, batch(0))
    graphs = engine.captured_graphs
    assert graphs is not None
    backward(engine, objective, batch(1))
    memory = [weakref.ref(tensor) for tensor in (*graphs._static_gradients, *mode_fields(graphs))]
    graphs.close()
    graphs.recorder.recordings.clear()  # type: ignore[attr-defined]
    assert memory and [reference() for reference in memory if reference() is not None] == []
    assert_same_backward(engine, eager, objective, batch(2))
    assert (graphs.replays, graphs.uncaptured) == (1, 1)


def mode_fields(graphs: Captured) -> list[Tensor]:
    return [tensor for mode in graphs._modes.values() for tensor in mode.batch.fields.values()]


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no memory is free"), RuntimeError("an operation failed")])
@pytest.mark.parametrize("number", [1, 2])
def test_an_error_while_capturing(monkeypatch: pytest.MonkeyPatch, error: RuntimeError, number: int) -> None:
    """In the forward graph or in the backward graph: all micro-batches run without graphs, and a line has the error."""

    class Failing(RecordedOperations):
        def record(self, work: Callable[[], Result]) -> tuple[Result, Replay]:
            recording = super().record(work)
            if len(self.recordings) == number:
                raise error
            return recording

    monkeypatch.setitem(RECORDERS, "cpu", Failing)
    objective = Squares()
    eager, engine = engine_of("off"), captured_engine(objective, batch(0), batch(0, deep=False))
    assert_same_backward(engine, eager, objective, batch(1))
    graphs = engine.captured_graphs
    assert graphs is not None and (graphs.replays, graphs.uncaptured) == (0, 1)
    assert [(type(error).__name__ in notice, str(error) in notice) for notice in graphs.notices] == [(True, True)]
    assert len(graphs.recorder.recordings) == number  # type: ignore[attr-defined]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_after_a_failed_cuda_graph() -> None:
    """Current stream, allocator and random numbers work as before, and another graph can be captured."""
    device = torch.device("cuda", torch.cuda.current_device())
    graphs, stream = CudaGraphs(device), torch.cuda.current_stream()
    numbers = torch.ones(8, device=device)
    for work in (lambda: numbers.sum().item(), lambda: torch.rand(8, device=device).nonzero()):
        with pytest.raises(RuntimeError):
            graphs.record(work)
        assert torch.cuda.current_stream() == stream and not torch.cuda.is_current_stream_capturing()
        torch.cuda.manual_seed(0)
        drawn = torch.rand(8, device=device)
        torch.cuda.manual_seed(0)
        assert torch.equal(drawn, torch.rand(8, device=device))
        torch.cuda.empty_cache()
        doubled, replay = graphs.record(lambda: numbers * 2)
        replay()
        assert torch.equal(doubled, numbers * 2)


def on_fsdp(work: Callable[[FsdpEngine, PosMaskedLanguageModelling], list[T]]) -> list[T]:
    """Return the result of a function of an engine with one micro-batch in a step, with recorded operations."""
    with recorded_on_cpu():
        config = small_config(Layout(engine="fsdp", micro_size=4), training={"capture": "on"})
        engine, objective = make_engine(Layout(engine="fsdp", micro_size=4), config, data_group())
        assert isinstance(engine, FsdpEngine)
        engine.train(True)
        result = work(engine, objective)
        engine.close()
        return result


def norms_by_capture(engine: FsdpEngine, objective: PosMaskedLanguageModelling) -> list[float]:
    """Norms of the gradient of the summed losses: without graphs, while they are captured, and of two replays."""
    graphs, norms = engine.captured_graphs, []
    assert graphs is not None
    for capture in (False, True, False, False):
        with graphs.capturing() if capture else nullcontext():
            losses = task_losses(objective, engine, synthetic_batch(range(4)))
            engine.backward(losses.sums.sum(), last=True)
        norms.append(float(engine.check_gradients()))
        engine.discard_gradients()
    assert (graphs.replays, graphs.uncaptured) == (3, 1)
    return norms


def test_the_factor_of_fsdp_appears_once(two_ranks: Ranks) -> None:
    """FSDP2 averages over two ranks and multiplies the loss by 2; the balancer's pass does not."""
    for uncaptured, *captured in two_ranks(on_fsdp, norms_by_capture):
        assert uncaptured > 0 and captured == [uncaptured] * 3


def states_of_gathers(engine: FsdpEngine, objective: PosMaskedLanguageModelling) -> list[bool]:
    """Whether FSDP2 keeps an event of a gather after a forward pass, and then after it is told to forget it."""
    objective(engine, synthetic_batch(range(4)))
    shared = cast(FSDPModule, engine.module)._get_fsdp_state()._comm_ctx
    shared.all_gather_state = shared.all_gather_state or object()  # a GPU's event; a CPU has none
    kept = shared.all_gather_state is not None
    engine.forget_forward_events()
    return [kept, shared.all_gather_state is not None]


def test_fsdp_forgets_the_events_of_a_forward_graph(two_ranks: Ranks) -> None:
    assert two_ranks(on_fsdp, states_of_gathers) == [[True, False]] * 2


def test_a_hidden_input_is_seen() -> None:
    """The comparison of the parity tests finds an objective that reads what is not in the batch."""

    class Scaled(Squares):
        scale = torch.ones(())

        def __call__(self, forward: PlainEngine, batch: Batch) -> TaskLosses:
            losses = super().__call__(forward, batch)
            losses.sums = losses.sums * self.scale
            return losses

    objective = Scaled()
    eager, engine = engine_of("off"), captured_engine(objective, batch(0))
    objective.scale = torch.full((), 2.0)
    for each in (eager, engine):
        backward(each, objective, batch(1))
    with pytest.raises(AssertionError):
        assert_equal_gradients(engine, eager)


def test_losses_without_a_backward_pass_are_refused() -> None:
    objective = Squares()
    engine = captured_engine(objective, batch(0))
    task_losses(objective, engine, batch(1))
    with pytest.raises(EngineError, match="capture off"):
        task_losses(objective, engine, batch(2))


def test_choice() -> None:
    assert choose_capture("on", CPU, [], ALONE)[0] == "on"
    assert choose_capture("auto", CPU, [], ALONE)[0] == "off"
    assert choose_capture("off", CPU, [], ALONE)[0] == "off"
    value, why = choose_capture("auto", CPU, ["a reason", "another"], ALONE)
    assert value == "off" and "a reason" in why
    with pytest.raises(EngineError, match="a reason"):
        choose_capture("on", CPU, ["a reason"], ALONE)
    with pytest.raises(EngineError, match="META"):
        choose_capture("on", torch.device("meta"), [], ALONE)
