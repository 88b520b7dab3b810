"""Whole steps of the training loop over the same random rows every time, for the benchmarks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, TypeVar

import torch
from torch import nn

from trp_scale.config import BatchConfig, Config, ModelConfig, PretrainConfig
from trp_scale.config.images import ImagePretrainConfig
from trp_scale.core.batch import Batch, WindowSource
from trp_scale.core.engine import Engine
from trp_scale.core.hooks import Hook, build_hooks, built
from trp_scale.core.run import Objective, RunContext
from trp_scale.distributed.groups import ALONE
from trp_scale.engines.plain import PlainEngine
from trp_scale.models.counting import RecordsOperations
from trp_scale.pretraining.base import DataFacts, find_upstream
from trp_scale.training.decisions import StepAgreement
from trp_scale.training.loop import Trainer
from trp_scale.training.metrics import StepRecord
from trp_scale.training.observer import Observer

Precision = Literal["bf16", "fp32"]
Run = TypeVar("Run", bound=Config)
Model = TypeVar("Model", bound=ModelConfig)


@dataclass(kw_only=True)
class StepOptions:
    """What to measure."""

    rows: int = 32
    """Images or sequences per step."""
    rounds: int = 7
    """Measured steps of each."""
    precision: Precision = "fp32"
    """Of forward and backward, of everything that is compared."""
    threads: int = 0
    """Threads of torch; 0 = as torch chooses."""

    def device(self) -> torch.device:
        """The GPU, or the CPU with so many threads from here on."""
        if self.threads:
            torch.set_num_threads(self.threads)
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def endless(config: Run, rows: int, *, accumulation: int = 1, precision: Precision = "fp32") -> Run:
    """The same settings without end, at a constant learning rate and with micro-batches of so many rows."""
    config.batch = BatchConfig(global_size=rows * accumulation, micro_size=rows)
    config.training.steps, config.training.precision = 10**9, precision
    config.optimizer.warmup_steps, config.optimizer.schedule = 0, "constant"
    return config


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What is trained.

    Attributes:
        config: settings of the run.
        module: with its initial weights, whole, on the CPU.
        objective: its losses.
        rows: of every step of this rank.
    """

    config: PretrainConfig
    module: nn.Module
    objective: Objective
    rows: Batch

    def plain(self, device: torch.device) -> PlainEngine:
        return PlainEngine(self.module, self.config, device=device)


@dataclass
class SameWindow:
    """Serves the same micro-batches at every step."""

    window: list[Batch]

    def next_window(self) -> list[Batch]:
        return list(self.window)


class Unobserved(Observer):
    """Takes no notes."""

    def __init__(self) -> None:
        self.enabled = False


@dataclass
class Notes(Observer):
    """Keeps the losses of the steps."""

    enabled: bool = True
    losses: list[float] = field(default_factory=list)

    def wants(self, step: int) -> bool:
        """No hook is asked for its metrics: some of them would wait for the GPU."""
        return False

    def step(self, record: StepRecord) -> None:
        self.losses.append(record.loss)

    def message(self, text: str) -> None:
        """Nobody listens."""


def micro_batches(rows: Batch, size: int) -> list[Batch]:
    """The same rows in micro-batches of this size. A list of kept positions cannot be cut into parts."""
    if size == rows.rows:
        return [rows]
    assert "kept" not in rows.fields, "kept positions are of the whole batch"
    return [
        replace(
            rows,
            fields={name: value[start : start + size] for name, value in rows.fields.items()},
            keys=rows.keys[start : start + size],
            start=start,
        )
        for start in range(0, rows.rows, size)
    ]


def loop_over(
    run: RunContext, source: WindowSource, others: Sequence[Hook] = (), observer: Observer | None = None
) -> Trainer:
    """The real loop, with the balancer and other hooks, that neither saves nor validates."""
    run.engine.train(True)
    return Trainer(
        run_context=run,
        hooks=build_hooks(run, others),
        source=source,
        observer=observer or Unobserved(),
        # On one rank nothing is sent: NCCL, where it is the group's, could not send what is on the host.
        agreement=StepAgreement(ALONE if run.data_group.size == 1 else run.data_group, 0),
    )


def trainer_of(engine: Engine, workload: Workload, observer: Observer | None = None) -> Trainer:
    """The real loop over a workload, with the balancer and the adversary; its rows are pinned where there is a GPU."""
    config = workload.config
    run = RunContext(config=config, objective=workload.objective, engine=engine)
    adversary = built(run, "adversary") if isinstance(config, ImagePretrainConfig) else None
    window = micro_batches(workload.rows, config.batch.micro_rows)
    if engine.device.type == "cuda":
        window = [micro.pack().pin_memory().unpack() for micro in window]
    return loop_over(run, SameWindow(window), [] if adversary is None else [adversary], observer)


def whole_step(workload: Workload, device: torch.device) -> Callable[[], object]:
    return trainer_of(workload.plain(device), workload).train_step


def recorded_flops(step: Callable[[], object]) -> int:
    """Return the FLOPs of a call."""
    with RecordsOperations() as recorder:
        step()
    return sum(operation.flops for operation in recorder.recorded)


def model_flops(config: PretrainConfig, facts: DataFacts | None = None) -> float:
    """Return the model FLOPs of a training step on one rank."""
    return find_upstream(config).outline(config, facts or DataFacts()).step_flops(1)
