"""`training.capture`: CUDA graphs of a micro-batch, so that the host does not launch its kernels one by one.

A micro-batch is cut at the loss sums of its tasks. The first graph is the objective's forward pass to the sums.
Balancer and hooks run as without capture, on a detached copy of the sums, whose gradient is one coefficient for each
task. The second graph is the backward pass from these coefficients to the gradients of the parameters, with the
engine's reduction. So task weights that change between steps are not frozen.

A graph reads and writes static memory. Fields and extras of a batch are copied there before the forward graph. After
the backward graph, the gradients of extras are added to those of the hooks' tensors, and the parameters' `.grad` are
set to static tensors. Dropout is seeded per micro-batch outside of the graphs. All graphs of an engine share one memory
pool, because a micro-batch is finished before the next begins.

Graphs are captured before the first step, for each mode (shapes of the batch, extras, with or without gradients). Other
modes run without a graph and are counted. All ranks capture a mode, or none does: they agree after each recording.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor

from trp_scale.core.batch import Batch, Extra, TaskLosses
from trp_scale.core.engine import EngineError
from trp_scale.core.run import Objective
from trp_scale.distributed.groups import Group, RankError, on_every_rank
from trp_scale.engines.compiled import first_reason

if TYPE_CHECKING:
    from trp_scale.engines.plain import PlainEngine

Result = TypeVar("Result")
Replay = Callable[[], None]


class CudaGraphs:
    """Recorder of the work of functions on a GPU. All its CUDA graphs share memory."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.pool = torch.cuda.graph_pool_handle()  # type: ignore[no-untyped-call]

    def record(self, work: Callable[[], Result]) -> tuple[Result, Replay]:
        """Return the result of `work`, and a function that does the same work on the same memory again. The content of
        the result is defined after a replay."""
        graph, current = torch.cuda.CUDAGraph(), torch.cuda.current_stream(self.stream.device)
        try:
            # thread_local: the loader's threads may pin memory meanwhile
            with torch.cuda.graph(graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local"):
                result = work()
        except Exception as error:
            torch.cuda.set_stream(current)
            self._restore(graph)
            raise error.__context__ or error from None  # the end of an invalid capture raises again
        return result, graph.replay

    def _restore(self, graph: torch.cuda.CUDAGraph) -> None:
        """End a failed capture. Older torch versions raise at its end before they close the pool and the generator:
        later memory events would wait for the capture, and dropout would raise."""
        device = self.stream.device.index
        with suppress(RuntimeError):  # it has ended
            torch._C._cuda_endAllocateToPool(device, self.pool)
        graph.reset()  # type: ignore[no-untyped-call]
        generator = torch.cuda.default_generators[device]
        generator.graphsafe_set_state(generator.clone_state())


RECORDERS: dict[str, type[Any]] = {"cuda": CudaGraphs}
"""Recorder of each type of device."""


UNTRIED = "this was not run on a GPU yet; --training.capture on asks for it"
"""Reason of `training.capture: auto` against capturing."""


def choose_capture(
    wanted: str, device: torch.device, reasons: list[str], group: Group
) -> tuple[Literal["on", "off"], str]:
    """Resolve `training.capture`, equally on all ranks; return it with a line for the log. Collective.

    Args:
        wanted: the setting.
        reasons: reasons against it, from the settings.

    Raises:
        EngineError: it is on, and there is a reason against it.
    """
    against = reasons if device.type in RECORDERS else [f"the device is a {device.type.upper()}", *reasons]
    why = first_reason(against, group)
    if wanted == "on" and why:
        raise EngineError(f"--training.capture is on, but {why}; allowed: auto, off")
    if wanted == "on":
        return "on", "micro-batches are captured in CUDA graphs"
    return "off", f"micro-batches are not captured in CUDA graphs: {why or UNTRIED}"


@dataclass(kw_only=True)
class Backward:
    """Backward graph of a mode.

    Attributes:
        replay: does its work.
        gradients: gradient of each parameter that has one, by its position among the engine's, in static memory.
        extras: gradient of each extra that has one, in static memory.
    """

    replay: Replay
    gradients: dict[int, Tensor]
    extras: dict[Extra, Tensor]


@dataclass(kw_only=True)
class Mode:
    """Graphs for micro-batches of the same shapes.

    Attributes:
        batch: static memory of fields and extras.
        losses: static memory of the results.
        forward: does the work of the forward pass.
        coefficients: [T] float64, static memory of the gradient of the sums.
        backwards: backward graphs by (first of the window, last of the window); empty without gradients.
    """

    batch: Batch
    losses: TaskLosses
    forward: Replay
    coefficients: Tensor
    backwards: dict[tuple[bool, bool], Backward] = field(default_factory=dict)


class Unfinished(NamedTuple):
    """Micro-batch whose forward graph has run, and its backward graph not yet. `sums`: detached, [T] float64."""

    mode: Mode
    sums: Tensor
    batch: Batch


class Captured:
    """Graphs of an engine's micro-batches.

    Args:
        engine: plain, ddp or FSDP2. `reduces`: its last backward pass of a window differs from the others.
            `forget_forward_events`: a backward graph starts after the end of the forward graph, and cannot wait for its
            events. `owns_gradient`: a gradient is in memory that the engine allocates once.
        losses_of: computes the losses of a micro-batch without a graph; may be compiled.
        several: windows may have more than one micro-batch.
    Attributes:
        replays: number of micro-batches of steps with a graph.
        uncaptured: number of micro-batches of steps without one.
        notices: lines for the log.
    """

    def __init__(
        self, engine: PlainEngine, losses_of: Callable[[Objective, Batch], TaskLosses], *, several: bool
    ) -> None:
        self.engine, self.losses_of, self.several = engine, losses_of, several
        self.recorder = RECORDERS[engine.device.type](engine.device)
        self.replays = self.uncaptured = 0
        self.notices: list[str] = []
        self._modes: dict[Any, Mode] = {}
        self._static_gradients: list[Tensor] = []  # one for each parameter
        self._captures = False
        self._unfinished: Unfinished | None = None

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Context of passes that capture their modes, after the same passes without graphs. Collective: the ranks run
        passes of the same modes in the same order."""
        self._captures = True
        try:
            yield
        finally:
            self._captures = False

    def give_up(self, reason: str) -> None:
        """Run all micro-batches without graphs from now on; drops the gradients of the present window."""
        self._captures = False
        self.close()
        self.notices.append(f"micro-batches are not captured: {reason}")

    def close(self) -> None:
        """Drop the graphs and their memory. NCCL waits at the end of a process for graphs with its operations."""
        self.engine.discard_gradients()
        self._modes.clear()
        self._static_gradients.clear()
        self._unfinished = None

    def losses(self, objective: Objective, batch: Batch) -> TaskLosses:
        """Compute the losses of a micro-batch; in evaluation mode without a graph."""
        if not self.engine.module.training:
            return self.losses_of(objective, batch)
        key = mode_key(self.engine, objective, batch)
        if self._captures and key not in self._modes:
            self._try_capture(key, objective, batch)
        mode = self._modes.get(key)
        if mode is None:
            self._note_uncaptured(batch)
            return self.losses_of(objective, batch)
        if self._unfinished is not None:
            raise EngineError(
                "a hook has computed the losses of a micro-batch with gradients and has not called the engine's "
                "backward; allowed: torch.no_grad() around it, or --training.capture off"
            )
        self.replays += 1
        with torch.no_grad():
            for name, static in mode.batch.fields.items():
                static.copy_(batch.fields[name], non_blocking=True)
            for name, static in mode.batch.extras.items():
                static.copy_(batch.extras[name])
            mode.forward()
            # Copies, because the next micro-batch overwrites them
            sums, counts = mode.losses.sums.clone(), mode.losses.counts.clone()
        if mode.backwards:
            sums.requires_grad_()
            self._unfinished = Unfinished(mode, sums, batch)
        return TaskLosses(sums=sums, counts=counts, shared_inputs=mode.losses.shared_inputs)

    def _note_uncaptured(self, batch: Batch) -> None:
        self.uncaptured += 1
        if self._modes and not self.notices:
            shapes = ", ".join(f"{name} {list(value.shape)}" for name, value in batch.fields.items())
            self.notices.append(f"micro-batches of these shapes are not captured: {shapes}")

    def backward(self, loss: Tensor, *, last: bool) -> bool:
        """Do the backward pass of the micro-batch whose forward pass was a graph; return False if there is none.

        Args:
            loss: depends on the sums that `losses` has returned.
        """
        unfinished, self._unfinished = self._unfinished, None
        if unfinished is None:
            return False
        mode, sums, batch = unfinished
        factor = self.engine.loss_factor()
        (loss * factor).backward()  # type: ignore[no-untyped-call]  # to the sums and the balancer's parameters
        assert sums.grad is not None, "the loss depends on the sums"
        mode.coefficients.copy_(sums.grad / factor)
        graph = self._backward_graph(mode, last=last and self.engine.reduces)
        graph.replay()
        holders = self.engine.gradient_holders()
        for number, gradient in graph.gradients.items():
            holders[number].grad = gradient
        if graph.extras:
            torch.autograd.backward([batch.extras[key] for key in graph.extras], list(graph.extras.values()))
        return True

    @torch.no_grad()
    def _backward_graph(self, mode: Mode, *, last: bool) -> Backward:
        """Return the backward graph for the present gradients, which are in static memory then."""
        first, holders = mode.backwards[True, last], self.engine.gradient_holders()
        if all(holders[number].grad is None for number in first.gradients):
            return first
        graph = mode.backwards[False, last]
        for number in graph.gradients:
            gradient, static = holders[number].grad, self._static_gradients[number]
            if gradient is None:
                static.zero_()
            elif gradient is not static:  # of a micro-batch without a graph
                static.copy_(gradient)
        return graph

    def _try_capture(self, key: Any, objective: Objective, batch: Batch) -> None:
        """Capture the graphs of a mode, or capture none if a rank fails: a number is read on the host, or memory
        ends."""
        try:
            self._modes[key] = self._capture(objective, batch)
        except RankError as error:
            self.give_up(str(error).partition("\n")[0])

    def _allocate(self, batch: Batch) -> Batch:
        """Allocate static gradients, once for all modes, because the graph of a window's last micro-batch reads those
        of other modes; return a copy of the batch, whose extras are leaves."""
        if not self._static_gradients:
            self._static_gradients = [torch.zeros_like(holder) for holder in self.engine.gradient_holders()]
        fields = {name: value.clone() for name, value in batch.fields.items()}
        extras = {
            key: extra.detach().clone().requires_grad_(extra.requires_grad) for key, extra in batch.extras.items()
        }
        return replace(batch, fields=fields, extras=extras, wire=None)

    def _capture(self, objective: Objective, batch: Batch) -> Mode:
        """Capture the graphs of a mode. Drops the gradients of the present window."""
        self.engine.discard_gradients()
        group = self.engine.data_group
        static = on_every_rank(group, "capturing", lambda: self._allocate(batch))
        coefficients = torch.zeros(len(objective.tasks), dtype=torch.float64, device=self.engine.device)

        def forward() -> tuple[TaskLosses, Tensor]:
            losses = self.losses_of(objective, static)
            return losses, losses.sums @ coefficients

        (losses, total), replay = on_every_rank(group, "capturing", lambda: self.recorder.record(forward))
        mode = Mode(batch=static, losses=losses, forward=replay, coefficients=coefficients)
        self.engine.forget_forward_events()
        if total.requires_grad:
            reduces = self.engine.reduces
            for first in (True, False) if self.several else (True,):
                for last in (False, True) if self.several and reduces else (reduces,):
                    mode.backwards[first, last] = self._capture_backward(mode, total, first=first, last=last)
            self.engine.discard_gradients()
        # Without the saved tensors, whose memory other modes may use
        mode.losses = replace(losses, sums=losses.sums.detach())
        return mode

    def _capture_backward(self, mode: Mode, total: Tensor, *, first: bool, last: bool) -> Backward:
        """Capture a backward pass.

        Args:
            total: scalar; its graph is kept.
            first: the gradients are new; otherwise they are added to those of earlier micro-batches.
            last: the engine reduces the gradients.
        """
        self.engine.discard_gradients()
        holders, extras = self.engine.gradient_holders(), mode.batch.extras
        for holder, static in zip(holders, self._static_gradients, strict=True):
            holder.grad = None if first else static
        for extra in extras.values():
            extra.grad = None

        def backward() -> dict[int, Tensor]:
            self.engine.accumulate(total, last=last, retain_graph=True)
            gradients = {number: holder.grad for number, holder in enumerate(holders) if holder.grad is not None}
            return {number: self._to_static(number, gradient) for number, gradient in gradients.items()}

        gradients, replay = on_every_rank(self.engine.data_group, "capturing", lambda: self.recorder.record(backward))
        if not first:  # without parameters that take no part
            used = mode.backwards[True, last].gradients
            gradients = {number: gradient for number, gradient in gradients.items() if number in used}
        return Backward(
            replay=replay,
            gradients=gradients,
            extras={key: extra.grad for key, extra in extras.items() if extra.grad is not None},
        )

    @torch.no_grad()
    def _to_static(self, number: int, gradient: Tensor) -> Tensor:
        """Return a gradient in memory that outlives the graph."""
        if self.engine.owns_gradient(gradient):
            return gradient
        static = self._static_gradients[number]
        return static if gradient is static else static.copy_(gradient)


def mode_key(engine: PlainEngine, objective: Objective, batch: Batch) -> Any:
    """Return the key of the graphs for a micro-batch."""
    tensors = [(name, value.shape, value.dtype) for name, value in batch.fields.items()]
    extras = [(key, value.shape, value.dtype, value.requires_grad) for key, value in batch.extras.items()]
    flags = id(objective), torch.is_grad_enabled(), engine.autocasts, batch.joined
    return *flags, frozenset(tensors), frozenset(extras)
