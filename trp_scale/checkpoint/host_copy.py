"""A copy in host memory of what a rank owns, taken between two steps: checkpoints are written from it behind the steps.

The memory is the same from one checkpoint to the next, so a run holds one copy at most. Under CUDA it is pinned.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from trp_scale.core.pieces import Piece
from trp_scale.distributed.environment import control_groups, read_lines

logger = logging.getLogger(__name__)

SHARE_OF_MEMORY = 0.8
"""Of the memory that is available when the copy is first made, so much may go into it; steps need some, too."""

_ALIGNED = 64


class HostCopy:
    """Memory that pieces are copied into. One holder of its content at a time."""

    def __init__(self) -> None:
        self._memory: Tensor | None = None
        self._registered = False

    def lacks(self, pieces: Iterable[Piece]) -> int:
        """Bytes that must still be taken from the machine for these pieces."""
        wanted = _size(pieces)
        return 0 if self._memory is not None and self._memory.numel() >= wanted else wanted

    def take(self, pieces: Iterable[Piece]) -> list[Piece]:
        """Copy pieces, and return them with the copies in place of the engine's tensors; waits for the device.

        Raises:
            RuntimeError: there is no memory for it.
        """
        held = list(pieces)
        on_gpu = any(tensor.is_cuda for piece in held for tensor in piece.tensors.values())
        memory = self._of_size(_size(held), pinned=on_gpu)
        copied, start = [], 0
        for piece in held:
            tensors = {}
            for state, tensor in piece.tensors.items():
                target = memory[start : start + tensor.nbytes].view(tensor.dtype)
                copy_into(target, tensor.detach())
                tensors[state] = target
                start += _padded(tensor.nbytes)
            copied.append(replace(piece, tensors=tensors))
        if on_gpu:
            torch.cuda.synchronize()
        return copied

    def release(self) -> None:
        """Give the memory back."""
        if self._registered and self._memory is not None:
            torch.cuda.cudart().cudaHostUnregister(self._memory.data_ptr())  # type: ignore[no-untyped-call]
        self._memory, self._registered = None, False

    def _of_size(self, size: int, *, pinned: bool) -> Tensor:
        if self._memory is None or self._memory.numel() < size:
            self.release()
            self._memory = torch.empty(size, dtype=torch.uint8)
            if pinned and size:
                # Not pin_memory=True: torch rounds pinned memory up to a power of two.
                error = torch.cuda.cudart().cudaHostRegister(self._memory.data_ptr(), size, 0)  # type: ignore[no-untyped-call]
                self._registered = int(error) == 0
                if not self._registered:
                    logger.warning("%d bytes for checkpoints could not be pinned: copies from the GPU are slower", size)
        return self._memory


def copy_into(target: Tensor, source: Tensor) -> None:
    """Copy a flat tensor into host memory; from a GPU without waiting for it.

    One thread copies. torch's own took 1.6 s for 1.3 GB on two cores that other work shared, this 0.2 s: its threads
    wait for each other after every tensor.
    """
    if source.is_cuda or not source.is_contiguous():
        target.copy_(source, non_blocking=source.is_cuda)
    else:
        np.copyto(target.view(torch.uint8).numpy(), source.view(torch.uint8).numpy())


def available_memory() -> int:
    """Bytes of host memory that can be taken now: of the machine, and of this process's control groups (version 2)."""
    meminfo = (line.split() for line in read_lines(Path("/proc/meminfo")))
    free = next((int(words[1]) * 1024 for words in meminfo if words[0] == "MemAvailable:"), 2**50)
    for folder in control_groups():
        limit, used = read_lines(folder / "memory.max"), read_lines(folder / "memory.current")
        if limit and used and limit[0] != "max":
            stat = (line.split() for line in read_lines(folder / "memory.stat"))
            cached = next((int(words[1]) for words in stat if words[0] == "inactive_file"), 0)
            free = min(free, int(limit[0]) - int(used[0]) + cached)
    return max(0, free)


def _size(pieces: Iterable[Piece]) -> int:
    return sum(_padded(tensor.nbytes) for piece in pieces for tensor in piece.tensors.values())


def _padded(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED
