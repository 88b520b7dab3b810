"""Count the part of a model on one --engine megatron rank, and the messages between tensor-parallel ranks, on fake
tensors. The model declares its partition (models/tensor_plan.py)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trp_scale.config import RefusedError
from trp_scale.distributed.groups import Group
from trp_scale.engines.sequence_parallel import Operation, exchange, products, split_tokens
from trp_scale.models.initialise import set_value
from trp_scale.models.tensor_plan import Cut, TensorPlan, matches

NUMBER = 4
"""Bytes per number in the sums of losses."""


@dataclass(frozen=True, kw_only=True)
class TensorSum:
    """Message of a tensor-parallel group.

    Attributes:
        phase: forward or backward.
        size: bytes.
        kind: as in Collective.
    """

    phase: str
    size: int
    kind: str = "all-reduce"


@dataclass(kw_only=True)
class CountsSums(Cut):
    """Records the sums over ranks of a partitioned model. `noted`: sums of a forward pass and its backward pass, in
    forward order."""

    noted: list[TensorSum] = field(default_factory=list)
    together: bool = False

    def note(self, phase: str, size: int, kind: str = "all-reduce") -> None:
        self.noted.append(TensorSum(phase=phase, size=size, kind=kind))

    def project(self, tokens: Tensor, *layers: nn.Module) -> tuple[Tensor, ...]:
        self.together = True
        outputs = tuple(layer(tokens) for layer in layers)
        self.together = False
        self.note("backward", tokens.numel() * outputs[0].element_size())
        return outputs

    def share_input(self, tensor: Tensor) -> Tensor:
        if tensor.requires_grad:
            self.note("backward", tensor.nbytes)
        return tensor

    def columns(self, module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        if not self.together:
            self.note("backward", inputs[0].numel() * output.element_size())

    def rows(self, module: nn.Module, inputs: Any, output: Tensor) -> None:
        self.note("forward", output.nbytes)

    def entered(self, module: nn.Module, inputs: Any, output: Tensor) -> None:
        self.note("backward", output.nbytes)

    def losses(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return cross-entropies; record three sums: largest logit, the label's logit, and the sum of exponentials."""
        for _ in range(3):
            self.note("forward", NUMBER * labels.numel())
        return F.cross_entropy(logits.float(), labels, reduction="none")


class CountsTokens(CountsSums):
    """Recorder of a block that splits tokens outside of the partitioned layers.

    Args:
        ranks: number of ranks that split them.

    Attributes:
        count: T of the last split.
    """

    def __init__(self, ranks: int) -> None:
        super().__init__()
        self.ranks = ranks
        self.count = 0

    def all(self, count: int) -> Operation:
        """Return a function that repeats a rank's tokens to `count` tokens, in place of a gather."""
        return lambda tokens: torch.cat([tokens] * self.ranks, dim=-2)[..., :count, :].contiguous()

    def split_tokens(self, tokens: Tensor) -> Tensor:
        return split_tokens(tokens, Group("tensor", size=self.ranks))

    def project(self, tokens: Tensor, *layers: nn.Module) -> tuple[Tensor, ...]:
        outputs = products(tokens, self.all(self.count), self.split_tokens, layers)
        size = self.ranks * tokens.numel() * outputs[0].element_size()
        for phase, kind in (("forward", "gather"), ("backward", "gather"), ("backward", "scatter")):
            self.note(phase, size, kind)
        return outputs

    def split(self, tokens: Tensor) -> Tensor:
        self.count = tokens.shape[-2]
        outputs = exchange(tokens, self.split_tokens, self.all(self.count))
        self.note("backward", self.ranks * outputs.nbytes, "gather")
        return outputs

    def whole(self, tokens: Tensor) -> Tensor:
        self.note("forward", self.ranks * tokens.nbytes, "gather")
        return exchange(tokens, self.all(self.count), self.split_tokens)


class RowsOfTokens(nn.Linear):
    """Row-parallel layer of a block that splits tokens; its output is reduce-scattered."""

    counts: CountsTokens

    def forward(self, inputs: Tensor) -> Tensor:
        part = F.linear(inputs, self.weight)
        sums = exchange(part, self.counts.split_tokens, self.counts.all(part.shape[-2]))
        self.counts.note("forward", self.counts.ranks * sums.nbytes, "scatter")
        self.counts.note("backward", self.counts.ranks * sums.nbytes, "gather")
        return sums + self.bias.to(sums.dtype)


def declared_plan(model: nn.Module) -> TensorPlan:
    """Return the model's tensor-parallel plan. Raises RefusedError: it has none."""
    plan = getattr(model, "tensor_plan", None)
    if not isinstance(plan, TensorPlan):
        raise RefusedError(f"--engine megatron: {type(model).__name__} has no tensor_plan; use another engine")
    return plan


def cut_over(make: Callable[[], nn.Module], ranks: int, split: bool) -> Callable[[], nn.Module]:
    """Return a function that makes one rank's part of a model, without values. `split`: whether the ranks split
    tokens."""

    def made() -> nn.Module:
        model = make()
        plan = declared_plan(model)
        for name, layer in list(model.named_modules()):
            smaller = _cut(plan.kind(name), layer, ranks)
            if smaller is not None:
                model.set_submodule(name, smaller)
        if split:
            _split(model, plan, ranks)
        for path, owner in model.named_modules():
            for name, tensor in [*owner.named_parameters(path, False), *owner.named_buffers(path, False)]:
                if matches(name, plan.first_dimension):
                    part = tensor.detach().chunk(ranks)[0]
                    kept = nn.Parameter(part) if isinstance(tensor, nn.Parameter) else part
                    setattr(owner, name.rpartition(".")[2], kept)
        for parameter in model.parameters():
            if parameter.is_meta:
                set_value(parameter, float)
        return model

    return made


def _split(model: nn.Module, plan: TensorPlan, ranks: int) -> None:
    """Make blocks compute on a rank's tokens."""
    if not plan.split:
        name = type(model).__name__
        raise RefusedError(
            f"--megatron.sequence_parallel: {name} has no blocks whose tokens can be split; allowed: several "
            "--model.layers, or without --megatron.sequence_parallel"
        )
    counts = CountsTokens(ranks)
    for module in plan.splitting(model):
        module.cut = counts  # type: ignore[assignment]
    for path in plan.split:
        for name, layer in list(model.get_submodule(path).named_modules(prefix=path)):
            if plan.kind(name) == "rows" and isinstance(layer, nn.Linear):
                rows = RowsOfTokens(layer.in_features, layer.out_features)
                rows.counts = counts
                model.set_submodule(name, rows)


def _cut(kind: str, layer: nn.Module, ranks: int) -> nn.Module | None:
    if kind == "vocabulary":
        assert isinstance(layer, nn.Embedding)
        return nn.Embedding(layer.num_embeddings // ranks, layer.embedding_dim)
    if kind in ("columns", "rows"):
        assert isinstance(layer, nn.Linear)
        sizes = {"columns": (1, ranks), "rows": (ranks, 1)}[kind]
        bias = layer.bias is not None
        return nn.Linear(layer.in_features // sizes[0], layer.out_features // sizes[1], bias=bias)
    return None


def watch(model: nn.Module) -> CountsSums:
    """Record the sums of the model's forward passes."""
    counts, plan = CountsSums(), declared_plan(model)
    hooks = {"columns": counts.columns, "rows": counts.rows, "vocabulary": counts.rows, "entered": counts.entered}
    for name, layer in model.named_modules():
        if (kind := plan.kind(name)) and not isinstance(layer, RowsOfTokens):
            layer.register_forward_hook(hooks[kind])
        cut = getattr(layer, "cut", None)
        if isinstance(cut, CountsTokens):
            cut.noted = counts.noted
        elif isinstance(cut, Cut):
            layer.cut = counts  # type: ignore[assignment]
    if plan.losses:
        setattr(model, plan.losses, counts.losses)
    return counts


def degrees(plan: TensorPlan, gpus: int, per_node: int) -> Iterator[int]:
    """Yield the allowed tensor-parallel degrees: divisors of the GPUs, of a node's GPUs, and of the plan's sizes."""
    for ranks in range(1, min(gpus, per_node) + 1):
        if not (gpus % ranks or per_node % ranks or any(size % ranks for size in plan.divided.values())):
            yield ranks
