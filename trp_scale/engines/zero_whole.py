"""ZeRO stage 0: whole weights, moments and gradients on every rank."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from trp_scale.core.pieces import STATE_NAMES, FlatRange, Piece
from trp_scale.engines.zero_layout import ZeroLayout


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

    def _shares(self, parameter: Tensor) -> list[tuple[int, int]]:
        """The range of the flattened parameter that each rank owns."""
        size, share = parameter.numel(), -(-parameter.numel() // self.world)
        return [(min(owner * share, size), min((owner + 1) * share, size)) for owner in range(self.world)]

    def pieces(self) -> Iterator[Piece]:
        for name, parameter in self.module.named_parameters():
            master = self.master(parameter)
            state = self.torch_optimizer.state.get(master, {})
            whole = {"weight": master.detach(), **{key: state[key] for key in STATE_NAMES if key in state}}
            for owner, (start, stop) in enumerate(self._shares(parameter)):
                tensors = {key: tensor.reshape(-1)[start:stop] for key, tensor in whole.items()}
                yield Piece(
                    name=name,
                    shape=tuple(parameter.shape),
                    region=FlatRange(start, stop),
                    tensors=tensors,
                    owner=owner == self.rank,
                )

    def gradients(self) -> list[Tensor]:
        # All ranks hold the same reduced gradient; rank 0 speaks for all, so that sums over ranks count it once.
        if self.rank != 0:
            return []
        return [parameter.grad for parameter in self.module.parameters() if parameter.grad is not None]

    def piece_gradients(self) -> list[Tensor]:
        found: list[Tensor] = []
        for parameter in self.module.parameters():
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            found += [gradient.reshape(-1)[start:stop] for start, stop in self._shares(parameter)]
        return found

    def clear_gradients(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)

    def clear_unused_gradients(self) -> None:
        """Nothing is left after a step."""

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
