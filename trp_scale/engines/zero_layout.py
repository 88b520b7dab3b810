"""Where DeepSpeed keeps weights, moments and gradients at each ZeRO stage, seen as pieces of parameters.

DeepSpeed's public getters gather whole tensors, or exist only on stage 3, or only after the first step; a checkpoint
and a gradient norm need the local part, always. These classes read the fragment mapping (stages 1, 2) and the partition
tables (stage 3) directly. They were checked against deepspeed 0.19.8.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from trp_scale.engines.base import STATE_NAMES, Piece
from trp_scale.engines.optimizer import empty_adamw_state


class ZeroLayout(ABC):
    """One ZeRO stage's bookkeeping.

    Args:
        module: the model as given to DeepSpeed.
        optimizer: `engine.optimizer`: torch's own on stage 0, DeepSpeed's wrapper above.
        rank: place in the data group.
        world: size of the data group.
    """

    def __init__(self, module: nn.Module, optimizer: Any, *, rank: int, world: int) -> None:
        self.module = module
        self.optimizer = optimizer
        self.rank = rank
        self.world = world

    @property
    def torch_optimizer(self) -> torch.optim.Optimizer:
        """The optimizer that holds the moments."""
        return self.optimizer.optimizer  # type: ignore[no-any-return]

    @property
    def loss_scaler(self) -> Any:
        """What holds the loss scale and its search; with fp16 only."""
        return self.optimizer.loss_scaler

    def loss_factor(self) -> float:
        """What a loss must still be multiplied by before DeepSpeed's backward."""
        return 1.0

    @abstractmethod
    def flat_weights(self) -> list[Tensor]:
        """The tensors the torch optimizer updates."""

    @abstractmethod
    def pieces(self) -> Iterator[Piece]:
        """This rank's pieces; see Engine.pieces."""

    @abstractmethod
    def gradients(self) -> list[Tensor]:
        """This rank's part of the reduced gradient; the parts of all ranks are disjoint and together whole."""

    @abstractmethod
    def clear_gradients(self) -> None:
        """Forget the window's gradients."""

    @abstractmethod
    def publish_weights(self) -> None:
        """Carry master weights into what the next forward reads, on all ranks."""

    def create_state(self) -> None:
        """Moments as AdamW makes them at its first step."""
        if isinstance(self.torch_optimizer, torch.optim.AdamW):
            for weights in self.flat_weights():
                self.torch_optimizer.state[weights] = empty_adamw_state(weights.detach())

    def set_steps(self, steps: int) -> None:
        """Step count of the bias correction."""
        for state in self.torch_optimizer.state.values():
            if "step" in state:
                state["step"].fill_(steps)


class WholeLayout(ZeroLayout):
    """Stage 0: every rank holds everything; each owns an equal range of every tensor, so that all ranks write."""

    @property
    def torch_optimizer(self) -> torch.optim.Optimizer:
        return self.optimizer  # type: ignore[no-any-return]

    def master(self, parameter: Tensor) -> Tensor:
        """The tensor that the optimizer updates for a parameter of the module."""
        return parameter

    def flat_weights(self) -> list[Tensor]:
        return [self.master(parameter) for parameter in self.module.parameters()]

    def pieces(self) -> Iterator[Piece]:
        for name, parameter in self.module.named_parameters():
            master = self.master(parameter)
            state = self.torch_optimizer.state.get(master, {})
            whole = {"weight": master.detach(), **{key: state[key] for key in STATE_NAMES if key in state}}
            share = -(-parameter.numel() // self.world)
            for owner in range(self.world):
                start, stop = min(owner * share, parameter.numel()), min((owner + 1) * share, parameter.numel())
                tensors = {key: tensor.reshape(-1)[start:stop] for key, tensor in whole.items()}
                yield Piece(
                    name=name, shape=tuple(parameter.shape), start=start, tensors=tensors, owner=owner == self.rank
                )

    def gradients(self) -> list[Tensor]:
        # All ranks hold the same reduced gradient; rank 0 speaks for all, so that sums over ranks count it once.
        if self.rank != 0:
            return []
        return [parameter.grad for parameter in self.module.parameters() if parameter.grad is not None]

    def clear_gradients(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)

    def publish_weights(self) -> None:
        """The weights themselves were written."""


class WholeHalfLayout(WholeLayout):
    """Stage 0 with fp16: whole fp32 master weights beside the module's fp16 ones, tensor by tensor.

    DeepSpeed's wrapper of this stage is an old one. Its start takes a step with zero gradients, so that the moments
    exist; weight decay has moved the master weights by then, which is taken back here. Its scaler knows no hysteresis.
    """

    def __init__(self, module: nn.Module, optimizer: Any, *, rank: int, world: int) -> None:
        super().__init__(module, optimizer, rank=rank, world=world)
        pairs = zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True)
        self._masters: dict[Tensor, Tensor] = {
            half: full for halves, fulls in pairs for half, full in zip(halves, fulls, strict=True)
        }
        optimizer.refresh_fp32_params()
        self.torch_optimizer.state.clear()

    @property
    def torch_optimizer(self) -> torch.optim.Optimizer:
        return self.optimizer.optimizer  # type: ignore[no-any-return]

    @property
    def loss_scaler(self) -> Any:
        return self.optimizer.loss_scale_config

    def loss_factor(self) -> float:
        # engine.backward leaves the scale out at this stage (0.19.8), and the step divides by it all the same.
        return float(self.optimizer.loss_scale)

    def master(self, parameter: Tensor) -> Tensor:
        return self._masters[parameter]

    @torch.no_grad()
    def publish_weights(self) -> None:
        for half, master in self._masters.items():
            half.copy_(master)


class FlatLayout(ZeroLayout):
    """Stages 1 and 2: a rank holds a range of the concatenation of each optimizer group."""

    def flat_weights(self) -> list[Tensor]:
        return list(self.optimizer.single_partition_of_fp32_groups)

    def pieces(self) -> Iterator[Piece]:
        for name, parameter in self.module.named_parameters():
            fragment = parameter._hp_mapping  # type: ignore[attr-defined]
            if fragment is None:  # no element of this parameter lies on this rank
                continue
            # Not fragment.optim_fragment: it is linked once, when only the first group has made its moments.
            flat = self.optimizer.single_partition_of_fp32_groups[fragment.param_group_index]
            state = self.torch_optimizer.state.get(flat, {})
            whole = {"weight": flat.detach(), **{key: state[key] for key in STATE_NAMES if key in state}}
            place = fragment.hp_fragment_address
            yield Piece(
                name=name,
                shape=tuple(parameter.shape),
                start=int(fragment.lp_fragment_address.start),
                tensors={key: tensor.narrow(0, place.start, place.numel) for key, tensor in whole.items()},
            )

    def gradients(self) -> list[Tensor]:
        if self.optimizer.cpu_offload:
            self.optimizer._wait_for_offload_copies()  # DeepSpeed waits only in its step, which comes after our look
            return [weights.grad for weights in self.flat_weights() if weights.grad is not None]
        return [tensor for group in self.optimizer.averaged_gradients.values() for tensor in group or []]

    def clear_gradients(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        for group in self.optimizer.averaged_gradients:
            self.optimizer.averaged_gradients[group] = None
            self.optimizer.all_grad_tensors[group] = None
        if self.optimizer.cpu_offload:
            # DeepSpeed starts a window anew only in its step; without this the next one would add to what is dropped.
            self.optimizer.micro_step_id = -1
            self.optimizer._offload_accumulated_param_ids = set()
            self.optimizer.reset_cpu_buffers()
            for weights in self.flat_weights():
                if weights.grad is not None:
                    weights.grad.zero_()

    def publish_weights(self) -> None:
        self.optimizer.update_lp_params()


class PartitionedLayout(ZeroLayout):
    """Stage 3: every parameter is flattened and cut into equal ranges, the last one padded."""

    def flat_weights(self) -> list[Tensor]:
        return list(self.optimizer.fp32_partitioned_groups_flat)

    def _valid(self, parameter: Any) -> tuple[int, int]:
        """First element and number of elements of this rank's range, padding left out."""
        size = int(parameter.ds_tensor.ds_numel)
        start = min(self.rank * size, int(parameter.ds_numel))
        return start, min(size, int(parameter.ds_numel) - start)

    def pieces(self) -> Iterator[Piece]:
        for name, parameter in self.module.named_parameters():
            group, offset, _ = self.optimizer.grad_position[self.optimizer.get_param_id(parameter)]
            flat = self.optimizer.fp32_partitioned_groups_flat[group]
            state = self.torch_optimizer.state.get(flat, {})
            start, length = self._valid(parameter)
            whole = {"weight": flat.detach(), **{key: state[key] for key in STATE_NAMES if key in state}}
            yield Piece(
                name=name,
                shape=tuple(parameter.ds_shape),  # type: ignore[attr-defined]
                start=start,
                tensors={key: tensor.narrow(0, offset, length) for key, tensor in whole.items()},
            )

    def gradients(self) -> list[Tensor]:
        if self.optimizer.offload_optimizer:
            return [weights.grad for weights in self.flat_weights() if weights.grad is not None]
        return [
            gradient.reshape(-1)[: self._valid(parameter)[1]]
            for group, gradients in self.optimizer.averaged_gradients.items()
            for gradient, parameter in zip(gradients, self.optimizer.fp16_groups[group], strict=True)
        ]

    def clear_gradients(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        if self.optimizer.offload_optimizer:
            self.optimizer.reset_cpu_buffers()
            for weights in self.flat_weights():
                if weights.grad is not None:
                    weights.grad.zero_()
        else:
            self.optimizer.averaged_gradients = {}

    def publish_weights(self) -> None:
        for group in range(len(self.optimizer.fp16_groups)):
            self.optimizer._reassign_or_swap_out_partitioned_parameters(group)
        if persistent := self.optimizer.persistent_parameters:
            # Small parameters stay gathered from the first forward on, and all_gather passes over gathered ones.
            persistent[0].partition(persistent)
            persistent[0].all_gather(persistent)
        self.optimizer.invalidate_secondary_tensor()


LAYOUTS: dict[str, type[ZeroLayout]] = {
    "AdamW": WholeLayout,
    "SGD": WholeLayout,
    "FP16_UnfusedOptimizer": WholeHalfLayout,
    "DeepSpeedZeroOptimizer": FlatLayout,
    "DeepSpeedZeroOptimizer_Stage3": PartitionedLayout,
}
"""By the class that DeepSpeed chose for `engine.optimizer`; torch's own where it wraps nothing."""
