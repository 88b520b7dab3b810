"""`training.compile`: torch.compile of a model, block by block or whole, and the count of its graphs.
`training.activation_checkpointing`: recomputation of blocks in the backward pass.

`whole` compiles the objective with the model's forward pass on plain and ddp, from a batch's bytes to the tasks' sums.
FSDP2 and DeepSpeed add work to the forward pass, so there it is the model alone.

A run has few modes: with or without gradients, training or validation, with or without a hook's extras. Each mode needs
one graph for each form of module. A further graph is surplus: something changes that should be constant, such as a
shape, and each change stops the run for a compilation. Surplus graphs are counted and reported with the failed guard.

Graphs are static (`dynamic` False), except in the dimensions that `varying` names. With torch's default the second size
would give a dynamic graph. A resumed run can see another size second, and would then round differently.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._triton import has_triton
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from trp_scale.core.batch import Batch, TaskLosses
from trp_scale.core.run import Objective
from trp_scale.distributed.groups import Group

if TYPE_CHECKING:
    from trp_scale.engines.plain import PlainEngine

MOST_GRAPHS = 64
"""Recompilation limit of a code object. torch's default is 8; `mlo_mae_tiny` in bf16 needs 11."""

MOST_LENGTHS = 8
"""Maximum number of lengths (`sequence_length` of the module) of a form in a mode; graphs of more are surplus."""

NEEDLESS_WARNINGS = ("TensorFloat32 tensor cores", "\\s*Online softmax is disabled")
"""Patterns of torch's warnings that need no action by the user; training.tf32 decides the first."""


def choose_compile(
    device: torch.device, zero_stage: int | None, reasons: Sequence[str], group: Group
) -> tuple[Literal["none", "blocks"], str]:
    """Resolve `training.compile: auto`, equally on all ranks; return it with the reason for the log. Collective.

    It compiles blocks, not the whole model: gradients are then reduced during the backward pass, and the start compiles
    a few forms of blocks instead of all layers.

    Args:
        reasons: reasons against compilation, from the settings.
    """
    against = list(reasons)
    if zero_stage == 3:
        against.insert(0, "ZeRO stage 3 gathers weights outside of torch's compiler")
    if device.type != "cuda":
        against.insert(0, f"the device is a {device.type.upper()}, where compilation takes minutes")
    elif not has_triton():
        against.insert(0, "torch finds no Triton for this GPU")
    if why := first_reason(against, group):
        return "none", f"not compiled: {why}"
    return "blocks", "compiled block by block: the device is a GPU"


def first_reason(reasons: Sequence[str], group: Group) -> str:
    """Return the first reason of the first rank that has one, "" without reasons. Collective."""
    return next((first[0] for first in group.gather_objects(reasons[:1]) if first), "")


class Graphs:
    """Count of the graphs of an engine's model. With `forward` the losses are compiled with that engine's forward pass.

    Attributes:
        made: number of graphs.
        surplus: descriptions of the graphs that no mode needed, oldest first.
    """

    def __init__(self, forward: PlainEngine | None = None) -> None:
        self._forward = forward
        self._losses = torch.compile(compiled_losses, dynamic=False)
        self.made = 0
        self.surplus: list[str] = []
        # torch's compile ids of the graphs, by (type, form, mode), then by length
        self._graphs_of: dict[Any, dict[int | None, set[str]]] = {}
        self._noted = 0
        self._seconds_before = torch._dynamo.utils.calculate_time_spent()["total_wall_time"]
        self._found_before = found_in_cache()

    def __deepcopy__(self, memo: dict[int, Any]) -> Graphs:
        return self  # a copy of the model adds to the same count

    def losses(self, objective: Objective, forward: Callable[..., Any], batch: Batch) -> TaskLosses:
        """Compute the losses of a batch, compiled with the forward pass if engine and objective allow it."""
        if self._forward is None or not objective.in_a_graph:
            return objective(forward, batch)
        mark_varying(self._forward.module, **batch.fields)
        before = graphs_so_far() - self.made
        losses = self._losses(objective, self._forward, batch)
        if (
            new_graphs := graphs_so_far() - self.made - before
        ):  # without the graphs of a forward pass before a graph break
            module, autocasts = self._forward.module, self._forward.autocasts
            self.note(new_graphs, module, graph_key(module, type(objective), autocasts, batch.fields, batch.extras))
        return losses

    def note(self, number: int, module: nn.Module, mode: Any, length: int | None = None) -> None:
        """Count `number` graphs of a call of `module` in a mode (`graph_key`), for a length (`sequence_length`)."""
        self.made += number
        form = tuple((name, tuple(parameter.shape), parameter.dtype) for name, parameter in module.named_parameters())
        graphs_of_lengths = self._graphs_of.setdefault((type(module), form, mode), {})
        known = graphs_of_lengths.setdefault(length, set())
        if known or len(graphs_of_lengths) > MOST_LENGTHS:
            of_all = set[str]().union(*graphs_of_lengths.values())
            guards = "; ".join(failed_guards(known or of_all)) or "torch names no guard"
            self.surplus.append(f"{type(module).__name__} was compiled again for a mode that has a graph: {guards}")
        records = torch._dynamo.utils.get_compilation_metrics()
        known.update(str(parameter.compile_id) for parameter in records if (parameter.end_time_us or 0) > self._noted)
        self._noted = max((parameter.end_time_us or 0 for parameter in records), default=0)

    def seconds(self) -> float:
        """Return the seconds of compilation in this process since the engine was built."""
        return float(torch._dynamo.utils.calculate_time_spent()["total_wall_time"] - self._seconds_before)

    def found(self) -> int:
        """Return the number of graphs from the cache directory."""
        return found_in_cache() - self._found_before


def compiled_losses(objective: Objective, forward: Callable[..., Any], batch: Batch) -> TaskLosses:
    return objective(forward, batch)


def graphs_so_far() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def found_in_cache() -> int:
    """Return the number of graphs (with their backward graphs) from torch's cache directory in this process."""
    return int(torch._dynamo.utils.counters["aot_autograd"]["autograd_cache_hit"])


def failed_guards(graphs: set[str]) -> list[str]:
    """Return the last failed guard of each of these graphs; guards of other modes fail as intended."""
    last = {}
    for failures in torch._dynamo.utils.guard_failures.values():
        for failure in failures:
            number, _, guard = str(failure).partition(": ")
            last[number] = guard
    return [last[number] for number in sorted(graphs & last.keys())]


def cache_directory() -> str:
    """Return torch's cache directory of graphs: TORCHINDUCTOR_CACHE_DIR, or one under the system's temporary
    directory."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir  # slow import, only with compilation

    return cache_dir()


def graph_key(module: nn.Module, *arguments: Any) -> Any:
    """Return the mode of a call: gradients, training, autocast, and the kinds of the arguments, without sizes and
    numbers."""
    autocast = torch.get_autocast_dtype("cuda"), torch.is_autocast_enabled("cuda"), torch.is_autocast_enabled("cpu")
    return (torch.is_grad_enabled(), module.training, autocast, kind(arguments))


def kind(value: Any) -> Any:
    """Return the kind of a value, without sizes and numbers."""
    if isinstance(value, Tensor):
        return (value.dtype, value.dim(), value.requires_grad)
    if isinstance(value, Mapping):
        return tuple((name, kind(entry)) for name, entry in value.items())
    if isinstance(value, Sequence) and not isinstance(value, str):
        return tuple(kind(entry) for entry in value)
    return value if isinstance(value, (bool, str)) else type(value)


def mark_varying(module: nn.Module, *arguments: Any, **named: Any) -> None:
    """Mark the first dimension of the arguments that the module's method `varying` returns as dynamic: one graph then
    serves all lengths.

    The size hint is the length that `varying` returns, not the first length seen: Inductor splits its sums by the hint,
    so a resumed run would round differently. The mark is an attribute of a tensor and is lost on views (FSDP2 passes
    views to a block), so it is set where the graph starts.
    """
    varying = getattr(module, "varying", None)
    tensors, length = varying(*arguments, **named) if varying is not None else ((), 0)
    for tensor in tensors:
        torch._dynamo.maybe_mark_dynamic(tensor, 0)
        tensor._dynamo_hint_overrides = {0: length}  # mark_dynamic's hint_override, which maybe_mark_dynamic lacks


@torch._dynamo.disable  # type: ignore[untyped-decorator]
def mark_block(block: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
    """Mark the arguments of a block where an engine's hooks on it end the graph of the whole model (`mark_varying`)."""
    mark_varying(block, *arguments, **named)


class Compiled:
    """Compiled forward pass of a module, which counts its graphs in `graphs`. A copy of the module copies it too."""

    def __init__(self, module: nn.Module, graphs: Graphs) -> None:
        self.module, self.graphs = module, graphs
        self.function = torch.compile(type(module).forward, dynamic=False)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        if torch.compiler.is_compiling():  # inside a larger graph
            return self.function(self.module, *arguments, **named)
        mark_varying(self.module, *arguments, **named)
        before = graphs_so_far()
        output = self.function(self.module, *arguments, **named)
        if new_graphs := graphs_so_far() - before:
            length_of = getattr(self.module, "sequence_length", None)
            length = None if length_of is None else length_of(*arguments, **named)
            self.graphs.note(new_graphs, self.module, graph_key(self.module, arguments, named), length)
        return output


def compile_model(module: nn.Module, how: str, forward: PlainEngine | None = None) -> Graphs | None:
    """Compile the forward pass of the module, or of each of `module.layers`, in place. Hooks of an engine on a block,
    such as gathering its weights, stay outside.

    Args:
        how: training.compile: none, blocks or whole; an unresolved auto compiles nothing.
        forward: engine that adds nothing to the forward pass: `whole` then includes the losses.

    Returns:
        Count of the graphs; None without compilation.
    """
    if how in ("none", "auto"):
        return None
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, MOST_GRAPHS)
    for text in NEEDLESS_WARNINGS:
        warnings.filterwarnings("ignore", text, UserWarning)
    graphs = Graphs(forward if how == "whole" else None)
    for part in [module] if how == "whole" else module.layers:  # type: ignore[union-attr]
        part.forward = Compiled(part, graphs)
    return graphs


KEPT = ("mm", "addmm", "bmm", "baddbmm")
"""Operations whose results selective checkpointing keeps, in addition to attention: most of a block's time."""


def keeps(context: Any, operation: Any, *arguments: Any, **named: Any) -> CheckpointPolicy:
    """Return whether the result of an operation is kept for the backward pass or recomputed."""
    name = operation._opname
    kept = name in KEPT or "attention" in name
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


class Checkpointed:
    """Forward pass of a block that the backward pass recomputes with the same dropout. `selective` also keeps expensive
    results."""

    def __init__(self, forward: Callable[..., Any], *, selective: bool) -> None:
        self.forward = forward
        self.options: dict[str, Any] = (
            {"context_fn": partial(create_selective_checkpoint_contexts, keeps)} if selective else {}
        )

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.forward(*arguments, **named)
        return checkpoint(self.forward, *arguments, use_reentrant=False, **self.options, **named)


def checkpoint_blocks(module: nn.Module, how: str) -> None:
    """Apply training.activation_checkpointing to each of `module.layers`, in place, after compile_model: compiled
    blocks are recomputed."""
    for block in module.layers if how != "none" else ():  # type: ignore[union-attr]
        block.forward = Checkpointed(block.forward, selective=how == "selective")
