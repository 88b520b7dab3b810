"""Tensors whose memory is a file: of them the machine keeps in memory what it has room for."""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Sequence
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from trp_scale.core.engine import EngineError


def zeros_on_disk(shape: Sequence[int], dtype: torch.dtype, directory: Path) -> Tensor:
    """Zeros on the CPU in a file without a name, which goes with the last tensor of it, however the process ends.

    Its blocks are taken now: a disk that filled up later would end the process with SIGBUS.

    Raises:
        EngineError: the directory cannot be written to, or has no room.
    """
    size = prod(shape) * dtype.itemsize
    if not size:
        return torch.zeros(*shape, dtype=dtype)
    try:
        with tempfile.TemporaryFile(dir=directory) as file:
            os.posix_fallocate(file.fileno(), 0, size)
            mapped = mmap.mmap(file.fileno(), size)
    except OSError as error:
        raise EngineError(
            f"--fsdp.offload_directory {directory}: no file of {size / 1e9:.3f} GB can be made ({error.strerror}); "
            "allowed: a directory of this machine's with 12 bytes for each parameter of the model, over all its ranks"
        ) from error
    return torch.frombuffer(mapped, dtype=dtype).view(*shape)
