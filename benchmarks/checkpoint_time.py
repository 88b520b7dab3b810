"""What a checkpoint takes from training: written while the steps wait, and behind them.

python benchmarks/checkpoint_time.py --directory DISK

A round is, for each way in turn: a checkpoint, then so many steps, in which one that is written behind them comes to
its end, is read back and takes the place of the one before. Against as many steps without a checkpoint in the same
round:

call     how long the call of the checkpoint keeps the main thread
steps    how much longer the steps after it take together, the finishing of it included
taken    both

The processor time of all threads is given beside, which other work on the machine changes less.
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import tyro

from benchmarks.rounds import pair_ratio
from benchmarks.steps import StepOptions, endless, trainer_of
from benchmarks.text_steps import text_workload
from trp_scale.checkpoint.manager import Content
from trp_scale.checkpoint.writer import CheckpointWriter
from trp_scale.config import CheckpointConfig, TextModelConfig
from trp_scale.distributed.groups import ALONE
from trp_scale.engines.plain import PlainEngine
from trp_scale.pretraining.pos_bert.settings import PosBertConfig
from trp_scale.training.loop import Trainer

NONE, BLOCKING, BEHIND = "none", "blocking", "asynchronous"


@dataclass(kw_only=True)
class Options(StepOptions):
    """What to measure; the model is BERT-base."""

    rows: int = 4
    """Sequences of 128 tokens per step."""
    steps: int = 4
    """After each checkpoint; one that is written behind them must come to its end within them."""
    layers: int = 12
    """Of BERT-base."""
    directory: Path | None = None
    """Where checkpoints are written; default: the system's directory for temporary files."""


@dataclass(frozen=True, kw_only=True)
class Round:
    """Seconds of one way in one round, those of processor time in all its threads, and steps that were begun before its
    checkpoint was finished."""

    call: float
    steps: float
    cpu: float
    behind: int


def one_round(trainer: Trainer, writer: CheckpointWriter | None, steps: int, save: Callable[[], None]) -> Round:
    """One checkpoint and the steps after it."""
    trainer.checkpoints = writer
    before = writer.newest if writer is not None else 0
    began, processor = time.perf_counter(), time.process_time()
    if writer is not None:
        save()
    called = time.perf_counter()
    behind = 0
    for _ in range(steps):
        behind += writer is not None and writer.newest == before
        trainer.train_step()
    steps_took = time.perf_counter() - called
    return Round(call=called - began, steps=steps_took, cpu=time.process_time() - processor, behind=behind)


def measure(options: Options, directory: Path) -> dict[str, list[Round]]:
    """The rounds of each way."""
    device = options.device()
    model = TextModelConfig(layers=options.layers, max_positions=128)
    workload = text_workload(endless(PosBertConfig(model=model), options.rows, precision=options.precision))
    engine: PlainEngine = workload.plain(device)
    trainer = trainer_of(engine, workload)
    trainer.train_step()
    writers = {
        name: CheckpointWriter(
            run_dir=directory / name,
            group=ALONE,
            settings=CheckpointConfig(every=1, keep=1, asynchronous=name == BEHIND),
            tell=print,
        )
        for name in (BLOCKING, BEHIND)
    }
    found: dict[str, list[Round]] = {NONE: [], BLOCKING: [], BEHIND: []}
    names = list(found)
    for number in range(options.rounds + 1):
        for name in names[number % 3 :] + names[: number % 3]:
            writer = writers.get(name)

            def save(writer: CheckpointWriter | None = writer) -> None:
                assert writer is not None
                content = Content(
                    step=trainer.state.step,
                    engine=engine,
                    hooks_state=trainer.hooks.state_dict(),
                    cursors={},
                    config={},
                    extra={},
                )
                writer.save(content)

            made = one_round(trainer, writer, options.steps, save)
            if writer is not None:
                writer.finish(lambda: None) if name == BLOCKING else writer.settle()
            if number:  # the first one takes memory and fills caches
                found[name].append(made)
            print(
                f"round {number}, {name}: call {made.call:.2f} s, {options.steps} steps {made.steps:.2f} s", flush=True
            )
    return found


def main() -> None:
    options = tyro.cli(Options, description=__doc__)
    directory = Path(tempfile.mkdtemp(dir=options.directory))
    try:
        found = measure(options, directory)
        size = sum(file.stat().st_size for file in (directory / BLOCKING).rglob("*.safetensors"))
    finally:
        shutil.rmtree(directory)
    plain = [each.steps for each in found[NONE]]
    print(f"\na checkpoint has {size / 1e9:.2f} GB; a step takes {statistics.median(plain) / options.steps:.2f} s")
    taken: dict[str, list[float]] = {}
    for name in (BLOCKING, BEHIND):
        pairs = list(zip(found[name], found[NONE], strict=True))
        longer = [each.steps - base.steps for each, base in pairs]
        taken[name] = [each.call + each.steps - base.steps for each, base in pairs]
        print(
            f"{name}: call {statistics.median(each.call for each in found[name]):.2f} s, steps "
            f"{statistics.median(longer):+.2f} s, taken {statistics.median(taken[name]):.2f} s, processor "
            f"{statistics.median(each.cpu - base.cpu for each, base in pairs):.2f} s; at most "
            f"{max(each.behind for each in found[name])} steps begun before it was finished"
        )
    for what, ours, theirs in (
        ("call", [each.call for each in found[BEHIND]], [each.call for each in found[BLOCKING]]),
        ("taken", taken[BEHIND], taken[BLOCKING]),
    ):
        ratio = pair_ratio(ours, theirs)
        print(f"{what}, {BEHIND} over {BLOCKING}: {ratio.median:.3f} ({ratio.lower:.3f} to {ratio.upper:.3f})")


if __name__ == "__main__":
    main()
