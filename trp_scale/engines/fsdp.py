"""FSDP2 (torch's fully_shard): weights, gradients and moments sharded by rows over the data ranks, or over each node
with a copy on each node."""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from trp_scale.config.registry import near_divisors
from trp_scale.core.engine import EngineError
from trp_scale.core.pieces import Piece, whole_tensors
from trp_scale.engines.compiled import mark_block
from trp_scale.engines.optimizer import MatrixOptimizer, empty_state
from trp_scale.engines.plain import PlainEngine
from trp_scale.engines.shards import assign_to_least_loaded, sum_of_squares
from trp_scale.models.initialise import Value, allocate, initialisers

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class FsdpEngine(PlainEngine):
    """FSDP2 with a unit for each block of `module.layers` and one for the rest; gradients are reduced once per window.

    With `fsdp.shard_ranks` (hybrid sharding) the ranks form a mesh: a row shards one copy, and the ranks of a column
    have the same part. One copy owns each parameter, so that sums over all ranks and checkpoints contain it once.

    Attributes:
        shard_ranks: columns of the mesh.
        copies: rows of the mesh.
    """

    name = "fsdp"
    plain_forward = False  # it gathers weights

    @property
    def offloads(self) -> bool:
        """Whether weights, gradients and moments are in host memory."""
        return self.config.fsdp.offload

    def place(self, module: nn.Module) -> nn.Module:
        if not torch.distributed.is_initialized():
            raise EngineError("--engine fsdp needs a process group: start with torchrun or deepspeed")
        self.decides_on_host = self.offloads  # an optimizer on the host cannot read the device's decision
        values = initialisers(module)
        if not values:
            module = module.to(self.device)
        mesh = self._mesh()
        # With fp32 weights forwards read fp32 under autocast, so that a hook's perturbation is exact.
        read, sent = (DTYPES[name] for name in (self.config.training.weights, self.config.training.gradients))
        shared: dict[str, Any] = {
            "mesh": mesh,
            "mp_policy": MixedPrecisionPolicy(param_dtype=read, reduce_dtype=sent, cast_forward_inputs=False),
            "offload_policy": self._offload_policy(),
        }
        for layer in module.layers:  # type: ignore[union-attr, attr-defined]
            fully_shard(layer, **shared)
            if self.config.training.compile == "whole":
                layer.register_forward_pre_hook(mark_block, with_kwargs=True)
        # The embeddings stay gathered from the forward on: the prediction head uses them again at its end.
        fully_shard(module, **shared, reshard_after_forward=False)  # changes the class in place
        # Prefetch a block's weights during the previous block; in the backward pass FSDP2 does it by default.
        for layer, following in pairwise(module.layers):  # type: ignore[arg-type]
            layer.set_modules_to_forward_prefetch([following])
        if values:
            on_disk = self._on_disk if self.config.fsdp.offload_directory else None
            allocate(module, self.device, torch.device("cpu") if self.offloads else self.device, on_disk)
            self.fill(module, values)
        self._owning_copies = assign_to_least_loaded(
            [parameter.numel() for parameter in module.parameters()], self.copies
        )
        return module

    def _offload_policy(self) -> OffloadPolicy:
        if not self.offloads:
            return OffloadPolicy()
        # Pinned memory makes copies to a GPU fast; files on a disk cannot be pinned.
        return CPUOffloadPolicy(pin_memory=self.device.type != "cpu" and not self.config.fsdp.offload_directory)

    def _on_disk(self, tensor: Tensor) -> Tensor:
        """Return zeros on the disk with the sharding of this tensor."""
        local = self.local(tensor)
        zeros = zeros_on_disk(local.shape, local.dtype, Path(self.config.fsdp.offload_directory))
        if not isinstance(tensor, DTensor):
            return zeros
        mesh, placements = tensor.device_mesh, tensor.placements
        return DTensor.from_local(zeros, mesh, placements, run_check=False, shape=tensor.shape, stride=tensor.stride())

    def _mesh(self) -> DeviceMesh:
        """Return the mesh of the ranks: one row, or with `fsdp.shard_ranks` several.

        Raises:
            EngineError: `fsdp.shard_ranks` does not divide the ranks.
        """
        world, wanted = self.data_group.size, self.config.fsdp.shard_ranks
        if wanted and world % wanted:
            raise EngineError(
                f"--fsdp.shard_ranks is {wanted} and does not divide the {world} ranks of this run; allowed: 0 for all "
                f"of them, {near_divisors(world, wanted)}"
            )
        self.shard_ranks = wanted or world
        self.copies = world // self.shard_ranks
        if self.copies == 1:
            return init_device_mesh(self.device.type, (world,), mesh_dim_names=("data",))
        names = ("copies", "shards")
        return init_device_mesh(self.device.type, (self.copies, self.shard_ranks), mesh_dim_names=names)

    @torch.no_grad()
    def fill(self, module: nn.Module, values: Mapping[str, Callable[[], Value]]) -> None:
        """This rank's rows of every parameter: one tensor at a time is whole."""
        for name, parameter in module.named_parameters():
            value, local = values[name](), self.local(parameter).view(-1)
            if isinstance(value, Tensor):
                start = self.first_element(parameter)
                value = value.reshape(-1)[start : start + local.numel()]
            local[...] = value

    def build_masters(self, module: nn.Module) -> None:
        """The shards are: FSDP2 rounds what it gathers."""

    def build_optimizer(self, module: nn.Module) -> torch.optim.Optimizer:
        optimizer = super().build_optimizer(module)
        if isinstance(optimizer, MatrixOptimizer):
            # The data ranks count copies too: in LAMB's ratio of norms this cancels.
            optimizer.shard(list(module.parameters()), self.local, self.first_element, self.data_group)
        if self.config.fsdp.offload_directory and isinstance(optimizer, torch.optim.AdamW):
            for parameter in module.parameters():
                optimizer.state[parameter] = empty_state(optimizer, parameter, self._on_disk)
        return optimizer

    def train(self, mode: bool) -> None:
        # A forward without backward leaves the outer unit gathered, and captured backward passes do not release it.
        cast(FSDPModule, self.module).reshard()
        super().train(mode)

    def accumulate(self, loss: Tensor, *, last: bool, retain_graph: bool = False) -> None:
        cast(FSDPModule, self.module).set_requires_gradient_sync(last)
        self.watch_backward()
        # FSDP2 averages over the ranks (its divide factor cannot be set on gloo); the loss is a share of a global sum.
        (loss * self.loss_factor()).backward(retain_graph=retain_graph)  # type: ignore[no-untyped-call]

    @property
    def reduces(self) -> bool:
        return True

    def forget_forward_events(self) -> None:
        # The first gather of the backward pass would wait for an event of the forward graph.
        cast(FSDPModule, self.module)._get_fsdp_state()._comm_ctx.all_gather_state = None

    def discard_gradients(self) -> None:
        super().discard_gradients()
        for gathered in self._gathered_parameters():
            # Gradients of a window whose last backward never came are still with the gathered parameters. No public
            # call drops them on every torch >= 2.11, and gathering again could wait for a rank that failed.
            gathered.grad = None
        for parameter in self._parameters():
            if "unsharded_accumulated_grad" in vars(parameter):  # where torch < 2.15 keeps those of another type
                parameter.unsharded_accumulated_grad = None

    def _gathered_parameters(self) -> Iterator[Tensor]:
        """The whole parameters that forwards read, once a forward has gathered them; their memory may be free."""
        for parameter in self._parameters():
            if (gathered := getattr(parameter, "_unsharded_param", None)) is not None:
                yield gathered

    def _parameters(self) -> Iterator[Any]:
        """Yield FSDP2's parameter objects, which have the shard and the gathered tensor."""
        for unit in self.module.modules():
            if isinstance(unit, FSDPModule):
                group = unit._get_fsdp_state()._fsdp_param_group
                yield from group.fsdp_params if group is not None else ()

    def leaves(self) -> Iterator[Tensor]:
        gathered = list(self._gathered_parameters())
        if not gathered:
            raise EngineError(
                f"torch {torch.__version__} does not show the gradients of single micro-batches under --engine fsdp; "
                "leave out what asks for them, or use --engine deepspeed"
            )
        return iter(gathered)

    def local(self, tensor: Tensor) -> Tensor:
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor

    def first_element(self, parameter: Tensor) -> int:
        rows = -(-parameter.shape[0] // self.shard_ranks)  # FSDP2 shards like torch.chunk
        row_numel = parameter.numel() // max(parameter.shape[0], 1)
        return min(self.data_group.rank % self.shard_ranks * rows, parameter.shape[0]) * row_numel

    def pieces(self) -> Iterator[Piece]:
        copy = self.data_group.rank // self.shard_ranks
        for piece, owning in zip(super().pieces(), self._owning_copies, strict=True):
            yield piece if owning == copy else replace(piece, owner=False)

    def check_gradients(self) -> Tensor:
        # Sum over all copies: all ranks see a copy that is not finite, and get the same bits.
        squares = sum_of_squares(self._gradients(), self.device)
        self._norm = (self.data_group.sum(squares) / self.copies).sqrt()
        return self._norm

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        # After a forward without backward the outer unit is still gathered: its parameters would be whole tensors that
        # the optimizer does not have, and the next forward would not read the shards.
        cast(FSDPModule, self.module).reshard()
        return self.module.named_parameters()

    def full_weights(self) -> dict[str, Tensor]:
        tensors = whole_tensors(self.pieces(), (piece.tensors["weight"] for piece in self.pieces()), self.data_group)
        return tensors if self.data_group.rank == 0 else {}


def zeros_on_disk(shape: Sequence[int], dtype: torch.dtype, directory: Path) -> Tensor:
    """Return zeros on the CPU in a memory-mapped unnamed file, which is freed with the last tensor, also if the process
    is killed.

    Its blocks are allocated now: on a disk that fills up later a write would end the process with SIGBUS.

    Raises:
        EngineError: the directory cannot be written to, or is full.
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
