"""Section of benchmarks/gpu.py on whole runs of launch/pretrain.py: shards, loader, checkpoints, and exact resume."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu_items import MEGABYTE, Figures, Item
from benchmarks.gpu_setting import ENGINES, ROOT, Setting, lacking

HALF, WHOLE = 4, 8
"""Steps of a run that is stopped and goes on."""
OF_A_LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Variables that this process may have and its runs, each alone, may not."""
SECONDS = 240
"""A run that takes longer is ended."""
DATA = {
    "embedded": "shard-text --embedded --length 128 --vocab_size 8192 --rows_per_block 64",
    "scenes": "shard-images --embedded --count 320",
}
"""Folder under data/ where recipes look, and the command of trp-scale that fills it."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """A recipe, what it is trained on, the layout, and flags beside them."""

    recipe: str
    data: str = "embedded"
    layout: str = "plain"
    flags: str = "--training.precision bf16"


RUNS = {
    "plain, compiled blocks": Run(recipe="pos_bert_tiny"),
    "plain, compiled whole": Run(recipe="pos_bert_tiny", flags="--training.precision bf16 --training.compile whole"),
    "plain, bf16 weights, not compiled": Run(
        recipe="pos_bert_tiny", flags="--training.precision bf16 --training.weights bf16 --training.compile none"
    ),
    "fsdp": Run(recipe="pos_bert_tiny", layout="fsdp"),
    "zero1": Run(recipe="pos_bert_tiny", layout="zero1"),
    "zero2, fp16": Run(recipe="pos_bert_tiny", layout="zero2", flags="--training.precision fp16"),
    "zero3": Run(recipe="pos_bert_tiny", layout="zero3"),
    "adversary": Run(recipe="adpe_tiny", data="scenes"),
    "three modalities, fsdp": Run(recipe="mm_mae_tiny", data="scenes", layout="fsdp"),
    "learned masks": Run(recipe="mlo_mae_tiny", data="scenes", flags="--training.precision bf16 --multilevel.every 2"),
}


def cores() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0))


def at_once() -> int:
    """Runs that share the cores."""
    return max(2, cores() // 4)


def python(*arguments: str) -> None:
    """Run a script or module of the project in a process of its own.

    Raises:
        RuntimeError: it failed; the message has the last line that it wrote, all of them are printed.
    """
    environment = {name: value for name, value in os.environ.items() if name not in OF_A_LAUNCHER}
    # By default each run would begin one compiling process for each core; they share the cores.
    environment["TORCHINDUCTOR_COMPILE_THREADS"] = str(max(1, cores() // at_once()))
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [environment.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    if done.returncode:
        print(done.stdout, file=sys.stderr)
        last = done.stdout.rstrip().rpartition("\n")[2]
        raise RuntimeError(f"{' '.join(arguments)} ended with {done.returncode}: {last}")


def pretrain(run: Run, data: Path, run_dir: Path, steps: int) -> None:
    """Begin or go on with a run, up to so many steps."""
    stage = ENGINES[run.layout]
    engine = ["--engine", run.layout] if stage is None else ["--ds_config", f"ds_configs/zero{stage}.json"]
    python(
        "launch/pretrain.py",
        *("--recipe", run.recipe, *engine, "--data.path", str(data), "--run_dir", str(run_dir), *run.flags.split()),
        *("--training.steps", str(steps), "--training.deterministic", "True", "--optimizer.schedule", "constant"),
    )


def steps_of(run_dir: Path) -> list[dict[str, Any]]:
    """What metrics.jsonl has of every step."""
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def halves_and_whole(run: Run, data: Future[Path], folder: Path) -> Figures:
    """A run that is stopped and goes on beside one that is not: exact resume on the GPU, with dropout."""
    made = data.result()
    pretrain(run, made, folder / "whole", WHOLE)
    for steps in (HALF, WHOLE):
        pretrain(run, made, folder / "halves", steps)
    whole, halves = steps_of(folder / "whole"), steps_of(folder / "halves")
    losses, resumed = ([step["loss"] for step in steps] for steps in (whole, halves))
    if len(losses) != WHOLE or len(resumed) != WHOLE:
        raise RuntimeError(f"{len(losses)} and {len(resumed)} steps were logged, {WHOLE} were asked for")
    gaps = [abs(a - b) / abs(b) for a, b in zip(resumed, losses, strict=True)]
    return {
        "losses": losses,
        "largest_gap_before_resume": max(gaps[:HALF]),
        "largest_gap_after_resume": max(gaps[HALF:]),
        "exact": resumed == losses,
        "applied": all(step["applied"] for step in whole),
        "peak_mb": whole[-1]["peak_memory_bytes"] / MEGABYTE,
    }


def shard(data: str, folder: Path) -> Path:
    """Make a data set by the command that users have, where it is not there already."""
    usual = ROOT / "data" / data
    if usual.exists():
        return usual
    path = folder / data
    python("-m", "trp_scale", *DATA[data].split(), "--output", str(path))
    return path


def runs(setting: Setting) -> Iterator[Item]:
    """Each of RUNS, several at once. Beside an H200, on 16 cores, four took 100 s, and of eight none was done in that
    time. A small setting has one on a CPU's precision."""
    chosen = {"plain": Run(recipe="pos_bert_tiny", flags="--batch.global_size 4")} if setting.small else RUNS
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(at_once()) as pool:
        folder = Path(name)
        data = {each: pool.submit(shard, each, folder) for each in dict.fromkeys(run.data for run in chosen.values())}
        begun = {
            title: pool.submit(halves_and_whole, run, data[run.data], folder / run.layout / title.replace(" ", "_"))
            for title, run in chosen.items()
            if not lacking(run.layout)
        }
        for title, run in chosen.items():
            one = begun.get(title)
            yield Item(
                name=title,
                measure=one.result if one else dict,
                seconds=1 if one and one.done() else 60,
                lacking=lacking(run.layout),
            )
