"""What torch.compile makes of a training step: graphs, those that no mode needed, and what stays outside of them.

    python benchmarks/graphs.py [--models pos_bert_tiny mae_plus_tiny ...] [--how none blocks model whole]

The real loop makes three steps of a tiny recipe's model over random rows, on one process, traced by aot_eager: it makes
the graphs that the default backend would compile, in seconds. Operations are those of one micro-batch's forward pass in
the third step, from what the loader gives to the tasks' sums: what launches work on a device, no views, no empty
tensors. A graph's become few kernels; each that is outside is one of its own. `model` is `whole` as FSDP2 and DeepSpeed
have it: without the losses.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import tyro
from torch import Tensor, fx
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.step_counts import CPU
from benchmarks.steps import Workload, endless, trainer_of
from benchmarks.workloads import build_workload
from trp_scale.config import PretrainConfig
from trp_scale.config.loader import load_recipe
from trp_scale.config.registry import make_settings
from trp_scale.core.batch import Batch, TaskLosses
from trp_scale.core.hooks import StepContext
from trp_scale.engines.plain import PlainEngine
from trp_scale.models.counting import launches

ROWS = 4
MODELS = ("pos_bert_tiny", "mae_plus_tiny", "adpe_tiny", "mm_mae_tiny")
"""Recipes; mae_plus_tiny is adpe_tiny without its adversary."""


@dataclass(kw_only=True)
class Options:
    """What to count."""

    models: list[str] = field(default_factory=lambda: list(MODELS))
    """Of MODELS."""
    how: list[str] = field(default_factory=lambda: ["none", "blocks", "model", "whole"])
    """training.compile, or model."""


@dataclass(frozen=True, kw_only=True)
class Counts:
    """Of a run. Attributes: graphs, surplus: made in all, and those that no mode needed. inside, outside: operations of
    a forward pass in graphs and beside them."""

    graphs: int
    surplus: int
    inside: int
    outside: int


class SplitByGraph(TorchDispatchMode):
    """Counts operations that launch work while it is active, in the graphs of `backend` and outside."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.inside = self.outside = 0
        self._in_graph = False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """So that compiled functions run while this is active."""
        return True

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        result = function(*arguments, **(named or {}))
        if launches(function, [each for each in tree_leaves(result) if isinstance(each, Tensor)]):
            self.inside += self._in_graph
            self.outside += not self._in_graph
        return result

    def backend(self, graph: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        """For torch.compile: aot_eager whose graphs are known."""

        def compiled(traced: fx.GraphModule, inputs: list[Any]) -> Any:
            def run(*arguments: Any) -> Any:
                self._in_graph = True
                try:
                    return traced(*arguments)
                finally:
                    self._in_graph = False

            return make_boxed_func(run)

        made: Callable[..., Any] = aot_autograd(fw_compiler=compiled)(graph, inputs)
        return made


@contextmanager
def forwards_counted(counter: SplitByGraph) -> Iterator[None]:
    """Operations of the steps' forward passes go to the counter; graphs are made by its backend."""
    losses_of = StepContext.compute_losses

    def counted(ctx: StepContext, micro: Batch) -> TaskLosses:
        with counter:
            return losses_of(ctx, micro)

    with patch.object(StepContext, "compute_losses", counted):
        yield


class ModelAlone(PlainEngine):
    """The plain engine, taken for one that hangs something on its forward pass."""

    plain_forward = False


def workload_of(name: str) -> Workload:
    """The recipe's model, objective, balancer and adversary over random rows of its shapes."""
    config = load_recipe(name.replace("mae_plus", "adpe"))
    assert isinstance(config, PretrainConfig)
    if name == "mae_plus_tiny":
        config.adversary = make_settings("adversary", "none")  # type: ignore[attr-defined]
    return build_workload(endless(config, ROWS))


def counted(workload: Workload, how: str) -> Counts:
    """Of three steps; the operations are the third's."""
    workload.config.training.compile = "whole" if how == "model" else how  # type: ignore[assignment]
    kind = ModelAlone if how == "model" else PlainEngine
    counter = SplitByGraph()
    torch._dynamo.reset()
    with patch.object(torch, "compile", partial(torch.compile, backend=counter.backend)):
        engine = kind(workload.module, workload.config, device=CPU)
        trainer = trainer_of(engine, workload)
        for _ in range(2):
            trainer.train_step()
        with forwards_counted(counter):
            trainer.train_step()
    graphs = engine.graphs
    return Counts(
        graphs=0 if graphs is None else graphs.made,
        surplus=0 if graphs is None else len(graphs.surplus),
        inside=counter.inside,
        outside=counter.outside,
    )


def main(options: Options) -> None:
    """Count and print."""
    print("| model | training.compile | graphs | not needed | operations of a forward pass in graphs, outside |")
    print("| --- | --- | --- | --- | --- |")
    for name in options.models:
        for how in options.how:
            counts = counted(workload_of(name), how)
            cells = (name, how, counts.graphs, counts.surplus, f"{counts.inside}, {counts.outside}")
            print(f"| {' | '.join(map(str, cells))} |", flush=True)


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
