"""Count a run's model with fake tensors: parameters per sharding unit, operations of the passes over a micro-batch with
their bytes and FLOPs, and saved activations. Nothing is allocated; no GPU or data is needed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from trp_scale.config import Config, RefusedError
from trp_scale.core.batch import Batch, TaskLosses
from trp_scale.core.run import Objective
from trp_scale.engines.compiled import checkpoint_blocks
from trp_scale.engines.optimizer import block_matrices
from trp_scale.methods.learned_masks.masks import NETWORKS
from trp_scale.models.counting import Operation, RecordsOperations, fake_pass, gpu_attention
from trp_scale.models.initialise import build_with_initialisers
from trp_scale.planning.clusters import Gpu
from trp_scale.planning.tensor_parallel import TensorSum, cut_over, declared_plan, watch
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

    def _tensor_sums(self, rows: int, rounded: bool) -> list[TensorSum]:
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

    def with_checkpointing(self, how: Checkpointing) -> Config:
        return replace(self.config, training=replace(self.config.training, activation_checkpointing=how))

    def _count_saved(self, how: Checkpointing, rounded: bool) -> Need:
        """Return the bytes that a forward pass saves for its backward pass."""
        with gpu_attention():
            return saved_by_rows(
                self.outline.model,
                self.outline.objective,
                self.outline.rows,
                self.with_checkpointing(how),
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

    def _note_saved(self, rows: int, *, rounded: bool) -> list[TensorSum]:
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
