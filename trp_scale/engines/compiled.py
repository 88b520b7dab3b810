"""`training.compile`: what torch.compile makes of a model, block by block or whole, and how many graphs that took.

Whole is the objective with the model's forward pass, from a batch's bytes to the tasks' sums, where the engine hangs
nothing on that pass: plain and ddp. FSDP2 and DeepSpeed compile the model alone.

A run has few modes: with gradients or without, in training or in validation, with what a hook adds or without. Each
needs one graph of each form of what is compiled. A graph more than that means that something changes which was meant
to stay, such as a shape: the run stands still while the graph is made, and again at the next change. Such graphs are
counted, and named with the guard that failed.

Each size has a graph of its own (`dynamic` False), but for the dimensions that `varying` names. By default torch makes
one for all sizes when a second comes. Which comes second differs in a run that is resumed, and so would its rounding.

`training.activation_checkpointing`: what a block keeps for its backward pass, which makes the rest once more.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn
from torch.utils._triton import has_triton
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from trp_scale.core.batch import Batch, TaskLosses
from trp_scale.core.objective import Objective
from trp_scale.distributed.groups import Group

Choice = tuple[Literal["none", "blocks"], str]

MOST_GRAPHS = 64
"""Of one piece of code. torch's own limit is 8; `mlo_mae_tiny` in bf16 needs 11."""

MOST_LENGTHS = 8
"""Of a form in a mode. A module may have a method `sequence_length`; one length more than these is surplus."""

NEEDLESS_WARNINGS = ("TensorFloat32 tensor cores", "\\s*Online softmax is disabled")
"""How two of torch's warnings begin, as patterns. Neither asks anything of a user: training.tf32 decides the first."""


def choose(device: torch.device, zero_stage: int | None, reasons: Sequence[str], group: Group) -> Choice:
    """Resolve `training.compile: auto` for this run, equal on all ranks, which all call this; and the reason, for the
    log.

    Blocks rather than the whole model: on several ranks their gradients travel while the backward pass runs, and a
    start takes the time of a few forms of blocks, not of all layers.

    Args:
        reasons: against it, from the settings.
    """
    against = list(reasons)
    if zero_stage == 3:
        against.insert(0, "ZeRO stage 3 gathers weights where torch's compiler cannot see it")
    if device.type != "cuda":
        against.insert(0, f"the device is a {device.type.upper()}, for which compiling takes minutes")
    elif not has_triton():
        against.insert(0, "torch finds no Triton for this GPU")
    difference = next((first for first in group.gather_objects(against[:1]) if first), None)
    if difference is not None:
        return "none", f"not compiled: {difference[0]}"
    return "blocks", "compiled block by block: the device is a GPU, and nothing speaks against it"


class PlainForward(Protocol):
    """An engine whose forward pass is the module's, with autocast around it. Attributes: autocasts: now."""

    module: nn.Module

    @property
    def autocasts(self) -> bool: ...

    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...


class Graphs:
    """Count of the graphs that the calls of one engine's model have led to. With `forward`, losses are compiled with
    that engine's forward pass.

    Attributes:
        made: how many.
        surplus: those that no mode of the run needed, in words, oldest first.
    """

    def __init__(self, forward: PlainForward | None = None) -> None:
        self._forward = forward
        self._losses = torch.compile(compiled_losses, dynamic=False)
        self.made = 0
        self.surplus: list[str] = []
        # torch's numbers of the graphs, by what was called and how, then by its length
        self._graphs_of: dict[Any, dict[int | None, set[str]]] = {}
        self._noted = 0
        self._seconds_before = torch._dynamo.utils.calculate_time_spent()["total_wall_time"]
        self._found_before = found_in_cache()

    def __deepcopy__(self, memo: dict[int, Any]) -> Graphs:
        return self  # a copy of the model adds to the same count

    def losses(self, objective: Objective, forward: Callable[..., Any], batch: Batch) -> TaskLosses:
        """The objective's losses of a batch; where they are no part of a graph the objective computes them itself, and
        the forward pass alone may be one."""
        if self._forward is None or not objective.in_a_graph:
            return objective(forward, batch)
        mark_varying(self._forward.module, **batch.fields)
        before = graphs_so_far() - self.made
        losses = self._losses(objective, self._forward, batch)
        if (
            new_graphs := graphs_so_far() - self.made - before
        ):  # without those of a forward pass that a graph broke before
            module, autocasts = self._forward.module, self._forward.autocasts
            self.note(new_graphs, module, graph_key(module, type(objective), autocasts, batch.fields, batch.extras))
        return losses

    def note(self, number: int, module: nn.Module, mode: Any, length: int | None = None) -> None:
        """Count `number` graphs of a call of `module` in a mode (`mode_of`); each length, by the module's
        `sequence_length`, has a graph of its own."""
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
        """Spent on compiling, in this process since the engine was made."""
        return float(torch._dynamo.utils.calculate_time_spent()["total_wall_time"] - self._seconds_before)

    def found(self) -> int:
        """Graphs that were found in the cache directory."""
        return found_in_cache() - self._found_before


def compiled_losses(objective: Objective, forward: Callable[..., Any], batch: Batch) -> TaskLosses:
    """Compute the compiled losses."""
    return objective(forward, batch)


def graphs_so_far() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def found_in_cache() -> int:
    """Graphs that torch has found in its cache directory in this process, with their backward graphs."""
    return int(torch._dynamo.utils.counters["aot_autograd"]["autograd_cache_hit"])


def failed_guards(graphs: set[str]) -> list[str]:
    """Return the last failed guard of each of these graphs, by torch's numbers. Graphs of other modes fail too, as they
    should."""
    last = {}
    for failures in torch._dynamo.utils.guard_failures.values():
        for failure in failures:
            number, _, guard = str(failure).partition(": ")
            last[number] = guard
    return [last[number] for number in sorted(graphs & last.keys())]


def cache_directory() -> str:
    """Return torch's cache directory of graphs: TORCHINDUCTOR_CACHE_DIR, or one under the system's temporary
    directory."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir  # not before something is compiled

    return cache_dir()


def graph_key(module: nn.Module, *arguments: Any) -> Any:
    """Return the key of a call that decides which graph it gets: whether gradients are wanted, whether the module
    trains, autocast, and the kinds of the arguments. Sizes and numbers are not part of it."""
    autocast = torch.get_autocast_dtype("cuda"), torch.is_autocast_enabled("cuda"), torch.is_autocast_enabled("cpu")
    return (torch.is_grad_enabled(), module.training, autocast, kind(arguments))


def kind(value: Any) -> Any:
    """Return the kind of a value, without its size and number."""
    if isinstance(value, Tensor):
        return (value.dtype, value.dim(), value.requires_grad)
    if isinstance(value, Mapping):
        return tuple((name, kind(entry)) for name, entry in value.items())
    if isinstance(value, Sequence) and not isinstance(value, str):
        return tuple(kind(entry) for entry in value)
    return value if isinstance(value, (bool, str)) else type(value)


def mark_varying(module: nn.Module, *arguments: Any, **named: Any) -> None:
    """Tell torch which arguments of a module change their first dimension from call to call, where the module has a
    method `varying` that names them. One graph then serves all lengths; else the second length would need another.

    The graph is made for the length that `varying` gives beside them, and not for the one that happens to come first:
    Inductor cuts its sums by it, so that a run that is resumed would round otherwise than one that never stopped.

    The mark is an attribute of a tensor, which does not pass on to what is made of it: FSDP2 gives a block its inputs
    as views. So it is made where the graph begins.
    """
    varying = getattr(module, "varying", None)
    tensors, length = varying(*arguments, **named) if varying is not None else ((), 0)
    for tensor in tensors:
        torch._dynamo.maybe_mark_dynamic(tensor, 0)
        tensor._dynamo_hint_overrides = {0: length}  # mark_dynamic's hint_override, which maybe_mark_dynamic lacks


class Compiled:
    """The forward pass of a module, as torch.compile makes it; it counts in `graphs` which call has led to graphs. A
    copy of the module takes a copy of this with it."""

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


def compile_model(module: nn.Module, how: str, forward: PlainForward | None = None) -> Graphs | None:
    """Compile the forward pass of the module, or of each of `module.layers`, in place. What an engine hangs on a block,
    such as gathering its weights, stays outside.

    Args:
        how: training.compile: none, blocks or whole; auto is for the run to decide (`choose`), and none here.
        forward: the engine, where it hangs nothing on the forward pass: whole then has the losses in it.

    Returns:
        a count of the graphs; None where nothing is compiled.
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
"""Operations whose results selective checkpointing keeps, with attention: they take most of a block's time."""


def keeps(context: Any, operation: Any, *arguments: Any, **named: Any) -> CheckpointPolicy:
    """Whether the result of an operation is kept for the backward pass, or made again there."""
    name = operation._opname
    kept = name in KEPT or "attention" in name
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


class Checkpointed:
    """The forward pass of a block, computed again in the backward pass with the same dropout. `selective` keeps what is
    expensive to compute, not the block's inputs alone."""

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
    """Apply training.activation_checkpointing to each of `module.layers`, in place; after compile_model, so that the
    compiled blocks are the ones computed again."""
    for block in module.layers if how != "none" else ():  # type: ignore[union-attr]
        block.forward = Checkpointed(block.forward, selective=how == "selective")
