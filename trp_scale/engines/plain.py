"""One process, whole weights: the reference that every other engine is compared with."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from trp_scale.config import Config
from trp_scale.core.batch import Batch, TaskLosses
from trp_scale.core.engine import EngineError
from trp_scale.core.pieces import STATE_NAMES, FlatRange, Piece, Shards
from trp_scale.core.run import Objective
from trp_scale.distributed.groups import ALONE, Group
from trp_scale.engines.captured import Captured
from trp_scale.engines.compiled import checkpoint_blocks, compile_model
from trp_scale.engines.optimizer import adamw_response, build_optimizer, empty_state, set_learning_rate
from trp_scale.engines.shards import ShardOperations, sum_of_squares
from trp_scale.models.initialise import fill_module


class Masters:
    """fp32 master weights, which the optimizer updates, of a module with bf16 parameters, which forward and backward
    read; autocast then copies no weights.

    Args:
        module: in fp32; its parameters become bf16 in place, its buffers stay.
    Attributes:
        names: names of the parameters.
        read: the module's bf16 parameters.
        own: the masters.
    """

    def __init__(self, module: nn.Module) -> None:
        self.names = [name for name, _ in module.named_parameters()]
        self.read = list(module.parameters())
        self.own = [nn.Parameter(weight.detach().clone(), requires_grad=weight.requires_grad) for weight in self.read]
        for parameter in self.read:
            parameter.data = parameter.data.bfloat16()

    @torch.no_grad()
    def publish(self) -> None:
        torch._foreach_copy_(tuple(self.read), tuple(self.own))

    def take_gradients(self) -> None:
        """Add the gradients of a backward pass to those of the masters."""
        take_gradients(zip(self.read, self.own, strict=True))

    def discard_gradients(self) -> None:
        for parameter in self.read:
            parameter.grad = None


@torch.no_grad()
def take_gradients(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Add the gradient of each first parameter to that of the second, in the second's precision, and release it."""
    sums: list[Tensor] = []
    more: list[Tensor] = []
    first: list[Tensor] = []
    values: list[Tensor] = []
    for read, master in pairs:
        if read.grad is None:
            continue
        if master.grad is None:
            master.grad = torch.empty_like(read.grad, dtype=master.dtype)
            first.append(master.grad)
            values.append(read.grad)
        else:
            sums.append(master.grad)
            more.append(read.grad)
        read.grad = None
    if first:  # foreach: with a kernel for each parameter the launches would take longer than the work
        torch._foreach_copy_(first, values)
    if sums:
        torch._foreach_add_(sums, more)


class PlainEngine(ShardOperations):
    """Whole weights, gradients and moments in torch, on one rank; FSDP2 differs only in where they are stored."""

    name = "plain"
    zero_stage: int | None = None
    decides_on_host = False
    plain_forward = True
    """Whether the engine adds nothing to the module's forward pass."""

    def __init__(self, module: nn.Module, config: Config, *, device: torch.device, data_group: Group = ALONE) -> None:
        if config.training.precision == "fp16":
            raise EngineError("--training.precision fp16 needs --ds_config (for its loss scaler) and a GPU; use bf16")
        self.config = config
        self.device = device
        self.data_group = data_group
        if config.training.capture == "on":  # several backward graphs of a forward graph read its saved tensors
            torch._functorch.config.donated_buffer = False
        self.graphs = compile_model(module, config.training.compile, self if self.plain_forward else None)
        checkpoint_blocks(module, config.training.activation_checkpointing)
        self.module: nn.Module = self.place(module)
        self.masters = self.build_masters(self.module)
        self.optimizer = self.build_optimizer(self.module)
        self._updated = [parameter for _, parameter in self.named_parameters()]  # a walk of the modules takes a ms
        self.forward_module: Any = self.module
        self._norm = torch.zeros(())
        self._steps = torch.zeros((), dtype=torch.int64, device=device)  # on the device, which decides what is applied
        self._exact = False
        self.captured_graphs = self.build_captured()

    def build_captured(self) -> Captured | None:
        """Return the graphs of micro-batches; `None` if they are not captured."""
        if self.config.training.capture != "on":
            return None
        compiled, batch = self.graphs, self.config.batch

        def compute_losses(objective: Objective, micro: Batch) -> TaskLosses:
            return objective(self, micro) if compiled is None else compiled.losses(objective, self, micro)

        alone = batch.micro_size * self.data_group.size == batch.global_size
        return Captured(self, compute_losses, several=not alone)

    def place(self, module: nn.Module) -> nn.Module:
        """Move the model to the device; FSDP2 shards it here."""
        if self.data_group.size != 1:
            raise EngineError(f"the plain engine runs on one rank, {self.data_group.size} found; use --engine fsdp")
        return fill_module(module, self.device)

    def build_masters(self, module: nn.Module) -> Masters | None:
        """Build fp32 masters; `None` if the optimizer updates the module's parameters."""
        return Masters(module) if self.rounds_weights else None

    def build_optimizer(self, module: nn.Module) -> torch.optim.Optimizer:
        return build_optimizer(module, self.config.optimizer, self.named_parameters(), self.config.training.precision)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.publish_restored()
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.autocasts):
            return self.forward_module(*args, **kwargs)

    @property
    def autocasts(self) -> bool:
        """Whether forwards compute in bf16 with fp32 weights."""
        return self.config.training.precision == "bf16" and not self._exact and not self.rounds_weights

    def backward(self, loss: Tensor, *, last: bool) -> None:
        if self.captured_graphs is None or not self.captured_graphs.backward(loss, last=last):
            self.accumulate(loss, last=last)

    def accumulate(self, loss: Tensor, *, last: bool, retain_graph: bool = False) -> None:
        """Backward pass without a captured graph."""
        self.watch_backward()
        loss.backward(retain_graph=retain_graph)  # type: ignore[no-untyped-call]
        if self.masters is not None:
            self.masters.take_gradients()

    @property
    def reduces(self) -> bool:
        return False

    def gradient_holders(self) -> list[nn.Parameter]:
        return self._updated

    def forget_forward_events(self) -> None:
        """Do nothing: no event connects the passes."""

    def owns_gradient(self, gradient: Tensor) -> bool:
        return False

    def local(self, tensor: Tensor) -> Tensor:
        return tensor

    def first_element(self, parameter: Tensor) -> int:
        """Return the first element of this rank's part in the flattened parameter."""
        return 0

    def _gradients(self) -> list[Tensor]:
        return [self.local(p.grad) for p in self._updated if p.grad is not None]

    def check_gradients(self) -> Tensor:
        self._norm = self.data_group.sum(sum_of_squares(self._gradients(), self.device)).sqrt()
        return self._norm

    def step(self, lr: float, applied: Tensor | None = None) -> None:
        if self.config.optimizer.clipping > 0:
            factor = (self.config.optimizer.clipping / (self._norm + 1e-6)).clamp(max=1.0)
            gradients = self._gradients()
            if gradients:  # a rank may have none; FSDP2 may keep them in host memory
                torch._foreach_mul_(gradients, factor.float().to(gradients[0].device))
        set_learning_rate(self.optimizer, lr)
        self._leave_out(None if applied is None or self.decides_on_host else ~applied)
        self.optimizer.step()
        self.publish_weights()
        self.discard_gradients()
        self._steps += 1 if applied is None else applied

    def _leave_out(self, skipped: Tensor | None) -> None:
        """Make the next optimizer step change nothing if `skipped`, 0-dimensional bool on the device, without a
        wait."""
        if isinstance(self.optimizer, torch.optim.AdamW):  # its fused kernel reads found_inf
            self.optimizer.found_inf = None if skipped is None else skipped.float()  # type: ignore[attr-defined]
        elif skipped is not None:  # SGD without momentum or decay; its fused form does not support FSDP2's tensors
            for gradient in self._gradients():
                gradient.masked_fill_(skipped, 0.0)

    def leaves(self) -> Iterator[Tensor]:
        return self.module.parameters()

    def loss_factor(self) -> float:
        return float(self.data_group.size)  # FSDP2 averages over ranks

    def discard_gradients(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        if self.masters is not None:
            self.masters.discard_gradients()
        self.forget_micro_batches()

    def skip(self) -> bool:
        self.discard_gradients()
        return False

    def train(self, mode: bool) -> None:
        self.module.train(mode)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Return the parameters of the optimizer by name."""
        if self.masters is None:
            return self.module.named_parameters()
        return zip(self.masters.names, self.masters.own, strict=True)

    def pieces(self) -> Iterator[Piece]:
        for name, parameter in self.named_parameters():
            flat = self.local(parameter.detach()).reshape(-1)
            state = self.optimizer.state.get(parameter, {})
            moments = {key: self.local(state[key]).reshape(-1) for key in STATE_NAMES if key in state}
            yield Piece(
                name=name,
                shape=tuple(parameter.shape),
                region=FlatRange(start := self.first_element(parameter), start + flat.numel()),
                tensors={"weight": flat, **moments},
            )

    def piece_gradients(self) -> list[Tensor]:
        return [
            torch.zeros_like(self.local(p.detach())).reshape(-1) if p.grad is None else self.local(p.grad).reshape(-1)
            for _, p in self.named_parameters()
        ]

    def clear_unused_gradients(self) -> None:
        """Do nothing: a step leaves no gradients."""

    def publish_weights(self) -> None:
        if self.masters is not None:
            self.masters.publish()

    @property
    def rounds_weights(self) -> bool:
        return self.config.training.weights == "bf16"

    @contextmanager
    def exact_forwards(self) -> Iterator[None]:
        self._exact, before = True, self._exact
        try:
            yield
        finally:
            self._exact = before

    def step_response(self, direction: Shards, *, lr: float, grad_norm: float) -> Shards:
        return adamw_response(self, direction, self.config.optimizer, lr=lr, grad_norm=grad_norm)

    def create_optimizer_state(self) -> None:
        if isinstance(self.optimizer, torch.optim.AdamW):
            for _, parameter in self.named_parameters():
                if not self.optimizer.state[parameter]:  # FSDP2 may have created it on a disk
                    self.optimizer.state[parameter] = empty_state(self.optimizer, parameter)

    def after_load(self, optimizer_steps: int) -> None:
        self.publish_weights()
        self._steps.fill_(optimizer_steps)
        for state in self.optimizer.state.values():
            state["step"].fill_(optimizer_steps)

    def optimizer_steps(self) -> int:
        return int(self._steps)

    def extra_state(self) -> Mapping[str, float]:
        return {}

    def load_extra_state(self, state: Mapping[str, float]) -> None:
        """Ignore the state: a loss scale of another engine's checkpoint has no meaning here."""

    def full_weights(self) -> dict[str, Tensor]:
        return {name: parameter.detach().float().cpu().clone() for name, parameter in self.named_parameters()}

    def close(self) -> None:
        if self.captured_graphs is not None:
            self.captured_graphs.close()
        self.optimizer.zero_grad(set_to_none=True)
