"""FSDP2 (torch's fully_shard): weights, gradients and moments sharded by rows over the data ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from trp_scale.core.engine import EngineError
from trp_scale.engines.optimizer import Lamb
from trp_scale.engines.plain import PlainEngine
from trp_scale.models.initialise import Value, allocate, first_values

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class FsdpEngine(PlainEngine):
    """Each block of `module.layers` is a unit of its own, the rest one more; gradients are reduced once per window."""

    name = "fsdp"
    plain_forward = False  # it gathers

    def place(self, module: nn.Module) -> nn.Module:
        if not torch.distributed.is_initialized():
            raise EngineError("--engine fsdp needs a process group: start with torchrun or deepspeed")
        values = first_values(module)
        if not values:
            module = module.to(self.device)
        mesh = init_device_mesh(self.device.type, (self.data_group.size,), mesh_dim_names=("data",))
        # With fp32 weights forwards read fp32 under autocast, so that a hook's perturbation is exact.
        read, sent = (DTYPES[name] for name in (self.config.training.weights, self.config.training.gradients))
        policy = MixedPrecisionPolicy(param_dtype=read, reduce_dtype=sent, cast_forward_inputs=False)
        for layer in module.layers:  # type: ignore[union-attr, attr-defined]
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        # The embeddings stay gathered from the forward on: the prediction head uses them again at its end.
        fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=False)  # changes the class in place
        # A block's weights are under way while the block before computes; backward FSDP2 sees to it by itself.
        for layer, following in pairwise(module.layers):  # type: ignore[arg-type]
            layer.set_modules_to_forward_prefetch([following])
        if values:
            allocate(module, self.device)
            self.fill(module, values)
        return module

    @torch.no_grad()
    def fill(self, module: nn.Module, values: Mapping[str, Callable[[], Value]]) -> None:
        """This rank's rows of every parameter: one tensor at a time is whole."""
        for name, parameter in module.named_parameters():
            value, local = values[name](), self.local(parameter).view(-1)
            if isinstance(value, Tensor):
                start = self.start_of(parameter)
                value = value.reshape(-1)[start : start + local.numel()]
            local[...] = value

    def masters_of(self, module: nn.Module) -> None:
        """The shards are: FSDP2 rounds what it gathers."""

    def optimizer_of(self, module: nn.Module) -> torch.optim.Optimizer:
        optimizer = super().optimizer_of(module)
        if isinstance(optimizer, Lamb):
            optimizer.shard(self.local, self.data_group)
        return optimizer

    def backward(self, loss: Tensor, *, last: bool) -> None:
        cast(FSDPModule, self.module).set_requires_gradient_sync(last)
        self.watch_backward()
        # FSDP2 averages over the ranks (its divide factor cannot be set on gloo); the loss is a share of a global sum.
        (loss * self.loss_factor()).backward()  # type: ignore[no-untyped-call]

    def discard_gradients(self) -> None:
        super().discard_gradients()
        for gathered in self._gathered():
            # Gradients of a window whose last backward never came are still with the gathered parameters. No public
            # call drops them on every torch >= 2.11, and gathering again could wait for a rank that failed.
            gathered.grad = None
        for parameter in self._parameters():
            if "unsharded_accumulated_grad" in vars(parameter):  # where torch < 2.15 keeps those of another type
                parameter.unsharded_accumulated_grad = None

    def _gathered(self) -> Iterator[Tensor]:
        """The whole parameters that forwards read, once a forward has gathered them; their memory may be free."""
        for parameter in self._parameters():
            if (gathered := getattr(parameter, "_unsharded_param", None)) is not None:
                yield gathered

    def _parameters(self) -> Iterator[Any]:
        """FSDP2's own, each of a shard and of what is gathered from it."""
        for unit in self.module.modules():
            if isinstance(unit, FSDPModule):
                group = unit._get_fsdp_state()._fsdp_param_group
                yield from group.fsdp_params if group is not None else ()

    def leaves(self) -> Iterator[Tensor]:
        found = list(self._gathered())
        if not found:
            raise EngineError(
                f"torch {torch.__version__} does not show the gradients of single micro-batches under --engine fsdp; "
                "leave out what asks for them, or use --engine deepspeed"
            )
        return iter(found)

    def local(self, tensor: Tensor) -> Tensor:
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor

    def start_of(self, parameter: Tensor) -> int:
        rows = -(-parameter.shape[0] // self.data_group.size)  # torch.chunk's rule, which FSDP2 shards by
        row_numel = parameter.numel() // max(parameter.shape[0], 1)
        return min(self.data_group.rank * rows, parameter.shape[0]) * row_numel

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        # After a forward without backward the outer unit is still gathered: its parameters would be whole tensors that
        # the optimizer knows nothing of, and what is written into the shards would not reach the next forward.
        cast(FSDPModule, self.module).reshard()
        return self.module.named_parameters()

    def full_weights(self) -> dict[str, Tensor]:
        weights = {}
        for name, parameter in self.named_parameters():
            full = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter  # collective
            if self.data_group.rank == 0:
                weights[name] = full.detach().float().cpu().clone()
        return weights
