"""ZeRO stages 1 and 2: a rank holds a range of the concatenation of each optimizer group."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

from torch import Tensor

from trp_scale.core.pieces import STATE_NAMES, FlatRange, Piece
from trp_scale.engines.zero_layout import ZeroLayout


class FlatLayout(ZeroLayout):
    """Weights, moments and gradients on the device."""

    def flat_weights(self) -> list[Tensor]:
        return list(self.optimizer.single_partition_of_fp32_groups)

    def _fragments(self) -> Iterator[tuple[str, Tensor, Any]]:
        """Name, parameter and place of each piece of this rank."""
        for name, parameter in self.module.named_parameters():
            fragment = parameter._hp_mapping  # type: ignore[attr-defined]
            if fragment is not None:  # otherwise no element of this parameter lies on this rank
                yield name, parameter, fragment

    def pieces(self) -> Iterator[Piece]:
        for name, parameter, fragment in self._fragments():
            # Not fragment.optim_fragment: it is linked once, when only the first group has made its moments.
            flat = self.optimizer.single_partition_of_fp32_groups[fragment.param_group_index]
            state = self.torch_optimizer.state.get(flat, {})
            whole = {"weight": flat.detach(), **{key: state[key] for key in STATE_NAMES if key in state}}
            place = fragment.hp_fragment_address
            yield Piece(
                name=name,
                shape=tuple(parameter.shape),
                region=FlatRange(start := int(fragment.lp_fragment_address.start), start + place.numel),
                tensors={key: tensor.narrow(0, place.start, place.numel) for key, tensor in whole.items()},
            )

    def gradients(self) -> list[Tensor]:
        return [tensor for group in self.optimizer.averaged_gradients.values() for tensor in group or []]

    def piece_gradients(self) -> list[Tensor]:
        # One tensor for each parameter of the group on this rank, and for padding, in the order of the flat weights.
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
        """Nothing is left after a step."""

    def publish_weights(self) -> None:
        self.optimizer.update_lp_params()


class FlatOffloadLayout(FlatLayout):
    """fp32 weights, moments and gradients in host memory."""

    def gradients(self) -> list[Tensor]:
        self.optimizer._wait_for_offload_copies()  # DeepSpeed waits only in its step, which comes after our look
        return [weights.grad for weights in self.flat_weights() if weights.grad is not None]

    def piece_gradients(self) -> list[Tensor]:
        self.optimizer._wait_for_offload_copies()
        flat = [weights.grad for weights in self.flat_weights()]
        places = [(fragment.param_group_index, fragment.hp_fragment_address) for _, _, fragment in self._fragments()]
        return [flat[group].narrow(0, place.start, place.numel) for group, place in places]  # type: ignore[union-attr]

    def clear_gradients(self) -> None:
        super().clear_gradients()
        # DeepSpeed starts a window anew only in its step; without this the next one would add to what is dropped.
        self.optimizer.micro_step_id = -1
        self.optimizer._offload_accumulated_param_ids = set()
        self.optimizer.reset_cpu_buffers()
        self.clear_unused_gradients()

    def clear_unused_gradients(self) -> None:
        # A parameter's own are overwritten by its first gradient of a window, if that is the window's first backward.
        for earlier in (*(weights.grad for weights in self.flat_weights()), *self._accumulated()):
            if earlier is not None:
                earlier.zero_()

    def _accumulated(self) -> list[Tensor]:
        """Sums over the micro-batches of a window, one for each parameter on this rank that had any."""
        return list(self.optimizer.accumulated_grads_in_cpu.values())

    @contextmanager
    def last_backward(self) -> Iterator[None]:
        # DeepSpeed hands over the sums of those parameters alone that take part in the last micro-batch.
        optimizer = self.optimizer
        earlier, optimizer._offload_accumulated_param_ids = optimizer._offload_accumulated_param_ids, set()
        yield
        if missed := earlier - optimizer._offload_accumulated_param_ids:
            optimizer._offload_accumulated_param_ids = missed
            optimizer._finalize_cpu_offload_gradient_accumulation()
