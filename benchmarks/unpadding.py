"""What it gives to leave padding out of PoS-BERT: the whole training step over real text, on one process.

    python benchmarks/unpadding.py --data DIR [--rows 32] [--rounds 9] [--size small|tiny|base]

The same weights, rows, masks and dropout rate, by turns with the list of places that a micro-batch keeps and without,
which computes whole rows. Each round takes the next rows of the training order. Losses of the first step must agree,
without dropout.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
import tyro

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.rounds import alternate, print_pairs, print_ratios
from benchmarks.steps import SameWindow, StepOptions, endless, loop_over
from benchmarks.text_steps import small_bert, without_list
from trp_scale.config import TextModelConfig
from trp_scale.config.loader import load_recipe
from trp_scale.core.batch import Batch
from trp_scale.core.run import RunContext
from trp_scale.engines.plain import PlainEngine
from trp_scale.pretraining.base import open_sources
from trp_scale.pretraining.pos_bert.model import BertForMaskedPositions
from trp_scale.pretraining.pos_bert.objective import PosMaskedLanguageModelling
from trp_scale.pretraining.pos_bert.settings import PosBertConfig
from trp_scale.training.loop import Trainer

KINDS = ("padded", "padding left out")


@dataclass(kw_only=True)
class Options(StepOptions):
    """What to measure."""

    data: Path
    """A data set of text, written by trp-scale shard-text."""
    rounds: int = 9
    """Measured steps of each."""
    size: Literal["tiny", "small", "base"] = "small"
    """The encoder: of the recipe pos_bert_tiny, 4 layers x 256, or of pos_bert_base."""
    dropout: float = 0.1
    """Of the encoder."""
    compile: Literal["none", "blocks"] = "none"
    """training.compile."""


def encoder(size: str) -> TextModelConfig:
    if size == "small":
        return small_bert()
    model = load_recipe(f"pos_bert_{size}").model
    assert isinstance(model, TextModelConfig)
    return model


def settings(options: Options) -> PosBertConfig:
    model = replace(encoder(options.size), dropout=options.dropout)
    config = endless(PosBertConfig(model=model), options.rows, precision=options.precision)
    config.data.path, config.data.workers = str(options.data), 0
    config.training.compile = options.compile
    return config


class Turns:
    """The two candidates, which take the same rows in the same round.

    Attributes:
        kept, places: places of all measured rows that were in a list, and all of them.
    """

    def __init__(self, options: Options, device: torch.device) -> None:
        self.config = settings(options)
        self.sources = open_sources(self.config, rank=0, world=1)
        self.trainers = {kind: self.trainer(device) for kind in KINDS}
        self.windows: dict[str, Iterator[Batch]] = {kind: self.rows() for kind in KINDS}
        self.kept = self.places = 0

    def trainer(self, device: torch.device) -> Trainer:
        meta = self.sources.meta
        module = BertForMaskedPositions(self.config.model, vocab_size=meta.vocab_size, seed=self.config.training.seed)
        objective = PosMaskedLanguageModelling(self.config.objective, meta.groups, self.config.model.hidden_size)
        engine = PlainEngine(module, self.config, device=device)
        return loop_over(RunContext(config=self.config, objective=objective, engine=engine), SameWindow([]))

    def rows(self) -> Iterator[Batch]:
        """Micro-batches of the training order, from its start."""
        source = open_sources(self.config, rank=0, world=1).train
        while True:
            yield from source.next_window()

    def step(self, kind: str) -> Callable[[], object]:
        """A step over the candidate's next rows."""
        trainer = self.trainers[kind]

        def call() -> None:
            batch = next(self.windows[kind])
            if kind == KINDS[0]:
                batch = without_list(batch)
            else:
                self.places += batch["tokens"].numel()
                self.kept += len(batch.fields.get("kept", batch["tokens"].flatten()))
            trainer.source = SameWindow([batch])
            trainer.train_step()

        return call

    @torch.no_grad()
    def difference(self) -> float:
        """Largest between the two of a task's loss over the same rows, over the loss; without dropout."""
        (batch,) = self.sources.train.next_window()
        assert "kept" in batch.fields, "nothing is padded in the first rows"
        losses = []
        for kind, trainer in self.trainers.items():
            trainer.engine.train(False)
            given = (without_list(batch) if kind == KINDS[0] else batch).to(trainer.engine.device)
            losses.append(trainer.objective(trainer.engine, given).sums)
            trainer.engine.train(True)
        return float(((losses[0] - losses[1]).abs() / losses[0].abs().clamp(min=1.0)).max())


def main(options: Options) -> None:
    device = options.device()
    turns = Turns(options, device)
    found = turns.difference()
    assert found < (1e-5 if options.precision == "fp32" else 1e-2), f"losses differ by {found:.1e}"
    measured = alternate({kind: turns.step(kind) for kind in KINDS}, rounds=options.rounds)
    length, model = turns.sources.meta.length, turns.config.model
    print(
        f"{options.data.name}: {options.rows} rows of {length} pieces, {model.layers} layers x {model.hidden_size}, "
        f"{options.precision}, {device.type}, {torch.get_num_threads()} threads; "
        f"{turns.kept / turns.places:.1%} of the places are kept, losses agree to {found:.1e}"
    )
    print_ratios(measured, KINDS[1])
    print_pairs(measured, KINDS[1])


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
