"""Counter of operations, their memory traffic and FLOPs, and of activation memory, for throughput, automatic
micro-batches and the planner.

Tensors may be real, fake, or on the meta device. Views and empty tensors are not counted; an operation over a list of
tensors (foreach, fused AdamW) counts as one. Memory traffic is the bytes that an operation reads and writes. FLOPs are
those of matrix products, convolutions and attention; one multiply-add is 2.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from trp_scale.core.batch import Batch, TaskLosses
from trp_scale.core.run import Objective
from trp_scale.models.initialise import parameters_as_shapes, replace_attribute

TRAINING_OVER_FORWARD = 3
"""The backward pass has twice the FLOPs of the forward pass. Model FLOPs do not include recomputation."""

COUNTED_LIKE = {
    "_scaled_dot_product_flash_attention_for_cpu": "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_flash_attention_for_cpu_backward": "_scaled_dot_product_efficient_attention_backward",
}
"""Fused attention on a CPU, which torch counts from 2.15 on, and an operation with the same FLOPs."""

for _name, _other in COUNTED_LIKE.items():
    flop_registry.setdefault(getattr(torch.ops.aten, _name), flop_registry[getattr(torch.ops.aten, _other)])

STAND_ALONE = (
    "sort",
    "topk",
    "cumsum",
    "scatter",
    "index_put",
    "index_add",
    "embedding_dense_backward",
    "_foreach",
    "_fused",
)
"""Parts of the names of operations that are never fused, in addition to those with FLOPs."""


@dataclass(frozen=True, kw_only=True)
class Operation:
    """An operation that launches work, in a phase of the step; `moved` is bytes read and written."""

    phase: str
    name: str
    moved: int
    flops: int


@dataclass(kw_only=True)
class Kernel:
    """Fused operations, counted as one: their names, bytes read by storage, and created storages with their bytes."""

    names: set[str] = field(default_factory=set)
    read: dict[int, int] = field(default_factory=dict)
    created: dict[int, tuple[StorageWeakRef, int]] = field(default_factory=dict)

    def add(self, name: str, inputs: list[Tensor], writes: list[Tensor]) -> None:
        """Add an operation."""
        self.names.add(name)
        for tensor in inputs:
            if storage(tensor) not in self.created:
                self.read[storage(tensor)] = max(self.read.get(storage(tensor), 0), tensor_bytes(tensor))
        for tensor in writes:
            weak = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
            self.created[storage(tensor)] = (weak, tensor_bytes(tensor))


class RecordsOperations(TorchDispatchMode):
    """Records operations while it is active, with the current `phase`. `fused` counts neighbouring operations as one
    kernel, except those that stand alone."""

    def __init__(self, *, fused: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.recorded: list[Operation] = []
        self.fused = fused
        self.kernel: Kernel | None = None
        self._phase = "forward"

    @property
    def phase(self) -> str:
        return self._phase

    @phase.setter
    def phase(self, phase: str) -> None:
        self.end_kernel()
        self._phase = phase

    def __exit__(self, *error: Any) -> None:
        self.end_kernel()
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        named = named or {}
        inputs = [leaf for leaf in tree_leaves((arguments, named)) if isinstance(leaf, Tensor)]
        alone = function._overloadpacket in flop_registry or any(part in function.name() for part in STAND_ALONE)
        if alone:
            self.end_kernel()
        result = function(*arguments, **named)
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        if launches(function, outputs):
            writes = written_tensors(function, arguments, named, outputs)
            if self.fused and not alone:
                self.kernel = self.kernel or Kernel()
                self.kernel.add(str(function._opname), inputs, writes)
                return result
            count = flop_registry.get(function._overloadpacket)
            flops = int(count(*arguments, **named, out_val=result)) if count is not None else 0
            self.add(str(function._opname), sum(map(tensor_bytes, [*inputs, *writes])), flops)
        return result

    def end_kernel(self) -> None:
        """Record the current fused kernel."""
        kernel, self.kernel = self.kernel, None
        if kernel is not None:
            # Bytes read from earlier storages, plus the bytes of created storages that are still alive
            alive = [size for storage, size in kernel.created.values() if not storage.expired()]  # type: ignore[no-untyped-call]
            self.add(" + ".join(sorted(kernel.names)), sum(kernel.read.values()) + sum(alive), 0)

    def add(self, name: str, moved: int, flops: int) -> None:
        """Record one operation in the current phase."""
        self.recorded.append(Operation(phase=self.phase, name=name, moved=moved, flops=flops))


def tensor_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def launches(function: Any, outputs: list[Tensor]) -> bool:
    """Whether an operation launches work: no view, no allocation, no query."""
    if function.namespace == "prim" or function.is_view or "empty" in function.name() or "detach" in function.name():
        return False
    if function._overloadpacket in (torch.ops.aten._unsafe_view, torch.ops.aten.lift_fresh, torch.ops.aten.alias):
        return False
    return bool(outputs) or function._schema.is_mutable


def written_tensors(function: Any, arguments: Any, named: Any, outputs: list[Tensor]) -> list[Tensor]:
    """Return the tensors that an operation writes, in place or new."""
    parameters = function._schema.arguments
    by_name = (named[parameter.name] for parameter in parameters[len(arguments) :] if parameter.name in named)
    if not function._schema.is_mutable:
        return outputs
    changed = [
        value for parameter, value in zip(parameters, [*arguments, *by_name], strict=False) if parameter.is_write
    ]
    return [leaf for leaf in tree_leaves(changed) if isinstance(leaf, Tensor)]


ATTENTION_MODULES = (
    "trp_scale.models.vit",
    "trp_scale.pretraining.mm_mae.model",
    "trp_scale.pretraining.pos_bert.modern",
)
"""Modules whose `attend` casts bf16 to fp32 on a CPU."""


@contextmanager
def gpu_attention() -> Iterator[None]:
    """Context with fused attention in the inputs' precision and without dropout, as on a GPU. On a CPU the models cast
    bf16 to fp32 (vit.attend), torch does not fuse attention with dropout, and packed rows need a mask."""
    fused = nn.functional.scaled_dot_product_attention
    places: list[Any] = [sys.modules[name] for name in ATTENTION_MODULES if name in sys.modules]

    def attention(*arguments: Any, dropout_p: float = 0.0, **named: Any) -> Tensor:
        return fused(*arguments, **named)

    def attend(queries: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None) -> Tensor:
        return fused(queries, keys, values, attn_mask=bias)

    def attend_segments(queries: Tensor, keys: Tensor, values: Tensor, bounds: Tensor, reach: int) -> Tensor:
        rows, _, length, _ = queries.shape
        width = 2 * reach
        if not 0 < width < length or length % width:
            return fused(queries, keys, values)
        # As many FLOPs as in windows: attention inside blocks of their width
        parts = (
            part.reshape(rows, -1, length // width, width, part.shape[-1]).transpose(1, 2).flatten(0, 1)
            for part in (queries, keys, values)
        )
        context = attention(*parts)  # [R * L / width, H, width, D / H]
        return context.view(rows, -1, *context.shape[1:]).transpose(1, 2).reshape(queries.shape)  # type: ignore[no-any-return]

    with ExitStack() as stack:
        stack.enter_context(replace_attribute(nn.functional, "scaled_dot_product_attention", attention))
        for module in places:
            stack.enter_context(replace_attribute(module, "attend", attend))
            if hasattr(module, "attend_segments"):
                stack.enter_context(replace_attribute(module, "attend_segments", attend_segments))
                stack.enter_context(replace_attribute(module, "has_segment_kernel", lambda hidden: True))
        yield


def replace_parameters(module: nn.Module, convert: Callable[[Tensor], Tensor]) -> None:
    """Replace each parameter and buffer by `convert` of it; shared parameters stay shared."""
    converted: dict[int, tuple[Tensor, nn.Parameter]] = {}  # keeps the old ones alive, so that ids are unique
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None:
                if id(parameter) not in converted:
                    converted[id(parameter)] = (parameter, nn.Parameter(convert(parameter).detach()))
                part._parameters[name] = converted[id(parameter)][1]
        for name, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[name] = convert(buffer)


@contextmanager
def fake_pass(
    model: nn.Module, *, device: torch.device, half: bool, rounded: bool
) -> Iterator[Callable[[Objective, Batch], TaskLosses]]:
    """Make the parameters and buffers of `model` fake tensors, permanently; yield a function that computes an
    objective's losses of a batch on fake tensors. `half` computes under autocast to bf16, `rounded` makes parameters
    bf16 instead."""
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:

        def fake(tensor: Tensor) -> Tensor:
            fake_tensor = mode.from_tensor(tensor, static_shapes=True).to(device)
            return fake_tensor.bfloat16() if rounded and isinstance(tensor, nn.Parameter) else fake_tensor

        def forward(*arguments: Any, **named: Any) -> Any:
            with torch.autocast(device.type, torch.bfloat16, enabled=half and not rounded):
                return model(*arguments, **named)

        def compute_losses(objective: Objective, batch: Batch) -> TaskLosses:
            fields = {name: fake(tensor) for name, tensor in batch.fields.items()}
            return objective(forward, replace(batch, fields=fields))

        replace_parameters(model, fake)
        yield compute_losses


def saved_bytes(model: nn.Module, run: Callable[[], object]) -> int:
    """Return the bytes that `run` saves for the backward pass, without parameters and buffers, plus twice the largest
    saved tensor for intermediate gradients."""
    known = {storage(tensor) for tensor in (*model.parameters(), *model.buffers())}
    saved: dict[int, Tensor] = {}  # keeps the tensors alive, so that storage ids are unique

    def save(tensor: Tensor) -> Tensor:
        if storage(tensor) not in known:
            saved[storage(tensor)] = tensor
        return tensor

    with saved_tensors_hooks(save, lambda tensor: tensor):
        result = run()
    sizes = [tensor.untyped_storage().nbytes() for tensor in saved.values()]
    del result
    return sum(sizes) + 2 * max(sizes, default=0)


def storage(tensor: Tensor) -> int:
    """Return the identifier of the tensor's storage."""
    return tensor.untyped_storage()._cdata  # type: ignore[no-any-return]


def count_flops(make_model: Callable[[], nn.Module], run: Callable[[nn.Module], object]) -> float:
    """Return the FLOPs of `run(model)`, without gradients unless `run` enables them.

    The model is on the meta device, which starts 0.3 s faster than fake tensors. Only one of equal blocks runs: ViT-g
    with its decoder takes 0.1 s. `run` calls the model with meta tensors; only their shapes may matter.
    """
    with parameters_as_shapes():
        model = make_model().to("meta")
    with torch.no_grad(), RecordsOperations() as recorder:
        _run_equal_blocks_once(model, recorder)
        run(model)
    return float(sum(operation.flops for operation in recorder.recorded))


def _run_equal_blocks_once(model: nn.Module, recorder: RecordsOperations) -> None:
    """Let blocks of the same type and shapes return the output of the first one, and record its operations again."""
    known: dict[Any, tuple[Any, list[Operation]]] = {}

    def remember(block: nn.Module) -> Callable[..., Any]:
        forward = block.forward

        def run_once(*arguments: Any, **named: Any) -> Any:
            tensors = (*block.parameters(), *tree_leaves((arguments, named)))
            shapes = [(leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else leaf for leaf in tensors]
            key = (type(block), torch.is_grad_enabled(), repr(shapes))
            if key not in known:
                before = len(recorder.recorded)
                output = forward(*arguments, **named)
                known[key] = (output, recorder.recorded[before:])
                return output
            output, operations = known[key]
            recorder.recorded += operations
            return output

        return run_once

    for blocks in [module for module in model.modules() if isinstance(module, nn.ModuleList)]:
        for block in blocks:
            block.forward = remember(block)  # type: ignore[method-assign]
