"""What a training step asks of its device: operations, bytes moved, bytes saved for the backward pass, FLOPs.

    python benchmarks/step_counts.py [--models bert_base_128 mae_vit_b ...] [--precision fp32|bf16]
        [--weights fp32|bf16] [--times 8] [--checkpointing full] [--fused] [--adversary none]

The real loop makes one step of one micro-batch on fake tensors, which have shapes and no content, so that a laptop
counts a large model in seconds. Counted are operations that launch work: no views, no empty tensors; an operation over
a list of tensors (foreach, fused AdamW) is one. Moved are the bytes of what an operation reads and writes, as if no
operation were fused with another. Saved are the bytes that the forward pass keeps for the backward pass, parameters
left out. Operations are those that torch has for a CPU; a GPU's autocast puts its casts elsewhere. Attention is a
GPU's: in bf16, which the models widen for a CPU, and without dropout of its own, which a GPU's kernels have inside.

--fused counts as if all operations between two others that stand alone (matrix products, attention, sorting, sums to
places that an index says) were one kernel, which reads what it needs once and writes only what is still needed after
it: what torch.compile could do at best, saving what eager mode saves.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
import tyro
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.gpu_setting import text_config
from benchmarks.steps import Precision, Workload, endless, trainer_of
from benchmarks.workloads import MM_MAE, EncoderSize, build_workload, image_recipe, text_workload
from trp_scale.config import TextModelConfig
from trp_scale.config.images import ImagePretrainConfig
from trp_scale.config.loader import load_recipe
from trp_scale.config.registry import make_settings
from trp_scale.core.batch import Batch
from trp_scale.engines.plain import PlainEngine
from trp_scale.models.counting import RecordsOperations, attention_of_a_gpu, replace_parameters, storage
from trp_scale.pretraining.mae.settings import MaeConfig
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
    json: bool = False
    """One JSON object in place of a table; tests/unit/benchmarks/step_counts.json is one of four models."""


@dataclass(kw_only=True)
class Counts:
    """Of a step. Attributes: operations, moved, flops: by phase. saved: bytes. names: of the operations."""

    operations: dict[str, int] = field(default_factory=lambda: dict.fromkeys(PHASES, 0))
    moved: dict[str, int] = field(default_factory=lambda: dict.fromkeys(PHASES, 0))
    flops: int = 0
    saved: int = 0
    names: set[str] = field(default_factory=set)


class CountsOperations(RecordsOperations):  # type: ignore[no-untyped-call]
    """Adds to `counts` what is asked of the device while it is active."""

    def __init__(self, *, fused: bool = False) -> None:
        super().__init__(fused=fused)
        self.counts = Counts()

    def add(self, name: str, moved: int, flops: int) -> None:
        self.counts.operations[self.phase] += 1
        self.counts.moved[self.phase] += moved
        self.counts.flops += flops
        self.counts.names.add(name)


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
            engine, counter = trainer.engine, CountsOperations(fused=fused)
            own = {storage(tensor) for tensor in work.module.state_dict(keep_vars=True).values()}
            kept: dict[int, Tensor] = {}

            def keep(tensor: Tensor) -> Tensor:
                if counter.phase == "forward" and storage(tensor) not in own:
                    kept[storage(tensor)] = tensor
                return tensor

            engine.create_optimizer_state()
            with (
                attention_of_a_gpu(),
                entering(engine, "backward", counter, "backward"),
                entering(engine, "check_gradients", counter, "update"),
                saved_tensors_hooks(keep, lambda tensor: tensor),
                counter,
            ):
                trainer.train_step()
            counter.counts.saved = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
            return counter.counts

    def fake(self, tensor: Tensor) -> Tensor:
        return self.mode.from_tensor(tensor, static_shapes=True)

    def fake_batch(self, batch: Batch) -> Batch:
        batch.fields = {name: self.fake(tensor) for name, tensor in batch.fields.items()}
        return batch


def agreed(counts: Tensor, window: list[Batch], *, stop: bool, written: bool = False) -> Agreed:
    """One rank agrees with itself; fake tensors have no content to read."""
    return Agreed(counts=counts, stop=stop, new_corrupt={})


@contextmanager
def entering(engine: Any, name: str, counter: CountsOperations, phase: str) -> Iterator[None]:
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
        assert isinstance(recipe.model, TextModelConfig)
        config = text_config(recipe.model, rows=rows, precision=precision, balancer=recipe.balancer)
        return text_workload(config, model.length, round(0.15 * model.length))
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


def main(options: Options) -> None:
    """Count and print."""
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
