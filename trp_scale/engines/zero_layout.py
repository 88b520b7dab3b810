"""Layouts of DeepSpeed's weights, moments and gradients at each ZeRO stage, as pieces of parameters.

Checkpoints and gradient norms need the local part at any time. DeepSpeed's public getters gather whole tensors, or work
only on stage 3 or after the first step. These classes read the fragment mapping (stages 1, 2) and the partition tables
(stage 3) directly. They were checked against deepspeed 0.19.8.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from trp_scale.core.pieces import STATE_NAMES, FlatRange, Piece, owned_ranges, shares
from trp_scale.distributed.groups import Group
from trp_scale.engines.optimizer import MatrixOptimizer, empty_state


class ZeroLayout(ABC):
    """Layout of a ZeRO stage. `optimizer` is `engine.optimizer`: torch's on stage 0, DeepSpeed's wrapper on others;
    `rank` and `world` are of the data group."""

    def __init__(self, module: nn.Module, optimizer: Any, *, rank: int, world: int) -> None:
        self.module = module
        self.optimizer = optimizer
        self.rank = rank
        self.world = world

    @property
    def torch_optimizer(self) -> torch.optim.Optimizer:
        return self.optimizer.optimizer  # type: ignore[no-any-return]

    @property
    def loss_scaler(self) -> Any:
        return self.optimizer.loss_scaler

    def loss_factor(self) -> float:
        """Return the factor to apply to a loss before DeepSpeed's backward."""
        return 1.0

    @abstractmethod
    def flat_weights(self) -> list[Tensor]:
        """Return the tensors that the torch optimizer updates."""

    @abstractmethod
    def pieces(self) -> Iterator[Piece]:
        """Yield this rank's pieces; see Engine.pieces."""

    @abstractmethod
    def gradients(self) -> list[Tensor]:
        """Return this rank's part of the reduced gradient; the parts of all ranks are disjoint and complete."""

    @abstractmethod
    def piece_gradients(self) -> list[Tensor]:
        """Return the reduced gradient in the order of `pieces`, flat, scaled like the losses; zero for parameters that
        the window did not use."""

    @abstractmethod
    def clear_gradients(self) -> None:
        """Clear the window's gradients."""

    @abstractmethod
    def clear_unused_gradients(self) -> None:
        """Zero the gradients that DeepSpeed keeps from earlier windows; otherwise a parameter that this window does not
        use would have them again."""

    def last_backward(self) -> AbstractContextManager[None]:
        """Context of the window's last backward pass."""
        return nullcontext()

    @abstractmethod
    def publish_weights(self) -> None:
        """Copy master weights to the weights of the next forward, on all ranks."""

    def create_state(self) -> None:
        """Create the moments as AdamW does at its first step."""
        if not isinstance(self.torch_optimizer, torch.optim.SGD):
            for weights in self.flat_weights():
                self.torch_optimizer.state[weights] = empty_state(self.torch_optimizer, weights)
            self.set_steps(0)

    def spread(self, optimizer: MatrixOptimizer, group: Group) -> None:
        """Give an optimizer that needs whole matrices the sharding over `group`."""
        optimizer.hold_flat(self.flat_weights(), self.pieces(), group)

    def set_steps(self, steps: int) -> None:
        """Set the step count of the bias correction."""
        counts_on_host = type(self.torch_optimizer).__name__ == "DeepSpeedCPUAdam"  # its C++ code takes no tensor
        for state in self.torch_optimizer.state.values():
            if counts_on_host:
                state["step"] = steps
            elif "step" in state:
                state["step"].fill_(steps)


class WholeLayout(ZeroLayout):
    """Stage 0: whole states on every rank; each owns an equal range of every tensor, so that all ranks write."""

    @property
    def torch_optimizer(self) -> torch.optim.Optimizer:
        return self.optimizer  # type: ignore[no-any-return]

    def master(self, parameter: Tensor) -> Tensor:
        """Return the tensor that the optimizer updates for a parameter of the module."""
        return parameter

    def flat_weights(self) -> list[Tensor]:
        return [self.master(parameter) for parameter in self.module.parameters()]

    def spread(self, optimizer: MatrixOptimizer, group: Group) -> None:
        optimizer.hold(self.flat_weights(), group)

    def pieces(self) -> Iterator[Piece]:
        for name, parameter in self.module.named_parameters():
            master = self.master(parameter)
            state = self.torch_optimizer.state.get(master, {})
            whole = {"weight": master.detach(), **{key: state[key] for key in STATE_NAMES if key in state}}
            yield from owned_ranges(name, tuple(parameter.shape), whole, rank=self.rank, world=self.world)

    def gradients(self) -> list[Tensor]:
        # All ranks have the same reduced gradient; sums over ranks must count it once.
        if self.rank != 0:
            return []
        return [parameter.grad for parameter in self.module.parameters() if parameter.grad is not None]

    def piece_gradients(self) -> list[Tensor]:
        parts: list[Tensor] = []
        for parameter in self.module.parameters():
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            parts += [gradient.reshape(-1)[start:stop] for start, stop in shares(parameter.numel(), self.world)]
        return parts

    def clear_gradients(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)

    def clear_unused_gradients(self) -> None:
        """Do nothing: a step leaves no gradients."""

    def publish_weights(self) -> None:
        """Do nothing: pieces are views of the weights."""


class WholeHalfLayout(WholeLayout):
    """Stage 0 with fp16: a whole fp32 master of each fp16 weight.

    DeepSpeed's wrapper for this stage is old. It creates the moments by a step with zero gradients, in which weight
    decay changes the masters; this is undone here. Its scaler has no hysteresis.
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
        # engine.backward omits the scale at this stage (0.19.8), but the step divides by it.
        return float(self.optimizer.loss_scale)

    def master(self, parameter: Tensor) -> Tensor:
        return self._masters[parameter]

    @torch.no_grad()
    def publish_weights(self) -> None:
        for half, master in self._masters.items():
            half.copy_(master)


class FlatLayout(ZeroLayout):
    """Stages 1 and 2: a rank has a range of each concatenated optimizer group, on the device."""

    def flat_weights(self) -> list[Tensor]:
        return list(self.optimizer.single_partition_of_fp32_groups)

    def _fragments(self) -> Iterator[tuple[str, Tensor, Any]]:
        """Yield name, parameter and fragment of each piece of this rank."""
        for name, parameter in self.module.named_parameters():
            fragment = parameter._hp_mapping  # type: ignore[attr-defined]
            if fragment is not None:  # None: this rank has no element of the parameter
                yield name, parameter, fragment

    def pieces(self) -> Iterator[Piece]:
        for name, parameter, fragment in self._fragments():
            # Not fragment.optim_fragment: it is linked when only the first group has moments.
            flat = self.optimizer.single_partition_of_fp32_groups[fragment.param_group_index]
            state = self.torch_optimizer.state.get(flat, {})
            whole = {"weight": flat.detach(), **{key: state[key] for key in STATE_NAMES if key in state}}
            address = fragment.hp_fragment_address
            yield Piece(
                name=name,
                shape=tuple(parameter.shape),
                region=FlatRange(start := int(fragment.lp_fragment_address.start), start + address.numel),
                tensors={key: tensor.narrow(0, address.start, address.numel) for key, tensor in whole.items()},
            )

    def gradients(self) -> list[Tensor]:
        return [tensor for group in self.optimizer.averaged_gradients.values() for tensor in group or []]

    def piece_gradients(self) -> list[Tensor]:
        # A tensor for each parameter of the group on this rank, and for padding, in the order of the flat weights.
        by_group: dict[int, dict[int, Tensor]] = {}
        for number, group in self.optimizer.averaged_gradients.items():
            flat = [tensor.reshape(-1) for tensor in group or []]
            starts = accumulate((tensor.numel() for tensor in flat), initial=0)
            by_group[number] = {start: tensor for start, tensor in zip(starts, flat, strict=False) if tensor.numel()}
        return [
            by_group[fragment.param_group_index][int(fragment.hp_fragment_address.start)]
            for _, _, fragment in self._fragments()
        ]

    def clear_gradients(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        for group in self.optimizer.averaged_gradients:
            self.optimizer.averaged_gradients[group] = None
            self.optimizer.all_grad_tensors[group] = None

    def clear_unused_gradients(self) -> None:
        """Do nothing: a step leaves no gradients."""

    @contextmanager
    def last_backward(self) -> Iterator[None]:
        # With overlap_comm, stage 1 reduces only the parameters that the last micro-batch uses.
        optimizer = self.optimizer
        if optimizer.partition_gradients or not optimizer.overlap_comm:
            yield
            return
        rest = optimizer.overlapping_partition_gradients_reduce_epilogue

        def reduce_the_others_too() -> None:
            names = {name for bucket in optimizer.ipg_buckets.values() for _, _, name in bucket.params}
            for number, group in enumerate(optimizer.bit16_groups):
                for parameter in group:
                    name = optimizer.get_param_id(parameter)
                    missed = name not in names and not optimizer.params_already_reduced[name]
                    if missed and optimizer.get_gradient_for_reduction(parameter) is not None:
                        optimizer.reduce_ready_partitions_and_remove_grads(parameter, number)
            rest()

        optimizer.overlapping_partition_gradients_reduce_epilogue = reduce_the_others_too
        try:
            yield
        finally:
            del optimizer.overlapping_partition_gradients_reduce_epilogue

    def publish_weights(self) -> None:
        self.optimizer.update_lp_params()


class FlatOffloadLayout(FlatLayout):
    """Flat layout with fp32 weights, moments and gradients in host memory."""

    def gradients(self) -> list[Tensor]:
        self.optimizer._wait_for_offload_copies()  # DeepSpeed waits only in its step, which comes later
        return [weights.grad for weights in self.flat_weights() if weights.grad is not None]

    def piece_gradients(self) -> list[Tensor]:
        self.optimizer._wait_for_offload_copies()
        flat = [weights.grad for weights in self.flat_weights()]
        places = [(fragment.param_group_index, fragment.hp_fragment_address) for _, _, fragment in self._fragments()]
        return [flat[group].narrow(0, position.start, position.numel) for group, position in places]  # type: ignore[union-attr]

    def clear_gradients(self) -> None:
        super().clear_gradients()
        # DeepSpeed starts a window only in its step; otherwise the next window would add to the dropped gradients.
        self.optimizer.micro_step_id = -1
        self.optimizer._offload_accumulated_param_ids = set()
        self.optimizer.reset_cpu_buffers()
        self.clear_unused_gradients()

    def clear_unused_gradients(self) -> None:
        # A parameter's first gradient of a window overwrites earlier ones only in the window's first backward.
        for earlier in (*(weights.grad for weights in self.flat_weights()), *self._accumulated()):
            if earlier is not None:
                earlier.zero_()

    def _accumulated(self) -> list[Tensor]:
        """Return the sums over a window's micro-batches, for each parameter on this rank with a gradient."""
        return list(self.optimizer.accumulated_grads_in_cpu.values())

    @contextmanager
    def last_backward(self) -> Iterator[None]:
        # DeepSpeed passes on only the sums of parameters that the last micro-batch uses.
        optimizer = self.optimizer
        earlier, optimizer._offload_accumulated_param_ids = optimizer._offload_accumulated_param_ids, set()
        yield
        if missed := earlier - optimizer._offload_accumulated_param_ids:
            optimizer._offload_accumulated_param_ids = missed
            optimizer._finalize_cpu_offload_gradient_accumulation()


class PartitionedLayout(ZeroLayout):
    """Stage 3: every parameter is flattened and split into equal ranges, the last one padded, on the device."""

    def flat_weights(self) -> list[Tensor]:
        return list(self.optimizer.fp32_partitioned_groups_flat)

    def _valid(self, parameter: Any) -> tuple[int, int]:
        """Return first element and length of this rank's range, without padding."""
        size = int(parameter.ds_tensor.ds_numel)
        start = min(self.rank * size, int(parameter.ds_numel))
        return start, min(size, int(parameter.ds_numel) - start)

    def _place(self, parameter: Any) -> tuple[int, int]:
        """Return the optimizer group, and the start of this rank's range in its flat weights."""
        group, offset, _ = self.optimizer.grad_position[self.optimizer.get_param_id(parameter)]
        return group, offset

    def pieces(self) -> Iterator[Piece]:
        for name, parameter in self.module.named_parameters():
            group, offset = self._place(parameter)
            flat = self.optimizer.fp32_partitioned_groups_flat[group]
            state = self.torch_optimizer.state.get(flat, {})
            start, length = self._valid(parameter)
            whole = {"weight": flat.detach(), **{key: state[key] for key in STATE_NAMES if key in state}}
            yield Piece(
                name=name,
                shape=tuple(parameter.ds_shape),  # type: ignore[attr-defined]
                region=FlatRange(start, start + length),
                tensors={key: tensor.narrow(0, offset, length) for key, tensor in whole.items()},
            )

    def _gradients(self) -> Iterator[tuple[int, Tensor]]:
        """Yield DeepSpeed's number of each parameter, and its gradient without padding."""
        for group, gradients in self.optimizer.averaged_gradients.items():
            for gradient, parameter in zip(gradients, self.optimizer.fp16_groups[group], strict=True):
                yield parameter.ds_id, gradient.reshape(-1)[: self._valid(parameter)[1]]

    def gradients(self) -> list[Tensor]:
        return [gradient for _, gradient in self._gradients()]

    def piece_gradients(self) -> list[Tensor]:
        by_number = dict(self._gradients())
        return [by_number[parameter.ds_id] for parameter in self.module.parameters()]  # type: ignore[attr-defined]

    def clear_gradients(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        self.optimizer.averaged_gradients = {}

    def clear_unused_gradients(self) -> None:
        # A parameter's first gradient of a window overwrites earlier ones only in the window's first backward.
        self.optimizer.grad_partitions_flat_buffer.zero_()

    def publish_weights(self) -> None:
        # Small parameters stay gathered, and after a forward without backward so do those that DeepSpeed expects in the
        # backward next. Gathering skips gathered parameters.
        self.optimizer._partition_all_parameters()
        for group in range(len(self.optimizer.fp16_groups)):
            self.optimizer._reassign_or_swap_out_partitioned_parameters(group)
        if persistent := self.optimizer.persistent_parameters:
            persistent[0].all_gather(persistent)
        self.optimizer.invalidate_secondary_tensor()


class PartitionedOffloadLayout(PartitionedLayout):
    """Partitioned layout with fp32 weights, moments and gradients in host memory."""

    def gradients(self) -> list[Tensor]:
        return [weights.grad for weights in self.flat_weights() if weights.grad is not None]

    def piece_gradients(self) -> list[Tensor]:
        flat = [weights.grad for weights in self.flat_weights()]
        parts = []
        for parameter in self.module.parameters():
            group, offset = self._place(parameter)
            parts.append(flat[group].narrow(0, offset, self._valid(parameter)[1]))  # type: ignore[union-attr]
        return parts

    def clear_gradients(self) -> None:
        super().clear_gradients()
        self.optimizer.reset_cpu_buffers()
        self.optimizer._offload_boundary_param_ids = set()
        self._zero_handed_over()

    def clear_unused_gradients(self) -> None:
        super().clear_unused_gradients()
        self._zero_handed_over()

    def _zero_handed_over(self) -> None:
        for weights in self.flat_weights():
            if weights.grad is not None:
                weights.grad.zero_()

    @contextmanager
    def last_backward(self) -> Iterator[None]:
        # DeepSpeed passes on only the sums of parameters that the last micro-batch uses.
        optimizer = self.optimizer
        earlier, optimizer._offload_boundary_param_ids = optimizer._offload_boundary_param_ids, set()
        yield
        if missed := earlier - optimizer._offload_boundary_param_ids:
            optimizer._offload_boundary_param_ids = missed
            optimizer._finalize_offload_gradient_accumulation()
            if torch.accelerator.is_available():
                torch.accelerator.synchronize()  # DeepSpeed does not wait for its copies to the host
