"""What minimax weighting costs over uniform weights: the whole training step, on one process.

    python benchmarks/minimax_overhead.py [--rows 32] [--rounds 15]

`exact` with one micro-batch takes its weights from the very forward pass that is weighted, `lagged` from the last step:
both should cost nothing. `exact` with several micro-batches adds a forward pass without gradients; it is shown beside.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import tyro

from trp_scale.config import TextModelConfig
from trp_scale.config.settings import Settings
from trp_scale.core.hooks import build_hooks
from trp_scale.upstreams.pos_bert.settings import PosBertConfig

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.rounds import alternate, print_ratios
from benchmarks.step_time import LENGTH, VOCABULARY, random_batch
from trp_scale.config import BatchConfig, OptimizerConfig, TrainingConfig
from trp_scale.config.components import settings_of
from trp_scale.core.batch import Batch
from trp_scale.core.run import RunContext
from trp_scale.data.text.groups import GROUPS
from trp_scale.distributed.groups import ALONE
from trp_scale.engines.plain import PlainEngine
from trp_scale.training.loop import StepAgreement, Trainer
from trp_scale.upstreams.pos_bert.model import BertForMaskedPositions
from trp_scale.upstreams.pos_bert.objective import PosMaskedLanguageModelling

BALANCING = {
    "uniform": settings_of("balancer", "uniform"),
    "minimax lagged": settings_of("balancer", "minimax", estimate="lagged"),
    "minimax exact": settings_of("balancer", "minimax", estimate="exact"),
}


@dataclass(kw_only=True)
class Options:
    """What to measure."""

    rows: int = 32
    """Sequences per step."""
    rounds: int = 15
    """Measured steps of each."""
    accumulation: int = 4
    """Micro-batches of the second comparison."""


@dataclass
class SameWindow:
    """Serves the same micro-batches at every step."""

    window: list[Batch]

    def next_window(self) -> list[Batch]:
        return list(self.window)


class Unobserved:
    """Takes no notes."""

    enabled = False

    def message(self, text: str) -> None:
        """Nobody listens."""


def rows_of(batch: Batch, start: int, stop: int) -> Batch:
    """Some rows of a batch."""
    fields = {name: value[start:stop] for name, value in batch.fields.items()}
    return replace(batch, fields=fields, keys=batch.keys[start:stop], start=start)


def step_of(balancing: Settings, options: Options, accumulation: int, device: torch.device) -> Callable[[], object]:
    """One whole training step, hooks and optimizer included."""
    micro = options.rows // accumulation
    config = PosBertConfig(
        model=TextModelConfig(layers=4, hidden_size=256, heads=4, intermediate_size=1024, max_positions=LENGTH),
        batch=BatchConfig(global_size=options.rows, micro_size=micro),
        training=TrainingConfig(steps=10**9, precision="bf16" if device.type == "cuda" else "fp32"),
        optimizer=OptimizerConfig(warmup_steps=0, schedule="constant"),
        balancer=balancing,
    )
    engine = PlainEngine(BertForMaskedPositions(config.model, vocab_size=VOCABULARY, seed=0), config, device=device)
    objective = PosMaskedLanguageModelling(config.objective, GROUPS, config.model.hidden_size)
    batch = random_batch(options.rows)
    run = RunContext(config=config, objective=objective, engine=engine)
    trainer = Trainer(
        run_context=run,
        hooks=build_hooks(run),
        source=SameWindow([rows_of(batch, first, first + micro) for first in range(0, options.rows, micro)]),
        observer=Unobserved(),  # type: ignore[arg-type]
        agreement=StepAgreement(ALONE, 0),
        save=lambda: None,
        validate=lambda: None,
        stop_requested=lambda: None,
    )
    return trainer.train_step


def main(options: Options) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for accumulation in (1, options.accumulation):
        print(f"{options.rows} x {LENGTH} tokens, accumulation {accumulation}, {device.type}")
        steps = {name: step_of(balancing, options, accumulation, device) for name, balancing in BALANCING.items()}
        print_ratios(alternate(steps, rounds=options.rounds), "uniform")


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
