"""The counter of the package: operations of a pass, the bytes that each moves, its FLOPs, and the bytes that are saved
for the backward pass. Throughput, automatic micro-batches and the planner all use it.

Shapes are enough: tensors without content (torch's meta device, or fake tensors) are counted as real ones are. Counted
are operations that launch work: no views, no empty tensors; an operation over a list of tensors (foreach, fused AdamW)
is one. Moved are the bytes of what an operation reads and writes. FLOPs are those of matrix products, convolutions and
attention; one multiply-add is 2.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
from trp_scale.core.objective import Objective
from trp_scale.models.initialise import parameters_as_shapes

TRAINING_OVER_FORWARD = 3
"""The backward pass does twice the forward's arithmetic. Recomputation is not counted: these are model FLOPs."""

COUNTED_LIKE = {
    "_scaled_dot_product_flash_attention_for_cpu": "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_flash_attention_for_cpu_backward": "_scaled_dot_product_efficient_attention_backward",
}
"""A CPU's fused attention, which torch counts from 2.15 on, and an operation with the same count on every version."""

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
"""Parts of the names of operations that are fused with none, beside those that have FLOPs."""


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One that launches work. Attributes: phase: of the step; moved: bytes read and written."""

    phase: str
    name: str
    moved: int
    flops: int


@dataclass(kw_only=True)
class Kernel:
    """Operations that are counted as one. Attributes: names: of them; read: bytes by storage that was there before;
    created: storages that they created, alive or not, with their bytes."""

    names: set[str] = field(default_factory=set)
    read: dict[int, int] = field(default_factory=dict)
    created: dict[int, tuple[StorageWeakRef, int]] = field(default_factory=dict)

    def add(self, name: str, inputs: list[Tensor], writes: list[Tensor]) -> None:
        """One operation more."""
        self.names.add(name)
        for tensor in inputs:
            if storage(tensor) not in self.created:
                self.read[storage(tensor)] = max(self.read.get(storage(tensor), 0), tensor_bytes(tensor))
        for tensor in writes:
            self.created[storage(tensor)] = (weak(tensor), tensor_bytes(tensor))

    def moved_bytes(self) -> int:
        """Bytes read, and written to what is still alive."""
        alive = [size for storage, size in self.created.values() if not storage.expired()]  # type: ignore[no-untyped-call]
        return sum(self.read.values()) + sum(alive)


class RecordsOperations(TorchDispatchMode):
    """Records what is asked of the device while it is active; `phase` says where.

    Args:
        fused: neighbours are one kernel, but for those that stand alone.
    Attributes:
        recorded: in order, unless `add` is overridden.
    """

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
        alone = stands_alone(function)
        if alone:
            self.end_kernel()
        result = function(*arguments, **named)
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        if launches(function, outputs):
            writes = written_tensors(function, arguments, named, outputs)
            if self.fused and not alone:
                self.kernel = self.kernel or Kernel()
                self.kernel.add(short(function), inputs, writes)
                return result
            count = flop_registry.get(function._overloadpacket)
            flops = int(count(*arguments, **named, out_val=result)) if count is not None else 0
            self.add(short(function), sum(map(tensor_bytes, [*inputs, *writes])), flops)
        return result

    def end_kernel(self) -> None:
        """Count what was put together."""
        kernel, self.kernel = self.kernel, None
        if kernel is not None:
            self.add(" + ".join(sorted(kernel.names)), kernel.moved_bytes(), 0)

    def add(self, name: str, moved: int, flops: int) -> None:
        """One operation of the present phase."""
        self.recorded.append(Operation(phase=self.phase, name=name, moved=moved, flops=flops))


def short(function: Any) -> str:
    """An operation's name without its library and variant."""
    return str(function._opname)


def weak(tensor: Tensor) -> StorageWeakRef:
    """Return a reference that tells whether the tensor's content is still alive."""
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


def tensor_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def stands_alone(function: Any) -> bool:
    """Whether an operation is a kernel of its own even where neighbours are fused."""
    return function._overloadpacket in flop_registry or any(part in function.name() for part in STAND_ALONE)


def launches(function: Any, outputs: list[Tensor]) -> bool:
    """Whether an operation gives the device work: not a view, not memory without content, not a question."""
    if function.namespace == "prim" or function.is_view or "empty" in function.name() or "detach" in function.name():
        return False
    if function._overloadpacket in (torch.ops.aten._unsafe_view, torch.ops.aten.lift_fresh, torch.ops.aten.alias):
        return False
    return bool(outputs) or function._schema.is_mutable


def written_tensors(function: Any, arguments: Any, named: Any, outputs: list[Tensor]) -> list[Tensor]:
    """Tensors whose content an operation writes: those it changes in place, or those it makes."""
    parameters = function._schema.arguments
    by_name = (named[parameter.name] for parameter in parameters[len(arguments) :] if parameter.name in named)
    if not function._schema.is_mutable:
        return outputs
    changed = [
        value for parameter, value in zip(parameters, [*arguments, *by_name], strict=False) if parameter.is_write
    ]
    return [leaf for leaf in tree_leaves(changed) if isinstance(leaf, Tensor)]


WIDENING = ("trp_scale.models.vit", "trp_scale.pretraining.mm_mae.model")
"""Modules whose `attend` widens bf16 for a CPU; those of other models are not loaded."""


@contextmanager
def attention_of_a_gpu() -> Iterator[None]:
    """Fused attention in the precision of its inputs, and without dropout: for a CPU the models widen bf16 before it
    (vit.attend), and torch takes its plain attention where there is dropout."""
    fused = nn.functional.scaled_dot_product_attention
    places: list[Any] = [sys.modules[name] for name in WIDENING if name in sys.modules]

    def attention(*arguments: Any, dropout_p: float = 0.0, **named: Any) -> Tensor:
        return fused(*arguments, **named)

    def attend(queries: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None) -> Tensor:
        return fused(queries, keys, values, attn_mask=bias)

    widening = [module.attend for module in places]
    nn.functional.scaled_dot_product_attention = attention
    for module in places:
        module.attend = attend
    try:
        yield
    finally:
        nn.functional.scaled_dot_product_attention = fused
        for module, original in zip(places, widening, strict=True):
            module.attend = original


def replace_parameters(module: nn.Module, convert: Callable[[Tensor], Tensor]) -> None:
    """Replace each parameter and buffer by `convert` of it; a parameter that is used twice stays one."""
    converted: dict[int, tuple[Tensor, nn.Parameter]] = {}  # the old ones too, so that no number comes twice
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
    """Context in which the parameters and buffers of `model` are fake, for good; yields a function that computes an
    objective's losses of a batch on fake tensors.

    Args:
        device: where the tensors pretend to be.
        half: under autocast to bf16.
        rounded: parameters are bf16 instead.
    """
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
    """Return the bytes that `run` saves for its backward pass, those of the model's parameters left out, and twice the
    largest tensor among them, for the gradients at work."""
    known = {storage(tensor) for tensor in (*model.parameters(), *model.buffers())}
    saved: dict[int, Tensor] = {}  # the tensors too, so that no number of a storage comes twice

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
    """Return an identifier that tensors with shared storage have in common."""
    return tensor.untyped_storage()._cdata  # type: ignore[no-any-return]


def count_flops(make_model: Callable[[], nn.Module], run: Callable[[nn.Module], object]) -> float:
    """Return the FLOPs of `run(model)`, without gradients unless `run` enables them.

    The model is on torch's meta device, which is ready 0.3 s sooner than fake tensors are. Of equal blocks one runs:
    ViT-g and its decoder take 0.1 s.

    Args:
        make_model: makes a model for this count alone.
        run: calls the model with meta tensors; the model may depend on their shapes, not on their values.
    """
    with parameters_as_shapes():
        model = make_model().to("meta")
    with torch.no_grad(), RecordsOperations() as recorder:
        _run_equal_blocks_once(model, recorder)
        run(model)
    return float(sum(operation.flops for operation in recorder.recorded))


def _run_equal_blocks_once(model: nn.Module, recorder: RecordsOperations) -> None:
    """Let blocks of the same kind and shapes return the output of the first of them, and record its operations."""
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
