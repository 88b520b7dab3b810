"""Time that a checkpoint takes from training: written while the steps wait, and behind them.

python benchmarks/checkpoint_time.py --directory DISK

A round is, for each way in turn, a checkpoint and the steps after it, against the steps of the same round without one.
"call" is the time of the checkpoint's call, "steps" the additional time of the steps after it, in which an asynchronous
checkpoint is finished, read back and published; "total" is both.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import tyro

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.rounds import pair_ratio
from benchmarks.steps import StepOptions, endless, trainer_of
from benchmarks.workloads import build_workload
from trp_scale.checkpoint.manager import Content
from trp_scale.checkpoint.writer import CheckpointWriter
from trp_scale.config import CheckpointConfig
from trp_scale.distributed.groups import ALONE
from trp_scale.pretraining.pos_bert.settings import PosBertConfig, PosBertModelConfig
from trp_scale.training.loop import Trainer

NONE, BLOCKING, BEHIND = "none", "blocking", "asynchronous"
WAYS = (NONE, BLOCKING, BEHIND)


@dataclass(kw_only=True)
class Options(StepOptions):
    """Size of the steps; the model is BERT-base."""

    rows: int = 4
    """Sequences of 128 tokens per step."""
    steps: int = 4
    """Steps after each checkpoint; an asynchronous checkpoint must be finished within them."""
    layers: int = 12
    """Of BERT-base."""
    directory: Path | None = None
    """Directory of the checkpoints; default: the system's directory for temporary files."""


def time_round(trainer: Trainer, writer: CheckpointWriter | None, steps: int) -> tuple[float, float]:
    """Return seconds of a checkpoint's call and of the steps after it."""
    trainer.control.checkpoints = writer
    began = time.perf_counter()
    if writer is not None:
        hooks = trainer.hooks.state_dict()
        engine = trainer.run_context.engine
        writer.save(Content(step=trainer.state.step, engine=engine, hooks_state=hooks, cursors={}, config={}, extra={}))
    called = time.perf_counter()
    for _ in range(steps):
        trainer.train_step()
    return called - began, time.perf_counter() - called


def measure(options: Options, directory: Path) -> dict[str, list[tuple[float, float]]]:
    """Return the rounds of each way."""
    config = PosBertConfig(model=PosBertModelConfig(layers=options.layers, max_positions=128))
    work = build_workload(endless(config, options.rows, precision=options.precision))
    trainer = trainer_of(work.plain(options.device()), work)
    trainer.train_step()
    writers = {
        way: CheckpointWriter(
            run_dir=directory / way,
            group=ALONE,
            settings=CheckpointConfig(every=1, keep=1, asynchronous=way == BEHIND),
            tell=print,
        )
        for way in (BLOCKING, BEHIND)
    }
    rounds: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
    for number in range(options.rounds + 1):
        for way in WAYS[number % 3 :] + WAYS[: number % 3]:
            writer = writers.get(way)
            seconds = time_round(trainer, writer, options.steps)
            if writer is not None:
                writer.finish(lambda: None) if way == BLOCKING else writer.settle()
            if number:  # the first round allocates memory and fills caches
                rounds[way].append(seconds)
    return rounds


def main(options: Options) -> None:
    with tempfile.TemporaryDirectory(dir=options.directory) as name:
        rounds = measure(options, Path(name))
        size = sum(file.stat().st_size for file in (Path(name) / BLOCKING).rglob("*.safetensors"))
    plain = [steps for _, steps in rounds[NONE]]
    print(f"a checkpoint has {size / 1e9:.2f} GB; a step takes {statistics.median(plain) / options.steps:.2f} s")
    calls, totals = {}, {}
    for way in (BLOCKING, BEHIND):
        calls[way] = [call for call, _ in rounds[way]]
        longer = [steps - base for (_, steps), base in zip(rounds[way], plain, strict=True)]
        totals[way] = [call + more for call, more in zip(calls[way], longer, strict=True)]
        call, steps, total = (statistics.median(values) for values in (calls[way], longer, totals[way]))
        print(f"{way}: call {call:.2f} s, steps {steps:+.2f} s, total {total:.2f} s")
    for name, seconds in (("call", calls), ("total", totals)):
        print(f"{name}, {BEHIND} over {BLOCKING}: {pair_ratio(seconds[BEHIND], seconds[BLOCKING])}")


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
