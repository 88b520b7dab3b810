"""Count a run's model with fake tensors: parameters per sharding unit, operations of the passes over a micro-batch with
their bytes and FLOPs, saved activations; the part of a model on one rank of --engine megatron, and the messages between
tensor-parallel ranks (models/tensor_plan.py). Nothing is allocated; no GPU or data is needed."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trp_scale.config import Config, RefusedError
from trp_scale.core.batch import Batch, TaskLosses
from trp_scale.core.run import Objective
from trp_scale.distributed.groups import Group
from trp_scale.engines.compiled import checkpoint_blocks
from trp_scale.engines.optimizer import block_matrices
from trp_scale.engines.sequence_parallel import Operation as TokenOperation
from trp_scale.engines.sequence_parallel import exchange, products, split_tokens
from trp_scale.methods.learned_masks.masks import NETWORKS
from trp_scale.models.counting import Operation, RecordsOperations, fake_pass, gpu_attention
from trp_scale.models.initialise import build_with_initialisers, set_value
from trp_scale.models.tensor_plan import Cut, TensorPlan, declared_plan
from trp_scale.planning.clusters import Gpu
from trp_scale.pretraining.base import DataFacts, Outline, find_upstream
from trp_scale.training.micro_size import FITTED, Need, saved_by_rows

CPU = torch.device("cpu")

Numbers = npt.NDArray[np.float64]
Checkpointing = Literal["none", "selective", "full"]

SHARE_OF_MEMORY, SHARE_OF_PEAK, SHARE_OF_PEAK_IN_ATTENTION = 0.8, 0.7, 0.35
"""Achieved shares of a GPU's memory rate, of its peak in matrix products, and of its peak in attention."""
LAUNCH = 2.3e-6
"""Seconds of the smallest operation on the device."""
HOST = {"forward": 8e-6, "backward": 5.5e-6}
"""Seconds of the host to launch an operation."""


@dataclass(frozen=True, kw_only=True)
class Pass:
    """Operations of a forward or backward pass over a micro-batch.

    Attributes:
        moved, flops: [operations, 2] bytes and FLOPs: constant part, and part per row.
        attention: [operations] whether the operation is fused attention.
        host: seconds to launch one operation.
    """

    moved: Numbers
    flops: Numbers
    attention: npt.NDArray[np.bool_]
    host: float

    def seconds(self, rows: int, gpu: Gpu, peak: float) -> float:
        """Return the seconds on the device: for each operation the maximum of memory, arithmetic and launch
        (roofline)."""
        by_rows = np.array([1.0, rows])
        reached = np.where(self.attention, SHARE_OF_PEAK_IN_ATTENTION, SHARE_OF_PEAK)
        memory = self.moved @ by_rows / (SHARE_OF_MEMORY * gpu.memory_rate)
        arithmetic = self.flops @ by_rows / (reached * peak)
        return float(np.maximum(np.maximum(memory, arithmetic), LAUNCH).sum())

    def launching(self) -> float:
        """Return the seconds of the host to launch all operations."""
        return self.host * len(self.moved)

    def total_flops(self, rows: int) -> float:
        """Return the FLOPs of matrix products and attention."""
        return float((self.flops @ np.array([1.0, rows])).sum())


@dataclass(frozen=True, kw_only=True)
class Collective:
    """Identical collectives of a step.

    Attributes:
        kind, ranks, apart: as in Cluster.seconds.
        size: bytes of the whole tensor.
        phase: forward, backward (of each micro-batch), last (last backward pass of the accumulation), or update.
        times: number of collectives.
        hides: whether they overlap with arithmetic; tensor-parallel sums do not.
    """

    kind: str
    size: int
    phase: str
    times: int = 1
    ranks: int = 0
    apart: int = 1
    hides: bool = True


class Counted:
    """Lazily computed counts of a run's model.

    Args:
        config: settings of the run.
        facts: properties of the data that determine shapes.
    """

    def __init__(self, config: Config, facts: DataFacts) -> None:
        self.config = config
        self.outline: Outline = find_upstream(config).outline(config, facts)
        self.step_flops = cache(self.outline.step_flops)
        self.passes = cache(self._passes)
        self.saved = cache(self._count_saved)
        self.over = cache(self._share_of_rank)
        self.tensor_sums = cache(self._tensor_sums)

    @cached_property
    def model(self) -> nn.Module:
        """Model of fake tensors."""
        return build_with_initialisers(self.outline.model)

    @cached_property
    def parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.model.parameters())

    @cached_property
    def blocks(self) -> list[int]:
        """Parameters of each block; each block is a sharding unit."""
        return [sum(parameter.numel() for parameter in layer.parameters()) for layer in self.model.layers]  # type: ignore[union-attr]

    @property
    def rest(self) -> int:
        """Parameters outside the blocks (embeddings and heads), one more unit."""
        return self.parameters - sum(self.blocks)

    @cached_property
    def block_elements(self) -> int:
        """Elements of the matrices of the blocks, which Muon updates."""
        hidden = block_matrices(self.model)
        return sum(parameter.numel() for name, parameter in self.model.named_parameters() if name in hidden)

    @property
    def moments(self) -> int:
        """Elements of the optimizer's moments: two per parameter, one for matrices that Muon updates."""
        return 2 * self.parameters - (self.block_elements if self.config.optimizer.kind == "muon" else 0)

    @cached_property
    def network(self) -> int:
        """Parameters of the masking network; 0 without learned masks."""
        masks = getattr(self.config, "multilevel", None)
        if masks is None or not masks.learns:
            return 0
        network = build_with_initialisers(lambda: NETWORKS[masks.network](self.config))  # type: ignore[arg-type]
        return sum(parameter.numel() for parameter in network.parameters())

    def _share_of_rank(self, ranks: int, split: bool) -> Counted:
        """Return the counts of one of the ranks that share the matrices and optionally split the tokens."""
        if ranks == 1:
            return self
        part = copy.copy(self)
        part.outline = replace(self.outline, model=cut_over(self.outline.model, ranks, split))
        for name in ("model", "parameters", "blocks", "block_elements"):
            part.__dict__.pop(name, None)
        part.passes, part.saved = cache(part._passes), cache(part._count_saved)
        part.over, part.tensor_sums = cache(part._share_of_rank), cache(part._tensor_sums)
        return part

    def _tensor_sums(self, rows: int, rounded: bool) -> list[Collective]:
        """Return the tensor-parallel sums of the passes over `rows` rows."""
        few, more = (self._note_saved(number, rounded=rounded) for number in FITTED)
        slopes = [(b.size - a.size) / (FITTED[1] - FITTED[0]) for a, b in zip(few, more, strict=True)]
        return [
            replace(operation, size=round(operation.size + slope * (rows - FITTED[0])))
            for operation, slope in zip(few, slopes, strict=True)
        ]

    def partial(self, part: Counted) -> int:
        """Return the number of parameter elements whose gradient a rank computes only from its own tokens."""
        partial = set(declared_plan(self.model).partial(self.model))
        pairs = zip(self.model.named_parameters(), part.model.parameters(), strict=True)
        return sum(a.numel() for (name, a), b in pairs if name in partial and a.shape == b.shape)

    def _count_saved(self, how: Checkpointing, rounded: bool) -> Need:
        """Return the bytes that a forward pass saves for its backward pass."""
        training = replace(self.config.training, activation_checkpointing=how)
        with gpu_attention():
            return saved_by_rows(
                self.outline.model,
                self.outline.objective,
                self.outline.rows,
                replace(self.config, training=training),
                device=CPU,
                rounded=rounded,
            )

    def _passes(self, how: Checkpointing, rounded: bool, fused: bool) -> dict[str, Pass]:
        """Return the passes "forward" and "backward"."""
        few, more = (self._record_operations(rows, how, rounded=rounded, fused=fused) for rows in FITTED)
        if [(operation.phase, operation.name) for operation in few] != [
            (operation.phase, operation.name) for operation in more
        ]:
            raise RefusedError(
                f"--upstream {getattr(self.config, 'upstream', '')}: with {FITTED[0]} and {FITTED[1]} rows its passes "
                "have different operations, so other numbers of rows cannot be predicted"
            )
        operations = {}
        for phase, host in HOST.items():
            pairs = [(a, b) for a, b in zip(few, more, strict=True) if a.phase == phase]
            operations[phase] = Pass(
                moved=_lines([(a.moved, b.moved) for a, b in pairs]),
                flops=_lines([(a.flops, b.flops) for a, b in pairs]),
                attention=np.array(["attention" in a.name for a, _ in pairs]),
                host=host,
            )
        return operations

    def _record_operations(self, rows: int, how: Checkpointing, *, rounded: bool, fused: bool) -> list[Operation]:
        """Return the operations of both passes over `rows` rows."""
        model = build_with_initialisers(self.outline.model)
        checkpoint_blocks(model, how)
        batch = self.outline.rows(rows)
        with (
            gpu_attention(),
            self._fake_pass(model, rounded=rounded) as losses_of,
            RecordsOperations(fused=fused) as recorder,
        ):
            losses = losses_of(self.outline.objective, batch)
            recorder.phase = "backward"
            (losses.sums / losses.counts.clamp(min=1)).sum().backward()  # type: ignore[no-untyped-call]
        operations: list[Operation] = recorder.recorded
        return operations

    def _note_saved(self, rows: int, *, rounded: bool) -> list[Collective]:
        model = build_with_initialisers(self.outline.model)
        sums = watch(model)
        batch = self.outline.rows(rows)
        with gpu_attention(), self._fake_pass(model, rounded=rounded) as losses_of:
            losses_of(self.outline.objective, batch)
        return sums.noted

    def _fake_pass(
        self, model: nn.Module, *, rounded: bool
    ) -> AbstractContextManager[Callable[[Objective, Batch], TaskLosses]]:
        return fake_pass(model, device=CPU, half=self.config.training.precision != "fp32", rounded=rounded)


def _lines(pairs: list[tuple[int, int]]) -> Numbers:
    """Return [n, 2] the lines through each pair of values at FITTED rows: value at 0, and slope."""
    values = np.array(pairs, dtype=np.float64).reshape(-1, 2)
    slope = (values[:, 1] - values[:, 0]) / (FITTED[1] - FITTED[0])
    return np.stack([np.maximum(values[:, 0] - slope * FITTED[0], 0.0), slope], axis=1)


NUMBER = 4
"""Bytes per number in the sums of losses."""


@dataclass(kw_only=True)
class CountsSums(Cut):
    """Records the sums over ranks of a partitioned model. `noted`: sums of a forward pass and its backward pass, in
    forward order."""

    noted: list[Collective] = field(default_factory=list)
    together: bool = False

    def note(self, phase: str, size: int, kind: str = "all-reduce") -> None:
        self.noted.append(Collective(phase=phase, size=size, kind=kind))

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

    def all(self, count: int) -> TokenOperation:
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


def cut_over(make: Callable[[], nn.Module], ranks: int, split: bool) -> Callable[[], nn.Module]:
    """Return a function that makes one rank's part of a model, without values. `split`: whether the ranks split
    tokens."""

    def made() -> nn.Module:
        model = make()
        plan = declared_plan(model, split=split)
        for name, layer in list(model.named_modules()):
            smaller = _cut(plan.kind(name), layer, ranks)
            if smaller is not None:
                model.set_submodule(name, smaller)
        if split:
            _split_blocks(model, plan, ranks)
        plan.cut_first_dimension(model, ranks)
        for parameter in model.parameters():
            if parameter.is_meta:
                set_value(parameter, float)
        return model

    return made


def _split_blocks(model: nn.Module, plan: TensorPlan, ranks: int) -> None:
    """Make blocks compute on a rank's tokens."""
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
