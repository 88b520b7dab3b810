"""Optimizers: AdamW, LAMB, Muon and SGD, with weight-decay groups and layer-wise learning rates."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, cast, runtime_checkable

import torch
from torch import Tensor, nn

from trp_scale.config import OptimizerConfig
from trp_scale.core.engine import EngineError
from trp_scale.core.pieces import STATE_NAMES, FlatRange, Piece, Shards, foreach_chunks
from trp_scale.distributed.groups import ALONE, Group

if TYPE_CHECKING:
    from trp_scale.core.engine import Engine


@runtime_checkable
class Layered(Protocol):
    """Module whose parameters have a depth, for `optimizer.layer_decay`.

    Attributes:
        depth: depth of the deepest parameters, the head's.
    """

    depth: int

    def parameter_depth(self, name: str) -> int:
        """Return the depth of a parameter by its name, from 0 for the embeddings to `depth`."""
        ...


LEARNED_POSITIONS = "pos_embed"
"""Name of an image encoder's learned positions: a matrix without weight decay, as in timm."""


def whole_shape(parameter: Tensor) -> tuple[int, ...]:
    """Return the shape of a parameter, also of a ZeRO-3 partition."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def decay_groups(
    parameters: Iterable[tuple[str, nn.Parameter]],
    weight_decay: float,
    scale_of: Callable[[str], float] = lambda _: 1.0,
    hidden: Collection[str] = (),
) -> list[dict[str, Any]]:
    """Return parameter groups: `hidden` matrices (names, for Muon) and other matrices with `weight_decay`, vectors
    (biases, norms, class and mask tokens, embeddings of classes and modalities) and LEARNED_POSITIONS without; up to
    three groups for each learning-rate scale, `lr_scale`.

    The code of MAE and of AdPE decays class and mask tokens, which have three dimensions there. MultiMAE does not decay
    global and mask tokens, as here, but decays the embeddings of classes and tasks, which its list of names misses.
    """
    by_rate: dict[float, tuple[list[nn.Parameter], ...]] = {}
    for name, parameter in parameters:
        orthogonal, matrices, vectors = by_rate.setdefault(scale_of(name), ([], [], []))
        decayed = len(whole_shape(parameter)) >= 2 and not name.endswith(LEARNED_POSITIONS)
        (orthogonal if name in hidden else matrices if decayed else vectors).append(parameter)
    kinds = ((True, True, weight_decay), (False, True, weight_decay), (False, False, 0.0))
    return [
        {"params": members, "weight_decay": decay, "lr_scale": scale, "matrices": decays, "hidden": is_hidden}
        for scale, groups in by_rate.items()
        for members, (is_hidden, decays, decay) in zip(groups, kinds, strict=True)
        if members
    ]


def layer_scales(module: nn.Module, layer_decay: float) -> Callable[[str], float]:
    """Return a function from a parameter's name to its learning-rate factor, layer_decay^(depth - its depth).

    Raises:
        EngineError: the module has no depths.
    """
    if layer_decay == 1.0:
        return lambda _: 1.0
    if not isinstance(module, Layered):
        raise EngineError(f"--optimizer.layer_decay is {layer_decay}, allowed here: 1; it is for fine-tuning")
    return lambda name: float(layer_decay ** (module.depth - module.parameter_depth(name)))


def build_optimizer(
    module: nn.Module,
    config: OptimizerConfig,
    parameters: Iterable[tuple[str, nn.Parameter]] | None = None,
    precision: str = "fp32",
) -> torch.optim.Optimizer:
    """Build fused AdamW, LAMB, Muon, or SGD without momentum or decay.

    Args:
        parameters: parameters to update, by the module's names; None: those of the module.
        precision: `training.precision`; Muon orthogonalises in fp32 if it is fp32, otherwise in bf16.
    """
    scales = layer_scales(module, config.layer_decay)
    named = list(parameters or module.named_parameters())
    hidden = block_matrices(module) if config.kind == "muon" else ()
    groups = decay_groups(named, config.weight_decay, scales, hidden)
    if config.kind == "sgd":
        for group in groups:
            group["weight_decay"] = 0.0
        return torch.optim.SGD(groups, lr=config.lr)
    shared: dict[str, Any] = {"lr": config.lr, "betas": (config.beta1, config.beta2), "eps": config.eps}
    if config.kind == "lamb":
        return Lamb(groups, named, **shared)
    if config.kind == "muon":
        from trp_scale.engines.muon import Muon

        dtype = torch.float32 if precision == "fp32" else torch.bfloat16
        return Muon(groups, named, **shared, momentum=config.momentum, dtype=dtype)
    return torch.optim.AdamW(groups, **shared, fused=True)


def block_matrices(module: nn.Module) -> set[str]:
    """Return the names of the weights of linear layers in the module's blocks (`layers`)."""
    inner = {
        id(part.weight)
        for layer in module.layers  # type: ignore[union-attr]
        for part in layer.modules()  # type: ignore[union-attr]
        if isinstance(part, nn.Linear)
    }
    return {name for name, parameter in module.named_parameters() if id(parameter) in inner}


@dataclass(frozen=True)
class Extent:
    """Elements of a parameter in a tensor that an optimizer updates.

    Attributes:
        number: parameter.
        start: first element in the flattened parameter.
        position: elements in the flattened tensor.
    """

    number: int
    start: int
    position: slice


class MatrixOptimizer(torch.optim.AdamW):
    """Fused AdamW that knows which elements of which parameters its tensors have, for updates of whole matrices.

    Args:
        groups: result of decay_groups.
        parameters: all parameters by name, in the same order on all ranks.
        settings: lr, betas and eps.
    """

    found_inf: Tensor | None = None
    shares_work = False
    """Whether replicas divide the matrices among themselves."""

    def __init__(
        self,
        groups: list[dict[str, Any]],
        parameters: Iterable[tuple[str, nn.Parameter]],
        **settings: Any,
    ) -> None:
        super().__init__(groups, **settings, fused=True)
        named = list(parameters)
        self.numbers = {name: number for number, (name, _) in enumerate(named)}
        self.shapes = [whole_shape(parameter) for _, parameter in named]
        self.hold([parameter for _, parameter in named])

    def moments(self, tensor: Tensor) -> tuple[str, ...]:
        """Return the names of the moments of a tensor."""
        return STATE_NAMES

    def hold(self, tensors: Sequence[Tensor], replicas: Group = ALONE) -> None:
        """Set the tensors to update: the whole parameters, which all ranks of `replicas` have."""
        self.shard(tensors, lambda tensor: tensor, lambda _: 0, replicas if self.shares_work else ALONE)

    def shard(
        self,
        tensors: Sequence[Tensor],
        local: Callable[[Tensor], Tensor],
        first_element: Callable[[Tensor], int],
        group: Group,
    ) -> None:
        """Set the tensors to update: the parameters, of which this rank has `local`, a range of the flattened parameter
        from `first_element` on."""
        self.local, self.group = local, group
        self.extents = {
            id(tensor): [Extent(number, first_element(tensor), slice(0, local(tensor).numel()))]
            for number, tensor in enumerate(tensors)
        }

    def hold_flat(self, tensors: Sequence[Tensor], pieces: Iterable[Piece], group: Group) -> None:
        """Set flat tensors to update; the weights of each piece are a range of one of them.

        Args:
            tensors: 1-dimensional.
            pieces: pieces of this rank.
            group: ranks that shard the parameters.
        """
        self.group = group
        self.extents = {id(tensor): [] for tensor in tensors}
        for piece in pieces:
            weight, region = piece.tensors["weight"], cast(FlatRange, piece.region)
            for tensor in tensors:
                start = (weight.data_ptr() - tensor.data_ptr()) // tensor.element_size()
                if 0 <= start < tensor.numel() and weight.numel():
                    position = slice(start, start + weight.numel())
                    self.extents[id(tensor)].append(Extent(self.numbers[piece.name], region.start, position))


class Lamb(MatrixOptimizer):
    """LAMB (You et al. 2020, Algorithm 2, phi the identity): w - lr |w| / |u| u, with u = m_hat / (sqrt(v_hat) + eps) +
    decay w. The ratio is 1 if a norm is 0, and for vectors, as in NVIDIA's and timm's code.

    AdamW's fused kernel updates the moments at learning rate 0, which keeps the weights; it reads `found_inf`. One sum
    over the ranks in float64 gives all norms. u needs the memory of this rank's weights. Nothing waits for the device.
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update moments and weights. DeepSpeed's stage 3 calls it for a part of the tensors at a time."""
        stated = [(group["lr"], group["weight_decay"]) for group in self.param_groups]
        for group in self.param_groups:
            group["lr"] = group["weight_decay"] = 0.0
        super().step()
        numbers: list[int] = []
        matrices: list[tuple[Tensor, Tensor]] = []  # weights and u of each matrix on this rank
        moves: list[tuple[list[Tensor], list[Tensor], float]] = []
        for group, (group["lr"], group["weight_decay"]) in zip(self.param_groups, stated, strict=True):
            held = [tensor for tensor in group["params"] if tensor.grad is not None]
            if not held:
                continue
            weights = [self.local(tensor).view(-1) for tensor in held]
            directions = self._directions(held, weights, group)
            moves.append((weights, directions, -group["lr"]))
            for tensor, weight, direction in zip(held, weights, directions, strict=True):
                for extent in self.extents[id(tensor)] if group["matrices"] else ():
                    numbers.append(extent.number)
                    matrices.append((weight[extent.position], direction[extent.position]))
        if moves:
            ratios = self._ratios(numbers, matrices, moves[0][0][0].device)
            for (_, direction), ratio in zip(matrices, ratios, strict=True):
                direction.mul_(ratio)
        for weights, directions, rate in moves:
            torch._foreach_mul_(directions, rate if self.found_inf is None else rate * (1 - self.found_inf))
            torch._foreach_add_(weights, directions)

    def _directions(self, held: list[Tensor], weights: list[Tensor], group: dict[str, Any]) -> list[Tensor]:
        (beta1, beta2), states = group["betas"], [self.state[tensor] for tensor in held]
        steps = torch.stack([state["step"] for state in states]).max().double().clamp(min=1)  # 0 before the first step
        means, squares = ([self.local(s[name]).view(-1) for s in states] for name in ("exp_avg", "exp_avg_sq"))
        roots = torch._foreach_sqrt(squares)
        torch._foreach_div_(roots, (1 - beta2**steps).sqrt())
        torch._foreach_add_(roots, group["eps"])
        directions = torch._foreach_div(means, 1 - beta1**steps)
        torch._foreach_div_(directions, roots)
        torch._foreach_add_(directions, weights, alpha=group["weight_decay"])
        return list(directions)

    def _ratios(
        self, numbers: list[int], matrices: list[tuple[Tensor, Tensor]], device: torch.device
    ) -> Iterable[Tensor]:
        """Return |w| / |u| of the whole matrix for each part of a matrix, 0-dimensional float64."""
        wide = torch.float64 if device.type == "cpu" else torch.float32  # engines/shards.py: parts
        zero = torch.zeros((), dtype=wide, device=device)
        rows = []
        for parts in zip(*matrices, strict=True):
            norms = dict(zip(numbers, torch._foreach_norm(list(parts), 2, wide), strict=True))
            rows.append(torch.stack([norms.get(number, zero) for number in range(len(self.shapes))]))
        squares = torch.stack(rows).double().square() if rows else zero.double().expand(2, len(self.shapes))
        weight, direction = self.group.sum(squares).sqrt()  # [parameters]
        ratios = torch.where((weight > 0) & (direction > 0), weight / direction, 1.0).unbind()
        return [ratios[number] for number in numbers]


def empty_state(
    optimizer: torch.optim.Optimizer, parameter: Tensor, zeros_like: Callable[[Tensor], Tensor] = torch.zeros_like
) -> dict[str, Tensor]:
    """Return the initial state of a tensor that fused AdamW, LAMB or Muon updates."""
    moments = optimizer.moments(parameter) if isinstance(optimizer, MatrixOptimizer) else STATE_NAMES
    step = torch.zeros((), dtype=torch.float32, device=parameter.device)
    return {"step": step, **{name: zeros_like(parameter) for name in moments}}


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr * group["lr_scale"]


def adamw_response(
    engine: Engine, direction: Shards, config: OptimizerConfig, *, lr: float, grad_norm: float
) -> Shards:
    """Return direction times d(-step) / d(gradient) of the last step; see Engine.step_response."""
    scale = lr * (min(1.0, config.clipping / (grad_norm + 1e-6)) if config.clipping > 0 else 1.0)
    if config.kind == "sgd":
        return direction.times(scale)
    if config.kind != "adamw":
        raise EngineError(f"--optimizer.kind is {config.kind}; allowed for a step's response: adamw, sgd")
    steps = engine.optimizer_steps()
    if steps == 0:
        raise EngineError("step_response needs a last step, and no step has been made; call it after a step")
    scale *= (1 - config.beta1) / (1 - config.beta1**steps)
    scaled: list[Tensor] = []
    squares = [piece.tensors["exp_avg_sq"] for piece in engine.pieces()]
    for parts, square in foreach_chunks(direction.parts, squares):
        steepness = list(torch._foreach_div(square, 1 - config.beta2**steps))
        torch._foreach_sqrt_(steepness)
        torch._foreach_add_(steepness, config.eps)
        scaled += torch._foreach_mul(parts, scale)
        torch._foreach_div_(scaled[-len(parts) :], steepness)
    return replace(direction, parts=scaled)
