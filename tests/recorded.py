"""A stand-in for CUDA graphs on a CPU: it records operations on tensors and does them again, on the same memory.

As in a CUDA graph, no Python runs at a replay, results have fixed addresses, and a number that the host reads is an
error. The random numbers of a replay are those of the generator's present state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import pytest
import torch
from torch.distributed.fsdp._fully_shard import _fsdp_param
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from trp_scale.engines import captured

Result = TypeVar("Result")

READS = ("_local_scalar_dense", "nonzero", "equal", "masked_select", "unique")
"""Operations whose result the host needs."""


class HostReadError(RuntimeError):
    """A recorded function reads a number on the host."""


class Recording(TorchDispatchMode):
    """List of operations with their arguments and results."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []
        self._scattered: int | None = None  # address of the last reduce-scatter's output

    def __torch_dispatch__(self, operation: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        if operation._opname in READS:
            raise HostReadError(f"{operation} reads a number on the host")
        given = tree_map_only(torch.Tensor, torch.ops.aten.alias, (arguments, named or {}))
        result = operation(*arguments, **(named or {}))
        if operation._opname == "copy_" and arguments[0].data_ptr() == self._scattered:
            return result  # gloo copies from memory of its own when the work is waited for, as `replay` does
        if operation._opname == "_reduce_scatter_base_":
            self._scattered = arguments[0].data_ptr()
        if not is_view(operation):
            self.calls.append((operation, *given, tree_map_only(torch.Tensor, torch.ops.aten.alias, result)))
        return result

    @torch.no_grad()
    def replay(self) -> None:
        for operation, arguments, named, before in self.calls:
            again = tree_leaves(operation(*arguments, **named))
            for old, new in zip(tree_leaves(before), again, strict=True):
                if isinstance(old, torch.Tensor):
                    if old.data_ptr() != new.data_ptr():
                        old.copy_(new)
                elif hasattr(new, "wait"):
                    new.wait()  # a collective


SHAPED = ("unsqueeze_", "squeeze_", "t_", "transpose_", "as_strided_")
"""Operations that change the shape of their argument and no memory."""


def is_view(operation: Any) -> bool:
    """Whether the result only refers to memory of an argument."""
    if operation._opname in SHAPED:
        return True
    results = operation._schema.returns
    return any(result.alias_info is not None and not result.alias_info.is_write for result in results)


class RecordedOperations:
    """Recorder of operations on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self.recordings: list[Recording] = []

    def record(self, work: Callable[[], Result]) -> tuple[Result, captured.Replay]:
        state = torch.get_rng_state()
        recording = Recording()
        with recording:
            result = work()
        torch.set_rng_state(state)
        self.recordings.append(recording)
        return result, recording.replay


@contextmanager
def recorded_on_cpu(enabled: bool = True) -> Iterator[None]:
    """Context in which `training.capture` works on a CPU; if not `enabled`, with no graph for any micro-batch."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(captured.RECORDERS, "cpu", RecordedOperations)
        # A graph's memory stays reserved; FSDP2 frees that of gathered weights outside of the recorded operations.
        patch.setattr(_fsdp_param, "free_storage", lambda tensor: None)
        if not enabled:
            patch.setattr(captured.Captured, "_try_capture", lambda *_: None)
        yield
