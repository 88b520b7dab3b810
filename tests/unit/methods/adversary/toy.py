"""A model of one weight vector with a perturbation beside it, and runs of it on the real loop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tests.synthetic import RecordingTrainer
from tests.unit.methods.balancing.toy import CPU, ToyObjective
from trp_scale.config import BatchConfig, Config, ModelConfig, OptimizerConfig, PretrainTrainingConfig
from trp_scale.config.images import CropsConfig, MaeVisionConfig
from trp_scale.config.registry import make_settings
from trp_scale.core.batch import Batch, TaskLosses
from trp_scale.core.hooks import Hook
from trp_scale.core.run import RunContext
from trp_scale.engines.plain import PlainEngine
from trp_scale.methods.adversary.positions import position_adversary
from trp_scale.models.positions import PerturbationShape
from trp_scale.pretraining.mae.settings import MaeConfig

COORDINATES = PerturbationShape(kind="relative_coordinate", encoder=(3, 2))


class Toy(nn.Module):
    """Loss of an element with inputs x [numel]: (x . (weight + perturbation) - 1)^2, times `factor`."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.1, 0.6, numel))
        self.factor = 1.0

    def forward(self, inputs: Tensor, perturbation: Tensor | None = None) -> Tensor:
        seen = self.weight if perturbation is None else self.weight + perturbation
        return self.factor * ((inputs * seen).sum(-1) - 1.0).square()


class ElementObjective(ToyObjective):
    """`size` tasks; element e belongs to task e mod size."""

    def __init__(self, size: int = 1) -> None:
        super().__init__(tasks=tuple(f"task{number}" for number in range(size)))

    def count(self, batch: Batch) -> Tensor:
        return torch.bincount(batch.keys % len(self.tasks), minlength=len(self.tasks)).double()

    def __call__(self, forward: Callable[..., Any], batch: Batch) -> TaskLosses:
        losses = forward(batch["inputs"], perturbation=batch.extras.get("perturbation")).double()  # [E]
        task = batch.keys % len(self.tasks)
        sums = torch.stack([losses[task == number].sum() for number in range(len(self.tasks))])
        return TaskLosses(sums=sums, counts=self.count(batch))


@dataclass
class Elements:
    """Global batches of elements that follow from their position."""

    config: Config
    numel: int
    cursor: int = 0

    def next_window(self) -> list[Batch]:
        first, size, micro = self.cursor, self.config.batch.global_size, self.config.batch.micro_size
        self.cursor += size
        return [self.batch(range(start, start + micro)) for start in range(first, first + size, micro)]

    def batch(self, positions: range) -> Batch:
        rows = [
            torch.randn(self.numel, generator=torch.Generator().manual_seed(position), dtype=torch.float32)
            for position in positions
        ]
        return Batch(fields={"inputs": torch.stack(rows)}, keys=torch.tensor(list(positions)), start=positions[0])


@dataclass(kw_only=True)
class Setting:
    """Settings of a toy run: those of the adversary, and some of the rest."""

    adversary: dict[str, Any] = field(default_factory=dict)
    balancer: dict[str, Any] = field(default_factory=lambda: {"kind": "uniform"})
    optimizer: dict[str, Any] = field(default_factory=dict)
    micro_size: int = 4
    tasks: int = 1
    steps: int = 1000
    shape: PerturbationShape = COORDINATES

    def config(self) -> Config:
        return MaeConfig(
            model=ModelConfig(),
            vision=MaeVisionConfig(patch_size=16),
            crops=CropsConfig(size=112),
            batch=BatchConfig(global_size=8, micro_size=self.micro_size),
            training=PretrainTrainingConfig(steps=self.steps),
            optimizer=OptimizerConfig(
                **{"kind": "sgd", "lr": 0.01, "warmup_steps": 0, "schedule": "constant", **self.optimizer}
            ),
            balancer=make_settings("balancer", **self.balancer),
            adversary=make_settings("adversary", **{"kind": "relative_coordinate", **self.adversary}),
        )


def stand_in_run(config: Config) -> RunContext:
    """A run of the toy that nothing is trained in."""
    return RunContext(config=config, objective=ElementObjective(), engine=PlainEngine(Toy(1), config, device=CPU))


def toy_hook(setting: Setting) -> Any:
    """The adversary of these settings."""
    run = stand_in_run(setting.config())
    return position_adversary(run.config.adversary, run, setting.shape)


def toy_trainer(setting: Setting, hook: Hook | None = None) -> RecordingTrainer:
    """The real loop over the toy, with the adversary of these settings unless another hook is given."""
    config, numel = setting.config(), setting.shape.numel
    engine = PlainEngine(Toy(numel), config, device=CPU)
    run = RunContext(config=config, objective=ElementObjective(setting.tasks), engine=engine)
    return RecordingTrainer.over(run, Elements(config, numel), [hook or toy_hook(setting)])


def gradient(setting: Setting, weight: Tensor, perturbation: Tensor, step: int) -> tuple[Tensor, Tensor, float]:
    """Gradients by the weight and the perturbation [numel], and the loss, of global batch `step`, in float64 and in
    one piece."""
    config = setting.config()
    whole = Elements(config, setting.shape.numel).batch(range(step * 8, step * 8 + 8))
    weight, perturbation = (each.detach().double().requires_grad_() for each in (weight, perturbation))
    losses = ((whole["inputs"].double() * (weight + perturbation)).sum(-1) - 1.0).square()
    by_task = torch.stack([losses[whole.keys % setting.tasks == task].mean() for task in range(setting.tasks)])
    shares = torch.full((setting.tasks,), 1.0 / setting.tasks, dtype=torch.float64)
    if setting.balancer["kind"] == "minimax":
        shares = torch.softmax(by_task.detach(), 0)
    total = (shares * by_task).sum()
    total.backward()  # type: ignore[no-untyped-call]
    return weight.grad, perturbation.grad, float(total.detach())
