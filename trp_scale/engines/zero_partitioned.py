"""ZeRO stage 3: every parameter is flattened and cut into equal ranges, the last one padded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from trp_scale.core.pieces import STATE_NAMES, FlatRange, Piece
from trp_scale.engines.zero_layout import ZeroLayout


class PartitionedLayout(ZeroLayout):
    """fp32 weights, moments and gradients on the device."""

    def flat_weights(self) -> list[Tensor]:
        return list(self.optimizer.fp32_partitioned_groups_flat)

    def _valid(self, parameter: Any) -> tuple[int, int]:
        """First element and number of elements of this rank's range, padding left out."""
        size = int(parameter.ds_tensor.ds_numel)
        start = min(self.rank * size, int(parameter.ds_numel))
        return start, min(size, int(parameter.ds_numel) - start)

    def _place(self, parameter: Any) -> tuple[int, int]:
        """Optimizer group, and where in its flat weights this rank's range begins."""
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
        """Each parameter's number in DeepSpeed and its gradient, without padding."""
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
        # A parameter's own are overwritten by its first gradient of a window, if that is the window's first backward.
        self.optimizer.grad_partitions_flat_buffer.zero_()

    def publish_weights(self) -> None:
        # Small parameters stay gathered from the first forward on, and after a forward without backward so do those of
        # which DeepSpeed expects the backward to use them next; gathering passes over what is gathered.
        self.optimizer._partition_all_parameters()
        for group in range(len(self.optimizer.fp16_groups)):
            self.optimizer._reassign_or_swap_out_partitioned_parameters(group)
        if persistent := self.optimizer.persistent_parameters:
            persistent[0].all_gather(persistent)
        self.optimizer.invalidate_secondary_tensor()


class PartitionedOffloadLayout(PartitionedLayout):
    """fp32 weights, moments and gradients in host memory."""

    def gradients(self) -> list[Tensor]:
        return [weights.grad for weights in self.flat_weights() if weights.grad is not None]

    def piece_gradients(self) -> list[Tensor]:
        flat = [weights.grad for weights in self.flat_weights()]
        found = []
        for parameter in self.module.parameters():
            group, offset = self._place(parameter)
            found.append(flat[group].narrow(0, offset, self._valid(parameter)[1]))  # type: ignore[union-attr]
        return found

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
        # DeepSpeed hands over the sums of those parameters alone that take part in the last micro-batch.
        optimizer = self.optimizer
        earlier, optimizer._offload_boundary_param_ids = optimizer._offload_boundary_param_ids, set()
        yield
        if missed := earlier - optimizer._offload_boundary_param_ids:
            optimizer._offload_boundary_param_ids = missed
            optimizer._finalize_offload_gradient_accumulation()
            if torch.accelerator.is_available():
                torch.accelerator.synchronize()  # it does not wait for its copies into host memory
