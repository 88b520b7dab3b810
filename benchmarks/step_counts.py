"""What a training step asks of its device: operations, bytes moved, bytes saved for the backward pass, FLOPs.

    python benchmarks/step_counts.py [--models bert_base_128 mae_vit_b ...] [--precision fp32|bf16]
        [--weights fp32|bf16] [--times 8] [--checkpointing full] [--fused] [--adversary none]
    python benchmarks/step_counts.py --graphs none blocks model whole

The real loop makes one step of one micro-batch on fake tensors, which have shapes and no content, so that a laptop
counts a large model in seconds. Counted are operations that launch work: no views, no empty tensors; an operation over
a list of tensors (foreach, fused AdamW) is one. Moved are the bytes of what an operation reads and writes, as if no
operation were fused with another. Saved are the bytes that the forward pass keeps for the backward pass, parameters
left out. Operations are those that torch has for a CPU; a GPU's autocast puts its casts elsewhere. Attention is a
GPU's: in bf16, which the models widen for a CPU, and without dropout of its own, which a GPU's kernels have inside.

--fused counts as if all operations between two others that stand alone (matrix products, attention, sorting, sums to
places that an index says) were one kernel, which reads what it needs once and writes only what is still needed after
it: what torch.compile could do at best, saving what eager mode saves.

--graphs counts what torch.compile makes of a step with each `training.compile`: graphs, those that no mode needed, and
the operations of a forward pass, from the loader's batch to the tasks' sums, in graphs and outside. The real loop makes
three steps of a tiny recipe's model, traced by aot_eager, which makes the graphs of the default backend in seconds. A
graph's operations become few kernels; each outside is one of its own. `model` is `whole` as FSDP2 and DeepSpeed have
it: without the losses.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import torch
import tyro
from torch import Tensor, fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.steps import Precision, Workload, endless, trainer_of
from benchmarks.workloads import MM_MAE, EncoderSize, build_workload, image_recipe, text_config
from trp_scale.config import PretrainConfig
from trp_scale.config.images import ImagePretrainConfig
from trp_scale.config.loader import load_recipe
from trp_scale.config.registry import make_settings
from trp_scale.core.batch import Batch, TaskLosses
from trp_scale.core.hooks import StepContext
from trp_scale.engines.plain import PlainEngine
from trp_scale.models.counting import Operation, RecordsOperations, gpu_attention, launches, replace_parameters, storage
from trp_scale.pretraining.mae.settings import MaeConfig
from trp_scale.pretraining.pos_bert.settings import PosBertModelConfig
from trp_scale.training.decisions import Agreed

CPU = torch.device("cpu")
PHASES = ("forward", "backward", "update")


@dataclass(frozen=True, kw_only=True)
class Model:
    """A recipe's model with the rows of a micro-batch. Text has a length; images an encoder's size."""

    recipe: str
    rows: int
    length: int = 0
    size: EncoderSize = "base"


MODELS = {
    "bert_base_128": Model(recipe="pos_bert_base", rows=32, length=128),
    "bert_base_512": Model(recipe="pos_bert_base", rows=32, length=512),
    "bert_large_128": Model(recipe="pos_bert_large", rows=16, length=128),
    "bert_large_512": Model(recipe="pos_bert_large", rows=16, length=512),
    "mae_vit_b": Model(recipe="mae_vit_b", rows=64),
    "mae_vit_l": Model(recipe="mae_vit_l", rows=64, size="large"),
    "mm_mae_vit_b": Model(recipe=MM_MAE, rows=64),
    "mae_plus_vit_b": Model(recipe="mae_plus_vit_b", rows=32),
    "adpe_vit_b": Model(recipe="adpe_vit_b", rows=32),
    "adpe_vit_l": Model(recipe="adpe_vit_l", rows=16, size="large"),
}
"""Rows: of the micro-batches that recipes stated before `batch.micro_size: auto`."""
TINY = ("pos_bert_tiny", "mae_plus_tiny", "adpe_tiny", "mm_mae_tiny")
"""Recipes of --graphs; mae_plus_tiny is adpe_tiny without its adversary."""


@dataclass(kw_only=True)
class Options:
    """What to count."""

    models: list[str] = field(default_factory=lambda: list(MODELS))
    """Of MODELS."""
    rows: int = 0
    """Of the micro-batch; 0 = the model's."""
    times: int = 1
    """The model's rows so many times."""
    precision: Precision = "bf16"
    """Of forward and backward."""
    weights: Literal["fp32", "bf16"] = "fp32"
    """What they read."""
    checkpointing: Literal["none", "selective", "full"] = "none"
    """training.activation_checkpointing. What selective keeps for itself is not among the bytes saved."""
    fused: bool = False
    """Count as if neighbouring operations were one kernel."""
    adversary: str = ""
    """Of image models, by its kind, in place of the recipe's; the index of relative positions is then relaxed."""
    graphs: tuple[Literal["none", "blocks", "model", "whole"], ...] = ()
    """Count the graphs of tiny recipes with these values of training.compile (model: whole without the losses)."""
    json: bool = False
    """One JSON object in place of a table; tests/unit/benchmarks/step_counts.json is one of four models."""


@dataclass(kw_only=True)
class Counts:
    """Of a step. Attributes: operations, moved, flops: by phase. saved: bytes."""

    operations: dict[str, int]
    moved: dict[str, int]
    flops: int
    saved: int = 0


def count_recorded(recorded: list[Operation]) -> Counts:
    """Sum recorded operations by phase."""
    phases = {phase: [operation for operation in recorded if operation.phase == phase] for phase in PHASES}
    return Counts(
        operations={phase: len(operations) for phase, operations in phases.items()},
        moved={phase: sum(operation.moved for operation in operations) for phase, operations in phases.items()},
        flops=sum(operation.flops for operation in recorded),
    )


class InPlace(PlainEngine):
    """The plain engine of a model that is where it trains: torch cannot move fake parameters."""

    def place(self, module: nn.Module) -> nn.Module:
        return module


class FakeTraining:
    """One step of a workload on fake tensors."""

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)

    def counts(self, *, fused: bool = False) -> Counts:
        """Of a step in one micro-batch."""
        work = self.workload
        with self.mode:
            replace_parameters(work.module, self.fake)
            trainer = trainer_of(InPlace(work.module, work.config, device=CPU), work)
            trainer.agreement.reach = agreed  # type: ignore[method-assign, assignment]
            window = [self.fake_batch(micro) for micro in trainer.source.next_window()]
            trainer.source.next_window = lambda: window  # type: ignore[method-assign]
            engine, counter = trainer.engine, RecordsOperations(fused=fused)
            own = {storage(tensor) for tensor in work.module.state_dict(keep_vars=True).values()}
            kept: dict[int, Tensor] = {}

            def keep(tensor: Tensor) -> Tensor:
                if counter.phase == "forward" and storage(tensor) not in own:
                    kept[storage(tensor)] = tensor
                return tensor

            engine.create_optimizer_state()
            with (
                gpu_attention(),
                entering(engine, "backward", counter, "backward"),
                entering(engine, "check_gradients", counter, "update"),
                saved_tensors_hooks(keep, lambda tensor: tensor),
                counter,
            ):
                trainer.train_step()
            saved = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
            return replace(count_recorded(counter.recorded), saved=saved)

    def fake(self, tensor: Tensor) -> Tensor:
        return self.mode.from_tensor(tensor, static_shapes=True)

    def fake_batch(self, batch: Batch) -> Batch:
        batch.fields = {name: self.fake(tensor) for name, tensor in batch.fields.items()}
        return batch


def agreed(counts: Tensor, window: list[Batch], *, stop: bool, written: bool = False) -> Agreed:
    """One rank agrees with itself; fake tensors have no content to read."""
    return Agreed(counts=counts, stop=stop, new_corrupt={})


@contextmanager
def entering(engine: Any, name: str, counter: RecordsOperations, phase: str) -> Iterator[None]:
    """Calls of the engine's method `name` begin a phase."""
    method: Callable[..., Any] = getattr(engine, name)

    def entered(*arguments: Any, **named: Any) -> Any:
        counter.phase = phase
        return method(*arguments, **named)

    setattr(engine, name, entered)
    try:
        yield
    finally:
        delattr(engine, name)


def workload_of(model: Model, precision: Precision, rows: int = 0, adversary: str = "") -> Workload:
    """The recipe's model, objective, balancer and adversary, or another one, over random rows of its shapes."""
    rows = rows or model.rows
    if model.length:
        recipe = load_recipe(model.recipe)
        assert isinstance(recipe.model, PosBertModelConfig)
        config = text_config(recipe.model, rows=rows, precision=precision, balancer=recipe.balancer)
        return build_workload(config, model.length, round(0.15 * model.length))
    images = endless(image_recipe(model.recipe, ImagePretrainConfig, model.size), rows, precision=precision)
    if adversary:
        assert isinstance(images, MaeConfig)
        images.adversary, images.vision.index = make_settings("adversary", adversary), "relaxed"
    return build_workload(images)


def counted(
    name: str,
    precision: Precision = "bf16",
    rows: int = 0,
    weights: Literal["fp32", "bf16"] = "fp32",
    *,
    checkpointing: Literal["none", "selective", "full"] = "none",
    fused: bool = False,
    adversary: str = "",
) -> Counts:
    """Of a step of MODELS' `name`."""
    workload = workload_of(MODELS[name], precision, rows, adversary)
    workload.config.training.weights = weights
    workload.config.training.activation_checkpointing = checkpointing
    return FakeTraining(workload).counts(fused=fused)


@dataclass(frozen=True, kw_only=True)
class GraphCounts:
    """Counts of a run. Attributes: graphs, surplus: made in all, and those that no mode needed. inside, outside:
    operations of a forward pass in graphs and outside."""

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


def tiny_workload(name: str) -> Workload:
    """The recipe's model, objective, balancer and adversary over random rows of its shapes."""
    config = load_recipe(name.replace("mae_plus", "adpe"))
    assert isinstance(config, PretrainConfig)
    if name == "mae_plus_tiny":
        config.adversary = make_settings("adversary", "none")  # type: ignore[attr-defined]
    return build_workload(endless(config, 4))


def counted_graphs(workload: Workload, how: str) -> GraphCounts:
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
    return GraphCounts(
        graphs=0 if graphs is None else graphs.made,
        surplus=0 if graphs is None else len(graphs.surplus),
        inside=counter.inside,
        outside=counter.outside,
    )


def print_graphs(options: Options) -> None:
    """Print a row for each tiny recipe and value of training.compile."""
    print("| model | training.compile | graphs | not needed | operations of a forward pass in graphs, outside |")
    print("| --- | --- | --- | --- | --- |")
    for name in TINY:
        for how in options.graphs:
            counts = counted_graphs(tiny_workload(name), how)
            cells = (name, how, counts.graphs, counts.surplus, f"{counts.inside}, {counts.outside}")
            print(f"| {' | '.join(map(str, cells))} |", flush=True)


def main(options: Options) -> None:
    """Count and print."""
    if options.graphs:
        print_graphs(options)
        return
    rows = {name: options.rows or MODELS[name].rows * options.times for name in options.models}
    how: Any = {
        name: getattr(options, name) for name in ("precision", "weights", "checkpointing", "fused", "adversary")
    }
    tables = {name: counted(name, rows=rows[name], **how) for name in options.models}
    if options.json:
        kept = ("operations", "moved", "saved", "flops")
        print(json.dumps({name: {each: getattr(counts, each) for each in kept} for name, counts in tables.items()}))
        return
    print("| model | rows | operations: forward, backward, update | GB moved: the same | GB saved | GFLOP |")
    print("| --- | --- | --- | --- | --- | --- |")
    for name, counts in tables.items():
        operations = ", ".join(str(counts.operations[phase]) for phase in PHASES)
        moved = ", ".join(f"{counts.moved[phase] / 1e9:.2f}" for phase in PHASES)
        print(
            f"| {name} | {rows[name]} | {operations} | {moved} | {counts.saved / 1e9:.2f} | {counts.flops / 1e9:,.0f} |"
        )


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
